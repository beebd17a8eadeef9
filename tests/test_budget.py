"""Does the oracle see what is wrong, and leave alone what is right?

A fused kernel is emulated in NumPy: key tiles with running maximum and sum, the declared 16-bit
roundings, a gradient by recomputation. Without a bug its arithmetic is correct and must pass on
every input family. With one seeded bug it must fail, in every dtype.
"""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash.testing import _bounds
from cuflash.testing import _model_flash as model_flash
from cuflash.testing._budget import Budget, BudgetError
from cuflash.testing._families import OF_EVERY_DTYPE
from support import cut_sums
from support.problems import DTYPES, Call, make_call, probe

BLOCK_N = 64
Q, KV = (2, 4, 64, 32), (2, 2, 256, 32)

FORWARD_BUGS = (
    "last key dropped",
    "a key counted twice",
    "diagonal off by one",
    "scale 1 % off",
    "rescaling of the accumulator skipped",
    "rescaling of the sum skipped",
    "accumulator of 16 bits",
    "padded keys in the denominator",
    "probabilities of 4 bits",
    "wrong head map",
    "one misplaced patch of 8 x 8",
    "bias before softcap",
    "bias transposed in one tile",
    "lse to base 2",
    "lse without the maximum",
    "hidden rows not zeroed",
    "sink forgotten",
    "sink counted in every tile",
    "slopes of the neighbouring head",
    "dropout not compensated",
    "dropout before the sum",
    "dropout mask of the neighbouring head",
    "dropout counted from the tile",
)
BACKWARD_BUGS = (
    "delta forgotten",
    "delta of the neighbouring row",
    "dlse with the wrong sign",
    "softcap without derivative",
    "scale forgotten in dk",
    "last key tile missing in dq",
    "last query tile missing in dk",
    "one head of the group missing in dk",
    "diagonal off by one in the backward",
    "score gradients of 4 bits",
    "padded queries in dv",
    "dq accumulated in 16 bits",
    "dropout forgotten in dv",
    "dropout forgotten in the scores' gradient",
    "dropout in delta's place",
)


def _four_bits(array: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 16) / 16, exponent).astype(array.dtype)


def _sixteen_bits(array: np.ndarray, call: Call) -> np.ndarray:
    half = call.dtype if call.dtype.itemsize == 2 else np.float16
    with np.errstate(over="ignore"):
        return array.astype(half).astype(array.dtype)


def _narrow(array: np.ndarray, call: Call) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(call.dtype).astype(array.dtype)


def _accumulate(
    acc: np.ndarray, a: np.ndarray, b: np.ndarray, call: Call, in_sixteen_bits: bool
) -> np.ndarray:
    """Return acc + a @ b; in 16 bits rounded after every 16 keys, as by a tensor core."""
    if not in_sixteen_bits:
        return acc + a @ b
    for start in range(0, b.shape[-2], 16):
        keys = slice(start, start + 16)
        acc = _sixteen_bits(acc + a[..., keys] @ b[..., keys, :], call)
    return acc


def _heads(call: Call, x: model_flash.Expanded, bug: str) -> tuple[np.ndarray, np.ndarray]:
    if bug != "wrong head map" or call.group_size == 1:
        return x.k, x.v
    order = np.arange(x.k.shape[-3]).reshape(-1, call.group_size).T.ravel()
    return x.k[..., order, :, :], x.v[..., order, :, :]


def _tile_scores(
    x: model_flash.Expanded, k: np.ndarray, tile: slice, bug: str
) -> tuple[np.ndarray, np.ndarray]:
    number = x.q.dtype.type
    slopes = x.slopes
    if bug == "slopes of the neighbouring head" and slopes.ndim:
        slopes = np.roll(slopes, 1, -3)
    bias = x.bias[..., tile] - slopes * x.distance[..., tile]
    if bug == "bias transposed in one tile" and tile.start == BLOCK_N:
        size = min(bias.shape[-2:])
        bias = bias.copy()
        bias[..., :size, :size] = bias[..., :size, :size].swapaxes(-1, -2).copy()
    scores = (x.q @ k[..., tile, :].swapaxes(-1, -2)) * number(x.scale)
    if bug == "scale 1 % off":
        scores = scores * number(1.01)
    slope = np.ones_like(scores)
    if x.softcap is not None:
        if bug == "bias before softcap":
            scores = scores + bias
        t = np.tanh(scores / number(x.softcap))
        scores = number(x.softcap) * t
        slope = slope if bug == "softcap without derivative" else 1 - t * t
    if bug != "bias before softcap" or x.softcap is None:
        scores = scores + bias
    return scores, slope


def _visible(x: model_flash.Expanded, bug: str) -> np.ndarray:
    visible = x.visible.copy()
    keys = visible.shape[-1]
    if bug == "last key dropped":
        visible[..., keys - 1] = False
    if bug.startswith("diagonal off by one"):
        visible[..., 1:] |= x.visible[..., :-1]
    return visible


def _kept(x: model_flash.Expanded, tile: slice, bug: str) -> np.ndarray:
    """Return the factors by which dropout multiplies a tile's weights."""
    kept = x.kept[..., tile]
    if bug == "dropout mask of the neighbouring head":
        kept = np.roll(kept, 1, -3)
    if bug == "dropout counted from the tile":
        kept = x.kept[..., : kept.shape[-1]]
    scale = 1 if bug == "dropout not compensated" else x.kept_scale
    return (kept * scale).astype(x.q.dtype)


def tiled_forward(
    call: Call, x: model_flash.Expanded, bug: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Compute FlashAttention-2's forward over key tiles, with at most one bug."""
    k, v = _heads(call, x, bug)
    visible = _visible(x, "" if "backward" in bug else bug)
    shape, keys = x.q.shape[:-1], k.shape[-2]
    largest, total = np.full(shape, -np.inf, x.q.dtype), np.zeros(shape, x.q.dtype)
    if bug != "sink forgotten":
        largest = x.sink[..., 0]
        total = np.where(np.isneginf(largest), 0, 1).astype(x.q.dtype)
    acc = np.zeros((*shape, v.shape[-1]), x.q.dtype)
    for start in range(0, keys, BLOCK_N):
        tile = slice(start, min(start + BLOCK_N, keys))
        scores, _ = _tile_scores(x, k, tile, bug)
        scores = np.where(visible[..., tile], scores, -np.inf)
        new = np.maximum(largest, scores.max(-1))
        shift = np.where(np.isneginf(new), 0, new)
        p = np.exp(scores - shift[..., None])
        if bug == "dropout before the sum":
            p = p * _kept(x, tile, "")
        alpha = np.exp(largest - shift)
        total = total * (1 if bug == "rescaling of the sum skipped" else alpha) + p.sum(-1)
        if bug == "padded keys in the denominator" and tile.stop == keys:
            with np.errstate(over="ignore"):
                total = total + 24 * np.exp(-shift)
        if bug == "sink counted in every tile" and start:
            total = total + np.exp(x.sink[..., 0] - shift)
        if bug == "a key counted twice" and start == 0:
            p[..., 5] *= 2
        if bug != "rescaling of the accumulator skipped":
            acc = acc * alpha[..., None]
        if bug != "dropout before the sum":
            p = p * _kept(x, tile, bug)
        p = _four_bits(p) if bug == "probabilities of 4 bits" else _narrow(p, call)
        acc = _accumulate(acc, p, v[..., tile, :], call, bug == "accumulator of 16 bits")
        largest = new
    empty = total == 0
    out = acc / np.where(empty, 1, total)[..., None]
    with np.errstate(divide="ignore", over="ignore"):
        base = np.log2(total) if bug == "lse to base 2" else np.log(total)
        lse = np.where(empty, -np.inf, base + np.where(empty, 0, largest))
        if bug == "lse without the maximum":
            lse = np.log(total)
        if bug == "hidden rows not zeroed":
            out = np.where(empty[..., None], v.mean(-2, keepdims=True), out)
        out = out.astype(call.dtype)
    if bug == "one misplaced patch of 8 x 8":
        out[..., 8:16, 8:16] = out[..., 16:24, 8:16]
    return out, lse.astype(x.q.dtype)


def tiled_backward(
    call: Call, x: model_flash.Expanded, out: np.ndarray, lse: np.ndarray, bug: str = ""
) -> dict[str, np.ndarray]:
    """Compute the gradient by recomputation over key tiles, with at most one bug."""
    number = x.q.dtype.type
    k, v = x.k, x.v
    visible = _visible(x, bug)
    keys, rows = k.shape[-2], x.q.shape[-2]
    delta = (x.dout * out.astype(x.q.dtype)).sum(-1)
    if bug == "delta forgotten":
        delta = np.zeros_like(delta)
    if bug == "delta of the neighbouring row":
        delta = np.roll(delta, 1, -1)
    delta = delta + (x.dlse if bug == "dlse with the wrong sign" else -x.dlse)
    reach = np.where(np.isneginf(lse), np.inf, lse)[..., None]
    dq, dk, dv = np.zeros_like(x.q), np.zeros_like(k), np.zeros_like(v)
    for start in range(0, keys, BLOCK_N):
        tile = slice(start, min(start + BLOCK_N, keys))
        scores, slope = _tile_scores(x, k, tile, bug)
        p = np.exp(np.where(visible[..., tile], scores, -np.inf) - reach)
        dp, kept = x.dout @ v[..., tile, :].swapaxes(-1, -2), _kept(x, tile, "")
        if bug == "dropout in delta's place":
            ds = p * (dp - delta[..., None]) * kept * slope
        else:
            forgotten = bug == "dropout forgotten in the scores' gradient"
            ds = p * (dp * (1 if forgotten else kept) - delta[..., None]) * slope
        ds = _four_bits(ds) if bug == "score gradients of 4 bits" else _narrow(ds, call)
        if not (bug == "last key tile missing in dq" and tile.stop == keys):
            dq = _accumulate(dq, ds, k[..., tile, :], call, bug == "dq accumulated in 16 bits")
        seen = slice(0, rows - 16 if bug == "last query tile missing in dk" else rows)
        dk[..., tile, :] = ds[..., seen, :].swapaxes(-1, -2) @ x.q[..., seen, :]
        p = p if bug == "dropout forgotten in dv" else p * kept
        dv[..., tile, :] = _narrow(p, call).swapaxes(-1, -2) @ x.dout
        if bug == "padded queries in dv":
            with np.errstate(over="ignore"):
                dv[..., tile, :] += np.exp(-lse[..., -1:, None]) * x.dout[..., -1:, :]
    if bug == "one head of the group missing in dk":
        dk = dk.copy()
        dk[..., -1, :, :] = 0
    scale = number(x.scale)
    full = {"q": scale * dq, "k": dk if bug == "scale forgotten in dk" else scale * dk, "v": dv}
    with np.errstate(over="ignore"):
        return {n: x.fold(n, a).astype(call.array(n).dtype) for n, a in full.items()}


def emulate(call: Call, bug: str = "", *, arithmetic: object = None) -> None:
    """Run the emulated kernel through the oracle, which raises if it objects."""
    budget = Budget(call)
    x = model_flash.expand(call, arithmetic or budget.accumulator)
    forward_bug = bug if bug in FORWARD_BUGS else ""
    out, lse = tiled_forward(call, x, forward_bug)
    budget.check_forward(out, lse)
    budget.check_backward(tiled_backward(call, x, out, lse, bug if bug in BACKWARD_BUGS else ""))
    if call.v.size:
        hot = probe(call)
        y = model_flash.expand(hot, arithmetic or budget.accumulator)
        Budget(hot).check_probe(tiled_forward(hot, y, forward_bug)[0])


def suite(dtype: np.dtype, families: tuple[str, ...], seed: int = 0) -> list[Call]:
    """Return one causal call of each family, with every feature that a bug can affect."""
    calls = []
    for family in families:
        rng = np.random.default_rng(seed + 1000)
        bias = rng.standard_normal((64, 256)).astype(np.float32)
        bias[7] = -np.inf
        options = {
            "causal": True,
            "softcap": 20.0,
            "bias": bias,
            "enable_gqa": True,
            "alibi_slopes": np.array([0.0, 0.01, 0.02, 0.04], np.float32),
            "sink": np.array([0.0, -100.0, 5.0, -np.inf], np.float32),
            "dropout": 0.25,
            "seed": 1,
        }
        call = make_call(family, seed, dtype, Q, KV, KV, options=options)
        dlse = rng.standard_normal((*call.batch, 64)).astype(call.lse_dtype)
        calls.append(call.but(dlse=dlse))
    return calls


def small(call: Call) -> Call:
    """Return a smaller call of float64, since its longdouble truth is slow without a BLAS."""
    if call.dtype != np.float64:
        return call
    rows, keys = slice(0, 40), slice(0, 104)
    options = dict(call.options)
    if "bias" in options:
        options["bias"] = options["bias"][rows, keys]
    dlse = None if call.dlse is None else call.dlse[:1, :, rows]
    return call.but(
        q=call.q[:1, :, rows], k=call.k[:1, :, keys], v=call.v[:1, :, keys],
        dout=call.dout[:1, :, rows], dlse=dlse, options=options,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("family", OF_EVERY_DTYPE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_arithmetic_passes(dtype: str, family: str) -> None:
    for seed in range(2):
        call = make_call(family, seed, DTYPES[dtype], Q, KV, KV, options={"enable_gqa": True})
        emulate(small(call))
        emulate(small(suite(DTYPES[dtype], (family,), seed)[0]))


@pytest.mark.parametrize(
    "dtypes", [(np.float16, np.float32, np.float32), (np.float32, bfloat16, np.float64)], ids=str
)
def test_operands_of_different_dtypes(dtypes: tuple[type, ...]) -> None:
    """Arithmetic in the widest dtype passes; in the dtype of the narrowest operand it fails."""
    call = small(make_call("normal", 0, dtypes, Q, KV, KV, options={"enable_gqa": True}))
    emulate(call)
    narrow = min(map(np.dtype, dtypes), key=lambda dtype: dtype.itemsize)
    own = {n: call.array(n).astype(narrow).astype(call.array(n).dtype) for n in ("q", "k", "v")}
    rounded = call.but(**own)
    x = model_flash.expand(rounded, Budget(call).accumulator)
    out, lse = tiled_forward(rounded, x)
    with pytest.raises(BudgetError):
        Budget(call).check_forward(out, lse)
    with pytest.raises(BudgetError):
        Budget(call).check_backward(tiled_backward(rounded, x, out, lse))


@pytest.mark.parametrize("keys", [1, 2, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_arithmetic_passes_where_chance_rules(dtype: str, keys: int) -> None:
    """Correct arithmetic passes on a handful of elements, where max|M - T| may be 0 by luck."""
    for family in OF_EVERY_DTYPE:
        for seed in range(3):
            emulate(make_call(family, seed, DTYPES[dtype], (1, 8), (keys, 8), (keys, 1)))


@pytest.mark.parametrize("family", OF_EVERY_DTYPE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_units_of_log_2_pass(dtype: str, family: str) -> None:
    """One fused multiply-add per exponent passes, though it rounds the references of rows."""
    for seed in range(4):
        q, kv = (2, 4, 65, 64), (2, 4, 129, 64)
        call = make_call(family, seed, DTYPES[dtype], q, kv, kv)
        x = model_flash.expand(call, np.float32)
        scale = np.float32(x.scale * np.log2(np.e))
        scores = x.q @ x.k.swapaxes(-1, -2)
        reference = scores.max(-1, keepdims=True) * scale
        fused = scores.astype(np.float64) * scale - reference
        p = np.exp2(fused.astype(np.float32))
        total = p.sum(-1, keepdims=True)
        out = (p.astype(call.dtype).astype(np.float32) @ x.v) / total
        lse = reference * np.float32(np.log(2)) + np.log(total)
        Budget(call).check_forward(out.astype(call.dtype), lse[..., 0])


@pytest.mark.long
@pytest.mark.parametrize("bug", FORWARD_BUGS + BACKWARD_BUGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bug_is_caught(dtype: str, bug: str) -> None:
    calls = suite(DTYPES[dtype], ("normal", "lse_minus_120", "normal_times_3"))
    calls.append(make_call("normal", 0, DTYPES[dtype], Q, KV, KV, options={"enable_gqa": True}))
    caught = []
    for call in calls:
        try:
            emulate(small(call), bug)
        except BudgetError as error:
            caught.append(str(error))
    assert caught, f"the oracle accepts {bug!r}"


def test_float32_in_float64_is_caught() -> None:
    call = small(suite(DTYPES["float64"], ("normal",))[0])
    with pytest.raises(BudgetError):
        emulate(call, arithmetic=np.float32)


def test_tf32_in_float32_is_caught() -> None:
    """Operands of 11 significant bits, as in TF32 products, fail the budget of float32."""
    call = make_call("normal", 0, np.float32, (2, 64, 64), (2, 256, 64), (2, 256, 64))
    x = model_flash.expand(call, np.float32)
    x.q = with_significant_bits(x.q, 11)
    out, lse = tiled_forward(call, x)
    with pytest.raises(BudgetError):
        Budget(call).check_forward(out, lse)


def with_significant_bits(array: np.ndarray, bits: int) -> np.ndarray:
    """Round to the nearest numbers with ``bits`` significant bits."""
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent).astype(array.dtype)


@pytest.mark.parametrize(
    ("bits", "family"),
    [(11, "normal"), (11, "uniform"), (11, "normal_times_3"), (11, "one_hot"), (8, "normal")],
)
def test_products_of_tf32_pass_by_their_own_budget(
    bits: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of 11 bits pass the budget of TF32, and products of 8 bits, as in bfloat16, fail."""
    options = {"causal": True, "softcap": 20.0}
    call = make_call(family, 0, np.float32, Q, KV, KV, options={**options, "enable_gqa": True})
    budget, x = Budget(call.but(tf32=True)), model_flash.expand(call, np.float32)

    def product(_: object, a: np.ndarray, b: np.ndarray, rounding: bool) -> np.ndarray:
        return with_significant_bits(a, bits) @ with_significant_bits(b, bits)

    with monkeypatch.context() as patched:
        patched.setattr(model_flash, "_product", product)
        out, lse = model_flash.forward(x)
        gradients = model_flash.backward(x, out, lse)
    if bits == 11:
        budget.check_forward(out, lse)
        budget.check_backward(gradients, given=(out, lse))
    else:
        with pytest.raises(BudgetError):  # out has too few rows for R2
            budget.check_backward(gradients, given=(out, lse))


@pytest.mark.long
@pytest.mark.parametrize(("family", "rows"), [("one_sign", 512), ("one_sign_near_1", 256)])
def test_sums_that_are_cut_off_are_caught(family: str, rows: int) -> None:
    """Sums cut off over all columns of dp and 64 keys of out fail: dk errs seven times as much."""
    shape = (rows, 128)
    call = make_call(family, 0, np.float32, shape, shape, shape).but(wrt=("q", "k"))
    out, lse, dq, dk = cut_sums.attention(call, in_parts=True)
    given = Budget(call)
    given.check_forward(out, lse)
    given.check_backward({"q": dq, "k": dk}, given=(out, lse))
    out, lse, dq, dk = cut_sums.attention(call, in_parts=False)
    old = Budget(call)
    old.check_forward(out, lse)
    with pytest.raises(BudgetError, match="R7"):
        old.check_backward({"q": dq, "k": dk}, given=(out, lse))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_element_is_reported_first(value: float) -> None:
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4))
    budget = Budget(call)
    out = budget.truth.out.astype(np.float32)
    out[0, 0] += 1
    out[2, 1] = value
    with pytest.raises(BudgetError, match=r"R5: out\[2, 1\] is (nan|inf), expected a finite value"):
        budget.check_forward(out)


def test_the_worst_element_is_reported() -> None:
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4))
    budget = Budget(call)
    out = budget.truth.out.astype(np.float32)
    out[0, 0] += 0.01
    out[1, 2] += 1
    with pytest.raises(BudgetError, match=r"out\[1, 2\] is .*2 of 12 elements are outside"):
        budget.check_forward(out)


def test_what_gpu_code_flushes_passes_and_nothing_larger() -> None:
    """The gradient of a float32 sink beside float64 may be 0 below float32's normal range. (D93)"""

    def check_zeros(sink: float) -> None:
        options = {"sink": np.full(2, sink, np.float32)}
        call = make_call("normal", 0, np.float64, (2, 3, 4), (2, 5, 4), (2, 5, 4), options=options)
        budget = Budget(call.but(wrt=("sink",)))
        assert budget.gradients["sink"].truth.all()
        budget.check_backward({"sink": np.zeros(2, np.float32)})

    check_zeros(-100.0)
    with pytest.raises(BudgetError, match="R6: dsink"):
        check_zeros(-80.0)


def test_negative_zero_in_a_hidden_row_is_caught() -> None:
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4), options={"q_lengths": 2})
    budget = Budget(call)
    out = budget.truth.out.astype(np.float32)
    budget.check_forward(out)
    out[2, 0] = -0.0
    with pytest.raises(BudgetError, match="R5"):
        budget.check_forward(out)


def test_a_shape_is_never_broadcast() -> None:
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4))
    with pytest.raises(BudgetError, match="shape"):
        Budget(call).check_forward(np.zeros((1, 4), np.float32))


@pytest.mark.parametrize("dtype", [DTYPES["float16"], DTYPES["bfloat16"]], ids=str)
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (40, 5), "softcap": 2.0}, {"kv_lengths": 30}], ids=str
)
def test_entries_one_by_one_have_the_budget_of_all(monkeypatch, dtype, options) -> None:
    call = make_call("normal", 1, dtype, *((2, 3, n, 24) for n in (70, 90, 90)), options=options)
    dlse = np.random.default_rng(0).standard_normal((2, 3, 70)).astype(np.float32)
    together = Budget(call.but(dlse=dlse))
    given = together.truth.out.astype(np.float32), together.truth.lse.astype(np.float32)
    monkeypatch.setattr(_bounds, "TOGETHER", 1)
    apart = Budget(call.but(dlse=dlse))
    assert len(apart.entries) == 6
    together.entries = ()
    together.given = apart.given = given
    pairs = [(together.forward.out, apart.forward.out)]
    pairs += zip(together.gradients.values(), apart.gradients.values(), strict=True)
    for one, other in pairs:
        for name in ("truth", "model", "unrounded", "accumulation", "rounding"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), one.name)
    for name in ("lse", "lse_error", "visible"):
        one, other = (getattr(b.forward, name) for b in (together, apart))
        np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize(
    "call",
    [
        make_call("normal", 0, np.float16, (2, 4, 8), (5, 8), (2, 5, 8)),
        make_call("normal", 0, np.float16, *((2, 4, 8),) * 3, options={"dropout": 0.5, "seed": 0}),
        make_call("normal", 0, np.float16, *((4, 8),) * 3),
        make_call(
            "normal", 0, np.float16, *((2, 4, 8),) * 3, options={"mask": np.ones((4, 4), bool)}
        ),
    ],
    ids=["one k", "dropout", "no batch", "mask"],
)
def test_entries_that_share_something_stay_together(monkeypatch, call) -> None:
    monkeypatch.setattr(_bounds, "TOGETHER", 1)
    assert Budget(call).entries == ()


def sample(rows: int = 512, heads: int = 6, columns: int = 16, family: str = "normal") -> Budget:
    """Return the budget of a float16 call."""
    shapes = ((heads, rows, 16), (heads, rows, 16), (heads, rows, columns))
    return Budget(make_call(family, 0, np.float16, *shapes))


def test_one_head_that_errs_too_much_is_caught() -> None:
    """An error in one head is caught even if the mean over all heads hides it."""
    budget = sample()
    tensor = budget.forward.out
    out, error = tensor.model.astype(np.float64), tensor.model - tensor.truth
    out[3] += 0.4 * error[3]
    with pytest.raises(BudgetError, match=r"R2: rms of the error of out \(head \(3,\)\)"):
        budget.check_forward(out)
    budget.check_forward(tensor.model)
    gradients = {name: own.model.astype(np.float64) for name, own in budget.gradients.items()}
    budget.check_backward(gradients)
    dv = budget.gradients["v"]
    gradients["v"][3] += 0.8 * (dv.model - dv.truth)[3]
    with pytest.raises(BudgetError, match=r"R2: rms of the error of dv \(head \(3,\)\)"):
        budget.check_backward(gradients)


def test_one_element_that_errs_more_than_roundings_can_is_caught() -> None:
    small = Budget(make_call("normal", 0, np.float16, (3, 4), (5, 4), (5, 4)))
    out = small.truth.out + 2.5 * small.forward.out.rounding
    with pytest.raises(BudgetError, match="R6: out"):
        small.check_forward(out)


def test_rows_and_not_elements_make_a_sample() -> None:
    """Samples count rows, not elements: the elements of a row share the error of its sum."""
    factor = 1 + 0.9 * 2.0**-11
    few = sample(4, 2, 1024, "uniform")
    few.check_forward(few.truth.out * factor)
    many = sample(family="uniform")
    with pytest.raises(BudgetError, match="R2"):
        many.check_forward(many.truth.out * factor)


def test_a_probe_knows_relative_errors() -> None:
    budget = Budget(probe(make_call("normal", 0, np.float16, (30, 16), (40, 16), (40, 16))))
    budget.check_probe(budget.truth.out * (1 + 2.0**-11))
    with pytest.raises(BudgetError, match="R3"):
        budget.check_probe(budget.truth.out * (1 + 2.0**-8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_logarithms_that_are_not_those_of_their_rows_are_caught(value: float) -> None:
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4), options={"q_lengths": 2})
    budget = Budget(call)
    for row in (1, 2):
        lse = budget.truth.lse.copy()
        budget.check_forward(budget.truth.out, lse)
        lse[row] = value
        if row == 1 or value != -np.inf:
            with pytest.raises(BudgetError, match=r"R[45]: lse"):
                budget.check_forward(budget.truth.out, lse)


def test_logarithms_have_their_digits() -> None:
    """lse where all scores are 0 may err by 21 roundings."""
    call = make_call("normal", 0, np.float32, (3, 4), (5, 4), (5, 4), options={"scale": 0.0})
    budget = Budget(call)
    budget.check_forward(budget.truth.out, budget.truth.lse + 8 * budget.u)
    with pytest.raises(BudgetError, match="R4: lse"):
        budget.check_forward(budget.truth.out, budget.truth.lse + 32 * budget.u)
