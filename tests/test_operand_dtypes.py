"""Are q, k and v of different dtypes computed in one dtype, with gradients in their own?"""

from __future__ import annotations

import itertools
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import find, settings
from ml_dtypes import bfloat16, finfo

import cuflash
from cuflash import _arrays
from cuflash._api.arguments import operands
from cuflash._arrays import write_rounded
from cuflash.testing._budget import Budget
from support import memory
from support.problems import FIELDS, calls, limits_of, make_call, run

FLOATS = (np.float16, bfloat16, np.float32, np.float64)
#: All triples of dtypes that promote and are not all equal.
MIXED = tuple(
    dtypes
    for dtypes in itertools.product(FLOATS, repeat=3)
    if len(set(dtypes)) > 1 and not {np.float16, bfloat16} <= set(dtypes)
)
PAIRS = tuple(d for d in MIXED if len(set(d)) == 2)


#: Shapes of q, k and v; k and v have one head for the three of q.
SHAPES = ((2, 3, 33, 40), (1, 40, 40), (1, 40, 24))


def ids(dtypes: tuple[Any, ...]) -> str:
    return "-".join(np.dtype(t).name for t in dtypes)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtypes", MIXED, ids=ids)
def test_gradients_are_exact_and_lie_inside_their_memory(
    xp: ModuleType, dtypes: tuple[Any, ...], with_out: bool
) -> None:
    call = make_call("normal", 0, dtypes, *SHAPES)
    result = run(xp, call, with_out=with_out)
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.parametrize("dtypes", PAIRS, ids=ids)
def test_packed_gradients(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    call = make_call("normal", 0, dtypes, *((2, 50, 40),) * 3)
    q, k, v, dout = (memory.to_device(xp, call.array(name)) for name in ("q", "k", "v", "dout"))
    ends = xp.asarray(np.array([3, 20, 45], np.int32))
    out, lse = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True)
    grads = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, ends, ends)
    out, lse = map(memory.to_numpy, (out, lse))
    of_name = {name: memory.to_numpy(getattr(grads, FIELDS[name])) for name in call.wrt}
    for first, last in ((3, 20), (20, 45)):
        rows = (slice(None), slice(first, last))
        own = {name: call.array(name)[rows] for name in ("q", "k", "v", "dout")}
        budget = Budget(call.but(**own))
        budget.check_forward(out[rows], lse[rows])
        gradients = {name: gradient[rows] for name, gradient in of_name.items()}
        budget.check_backward(gradients, given=(out[rows], lse[rows]))
    for name, gradient in of_name.items():
        assert gradient.dtype == call.array(name).dtype
        assert not gradient[:, :3].any()
        assert not gradient[:, 45:].any()


#: For each width, an operand that is promoted beside an operand that is not.
FEW = (
    (np.float16, np.float32, np.float32), (np.float32, bfloat16, np.float64),
    (np.float64, np.float64, np.float16), (np.float32, np.float16, np.float32),
)  # fmt: skip


@pytest.mark.parametrize("dtypes", FEW, ids=ids)
def test_axes(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    """Axes orders work with mixed dtypes: rows before heads, features before rows."""
    shapes = ((2, 3, 33, 40), (2, 3, 40, 40), (2, 3, 40, 24))
    axes = ((-3, -1), (-1, -2), (-3, -1), (-1, -3))
    call = make_call("normal", 0, dtypes, *shapes, axes=axes)
    result = run(xp, call, with_out=True)
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtypes", FEW, ids=ids)
def test_groups_and_gradients_of_options(
    xp: ModuleType, dtypes: tuple[Any, ...], with_out: bool
) -> None:
    """Gradients of groups and options are right, each option with a dtype of its own."""
    rng = np.random.default_rng(1)
    options = {
        "enable_gqa": True,
        "causal": True,
        "bias": rng.standard_normal((6, 33, 40)).astype(np.float16),
        "alibi_slopes": rng.random(6),
        "sink": rng.standard_normal(6).astype(np.float32),
    }
    wrt = ("q", "k", "v", "bias", "alibi_slopes", "sink", "scale")
    shapes = ((2, 6, 33, 40), (2, 3, 40, 40), (2, 3, 40, 24))
    call = make_call("normal", 0, dtypes, *shapes, options=options, wrt=wrt)
    result = run(xp, call, with_out=with_out)
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))
    for name in set(wrt) - {"scale"}:
        assert result.gradients[name].dtype == call.array(name).dtype, name


@pytest.mark.parametrize("dtypes", FEW, ids=ids)
def test_out_is_of_the_promoted_dtype(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    """An out of another dtype than the promoted one is refused, and nothing is written to it."""
    call = make_call("normal", 0, dtypes, *SHAPES)
    q, k, v = (memory.to_device(xp, call.array(name)) for name in ("q", "k", "v"))
    shape = (2, 3, 33, 24)
    for dtype in set(FLOATS) - {call.dtype.type}:
        out = xp.ones(shape, dtype)
        with pytest.raises((TypeError, ValueError), match=f"out.*{np.dtype(dtype)}"):
            cuflash.attention(q, k, v, out=out)
        assert (out == xp.ones((), dtype)).all()
    out = xp.zeros(shape, call.dtype)
    cuflash.attention(q, k, v, out=out)
    np.testing.assert_array_equal(*map(memory.to_numpy, (out, cuflash.attention(q, k, v))))


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
@pytest.mark.parametrize(
    "dtypes",
    [(t, t, t) for t in FLOATS] + [(np.float16, np.float32, np.float32)],
    ids=ids,
)
def test_saved_arrays_of_other_dtypes_are_read_as_what_they_hold(
    xp: ModuleType, dtypes: tuple[Any, ...], name: str
) -> None:
    """Saved arrays of other dtypes give the same gradients, if they hold the same numbers."""
    call = make_call("normal", 0, dtypes, (2, 33, 40), (2, 40, 40), (2, 40, 24))
    q, k, v = (memory.to_device(xp, call.array(name)) for name in ("q", "k", "v"))
    rng = np.random.default_rng(0)

    def eighths(*shape: int) -> np.ndarray:
        return rng.integers(-8, 9, shape) / 8.0

    saved = {
        "dout": eighths(2, 33, 24), "out": eighths(2, 33, 24),
        "lse": 4 + eighths(2, 33), "dlse": eighths(2, 33),
    }  # fmt: skip

    def gradients(dtype_of: dict[str, Any]) -> list[np.ndarray]:
        dout, out, lse, dlse = (
            memory.to_device(xp, a.astype(dtype_of[n])) for n, a in saved.items()
        )
        found = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
        return [memory.to_numpy(g) for g in (found.dq, found.dk, found.dv)]

    usual = {n: call.lse_dtype if "lse" in n else call.dtype for n in saved}
    expected = gradients(usual)
    for dtype in FLOATS:
        for found, right in zip(gradients(usual | {name: dtype}), expected, strict=True):
            np.testing.assert_array_equal(found, right, np.dtype(dtype).name)


@pytest.mark.parametrize("dtypes", PAIRS, ids=ids)
def test_weights_and_logsumexp(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    call = make_call("normal", 0, dtypes, *SHAPES)
    q, k = (memory.to_device(xp, a) for a in (call.q, call.k))
    wide = call.but(v=call.k).dtype
    promoted = [memory.to_device(xp, a.astype(wide)) for a in (call.q, call.k)]
    lse, same = cuflash.logsumexp(q, k), cuflash.logsumexp(*promoted)
    np.testing.assert_array_equal(memory.to_numpy(lse), memory.to_numpy(same))
    some = [cuflash.weights(*a, lse, rows=slice(None)) for a in ((q, k), promoted)]
    np.testing.assert_array_equal(*map(memory.to_numpy, some))
    dlse = xp.ones(lse.shape, lse.dtype)
    grads = cuflash.logsumexp_backward(dlse, q, k, lse, wrt=("q", "k"))
    whole = cuflash.logsumexp_backward(dlse, *promoted, lse, wrt=("q", "k"))
    for name, own in (("dq", dtypes[0]), ("dk", dtypes[1])):
        expected = np.zeros(getattr(whole, name).shape, own)
        write_rounded(expected, memory.to_numpy(getattr(whole, name)))
        np.testing.assert_array_equal(memory.to_numpy(getattr(grads, name)), expected)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_float64_is_rounded_once(xp: ModuleType, dtype: Any) -> None:
    """float64 just beyond a tie of 16 bits is rounded once; by way of float32 it would be a tie."""
    ulp = 2.0**-10 if dtype is np.float16 else 2.0**-7
    beyond = np.array([1 + ulp / 2 + 2.0**-40, 1 + 1.5 * ulp - 2.0**-40, 1e300, -1e300, np.nan])
    expected = np.array([1 + ulp, 1 + ulp, np.inf, -np.inf, np.nan])
    found = xp.zeros(5, dtype)
    with np.errstate(over="ignore"):
        write_rounded(found, xp.asarray(beyond))
    np.testing.assert_array_equal(memory.to_numpy(found).astype(np.float64), expected)


def test_only_what_has_another_dtype_is_copied() -> None:
    half, single = np.ones((4, 8), np.float16), np.ones((4, 8), np.float32)
    _, given, (q, k, v) = operands(half, single, single)
    assert q.dtype == k.dtype == v.dtype == np.float32
    assert given["q"] is half
    assert k is v is single


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_a_gradient_in_float64_is_rounded_once(dtype: Any, packed: bool) -> None:
    """dv, here dout just beyond a tie of 16 bits as one key has all weight, is rounded once."""
    ulp = float(finfo(dtype).eps)
    zero, dout = np.zeros((1, 1)), np.array([[1 + ulp / 2 + 2.0**-40]])
    ends = [[0, 1], [0, 1]] if packed else []
    backward = cuflash.attention_varlen_backward if packed else cuflash.attention_backward
    dv = backward(dout, zero, zero, zero.astype(dtype), zero, zero[0], *ends).dv
    assert dv.dtype == dtype
    assert float(dv[0, 0]) == 1 + ulp


@pytest.mark.full
def test_mixed_dtypes_are_drawn() -> None:
    drawn = calls(limits_of(np), options=())
    for mixed in ((np.float16, np.float32, np.float64), (np.float32, np.float32, bfloat16)):
        call = find(
            drawn,
            lambda call, mixed=mixed: (call.q.dtype, call.k.dtype, call.v.dtype) == mixed,
            settings=settings(max_examples=20_000, derandomize=True, deadline=None),
        )
        assert (
            call.dout.dtype == call.dtype == max(map(np.dtype, mixed), key=attrgetter("itemsize"))
        )


def test_the_dtype_of_every_buffer_that_kernels_write() -> None:
    """No launch gets a gradient array of another dtype than kernels write; needs no GPU."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._launch import plan
    from support.recorded_launches import recorded_launches

    seen = []
    plan_launch = plan.plan_launch

    def noted(step: Any, problem: Any, layouts: Any, *rest: Any) -> Any:
        sizes = {n: layouts[n].itemsize for n in ("dq", "dk", "dv") if n in layouts}
        seen.append(sizes)
        assert set(sizes.values()) <= {problem.dtype.itemsize}, sizes
        return plan_launch(step, problem, layouts, *rest)

    for dtypes in MIXED:
        with recorded_launches() as (library, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "plan_launch", noted)
            call = make_call("normal", 0, dtypes, *SHAPES)
            q, k, v = map(library.asarray, (call.q, call.k, call.v))
            result = cuflash.attention(q, k, v, return_lse=True)
            grads = cuflash.attention_backward(result.out, q, k, v, *result)
            assert [g.dtype for g in (grads.dq, grads.dk, grads.dv)] == list(map(np.dtype, dtypes))
    assert any(seen)


@pytest.mark.parametrize("dtypes", FEW, ids=ids)
def test_a_capture_takes_one_dtype(dtypes: tuple[Any, ...]) -> None:
    """A capture refuses mixed dtypes, whose copies need memory; needs no GPU."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.recorded_launches import recorded_launches

    call = make_call("normal", 0, dtypes, *SHAPES)
    with recorded_launches() as (library, launched), pytest.MonkeyPatch.context() as patch:
        q, k, v = map(library.asarray, (call.q, call.k, call.v))
        result = cuflash.attention(q, k, v, return_lse=True)
        room = cuflash.Gradients(*(library.zeros(a.shape, a.dtype) for a in (q, k, v)))
        launched.clear()
        patch.setattr(_arrays, "is_capturing", lambda: True)
        dtype = str(call.dtype)
        with pytest.raises(RuntimeError, match=f"cannot allocate .* dtype {dtype}"):
            cuflash.attention(q, k, v, return_lse=True, out=result)
        with pytest.raises(RuntimeError, match=f"cannot allocate .* dtype {dtype}"):
            cuflash.attention_backward(result.out, q, k, v, *result, grads_out=room)
    assert not launched
