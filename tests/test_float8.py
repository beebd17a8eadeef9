"""Are operands of 8 bits what their scales say, everywhere that a call may have them?"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import Options, reference
from cuflash._problem.float8 import E4M3, E5M2, factor_of_rows, rows_of_blocks
from cuflash.testing import assert_attention_close
from support import covering

BF16 = np.dtype(ml_dtypes.bfloat16)
RESULTS = (np.dtype(np.float16), BF16, np.dtype(np.float32))
ROWS = covering.rows()[:: len(covering.rows()) // 40]


def of_8_bits(shape: tuple[int, ...], seed: int, dtype: Any = E4M3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def powers_of_two(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32)


def scales(heads: tuple[int, int] = (4, 4), keys: int = 35) -> dict[str, Any]:
    """One number, one factor for each head, one for each block of 16 rows."""
    k = powers_of_two((heads[1], 1, 1), 1)
    return {"q_scale": 0.5, "k_scale": k, "v_scale": powers_of_two((1, -(-keys // 16), 1), 2)}


def dequantized(array: np.ndarray, scale: Any, dtype: Any = np.float64) -> np.ndarray:
    """By the definition of a scale, row by row."""
    wide = array.astype(np.float64)
    if getattr(scale, "ndim", 0):
        rows = rows_of_blocks(array.shape[-2], scale.shape[-2])
        numbers = np.arange(array.shape[-2]) // rows if scale.shape[-2] > 1 else [0]
        scale = scale[..., numbers, :]
    return (wide * scale).astype(dtype)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['dtype']} {row['heads']}")
def test_a_call_is_that_of_dequantised_arrays(row: dict[str, str]) -> None:
    """Forward and gradient, with the options of calls that cover three of them together."""
    row = row | {"packed": "no", "layout": "dense", "dtype": "bfloat16", "operand dtypes": "same"}
    call = covering.call_of(row, 1)
    operands = [a.astype(np.float32).astype(E4M3) for a in call.qkv]
    own = scales((call.q.shape[-3], call.k.shape[-3]))
    if call.v.ndim < 4 or call.v.shape[-3] != call.k.shape[-3]:
        own["k_scale"] = 2.0
    plain = [dequantized(a, s, BF16) for a, s in zip(operands, own.values(), strict=True)]
    out, lse = cuflash.attention(*operands, return_lse=True, **call.options, **own)
    expected = cuflash.attention(*plain, return_lse=True, **call.options)
    assert out.dtype == BF16
    assert bits(out) == bits(expected.out)
    assert bits(lse) == bits(expected.lse)
    dout = call.dout.astype(np.float32).astype(E5M2)
    given_ = {"dlse": call.dlse, "wrt": call.wrt, **call.options}
    grads = cuflash.attention_backward(dout, *operands, out, lse, **given_, **own)
    others = cuflash.attention_backward(dout.astype(BF16), *plain, out, lse, **given_)
    for ours, theirs in zip(grads, others, strict=True):
        assert ours.dtype == theirs.dtype
        assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("dtype", RESULTS, ids=str)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_the_result_has_the_dtype_of_its_destination(kind: Any, dtype: Any) -> None:
    q, k, v = (of_8_bits((2, 3, 40, 16), i, kind) for i in range(3))
    own = {"q_scale": 0.25, "v_scale": powers_of_two((2, 1, 1, 1), 3)}
    out = np.full((2, 3, 40, 16), np.nan, dtype)
    assert cuflash.attention(q, k, v, out=out, **own) is out
    plain = [dequantized(q, 0.25, dtype), k.astype(dtype), dequantized(v, own["v_scale"], dtype)]
    assert bits(out) == bits(cuflash.attention(*plain))
    exact = reference.attention(q, k, v, **own)
    assert bits(exact) == bits(
        reference.attention(dequantized(q, 0.25), k, dequantized(v, own["v_scale"]))
    )
    lse = np.empty(out.shape[:-1], np.float32)
    cuflash.attention(q, k, v, out=(out, lse), return_lse=True, **own)
    grads = cuflash.attention_backward(out, q, k, v, out, lse, **own)
    assert {g.dtype for g in grads} == {np.dtype(dtype)}


def test_keys_and_values_alone_may_have_8_bits() -> None:
    """As of a cache: they are read in the dtype of the queries."""
    q = of_8_bits((2, 4, 5, 16), 0).astype(np.float16)
    k, v = of_8_bits((2, 2, 40, 16), 1), of_8_bits((2, 2, 40, 16), 2)
    own = {"k_scale": powers_of_two((2, 1, 1), 1), "v_scale": powers_of_two((2, 2, 5, 1), 2)}
    out = cuflash.attention(q, k, v, enable_gqa=True, **own)
    plain = [dequantized(a, s, np.float16) for a, s in zip((k, v), own.values(), strict=True)]
    assert bits(out) == bits(cuflash.attention(q, *plain, enable_gqa=True))


def test_packed_sequences_pages_and_relatives() -> None:
    q, k, v = (of_8_bits((3, 50, 16), i) for i in range(3))
    own = {"q_scale": powers_of_two((3, 4, 1), 1), "k_scale": 2.0, "v_scale": 0.5}
    plain = [dequantized(a, s, BF16) for a, s in zip((q, k, v), own.values(), strict=True)]
    ends = np.array([0, 20, 50])
    out, lse = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True, **own)
    assert bits(out) == bits(cuflash.attention_varlen(*plain, ends, ends))
    exact = reference.attention_varlen(q, k, v, ends, ends, **own)
    assert bits(exact) == bits(reference.attention_varlen(*plain, ends, ends))
    ours = cuflash.attention_varlen_backward(out, q, k, v, out, lse, ends, ends, **own)
    theirs = cuflash.attention_varlen_backward(out, *plain, out, lse, ends, ends)
    assert all(bits(a) == bits(b) for a, b in zip(ours, theirs, strict=True))
    del own["v_scale"]
    lse = cuflash.logsumexp(q, k, **own)
    assert bits(lse) == bits(cuflash.logsumexp(*plain[:2]))
    weights = cuflash.weights(q, k, lse, rows=slice(None), **own)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    ours = cuflash.logsumexp_backward(lse, q, k, lse, **own)
    assert bits(ours.dk) == bits(cuflash.logsumexp_backward(lse, *plain[:2], lse).dk)
    pages = [of_8_bits((4, 3, 16, 16), i) for i in (3, 4)]
    table, queries = np.array([[3, 1], [0, 2]]), plain[0][None, :, :2].repeat(2, 0)
    own = {"k_scale": powers_of_two((4, 3, 1, 1), 1), "v_scale": powers_of_two((3, 1, 1), 1)}
    found = cuflash.attention_paged(queries, *pages, table, [20, 30], **own)
    wide = [dequantized(a, s, BF16) for a, s in zip(pages, own.values(), strict=True)]
    assert bits(found) == bits(cuflash.attention_paged(queries, *wide, table, [20, 30]))
    exact = reference.attention_paged(queries, *pages, table, [20, 30], **own)
    assert bits(exact) == bits(reference.attention_paged(queries, *wide, table, [20, 30]))


def test_parts_of_the_keys_merge() -> None:
    q, k, v = (of_8_bits((2, 64, 32), i) for i in range(3))
    own = {"q_scale": 2.0, "k_scale": 0.5}
    parts = [
        cuflash.attention(q, k[:, i], v[:, i], return_lse=True, **own)
        for i in (slice(0, 30), slice(30, 64))
    ]
    out, lse = cuflash.merge(np.stack([p.out for p in parts]), np.stack([p.lse for p in parts]))
    whole = reference.attention(q, k, v, return_lse=True, **own)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-5)
    assert abs(out.astype(float) - whole.out).max() < 2.0**-7 * abs(whole.out).max()


def test_axes_belong_to_the_elements_and_not_to_scales() -> None:
    q, k, v = (of_8_bits((2, 40, 3, 16), i) for i in range(3))
    own = {"q_scale": powers_of_two((2, 3, 5, 1), 1), "k_scale": powers_of_two((3, 1, 1), 2)}
    out = cuflash.attention(q, k, v, axes=[(-3, -1)] * 4, **own)
    heads_first = cuflash.attention(*(a.swapaxes(1, 2) for a in (q, k, v)), **own)
    assert bits(out.swapaxes(1, 2)) == bits(heads_first)


# --------------------------------------------------------------------------------------- options
def test_scales_are_options() -> None:
    array = powers_of_two((3, 1, 1), 0)
    options = Options(q_scale=2, k_scale=array)
    assert options == Options(q_scale=2.0, k_scale=array)
    assert options != Options(q_scale=2.0, k_scale=array.copy())
    assert hash(options) == hash(Options(q_scale=2.0, k_scale=array.copy()))
    assert hash(options) != hash(Options(q_scale=2.0))
    again = pickle.loads(pickle.dumps(options))
    assert again.q_scale == 2.0
    assert bits(copy.deepcopy(again).k_scale) == bits(array)
    assert repr(replace(options, k_scale=None)) == "Options(q_scale=2.0)"


Q = of_8_bits((2, 3, 50, 8), 0)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one for each head": ({"k_scale": np.ones(3)}, ValueError, r"write k_scale\[..., None, None\]"),
    "columns": ({"q_scale": np.ones((50, 8))}, ValueError, r"the shape \(2, 3, 1, 1\)"),
    "another batch": ({"q_scale": np.ones((4, 1, 1))}, ValueError, r"broadcasts to \(2, 3, 1, 1\)"),
    "three blocks": ({"v_scale": np.ones((3, 1))}, ValueError, "blocks of 32 rows are 2"),
    "integers": ({"q_scale": np.ones((1, 1), int)}, TypeError, "floating dtype"),
    "zero": ({"q_scale": 0.0}, ValueError, "finite positive number"),
    "a word": ({"q_scale": "half"}, TypeError, "finite positive number"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_scale_is_named(name: str) -> None:
    keywords, kind, text = WRONG[name]
    with pytest.raises(kind, match=text) as caught:
        cuflash.attention(Q, Q, Q, **keywords)
    assert str(caught.value).startswith(next(iter(keywords)))


def test_a_scale_belongs_to_8_bits() -> None:
    wide = Q.astype(np.float32)
    with pytest.raises(TypeError, match="v_scale: got a scale of float32, expected v of float8"):
        cuflash.attention(Q, Q, wide, v_scale=2.0)
    with pytest.raises(TypeError, match="v_scale"):
        cuflash.logsumexp(Q, Q, v_scale=2.0)
    with pytest.raises(TypeError, match="out: got dtype float64"):
        cuflash.attention(Q, Q, Q, out=np.empty(Q.shape))


@given(st.integers(1, 5000), st.integers(0, 13))
def test_the_number_of_blocks_says_how_long_they_are(length: int, exponent: int) -> None:
    blocks = -(-length // 2**exponent)
    if blocks > 1:
        assert rows_of_blocks(length, blocks) == 2**exponent
        factors = factor_of_rows(np.arange(blocks)[:, None], length)
        assert (factors[:, 0] == np.arange(length) // 2**exponent).all()


# -------------------------------------------------------------------------------------- quantize
def nearest(x: float, dtype: Any) -> float:
    """The number of ``dtype`` nearest to ``x``, of two the one with an even last bit."""
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    numbers = codes.astype(np.float64)
    finite = np.isfinite(numbers)
    distance = np.where(finite, abs(numbers - x), np.inf)
    nearest_two = np.flatnonzero(distance == distance.min())
    even = [i for i in nearest_two if i % 2 == 0]
    return float(numbers[(even or nearest_two)[0]])


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([np.float64, np.float32, np.float16, BF16]),
)
def test_elements_are_rounded_to_nearest_even(values: list[float], kind: Any, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        x = np.array([values]).astype(dtype)
    array, scale = cuflash.quantize(x, dtype=kind)
    assert array.dtype == kind
    assert scale.shape == (1, 1)
    size = np.abs(x.astype(np.float64))
    largest = size[np.isfinite(size)].max(initial=0)
    if largest > 2.0**-80:
        most = float(ml_dtypes.finfo(kind).max)
        assert largest / scale[0, 0] <= most < largest / scale[0, 0] * 2
    for own, code in zip(x[0].astype(np.float64), array[0], strict=True):
        if np.isfinite(own):
            assert float(code) == nearest(own / float(scale[0, 0]), kind)
        else:
            assert np.isnan(float(code))
    assert (dequantized(array, scale, BF16).astype(np.float64) == dequantized(array, scale))[
        np.isfinite(array.astype(np.float32))
    ].all()


@pytest.mark.parametrize(("per", "shape"), [
    ("matrix", (2, 3, 1, 1)), ("tensor", (1, 1)), (16, (2, 3, 4, 1)), (1, (2, 3, 50, 1)),
    (64, (2, 3, 1, 1)),
])  # fmt: skip
def test_scales_have_the_shape_that_options_take(per: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 50, 8)) * 100
    x[:, :, 20:30] *= 64
    array, scale = cuflash.quantize(x, per=per)
    assert scale.shape == shape
    # Four significant bits of each normal number.
    assert (abs(dequantized(array, scale) - x) <= np.maximum(2.0**-4 * abs(x), 64)).all()
    out = cuflash.attention(array, array, array, q_scale=scale, k_scale=scale, v_scale=scale)
    assert out.shape == x.shape
    swapped, same = cuflash.quantize(x.swapaxes(1, 2), per=per, axes=(-3, -1))
    assert bits(swapped.swapaxes(1, 2)) == bits(array)
    assert bits(same) == bits(scale)


@pytest.mark.parametrize("d", [1, 64, 80, 96])
def test_a_rotation_keeps_products(d: int) -> None:
    """In 8 bits they are what those of turned arrays round to: compared by their errors."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 200, d))
    a, b = (cuflash.quantize(array, rotation=5) for array in (x, y))
    turned = dequantized(*a) @ dequantized(*b).T
    plain = dequantized(*cuflash.quantize(x)) @ dequantized(*cuflash.quantize(y)).T
    error, without = (np.sqrt(((p - x @ y.T) ** 2).mean()) for p in (turned, plain))
    assert error < 1.2 * without
    other = dequantized(*cuflash.quantize(y, rotation=6))
    assert d == 1 or np.sqrt(((dequantized(*a) @ other.T - x @ y.T) ** 2).mean()) > 5 * error


def test_a_rotation_spreads_outliers() -> None:
    """Of FlashAttention-3's family; by the factor that the same rounding has in float64."""
    rng = np.random.default_rng(0)

    def family() -> np.ndarray:
        shape = (2, 1024, 64)
        rare = rng.random(shape) < 0.001
        return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * rare

    q, k, v = family(), family(), family()
    exact = reference.attention(q, k, v)

    def error(compute: Any, **keywords: Any) -> float:
        (q8, qs), (k8, ks) = (cuflash.quantize(a, per="tensor", **keywords) for a in (q, k))
        v8, vs = cuflash.quantize(v, per="tensor")
        out = compute(q8, k8, v8, q_scale=qs, k_scale=ks, v_scale=vs)
        return float(np.sqrt(((out.astype(np.float64) - exact) ** 2).mean()))

    gain = error(cuflash.attention) / error(cuflash.attention, rotation=1)
    simulated = error(reference.attention) / error(reference.attention, rotation=1)
    assert simulated > 1.25
    assert abs(gain / simulated - 1) < 0.05


def test_what_quantize_refuses() -> None:
    x = np.ones((4, 8))
    for keywords, kind, text in (
        ({"per": "head"}, TypeError, "per: got 'head'"),
        ({"per": 48}, ValueError, "per: got 48"),
        ({"dtype": np.float16}, TypeError, "dtype: got dtype float16"),
        ({"rotation": -1}, ValueError, "rotation"),
    ):
        with pytest.raises(kind, match=text):
            cuflash.quantize(x, **keywords)
    with pytest.raises(TypeError, match="x: got dtype int64"):
        cuflash.quantize(x.astype(int))
    assert cuflash.quantize(np.ones((0, 3, 8))).array.shape == (0, 3, 8)
    assert cuflash.quantize(np.zeros((3, 8))).scale == 1


def test_several_ranks_take_no_8_bits_yet() -> None:
    comm = cuflash.distributed.simulated(2)
    parts = [of_8_bits((4, 8, 16), i) for i in range(2)]
    with pytest.raises(NotImplementedError, match="8 bits on several ranks"):
        cuflash.distributed.attention(parts, parts, parts, comm=comm)


# ----------------------------------------------------------------------------------- on a GPU
@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def on_gpu(cupy: Any, value: Any) -> Any:
    """CuPy takes no array of 8-bit floats from the host: bytes, viewed as such."""
    if isinstance(value, tuple):
        return tuple(on_gpu(cupy, part) for part in value)
    if not hasattr(value, "strides"):
        return value
    return (
        cupy.asarray(value.view(np.uint8)).view(value.dtype)
        if value.itemsize == 1
        else (cupy.asarray(value))
    )


def on_host(array: Any) -> np.ndarray:
    return array.view(np.uint8).get().view(array.dtype)


GPU_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "lengths": {"kv_lengths": np.array([[200], [333]]), "q_lengths": np.array([[90], [300]])},
    "softcap": {"softcap": 3.0, "causal": True},
    "slopes": {"alibi_slopes": np.array([0.1, 0.3], np.float32)},
    "mask": {"mask": np.random.default_rng(3).random((300, 340)) < 0.5},
    "sink": {"sink": np.array([0.5, -1.0], np.float32)},
    "dropout": {"dropout": 0.25, "seed": 3},
    "segments": {"segment_ids": (np.arange(300) // 90, np.arange(340) // 100)},
    "bias": {"bias": np.random.default_rng(4).standard_normal((300, 340)).astype(np.float32)},
    "shared heads": {"enable_gqa": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_OPTIONS)
@pytest.mark.parametrize("d", [64, 256])
def test_a_kernel_is_within_the_budget(cupy: Any, d: int, name: str) -> None:
    """Of 8 bits where it is faster, else of dequantised arrays; with the same bits every time."""
    rng = np.random.default_rng(0)
    heads = 1 if name == "shared heads" else 2
    x = [rng.standard_normal((2, h, n, d)) for h, n in ((2, 300), (heads, 340), (heads, 340))]
    made = [cuflash.quantize(a, rotation=1) for a in x]
    options = {f"{n}_scale": own.scale for n, own in zip("qkv", made, strict=True)}
    options |= GPU_OPTIONS[name]
    there = [on_gpu(cupy, own.array) for own in made]
    moved = {n: on_gpu(cupy, value) for n, value in options.items()}
    out, lse = cuflash.attention(*there, return_lse=True, **moved)
    found = (on_host(out), lse.get())
    assert_attention_close(found, *(own.array for own in made), **options)
    for _ in range(20):
        assert bits(on_host(cuflash.attention(*there, **moved))) == bits(found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("out", RESULTS, ids=str)
def test_gradients_on_a_gpu(cupy: Any, out: Any) -> None:
    q, k, v = (of_8_bits((2, 3, 200, 64), i) for i in range(3))
    dout = of_8_bits((2, 3, 200, 64), 3, E5M2)
    own = {"q_scale": 0.5, "k_scale": powers_of_two((3, 4, 1), 1), "v_scale": 2.0, "causal": True}
    there = [on_gpu(cupy, a) for a in (q, k, v)]
    moved = {n: on_gpu(cupy, value) for n, value in own.items()}
    results = (cupy.empty(q.shape, out), cupy.empty(q.shape[:-1], np.float32))
    cuflash.attention(*there, out=results, return_lse=True, **moved)
    grads = cuflash.attention_backward(on_gpu(cupy, dout), *there, *results, **moved)
    assert {g.dtype for g in grads} == {np.dtype(out)}
    assert_attention_close(
        (on_host(results[0]), results[1].get()), q, k, v, dout=dout.astype(out),
        gradients=cuflash.Gradients(*(on_host(g) for g in grads)), **own,
    )  # fmt: skip


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu(cupy: Any) -> None:
    q, k, v = (of_8_bits((2, 300, 256), i) for i in range(3))
    ends, own = [0, 100, 100, 290], {"k_scale": powers_of_two((2, 1, 1), 1)}
    there = [on_gpu(cupy, a) for a in (q, k, v)]
    out = on_host(
        cuflash.attention_varlen(*there, ends, ends, k_scale=cupy.asarray(own["k_scale"]))
    )
    for i, j in ((0, 100), (100, 290)):
        assert_attention_close(out[:, i:j], *(a[:, i:j] for a in (q, k, v)), **own)
    assert not out[:, 290:].astype(np.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("per", ["matrix", "tensor", 16, 64, 1])
@pytest.mark.parametrize("d", [64, 80, 256])
def test_a_gpu_quantises_to_the_same_bits(
    cupy: Any, kind: Any, dtype: Any, per: Any, d: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 100, d)) * np.exp2(rng.integers(-9, 6, (2, 3, 100, d)))
    x[0, 0, 0, :4] = [np.nan, np.inf, 0.0, -0.0]
    x[1, 1] = 0
    x = x.astype(dtype)
    expected, found = (cuflash.quantize(a, per=per, dtype=kind) for a in (x, cupy.asarray(x)))
    assert bits(found.scale.get()) == bits(expected.scale)
    array = on_host(found.array)
    nan = np.isnan(expected.array.astype(np.float32))
    assert (np.isnan(array.astype(np.float32)) == nan).all()
    assert ((array.view(np.uint8) == expected.array.view(np.uint8)) | nan).all()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_a_gpu_rotates_alike(cupy: Any, d: int) -> None:
    """In another order of sums: few elements are rounded otherwise."""
    x = np.random.default_rng(0).standard_normal((3, 70, d)).astype(BF16)
    expected, found = (cuflash.quantize(a, rotation=7) for a in (x, cupy.asarray(x)))
    assert bits(found.scale.get()) == bits(expected.scale)
    assert (on_host(found.array).view(np.uint8) != expected.array.view(np.uint8)).mean() < 0.001
