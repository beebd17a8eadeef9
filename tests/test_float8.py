"""Are operands of 8 bits what their scales say, wherever a call may have them?"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import Options, reference
from cuflash._api import float8
from cuflash._api.arguments import Keywords
from cuflash._problem.float8 import E4M3, E5M2, RESULTS, factor_of_rows, rows_of_blocks
from cuflash.testing import assert_attention_close
from support import covering
from support.float8 import BF16, bits, dequantized, of_8_bits, on_gpu, on_host, powers_of_two

#: Products with this factor are exact in float32, and rounded in 16 bits.
ELEVEN_BITS = 0.25 + 2.0**-12
#: (sequence, feature) axes of q, k, v and out, each in another order.
AXES = [(-3, -1), (-1, 0), (-2, -1), (0, 1)]
PAGES = [(-3, -1), (-1, -2), (-2, -1), (1, 2)]
ROWS = covering.rows()[:: len(covering.rows()) // 40]


def scales(heads: tuple[int, int] = (4, 4), keys: int = 35) -> dict[str, Any]:
    """Return a number for q, a factor of each head for k, and of each block of 16 rows for v."""
    k = powers_of_two((heads[1], 1, 1), 1)
    return {"q_scale": 0.5, "k_scale": k, "v_scale": powers_of_two((1, -(-keys // 16), 1), 2)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['dtype']} {row['heads']}")
def test_a_call_is_that_of_dequantised_arrays(row: dict[str, str]) -> None:
    """Results have the bits of dequantised arrays, with options that cover all triples."""
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
    own = {"q_scale": ELEVEN_BITS, "v_scale": powers_of_two((2, 1, 1, 1), 3)}
    out = np.full((2, 3, 40, 16), np.nan, dtype)
    assert cuflash.attention(q, k, v, out=out, **own) is out
    given_ = (ELEVEN_BITS, 1.0, own["v_scale"])
    plain = [dequantized(a, s, dtype) for a, s in zip((q, k, v), given_, strict=True)]
    assert bits(out) == bits(cuflash.attention(*plain))
    table, lengths = np.arange(2)[:, None], [40, 33]
    cuflash.attention_paged(q, k, v, table, lengths, out=out, **own)
    assert bits(out) == bits(cuflash.attention_paged(*plain, table, lengths))
    exact = reference.attention(q, k, v, **own)
    wide = [dequantized(a, s) for a, s in zip((q, k, v), given_, strict=True)]
    assert bits(exact) == bits(reference.attention(*wide))
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


@pytest.mark.parametrize("rows", [160, 6])
def test_results_of_another_library_are_close_in_their_own_dtype(rows: int) -> None:
    """Another library's results pass in the dtype that they have; float64 is judged as float32."""
    q, k, v, dout = (of_8_bits((2, rows, 16), i) for i in range(4))
    own = {"q_scale": 0.5, "v_scale": powers_of_two((2, 3, 1), 1)}
    exact = reference.attention(q, k, v, return_lse=True, **own)
    gradients = reference.attention_backward(dout, q, k, v, **own)
    for dtype in (*RESULTS, np.float64):
        result = (exact.out.astype(dtype), exact.lse)
        rounded = cuflash.Gradients(*(g.astype(dtype) for g in gradients))
        given_ = {"gradients": rounded, "dout": dout, **own}
        assert_attention_close(result, q, k, v, **given_)
        eps = float(ml_dtypes.finfo(BF16 if dtype == BF16 else np.float16).eps)
        rounded.dv[...] = rounded.dv.astype(float) * (1 + 8 * eps)
        with pytest.raises(AssertionError, match="dv"):
            assert_attention_close(result, q, k, v, **given_)
    with pytest.raises(AssertionError):
        assert_attention_close(exact.out * 1.2, q, k, v, **own)


def test_keys_and_values_alone_may_have_8_bits() -> None:
    """Keys and values of 8 bits, as in a cache, are read in the dtype of 16-bit queries."""
    q = of_8_bits((2, 4, 5, 16), 0).astype(np.float16)
    k, v = of_8_bits((2, 2, 40, 16), 1), of_8_bits((2, 2, 40, 16), 2)
    own = {"k_scale": powers_of_two((2, 1, 1), 1), "v_scale": powers_of_two((2, 2, 5, 1), 2)}
    out = cuflash.attention(q, k, v, enable_gqa=True, **own)
    plain = [dequantized(a, s, np.float16) for a, s in zip((k, v), own.values(), strict=True)]
    assert bits(out) == bits(cuflash.attention(q, *plain, enable_gqa=True))


def test_8_bits_are_read_in_the_widest_dtype_of_the_others() -> None:
    """Scales keep all digits in the widest dtype, also of numbers that float16 lacks."""
    q, k, v = (of_8_bits((2, 40, 16), i) for i in range(3))
    scale = np.array([[[0.3]], [[1e-9]]])
    for dtypes in ((np.float16, np.float32), (np.float32, np.float16), (np.float64,) * 2):
        others = [a.astype(dtype) for a, dtype in zip((k, v), dtypes, strict=True)]
        widest = np.promote_types(*dtypes)
        plain = q.astype(widest) * scale.astype(widest)
        out = cuflash.attention(q, *others, q_scale=scale)
        assert out.dtype == widest
        assert bits(out) == bits(cuflash.attention(plain, *others))
    exact = reference.attention(q, *others, q_scale=0.3)
    assert abs(cuflash.attention(q, *others, q_scale=0.3) - exact).max() < 1e-14


def test_a_factor_may_lie_beyond_the_dtype_of_its_products() -> None:
    q = np.full((5, 16), 2.0**-6).astype(E4M3)
    keys = of_8_bits((7, 16), 1).astype(np.float16)
    out = cuflash.attention(q, keys, keys, q_scale=2.0**17)
    assert bits(out) == bits(cuflash.attention(np.full((5, 16), 2048, np.float16), keys, keys))


def test_a_gradient_of_out_alone_may_have_8_bits() -> None:
    q, k, v = (of_8_bits((3, 40, 16), i).astype(np.float16) for i in range(3))
    dout, ends = of_8_bits((3, 40, 16), 3, E5M2), [0, 15, 40]
    wide = dout.astype(np.float16)
    saved = cuflash.attention(q, k, v, return_lse=True)
    ours = cuflash.attention_backward(dout, q, k, v, *saved)
    theirs = cuflash.attention_backward(wide, q, k, v, *saved)
    assert all(bits(a) == bits(b) for a, b in zip(ours, theirs, strict=True))
    saved = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True)
    ours = cuflash.attention_varlen_backward(dout, q, k, v, *saved, ends, ends)
    theirs = cuflash.attention_varlen_backward(wide, q, k, v, *saved, ends, ends)
    assert all(bits(a) == bits(b) for a, b in zip(ours, theirs, strict=True))


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
    exact = reference.logsumexp(q, k, q_scale=0.3).astype(np.float32)
    weights = cuflash.weights(q, k, exact, rows=slice(None), q_scale=0.3)
    exact = reference.weights(q, k, rows=slice(None), q_scale=0.3)
    np.testing.assert_allclose(weights, exact, rtol=1e-5)
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


def in_order(array: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
    """Move the (sequence, feature) axes to the end."""
    return np.moveaxis(array, pair, (-2, -1))


@pytest.mark.parametrize("functions", [cuflash, reference], ids=["cuflash", "reference"])
def test_axes_belong_to_the_elements_and_not_to_scales(functions: Any) -> None:
    q, k, v, dout = (of_8_bits((2, 3, 40, 16), i) for i in range(4))
    there = [np.moveaxis(a, (-2, -1), pair) for a, pair in zip((q, k, v), AXES, strict=False)]
    dout_there = np.moveaxis(dout, (-2, -1), AXES[3])
    own = {"q_scale": powers_of_two((2, 3, 5, 1), 1), "k_scale": powers_of_two((3, 1, 1), 2)}
    of_qk, own = own, own | {"v_scale": powers_of_two((2, 1, 3, 1), 3)}
    found = functions.attention(*there, axes=AXES, return_lse=True, **own)
    expected = functions.attention(q, k, v, return_lse=True, **own)
    assert bits(in_order(found.out, AXES[3])) == bits(expected.out)
    assert bits(found.lse) == bits(expected.lse)
    ours = functions.attention_backward(dout_there, *there, *found, axes=AXES, **own)
    theirs = functions.attention_backward(dout, q, k, v, *expected, **own)
    for a, b, pair in zip(ours, theirs, AXES, strict=False):
        assert bits(in_order(a, pair)) == bits(b)
    if functions is cuflash:
        assert_attention_close(found, *there, axes=AXES, gradients=ours, dout=dout_there, **own)
    rows = {"axes": AXES, "rows": [3, 30]}
    of_rows = functions.weights(*there[:2], found.lse, **rows, **of_qk)
    assert bits(of_rows) == bits(functions.weights(q, k, found.lse, rows=[3, 30], **of_qk))
    if functions is reference:
        ours = reference.scores(*there[:2], axes=AXES, **of_qk)
        assert bits(ours) == bits(reference.scores(q, k, **of_qk))
    lse = functions.logsumexp(*there[:2], axes=AXES, **of_qk)
    assert bits(lse) == bits(functions.logsumexp(q, k, **of_qk))
    ours = functions.logsumexp_backward(lse, *there[:2], lse, axes=AXES, **of_qk)
    theirs = functions.logsumexp_backward(lse, q, k, lse, **of_qk)
    for a, b, pair in zip(ours, theirs, AXES, strict=False):
        assert bits(in_order(a, pair)) == bits(b)


@pytest.mark.parametrize("functions", [cuflash, reference], ids=["cuflash", "reference"])
def test_axes_of_packed_sequences_and_pages(functions: Any) -> None:
    q, k, v = (of_8_bits((3, 50, 16), i) for i in range(3))
    dout, ends = of_8_bits((3, 50, 16), 3, E5M2), np.array([0, 20, 50])
    own = {"q_scale": powers_of_two((3, 4, 1), 1), "k_scale": powers_of_two((3, 1, 1), 2)}
    there = [np.moveaxis(a, (-2, -1), pair) for a, pair in zip((q, k, v), AXES, strict=False)]
    dout_there = np.moveaxis(dout, (-2, -1), AXES[3])
    given_ = {"axes": AXES, "return_lse": True, **own}
    found = functions.attention_varlen(*there, ends, ends, **given_)
    expected = functions.attention_varlen(q, k, v, ends, ends, return_lse=True, **own)
    assert bits(in_order(found.out, AXES[3])) == bits(expected.out)
    backward = functions.attention_varlen_backward
    ours = backward(dout_there, *there, *found, ends, ends, axes=AXES, **own)
    theirs = backward(dout, q, k, v, *expected, ends, ends, **own)
    for a, b, pair in zip(ours, theirs, AXES, strict=False):
        assert bits(in_order(a, pair)) == bits(b)
    q, k, v = (of_8_bits((n, 3, 16, 16), i) for n, i in ((2, 4), (4, 5), (4, 6)))
    own = {"k_scale": powers_of_two((4, 1, 2, 1), 1), "v_scale": powers_of_two((3, 1, 1), 2)}
    there = [np.moveaxis(a, (-2, -1), pair) for a, pair in zip((q, k, v), PAGES, strict=False)]
    table = [np.array([[3, 1], [0, 2]]), [20, 30]]
    found = functions.attention_paged(*there, *table, axes=PAGES, **own)
    expected = functions.attention_paged(q, k, v, *table, **own)
    assert bits(in_order(found, PAGES[3])) == bits(expected)


def test_a_workspace_is_that_of_dequantised_arrays() -> None:
    """The workspace is that of dequantised operands, in C order; others keep their strides."""
    q, k, v = (of_8_bits((2, 3, 40, 16), i) for i in range(3))
    wide = np.broadcast_to(v[:, :1].astype(np.float16), v.shape)
    for operands in ((q, k, v), (q, k, wide), (q.swapaxes(0, 1), k.swapaxes(0, 1), v[0])):
        unread, *_ = float8.without_memory(*operands, Options(k_scale=2.0), AXES)
        plain = float8.dequantized(*operands, Options(k_scale=2.0), axes=AXES)
        for ours, theirs in zip(unread[:3], plain[:3], strict=True):
            assert (ours.dtype, ours.shape, ours.strides) == (
                theirs.dtype, theirs.shape, theirs.strides,
            )  # fmt: skip
    for kind in (E4M3, E5M2):
        of_kind = [a.view(kind) for a in (q, k, v)]
        assert cuflash.workspace_size(*of_kind, q_scale=2.0, backward=True) == 0
        table = np.zeros((2, 2), np.int32)
        for queries in (of_kind[0], q.astype(np.float16)):
            assert cuflash.workspace_size(queries, *of_kind[1:], page_table=table) == 0


def test_scales_for_kernels() -> None:
    """Scales that are numbers multiply the scale of scores; arrays have one factor per entry."""
    q = np.zeros((16, 5, 3), E4M3)
    k_scale = powers_of_two((3, 1, 1), 0)
    options = Options(q_scale=0.5, k_scale=k_scale, causal=True)
    found = float8._of_entries(options, [0.5, k_scale, None], q, [(1, 0)] * 4)
    assert bits(found.k_scale) == bits(k_scale[:, 0, 0])
    assert (found.q_scale, found.v_scale, found.causal) == (None, None, True)
    assert found.scale == 0.5 / 4
    options = Options(q_scale=0.5, k_scale=4.0, scale=0.3)
    found = float8._of_entries(options, [0.5, 4.0, None], q, None)
    assert (found.q_scale, found.k_scale, found.scale) == (None, None, 0.6)


# --------------------------------------------------------------------------------------- options
def test_scales_are_options() -> None:
    array = powers_of_two((3, 1, 1), 0)
    options = Options(q_scale=2, k_scale=array)
    assert options == Options(q_scale=2.0, k_scale=array)
    assert options == Options(q_scale=np.array(2.0), k_scale=array)
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
    "three blocks": ({"v_scale": np.ones((3, 1))}, ValueError, "32 rows in a block, 2 blocks"),
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
    with pytest.raises(TypeError, match="v_scale: got a scale for v of float32, expected"):
        cuflash.attention(Q, Q, wide, v_scale=2.0)
    for name in ("q_scale", "k_scale", "v_scale"):
        with pytest.raises(TypeError, match=f"{name}: got a scale for . of float32"):
            cuflash.attention(wide, wide, wide, **{name: 2.0})
    for operand in (Q, wide):
        with pytest.raises(TypeError, match="v_scale"):
            cuflash.logsumexp(operand, operand, v_scale=2.0)
    with pytest.raises(TypeError, match="k_pages: got list"):
        cuflash.attention_paged(Q, [Q], Q, np.zeros((2, 1), int), [3, 3])
    with pytest.raises(TypeError, match="out: got dtype float64"):
        cuflash.attention(Q, Q, Q, out=np.empty(Q.shape))


def test_sequences_without_a_row_have_a_factor() -> None:
    none = np.zeros((3, 0, 8), E4M3)
    own = {"k_scale": np.ones((3, 1, 1)), "v_scale": np.ones((3, 0, 1))}
    assert not cuflash.attention(Q, none, none, **own).astype(np.float32).any()


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
    with pytest.raises(NotImplementedError, match=r"8-bit .* on several ranks"):
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
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_kernel_is_within_the_budget(cupy: Any, d: int, name: str) -> None:
    """A kernel is within the budget of dequantised arrays, with the same bits every time."""
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
        (on_host(results[0]), results[1].get()), *there, dout=on_gpu(cupy, dout),
        gradients=cuflash.Gradients(*(on_host(g) for g in grads)), **own,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "scale", "exact"),
    [
        (np.float16, None, True), (np.float16, 0.5, True), (np.float16, 0.3, False),
        (np.float16, 2.0**-16, False), (np.float16, 2.0**8, False), (BF16, 2.0**-16, True),
        (BF16, np.ones((3, 1, 1), np.float32), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_gradient_has_the_lse_of_the_numbers_that_it_reads(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, scale: Any, exact: bool, return_lse: bool,
    in_pages: bool,
) -> None:  # fmt: skip
    """Kernels that scale scores run before a gradient only if dequantising rounds nothing."""
    monkeypatch.setattr(float8, "is_cupy", lambda _: True)
    monkeypatch.setattr(float8, "dequantized", lambda *_, **__: ("dequantised",) * 4)
    monkeypatch.setattr(float8, "_of_entries", lambda options, *_: options)
    q, k = np.zeros((2, 3, 1, 64), dtype), of_8_bits((2, 3, 9, 64), 0)
    options = cuflash.Options(k_scale=scale)
    for for_gradient in (False, True):
        given = Keywords(None, None, True, return_lse or for_gradient, None, None, None)
        arrays = float8.forward(
            lambda *arrays: arrays, q, k, k, options, given, for_gradient=for_gradient,
            names=("q", "k_pages", "v_pages") if in_pages else ("q", "k", "v"),
        )  # fmt: skip
        needs_lse = for_gradient or (return_lse and not in_pages)
        assert (arrays[1] is k) == (exact or not needs_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, BF16, E4M3], ids=str)
def test_gradients_of_any_scale_on_a_gpu(cupy: Any, dtype: Any) -> None:
    """Scores near 170 by a scale that is no power of two: weights are not off by whole parts."""
    q, k = np.full((1, 2, 1, 64), 2.0).astype(dtype), np.full((1, 2, 40, 64), 4.5).astype(E4M3)
    v, dout = of_8_bits((1, 2, 40, 64), 2), np.ones((1, 2, 1, 64), BF16)
    own = {"k_scale": np.float32([[[0.3]], [[0.7]]]), "scale": 1.0}
    there = [on_gpu(cupy, a) for a in (q, k, v)]
    moved = {n: on_gpu(cupy, value) for n, value in own.items()}
    out, pullback = cuflash.attention_vjp(*there, **moved)
    dout = dout.astype(on_host(out).dtype)
    grads = pullback(on_gpu(cupy, dout))
    assert_attention_close(
        on_host(out), *there, dout=on_gpu(cupy, dout),
        gradients=cuflash.Gradients(*(on_host(g) for g in grads)), **own,
    )  # fmt: skip


@pytest.mark.gpu
def test_packed_sequences_on_a_gpu(cupy: Any) -> None:
    q, k, v = (of_8_bits((2, 300, 128), i) for i in range(3))
    ends, own = [0, 100, 100, 290], {"k_scale": powers_of_two((2, 1, 1), 1)}
    there = [on_gpu(cupy, a) for a in (q, k, v)]
    out = on_host(
        cuflash.attention_varlen(*there, ends, ends, k_scale=cupy.asarray(own["k_scale"]))
    )
    for i, j in ((0, 100), (100, 290)):
        assert_attention_close(out[:, i:j], *(a[:, i:j] for a in (q, k, v)), **own)
    assert not out[:, 290:].astype(np.float32).any()
