"""Are q, k and v of different dtypes served in the one they promote to, gradients in their own?"""

from __future__ import annotations

import itertools
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import find, settings
from ml_dtypes import bfloat16

import cuflash
from cuflash._arrays import write_rounded
from support import memory
from support.budget import Budget
from support.problems import FIELDS, calls, limits_of, make_call, run

FLOATS = (np.float16, bfloat16, np.float32, np.float64)
#: Every three dtypes that promote and are not one.
MIXED = tuple(
    dtypes
    for dtypes in itertools.product(FLOATS, repeat=3)
    if len(set(dtypes)) > 1 and not {np.float16, bfloat16} <= set(dtypes)
)
PAIRS = tuple(d for d in MIXED if len(set(d)) == 2)


#: Of q, k and v; these two have one head for the three of q.
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
    """Just beyond a tie of 16 bits, which float32 would make a tie."""
    ulp = 2.0**-10 if dtype is np.float16 else 2.0**-7
    beyond = np.array([1 + ulp / 2 + 2.0**-40, 1 + 1.5 * ulp - 2.0**-40, 1e300, -1e300, np.nan])
    expected = np.array([1 + ulp, 1 + ulp, np.inf, -np.inf, np.nan])
    found = xp.zeros(5, dtype)
    with np.errstate(over="ignore"):
        write_rounded(found, xp.asarray(beyond))
    np.testing.assert_array_equal(memory.to_numpy(found).astype(np.float64), expected)


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
    """Without a GPU: what is launched is never given a narrower array than kernels write."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._launch import run
    from support.recorded_launches import recorded_launches

    seen = []
    plan_launch = run.plan_launch

    def noted(step: Any, problem: Any, layouts: Any, *rest: Any) -> Any:
        sizes = {n: layouts[n].itemsize for n in ("dq", "dk", "dv") if n in layouts}
        seen.append(sizes)
        assert set(sizes.values()) <= {problem.dtype.itemsize}, sizes
        return plan_launch(step, problem, layouts, *rest)

    for dtypes in MIXED:
        with recorded_launches() as (library, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "plan_launch", noted)
            call = make_call("normal", 0, dtypes, *SHAPES)
            q, k, v = map(library.asarray, (call.q, call.k, call.v))
            result = cuflash.attention(q, k, v, return_lse=True)
            grads = cuflash.attention_backward(result.out, q, k, v, *result)
            assert [g.dtype for g in (grads.dq, grads.dk, grads.dv)] == list(map(np.dtype, dtypes))
    assert any(seen)
