"""Do the portable kernels compute what the definition says? Run by a C++ compiler, without a GPU.

A few calls of small arrays run forward and backward, with every gradient, through the plans and the
parameters of a GPU: `support.host_device`. What depends on a GPU's rounding, memory model or timing
is left to the tests marked gpu.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash._problem.problem import describe
from cuflash._results import Saved
from cuflash.testing._budget import Budget
from support import chosen, covering, problems
from support.problems import Call, make_call

pytest.importorskip("cupy", reason="CuPy is not installed")

import test_modifiers
import test_varlen

from cuflash._launch import run, score_gradients
from cuflash._problem.packed import describe_packed
from cuflash._select.score_sums import score_sums
from support.host_device import COMPILER, HostDevice, host_device, on_device, options_on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
#: Rows of the covering array that together have every kernel, option and gradient.
ROWS = (129, 145, 64)
#: Options of calls with few rows and keys; kernels of partner warps hold one that changes scores.
FEW_ROWS, FEW_KEYS = 75, 90
_RNG = np.random.default_rng(5)
_MASK = _RNG.random((2, 1, FEW_ROWS, FEW_KEYS)) < 0.7
_MASK[0, 0, 20:40] = False  # rows that see nothing
ONE_OPTION: dict[str, dict[str, Any]] = {
    "bias, window": {"bias": _RNG.standard_normal((2, FEW_ROWS, FEW_KEYS)), "window": (40, 8)},
    "key bias": {"bias": _RNG.standard_normal((2, 1, 1, FEW_KEYS))},
    "dropout": {"dropout": 0.25, "seed": 3},
    "transposed bias": {"bias": _RNG.standard_normal((FEW_KEYS, FEW_ROWS)).T},
    "mask, causal": {"mask": _MASK, "causal": True},
    "bias of -inf": {"bias": np.where(_MASK, 0.5, -np.inf)},
    "slopes": {"alibi_slopes": np.array([0.1, 0.3])},
    "softcap, causal": {"softcap": 5.0, "causal": True},
    "segments, lengths": {
        "segment_ids": tuple(np.sort(_RNG.integers(0, 3, (2, 1, n))) for n in (FEW_ROWS, FEW_KEYS)),
        "q_lengths": np.array([[75], [50]]), "kv_lengths": np.array([[90], [33]]),
    },
}  # fmt: skip


@pytest.fixture
def device(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path) as found:
        yield found


def full_of_nan(shape: tuple[int, ...], dtype: Any) -> Any:
    return on_device(np.full(shape, np.nan, dtype))


def results(
    call: Call, options: cuflash.Options, precision: str | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return out, lse and the gradients by input name."""
    options_on_device(options)
    dout, q, k, v = (on_device(call.array(name)) for name in ("dout", "q", "k", "v"))
    problem = describe(q, k, v, options, precision=precision)
    out = full_of_nan(problem.out_shape, problem.dtype)
    lse = full_of_nan(problem.lse_shape, problem.lse_dtype)
    run.forward(problem, (q, k, v), options, out, lse)
    gradients = {n: full_of_nan(call.array(n).shape, call.array(n).dtype) for n in call.wrt}
    dlse = None if call.dlse is None else on_device(call.dlse)
    saved = Saved(dout, out, lse, dlse)
    run.backward(problem, (q, k, v), options, saved, gradients)
    return (
        np.asarray(out), np.asarray(lse), {n: np.asarray(g) for n, g in gradients.items()}
    )  # fmt: skip


def reference_results(call: Call, options: cuflash.Options) -> dict[str, Any]:
    """Return out and gradients of the definition in float64, by name."""
    q, k, v, dout = (call.array(name).astype(np.float64) for name in ("q", "k", "v", "dout"))
    out, lse = reference.attention(q, k, v, options=options, return_lse=True)
    grads = reference.attention_backward(dout, q, k, v, out, lse, options=options)
    return {"out": out, "q": grads.dq, "k": grads.dk, "v": grads.dv}


def check(call: Call, options: cuflash.Options) -> dict[str, Any]:
    """Check out, lse and gradients against the budget; return the gradients."""
    out, lse, gradients = results(call, options)
    budget = Budget(call)
    budget.check_forward(out, lse)
    budget.check_backward(gradients, given=(out, lse))
    return gradients


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "dtype"),
    list(zip(itertools.cycle(ROWS), covering.FACTORS["dtype"], strict=False)),
)
def test_rows_of_the_covering_array(device: HostDevice, number: int, dtype: str) -> None:
    row = covering.rows()[number] | {"dtype": dtype, "operand dtypes": "same"}
    call = covering.call_of(row, number).but(axes=None, placements={})
    check(call, cuflash.Options(**call.options))
    assert {"cuflash_forward_sm80", "cuflash_backward_dscore_sm80"} <= set(device.launched)


@pytest.mark.full
@pytest.mark.parametrize(
    "head_dims", [(20, 28), (64, 48), (90, 76), (128, 128), (180, 140), (250, 256)], ids=str
)
def test_tiles_of_float32_are_split_once(device: HostDevice, head_dims: tuple[int, int]) -> None:
    """float32 tiles that are split once are right in groups, and unseen NaN queries add nothing."""
    (d, d_v), rng = head_dims, np.random.default_rng(3)
    mask = rng.random((2, 1, 75, 90)) < 0.7
    mask[0, 0, 20:40] = mask[1, 0, 3] = False
    options = {"enable_gqa": True, "causal": True, "mask": mask}
    shapes = (2, 2, 75, d), (2, 1, 90, d), (2, 1, 90, d_v)
    call = make_call("normal", 6, np.float32, *shapes, options=options)
    clean = check(call, cuflash.Options(**options))
    q, dout = call.q.copy(), call.dout.copy()
    q[0, :, 20:40] = dout[0, :, 20:40] = np.nan  # these queries see nothing
    poisoned = results(call.but(q=q, dout=dout), cuflash.Options(**options))[2]
    for name, gradient in clean.items():
        np.testing.assert_array_equal(poisoned[name], gradient, name)
    passes = 1 if max(head_dims) <= 64 else 2
    assert device.launched.count("cuflash_backward_dkv_sm80") == 2 * passes


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "head_dim"), list(zip(ONE_OPTION, itertools.cycle((48, 90, 128)), strict=False))
)
def test_float64_gradients_of_partner_warps(device: HostDevice, name: str, head_dim: int) -> None:
    """Gradients with an option are within the budget, with and without shared heads."""
    for heads in (2, 1):
        keys = (2, heads, FEW_KEYS)
        shapes = (2, 2, FEW_ROWS, head_dim), (*keys, head_dim), (*keys, head_dim - 8)
        options = ONE_OPTION[name] | {"enable_gqa": heads == 1}
        call = make_call("normal", 7, np.float64, *shapes, options=options)
        check(call, cuflash.Options(**options))
    kernels = ["cuflash_backward_dkv_partners", "cuflash_backward_dq_partners"]
    assert [device.launched.count(kernel) for kernel in kernels] == [2, 2]


@pytest.mark.full
def test_workspaces_may_hold_anything(device: HostDevice) -> None:
    """No result depends on what row statistics, segment bounds and sums of scores held before."""
    ids = tuple(np.sort(np.random.default_rng(n).integers(0, 4, (2, 1, n))) for n in (100, 70))
    options = {
        "segment_ids": ids, "causal": True, "sink": np.array([0.5, -1.0], np.float32),
        "alibi_slopes": np.array([0.1, 0.2], np.float32),
        "bias": np.random.default_rng(0).standard_normal((100, 70)).astype(np.float32),
    }  # fmt: skip
    shapes = (2, 2, 100, 24), (2, 2, 70, 24), (2, 2, 70, 24)
    wrt = ("q", "k", "v", "bias", "alibi_slopes", "sink", "scale")
    call = make_call("normal", 4, np.float16, *shapes, options=options, wrt=wrt)
    found = []
    for device.unwritten in (0xFF, 0x45):
        out, lse, gradients = results(call, cuflash.Options(**options))
        found.append([a.tobytes() for a in (out, lse, *gradients.values())])
    assert found[0] == found[1]
    budget = Budget(call)
    budget.check_forward(out, lse)
    budget.check_backward(gradients, given=(out, lse))
    assert "cuflash_segment_bounds" in device.launched


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("with_arrays", [False, True])
def test_a_repeated_call_is_that_of_its_own_arrays(with_arrays: bool) -> None:
    shapes = (2, 4, 70, 24), (2, 2, 90, 24), (2, 2, 90, 40)
    repeats: list[Any] = []
    repeats_of_forward: list[Any] = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        own: dict[str, Any] = {}
        if with_arrays:
            ids = np.sort(rng.integers(0, 3, (2, 1, 90)))
            own = {
                "bias": rng.standard_normal((4, 70, 90)).astype(np.float32),
                "sink": rng.standard_normal(4).astype(np.float16),
                "segment_ids": (ids[..., :70].copy(), ids),
            }
        options = options_on_device(cuflash.Options(causal=True, enable_gqa=True, **own))
        of_options = [array.data.ptr for array in options.arrays.values()]
        call = make_call("normal", seed, np.float16, *shapes, options={"enable_gqa": True})
        dout, q, k, v = (on_device(call.array(name)) for name in ("dout", "q", "k", "v"))
        problem = describe(q, k, v, options)
        out = full_of_nan(problem.out_shape, problem.dtype)
        lse = full_of_nan(problem.lse_shape, problem.lse_dtype)
        plan = run.forward(problem, (q, k, v), options, out, lse)
        assert plan is not None
        repeats_of_forward.append(run.repeated_forward(plan, problem, q, options, lse))
        same = repeats_of_forward[0](*(a.data.ptr for a in (q, k, v)), *of_options)
        assert [a.tobytes() for a in same] == [out.tobytes(), lse.tobytes()], seed
        gradients = {name: full_of_nan(call.array(name).shape, problem.dtype) for name in "qkv"}
        saved = Saved(dout, out, lse)
        plan = run.backward(problem, (q, k, v), options, saved, gradients)
        assert plan is not None
        repeats.append(run.repeated_backward(plan, problem, (q, k, v), options, saved))
        again = repeats[0](*(a.data.ptr for a in (q, k, v, dout, out, lse)), *of_options)
        for name, gradient in gradients.items():
            assert getattr(again, f"d{name}").tobytes() == gradient.tobytes(), (seed, name)
    in_double = saved._replace(dout=dout.astype(np.float64))
    plan_of_others = run.backward(problem, (q, k, v), options, in_double, gradients)
    assert plan_of_others is None  # it has read a copy of the caller's dout
    off = on_device(np.zeros(out.nbytes + 2, np.uint8)[2:].view(out.dtype).reshape(out.shape))
    off_its_place = saved._replace(dout=off)
    assert run.repeated_backward(plan, problem, (q, k, v), options, off_its_place) is None


@pytest.mark.parametrize("shape", [(320,), (512,), (8, 128), (500, 1)], ids=str)
def test_a_gradient_of_a_sink_reads_workspaces_of_any_shape(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_gradients, "cupy", np)
    rng = np.random.default_rng(0)
    statistics = rng.standard_normal((2, 20, 2)).astype(np.float32)
    sink, gradient = np.array([0.5, -1.0], np.float32), np.empty(2, np.float32)
    q = np.zeros((2, 20, 8), np.float16)
    problem = describe(q, q, q, cuflash.Options(sink=sink))
    workspace = np.full(shape, 0xFF, np.uint8)
    workspace.reshape(-1)[: statistics.nbytes] = statistics.view(np.uint8).reshape(-1)
    lse, delta = statistics[..., 0], statistics[..., 1]
    score_gradients.write_sink(problem, workspace, lse, sink, gradient, None, None)
    expected = -(np.exp(sink[:, None] - lse) * delta).sum(-1)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("head_dims", [(3, 5), (16, 40)], ids=str)
def test_small_head_sizes(head_dims: tuple[int, int]) -> None:
    """Small head sizes are right over several tiles, with the bias of kernel regression."""
    d, d_v = head_dims
    bias = np.random.default_rng(0).standard_normal((1, 150)).astype(np.float32)
    shapes = (1, 100, d), (1, 150, d), (1, 150, d_v)
    call = make_call("normal", 1, np.float16, *shapes, options={"bias": bias}, wrt=("k", "bias"))
    check(call, cuflash.Options(bias=bias))


@pytest.mark.long
@pytest.mark.usefixtures("device")
def test_blocks_that_a_row_does_not_see_leave_its_bits() -> None:
    """Blocks of hidden keys change no bit: a sum's rounding errors are kept beside it unchanged."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, n, 16)).astype(np.float32) for n in (200, 500, 500))
    k[:, 64:] *= 5  # weights grow: a block adds more than the sum before it
    seen = np.broadcast_to(np.arange(500) < 120, (200, 500)).copy()
    pairs = []
    for keys in (120, 500):
        call = Call(q, k[:, :keys], v[:, :keys], np.zeros_like(q), options={}, wrt=())
        pairs.append(results(call, cuflash.Options(mask=seen[:, :keys].copy()))[:2])
    (out, lse), (with_hidden, lse_with_hidden) = pairs
    np.testing.assert_array_equal(with_hidden, out)
    np.testing.assert_array_equal(lse_with_hidden, lse)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("options", [{}, {"softcap": 1e6}, {"sink": np.array(0.0)}], ids=str)
def test_a_key_that_takes_everything_gives_its_value(options: dict[str, Any]) -> None:
    """One key with all weight gives its value exactly, at logits near 1e5 with steps of 1/128."""
    rng = np.random.default_rng(0)
    q, k, v = ((100 + rng.random((n, 96))).astype(np.float32) for n in (40, 60, 60))
    k[7] += 1
    v = np.round(v * 1024) / 1024  # exact in two parts of TF32
    call = Call(q, k, v, np.zeros_like(q), options={}, wrt=())
    out, _, _ = results(call, cuflash.Options(**options))
    np.testing.assert_array_equal(out, np.broadcast_to(v[7], out.shape))


@pytest.mark.full
@pytest.mark.usefixtures("device")
def test_tf32_rounds_operands_and_nothing_else() -> None:
    """TF32 errs as rounding to 11 bits does: by at most two units and at least a tenth of one."""
    call = make_call("normal", 0, np.dtype(np.float32), (40, 64), (50, 64), (50, 32))
    options = cuflash.Options(causal=True)
    out, _, gradients = results(call, options, "tf32")
    expected = reference_results(call, options)
    step = 2.0**-11
    for name, result in {"out": out, **gradients}.items():
        error = np.linalg.norm(result - expected[name]) / np.linalg.norm(expected[name])
        assert step / 10 < error < 2 * step, name


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [("float32", 20, 200), ("float32", 200, 40), ("float64", 200, 180)],
)
def test_columns_in_parts(dtype: str, head_dim: int, head_dim_v: int) -> None:
    """Wide results are right in column blocks, also of rows that see a NaN.

    Each thread block computes some columns. Rows that do not see the NaN are computed again pair by
    pair, with a sink as large as their largest scores.
    """
    options = {"causal": True, "sink": np.array(1.8)}
    call = make_call(
        "normal", 0, np.dtype(dtype), (20, head_dim), (35, head_dim), (35, head_dim_v),
        options=options,
    )  # fmt: skip
    problem = describe(call.q, call.k, call.v, cuflash.Options(**options))
    parts = chosen.portable("forward_sm80", problem, 227 << 10, 16).split_columns
    assert (parts > 1) == (head_dim_v > 128)
    v = call.v.copy()
    v[30, 35 if head_dim_v == 40 else 170] = np.nan
    check(call.but(v=v), cuflash.Options(**options))


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["ALiBi", "mask of an array"])
def test_formulas(name: str) -> None:
    formula, option = test_modifiers.SAME[name]
    q, k, v, dout = test_modifiers.inputs(np.float16)
    call = Call(q, k, v, dout, options={**option, "enable_gqa": True})
    check(call, cuflash.Options(**formula, enable_gqa=True))


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_formula_is_asked_about_pairs_that_exist(dtype: Any) -> None:
    rows, keys = 70, 300
    asked = on_device(np.zeros(2, np.float32))
    formula = test_modifiers.formula_that_notes(asked, rows, keys)
    call = make_call("normal", 1, dtype, (2, rows, 24), (2, keys, 24), (2, keys, 24))
    results(call, cuflash.Options(score_mod=formula))
    assert asked.tolist() == [1, 0]


@pytest.mark.long
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["causal", "every"])
def test_packed_sequences(kind: str) -> None:
    def attend(arrays: Any, ends: Any, given: Any, wrt: Any) -> Any:
        options = options_on_device(cuflash.Options(**given))
        dout, q, k, v = map(on_device, arrays)
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(on_device, ends), strict=True))
        problem = describe_packed(q, k, v, options, packed, axes=None, precision=None)
        out = on_device(np.zeros(problem.out_shape, problem.dtype))
        lse = on_device(np.full(problem.lse_shape, -np.inf, np.float32))
        run.forward(problem, (q, k, v), options, out, lse, cu_seqlens=packed)
        inputs = {"q": q, "k": k, "v": v, "scale": np.zeros(()), **options.arrays}
        gradients = {n: on_device(np.zeros_like(inputs[n])) for n in wrt}
        saved = Saved(dout, out, lse)
        run.backward(problem, (q, k, v), options, saved, gradients, cu_seqlens=packed)
        plain = {n: np.asarray(g) for n, g in gradients.items()}
        assert all(math.prod(g.shape) for g in plain.values())
        return np.asarray(out), np.asarray(lse), plain

    test_varlen.check_sequences(np.float16, "mixed", kind, attend)


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("lead", [0, 1, 40])
def test_sums_of_packed_sequences_know_nothing_of_each_other(lead: int) -> None:
    lengths = (3, 0, 31, 32, 33, 1, 1100, 64, 0, 2000, 5)
    ends = np.cumsum((lead, *lengths))
    rows = np.random.default_rng(0).standard_normal((2, ends[-1] + 7))
    rows[:, ends[2] : ends[3]] *= 1e30
    rows[1, ends[5]] = np.nan
    sums = score_gradients.of_sequences(rows, ends.astype(np.int32))
    assert sums.shape == (len(lengths), 2)
    for found, first, last in zip(sums, ends[:-1], ends[1:], strict=True):
        for entry in range(2):
            own = rows[entry, first:last]
            exact = math.fsum(own)
            np.testing.assert_allclose(
                found[entry], exact, rtol=0, atol=64 * np.finfo(float).eps * np.abs(own).sum()
            )
    assert np.isnan(sums).sum() == 1


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {"causal": True, "kv_lengths": np.array([[50], [0]])}), (5, {"softcap": 2.0})],
    ids=str,
)
def test_query_heads_of_a_group_in_one_tile(rows: int, options: dict[str, Any]) -> None:
    shapes = (2, 6, rows, 32), (2, 2, 60, 32), (2, 2, 60, 32)
    call = problems.make_call(
        "normal", 3, np.float16, *shapes, options={**options, "enable_gqa": True}
    )
    check(call, cuflash.Options(**call.options))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["bias", "alibi_slopes"])
def test_sums_in_float64_are_rounded_once(name: str) -> None:
    """A sum just beyond a tie of 16 bits is rounded once; by way of float32 it would be the tie."""
    ulp = 2.0**-10
    a = on_device(np.zeros((2, 1, 4)))
    array = on_device(np.zeros({"bias": (2, 1, 1), "alibi_slopes": (2,)}[name], np.float16))
    options = options_on_device(cuflash.Options(**{name: array}))
    problem = describe(a, a, a, options)
    own = score_sums(problem, name, array.shape)
    sums = np.full(own.shape, 1 + ulp / 2 + 2.0**-40)
    score_gradients.write(problem, name, own, sums, array, None)
    np.testing.assert_array_equal(np.asarray(array), np.float16(1 + ulp))
