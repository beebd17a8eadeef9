"""Are operands of 8 bits what their scales say, everywhere that a call may have them?"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import Options, reference
from cuflash._problem.float8 import E4M3, E5M2, factor_of_rows, rows_of_blocks
from cuflash.testing import assert_attention_close
from support import covering
from support.float8 import BF16, bits, dequantized, of_8_bits, on_gpu, on_host, powers_of_two

RESULTS = (np.dtype(np.float16), BF16, np.dtype(np.float32))
ROWS = covering.rows()[:: len(covering.rows()) // 40]


def scales(heads: tuple[int, int] = (4, 4), keys: int = 35) -> dict[str, Any]:
    """One number, one factor for each head, one for each block of 16 rows."""
    k = powers_of_two((heads[1], 1, 1), 1)
    return {"q_scale": 0.5, "k_scale": k, "v_scale": powers_of_two((1, -(-keys // 16), 1), 2)}


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


def test_the_definition_of_a_gradient_is_that_of_dequantised_arrays() -> None:
    q, k, v = (of_8_bits((2, 3, 40, 16), i) for i in range(3))
    dout = of_8_bits((2, 3, 40, 16), 3, E5M2)
    own = {"q_scale": 0.25, "k_scale": powers_of_two((3, 3, 1), 1), "v_scale": 2.0}
    plain = [dequantized(a, s) for a, s in zip((q, k, v), own.values(), strict=True)]
    wrt = ("q", "k", "v", "scale")
    found = reference.attention_backward(dout, q, k, v, wrt=wrt, **own)
    expected = reference.attention_backward(dout.astype(float), *plain, wrt=wrt)
    assert all(bits(a) == bits(b) for a, b in zip(found, expected, strict=True))


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


def test_several_ranks_take_no_8_bits_yet() -> None:
    comm = cuflash.distributed.simulated(2)
    parts = [of_8_bits((4, 8, 16), i) for i in range(2)]
    with pytest.raises(NotImplementedError, match="8 bits on several ranks"):
        cuflash.distributed.attention(parts, parts, parts, comm=comm)


# ----------------------------------------------------------------------------------- on a GPU
@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


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
    """Of dequantised arrays, with the same bits every time."""
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
