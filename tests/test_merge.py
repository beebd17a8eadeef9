"""Do partial results combine to the whole, forward and backward, within what rounding explains?

Truth is the definition in longdouble. With u = eps/2 of the arithmetic (float64 for float64 lses,
otherwise float32), n parts, x_i = |lse_i - max lse|, w_i the weights, m = sum_i(w_i x_i) and c(n) u
the error of a sum:

    lse     E = u (m + 12 + c(n) + 4 |log total| + 2 |lse|), + ulp of 16 bits
    out     F + ulp of out's dtype,  F = sum_i w_i |out_i| u (x_i + m + 24 + 2 c(n))
    douts   w_i |dout| r_i + ulp,  r_i = E + u (|lse_i - lse| + 10)
    dlses   w_i [ r_i slope_i + sum |dout| (F + u (c(d) + 4) (|out_i| + |out|)) + 2 u |dlse| ] + ulp

(8 u for an exp; slope_i = sum |dout| (|out_i| + |out|) + |dlse|), and the smallest normal number
for every weight that underflows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16, finfo

import cuflash
from cuflash import reference
from cuflash.testing._bounds import sum_error
from support import derivatives, memory
from support.problems import DTYPES, FIELDS, make_call

EXACT = np.longdouble


@dataclass(frozen=True, eq=False)
class Parts:
    """Arguments of merge and merge_backward, with parts along ``axis``."""

    outs: np.ndarray
    lses: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None
    axis: int

    def __repr__(self) -> str:
        dlse = "no" if self.dlse is None else "a"
        return (
            f"Parts({self.outs.dtype}{self.outs.shape}, {self.lses.dtype}, axis={self.axis}, "
            f"{dlse} dlse, lses={self.lses.tolist()})"
        )


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    """Draw parts of any dtypes, with near and far logarithms; some parts saw no key."""
    out_dtype = DTYPES[draw(st.sampled_from(tuple(DTYPES)))]
    lse_dtype = DTYPES[draw(st.sampled_from(tuple(DTYPES)))]
    batch = draw(st.sampled_from(((), (2,), (2, 3), (0,))))
    n, rows, columns = draw(st.integers(1, 5)), draw(st.integers(0, 6)), draw(st.integers(0, 4))
    axis = draw(st.integers(0, len(batch) + 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape = (*batch, rows)
    spread, level = draw(st.sampled_from((1, 30, 300))), draw(st.sampled_from((0, -120, 6e4)))
    lses = level + spread * rng.standard_normal((*shape[:axis], n, *shape[axis:]))
    most = float(finfo(lse_dtype).max) / 2
    lses = lses.clip(-most, most)
    lses[rng.random(lses.shape) < draw(st.sampled_from((0, 0.3)))] = -np.inf
    outs = rng.standard_normal((*lses.shape, columns))
    outs[np.isneginf(lses)] = 0
    dlse = rng.standard_normal(shape).astype(lse_dtype) if draw(st.booleans()) else None
    dout = rng.standard_normal((*shape, columns))
    return Parts(outs.astype(out_dtype), lses.astype(lse_dtype), dout.astype(out_dtype), dlse, axis)


@dataclass
class Bounds:
    """The error that each result may have, parts first."""

    out: np.ndarray
    lse: np.ndarray
    douts: np.ndarray
    dlses: np.ndarray


@np.errstate(all="ignore")
def bounds(p: Parts, xp: ModuleType) -> Bounds:
    """Return the bounds derived above; with CuPy's -ftz=true float32 has no subnormals (D93)."""
    outs, lses = (np.moveaxis(a.astype(EXACT), p.axis, 0) for a in (p.outs, p.lses))
    arithmetic = finfo(np.float64 if p.lses.dtype == np.float64 else np.float32)
    u, tiny = EXACT(arithmetic.eps) / 2, EXACT(arithmetic.smallest_normal)
    n, columns = outs.shape[0], outs.shape[-1]
    out, lse = reference.merge(outs, lses, dtype=EXACT)
    hidden, nothing = np.isneginf(lses), np.isneginf(lse)
    highest = np.where(nothing, 0, lses.max(0))
    x = np.where(hidden, 0, np.abs(lses - highest))
    w = np.where(hidden, 0, np.exp(lses - lse))
    mean = (w * x).sum(0)
    log_total = np.where(nothing, 0, lse - highest)
    level = np.where(nothing, 0, np.abs(lse))
    E = u * (mean + 12 + sum_error(n) + 4 * np.abs(log_total) + 2 * level)

    def ulp(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        info = finfo(dtype)
        least = EXACT(info.smallest_subnormal)
        if xp is not np:
            least = max(least, EXACT(np.finfo(np.float32).smallest_normal))
        return EXACT(info.eps) * np.abs(array) + least + tiny

    size = np.abs(outs)
    factor = u * (x + mean + 24 + 2 * sum_error(n))
    F = (w * factor)[..., None] * size + tiny * size
    F = F.sum(0)
    dout = np.abs(p.dout.astype(EXACT))
    dlse = np.zeros_like(lse) if p.dlse is None else np.abs(p.dlse.astype(EXACT))
    apart = np.where(hidden, 0, np.abs(lses - lse))
    r = E + u * (apart + 10)
    both = size + np.abs(out)
    slope = (dout * both).sum(-1) + dlse
    slope_error = (dout * (F + u * (sum_error(columns) + 4) * both)).sum(-1) + 2 * u * dlse
    exact = reference.merge_backward(p.dout.astype(EXACT), outs, lses, dlse=p.dlse, dtype=EXACT)
    return Bounds(
        F + ulp(out, p.outs.dtype),
        E + (ulp(level, p.lses.dtype) if p.lses.dtype.itemsize == 2 else 0),
        (w * r + tiny)[..., None] * dout + ulp(exact.out, p.outs.dtype),
        w * (r * slope + slope_error) + tiny * slope + ulp(exact.lse, p.lses.dtype),
    )


def assert_close(name: str, got: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> None:
    assert got.shape == exact.shape, name
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float64)), finite, err_msg=name)
    np.testing.assert_array_equal(got[~finite], exact[~finite].astype(got.dtype), err_msg=name)
    error = np.abs(np.where(finite, got.astype(EXACT), 0) - np.where(finite, exact, 0))
    assert np.all(error <= bound), f"{name}: {(error / bound).max()} of what is allowed"


def on_host(result: cuflash.AttentionResult) -> cuflash.AttentionResult:
    return cuflash.AttentionResult(*map(memory.to_numpy, result))


@given(p=parts())
def test_merge_is_the_definition(xp: ModuleType, p: Parts) -> None:
    outs, lses = memory.to_device(xp, p.outs), memory.to_device(xp, p.lses)
    got = on_host(cuflash.merge(outs, lses, p.axis))
    exact = reference.merge(p.outs, p.lses, p.axis, dtype=EXACT)
    assert (got.out.dtype, got.lse.dtype) == (p.outs.dtype, p.lses.dtype)
    allowed = bounds(p, xp)
    assert_close("lse", got.lse, exact.lse, allowed.lse)
    assert_close("out", got.out, exact.out, allowed.out)


@given(p=parts())
def test_gradient_is_the_definition(xp: ModuleType, p: Parts) -> None:
    dout, outs, lses = (memory.to_device(xp, a) for a in (p.dout, p.outs, p.lses))
    dlse = None if p.dlse is None else memory.to_device(xp, p.dlse)
    got = on_host(cuflash.merge_backward(dout, outs, lses, dlse=dlse, axis=p.axis))
    exact = reference.merge_backward(
        p.dout.astype(EXACT), p.outs, p.lses, dlse=p.dlse, axis=p.axis, dtype=EXACT
    )
    assert (got.out.dtype, got.lse.dtype) == (p.outs.dtype, p.lses.dtype)
    allowed = bounds(p, xp)
    for name, bound in (("out", allowed.douts), ("lse", allowed.dlses)):
        gradient, truth = (np.moveaxis(getattr(a, name), p.axis, 0) for a in (got, exact))
        assert_close("d" + name + "s", gradient, truth, bound)


@given(p=parts())
def test_a_sequence_is_a_first_axis(p: Parts) -> None:
    outs, lses = (np.moveaxis(a, p.axis, 0) for a in (p.outs, p.lses))
    stacked = cuflash.merge(p.outs, p.lses, p.axis)
    listed = cuflash.merge(list(outs), tuple(lses))
    for a, b in zip(stacked, listed, strict=True):
        np.testing.assert_array_equal(a, b)
    stacked = cuflash.merge_backward(p.dout, p.outs, p.lses, dlse=p.dlse, axis=p.axis)
    listed = cuflash.merge_backward(p.dout, list(outs), tuple(lses), dlse=p.dlse)
    for a, b in zip(stacked, listed, strict=True):
        np.testing.assert_array_equal(np.moveaxis(a, p.axis, 0), b)


@given(p=parts())
def test_one_part_is_itself(p: Parts) -> None:
    """One part merges to itself bit for bit, and its gradients are the cotangents."""
    out, lse = (np.moveaxis(a, p.axis, 0)[:1] for a in (p.outs, p.lses))
    merged = cuflash.merge(out, lse)
    np.testing.assert_array_equal(merged.out, out[0])
    np.testing.assert_array_equal(merged.lse, lse[0])
    dlse = np.ones_like(lse[0])
    gradient = cuflash.merge_backward(p.dout, out, lse, dlse=dlse)
    seen = ~np.isneginf(lse[0])
    np.testing.assert_array_equal(gradient.out[0], np.where(seen[..., None], p.dout, 0))
    np.testing.assert_array_equal(gradient.lse[0], np.where(seen, dlse, 0))


@pytest.mark.parametrize("lse_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_keep_the_digits_of_their_own_dtype(dtype: str, lse_dtype: type) -> None:
    """Parts keep all digits of their dtype for any dtype of lse: weights of 1/2 and 1 are exact."""
    rng = np.random.default_rng(3)
    out, dout = rng.standard_normal((2, 5, 3)).astype(DTYPES[dtype])
    outs, lses = np.stack([out, out]), np.zeros((2, 5), lse_dtype)
    np.testing.assert_array_equal(cuflash.merge(outs, lses).out, out)
    np.testing.assert_array_equal(cuflash.merge(outs, lses).lse, np.log(lse_dtype(2)))
    np.testing.assert_array_equal(cuflash.merge_backward(dout, outs[:1], lses[:1]).out[0], dout)


@given(p=parts(), data=st.data())
def test_a_part_that_saw_nothing_is_neutral(p: Parts, data: st.DataObject) -> None:
    """A part that saw no key has no effect, at any place and with any out, and gradients of 0."""
    outs, lses = (np.moveaxis(a, p.axis, 0) for a in (p.outs, p.lses))
    at = data.draw(st.integers(0, len(outs)))
    more_outs = np.insert(outs, at, np.nan, axis=0)
    more_lses = np.insert(lses, at, -np.inf, axis=0)
    for a, b in zip(cuflash.merge(outs, lses), cuflash.merge(more_outs, more_lses), strict=True):
        assert a.tobytes() == b.tobytes()
    few = cuflash.merge_backward(p.dout, outs, lses, dlse=p.dlse)
    many = cuflash.merge_backward(p.dout, more_outs, more_lses, dlse=p.dlse)
    for a, b in zip(few, many, strict=True):
        assert not b[at].any()
        assert np.delete(b, at, axis=0).tobytes() == a.tobytes()


def test_a_row_that_no_part_saw() -> None:
    """In a row that no part saw, out is +0 and lse -inf, and its cotangents are not read."""
    outs, lses = np.full((2, 3, 4), np.nan, np.float32), np.full((2, 3), -np.inf, np.float32)
    outs[:, 1], lses[:, 1] = 1, 0
    out, lse = cuflash.merge(outs, lses)
    hidden = np.array([True, False, True])
    np.testing.assert_array_equal(np.isneginf(lse), hidden)
    assert not out[hidden].any()
    assert not np.signbit(out[hidden]).any()
    dout, dlse = np.ones((3, 4), np.float32), np.ones(3, np.float32)
    dout[hidden], dlse[hidden] = np.nan, np.nan
    gradient = cuflash.merge_backward(dout, outs, lses, dlse=dlse)
    for array in gradient:
        assert not array[:, hidden].any()
        np.testing.assert_array_equal(array[:, 1], 0.5)


@pytest.mark.parametrize("module", [cuflash, reference])
@pytest.mark.parametrize("lse", [-1000.0, -np.inf])
def test_only_a_part_that_saw_nothing_is_not_read(module: Any, lse: float) -> None:
    """A part with a non-finite element counts unless its lse is -inf, however small its weight."""
    outs, lses = np.array([[[1.0]], [[np.nan]]]), np.array([[0.0], [lse]])
    counts = not np.isneginf(lse)
    merged = module.merge(outs, lses)
    np.testing.assert_array_equal(np.isnan(merged.out), counts)
    np.testing.assert_array_equal(merged.lse, 0)
    douts, dlses = module.merge_backward(np.ones((1, 1)), outs, lses, dlse=np.ones(1))
    np.testing.assert_array_equal(douts, [[[1]], [[0]]])
    np.testing.assert_array_equal(dlses, [[np.nan], [np.nan]] if counts else [[1], [0]])


@given(p=parts())
def test_gradients_are_derivatives(p: Parts) -> None:
    """Gradients of float64 agree with differences along random directions, with near lses."""
    outs = np.moveaxis(p.outs, p.axis, 0).astype(np.float64)
    lses = np.moveaxis(p.lses, p.axis, 0).astype(np.float64)
    finite = np.isfinite(lses)
    lses = np.where(finite, np.sin(lses, where=finite, out=np.zeros_like(lses)), -np.inf)
    dout = p.dout.astype(np.float64)
    dlse = np.zeros(lses.shape[1:]) if p.dlse is None else p.dlse.astype(np.float64)
    gradient = cuflash.merge_backward(dout, outs, lses, dlse=dlse)

    def value(outs: np.ndarray, lses: np.ndarray) -> float:
        out, lse = cuflash.merge(outs, lses)
        return float((dout * out).sum() + (dlse * np.where(np.isneginf(lse), 0, lse)).sum())

    rng = np.random.default_rng(1)
    for x, slope, f in (
        (outs, gradient.out, lambda x: value(x, lses)),
        (lses, gradient.lse, lambda x: value(outs, x)),
    ):
        direction = rng.standard_normal(x.shape)
        direction /= max(float(np.linalg.norm(direction)), 1.0)
        expected = derivatives.along(f, x, direction)
        assert abs(float((slope * direction).sum()) - expected) <= 1e-8 * max(
            1.0, float(np.linalg.norm(slope))
        )


# Beside attention (P15; the forward is in test_properties).


@pytest.mark.parametrize("cuts", [(), (13,), (0, 13, 13, 30)])
def test_gradient_of_attention_in_parts(cuts: tuple[int, ...]) -> None:
    """Gradients through merge and through each part add up to the gradients of the whole."""
    rng = np.random.default_rng(8)
    q, k, v, dout = (
        rng.standard_normal(shape)
        for shape in ((2, 4, 21, 6), (2, 2, 30, 6), (2, 2, 30, 5), (2, 4, 21, 5))
    )
    dlse = rng.standard_normal((2, 4, 21))
    shared = {"enable_gqa": True, "causal": True, "softcap": 3.0, "alibi_slopes": rng.random(4)}
    bias, sink = rng.standard_normal((4, 21, 30)), rng.standard_normal(4)
    wrt = ("q", "k", "v", "bias", "alibi_slopes", "scale")
    whole = {**shared, "offset": 3, "bias": bias, "sink": sink}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **whole)
    expected = cuflash.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=(*wrt, "sink"), **whole
    )
    results, options = [], []
    for first, last in zip((0, *cuts), (*cuts, 30), strict=True):
        keys = slice(first, last)
        own = {**shared, "offset": 3 - first, "bias": bias[..., keys]}
        if not options:  # exactly one part has the sink
            own["sink"] = sink
        options.append((keys, own))
        results.append(
            cuflash.attention(q, k[..., keys, :], v[..., keys, :], return_lse=True, **own)
        )
    outs, lses = [r.out for r in results], [r.lse for r in results]
    for got, exact in zip(cuflash.merge(outs, lses), (out, lse), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-13)
    douts, dlses = cuflash.merge_backward(dout, outs, lses, dlse=dlse)
    total = {n: np.zeros_like(getattr(expected, FIELDS[n])) for n in (*wrt, "sink")}
    for (keys, own), part, part_dout, part_dlse in zip(options, results, douts, dlses, strict=True):
        names = (*wrt, "sink") if "sink" in own else wrt
        gradients = cuflash.attention_backward(
            part_dout, q, k[..., keys, :], v[..., keys, :], *part, dlse=part_dlse, wrt=names, **own
        )
        for name in names:
            target = total[name]
            if name in ("k", "v"):
                target = target[..., keys, :]
            elif name == "bias":
                target = target[..., keys]
            target += getattr(gradients, FIELDS[name])
    for name, got in total.items():
        exact = getattr(expected, FIELDS[name])
        size = float(np.abs(exact).max())
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-13 * max(size, 1), err_msg=name)


def test_parts_of_16_bits_lose_one_rounding_each() -> None:
    """16-bit parts with a float32 lse err by u/2 of each part and u/2 of the sum."""
    call = make_call("normal", 9, bfloat16, (2, 40, 8), (2, 60, 8), (2, 60, 8))
    cuts = (slice(0, 20), slice(20, 60))
    shared = [cuflash.attention(call.q, call.k[:, s], call.v[:, s], return_lse=True) for s in cuts]
    merged = cuflash.merge([p.out for p in shared], [p.lse for p in shared])
    assert (merged.out.dtype, merged.lse.dtype) == (np.dtype(bfloat16), np.dtype(np.float32))
    exact_parts = [
        reference.attention(call.q, call.k[:, s], call.v[:, s], return_lse=True) for s in cuts
    ]
    exact = reference.merge([p.out for p in exact_parts], [p.lse for p in exact_parts])
    weight = [np.exp(p.lse - exact.lse)[..., None] for p in exact_parts]
    eps = float(finfo(bfloat16).eps)
    # Each part errs by an ulp at most. Errors of the float32 weights are negligible beside that.
    allowed = sum(
        w * (eps * np.abs(p.out) + eps / 64) for w, p in zip(weight, exact_parts, strict=True)
    )
    error = np.abs(merged.out.astype(np.float64) - exact.out)
    assert np.all(error <= allowed + eps * np.abs(exact.out))


# Wrong calls.


def wrong_calls() -> dict[str, tuple[Callable[[], Any], type[Exception], str, str]]:
    """Return name -> call, exception, argument and words of the message."""
    outs, lses = np.ones((2, 5, 3)), np.zeros((2, 5))
    merge, backward = cuflash.merge, cuflash.merge_backward
    return {
        "no parts": (lambda: merge(outs[:0], lses[:0]), ValueError, "outs", "no parts"),
        "empty lists": (lambda: merge([], []), ValueError, "outs", "no parts"),
        "a number": (lambda: merge(3, lses), TypeError, "outs", "int"),
        "numbers": (lambda: merge([1.0], [2.0]), TypeError, "outs[0]", "float"),
        "integers": (lambda: merge(outs.astype(int), lses), TypeError, "outs", "int64"),
        "integer lses": (lambda: merge(outs, lses.astype(int)), TypeError, "lses", "int64"),
        "negative axis": (lambda: merge(outs, lses, axis=-1), ValueError, "axis", "from 0"),
        "axis of the features": (lambda: merge(outs, lses, axis=2), ValueError, "axis", "to 1"),
        "axis of a list": (
            lambda: merge(list(outs), list(lses), axis=1), ValueError, "axis", "0 for a list"
        ),
        "more lses": (lambda: merge(outs, np.zeros((3, 5))), ValueError, "lses", "(2, 5)"),
        "parts of two dtypes": (
            lambda: merge([outs[0], outs[1].astype(np.float32)], list(lses)),
            TypeError, "outs[1]", "float32",
        ),
        "parts of two shapes": (
            lambda: merge([outs[0], outs[1][:4]], list(lses)), ValueError, "outs[1]", "(5, 3)"
        ),
        "dout with parts": (lambda: backward(outs, outs, lses), ValueError, "dout", "(5, 3)"),
        "integer dout": (
            lambda: backward(outs[0].astype(int), outs, lses), TypeError, "dout", "int64"
        ),
        "dout as a list": (
            lambda: backward(outs[0].tolist(), outs, lses), TypeError, "dout", "list"
        ),
        "dlse with parts": (
            lambda: backward(outs[0], outs, lses, dlse=lses), ValueError, "dlse", "(5,)"
        ),
        "dlse as a list": (
            lambda: backward(outs[0], outs, lses, dlse=[0.0] * 5), TypeError, "dlse", "list"
        ),
        "integer dlse": (
            lambda: backward(outs[0], outs, lses, dlse=lses[0].astype(int)),
            TypeError, "dlse", "int64",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_call(name: str) -> None:
    call, kind, argument, words = wrong_calls()[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(argument)
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_results_in_float64_are_rounded_once(xp: ModuleType, dtype: Any) -> None:
    """Results just beyond a tie of 16 bits are rounded once; by way of float32 they were ties."""
    ulp = float(finfo(dtype).eps)
    outs = xp.asarray(np.array([[[1.0]], [[1 + ulp]]], dtype))
    lses = xp.asarray(np.array([[0.0], [2.0**-28]]))  # the second part weighs a little more
    merged = cuflash.merge(outs, lses).out
    beyond = np.array([1 + ulp / 2 + 2.0**-40])
    douts = cuflash.merge_backward(xp.asarray(beyond[None]), outs[:1], lses[:1]).out
    one, dlse = xp.asarray(np.ones((1, 1, 1))), xp.asarray(beyond)
    low = xp.asarray(np.zeros((1, 1), dtype))
    dlses = cuflash.merge_backward(one[0], one, low, dlse=dlse).lse
    for found in (merged, douts, dlses):
        assert found.dtype == dtype
        assert float(memory.to_numpy(found).ravel()[0]) == 1 + ulp
