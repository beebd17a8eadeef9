"""Are q, k and v of different dtypes served in the one they promote to, gradients in their own?"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash._arrays import write_rounded
from support import memory

FLOATS = (np.float16, bfloat16, np.float32, np.float64)
#: Every three dtypes that promote and are not one.
MIXED = tuple(
    dtypes
    for dtypes in itertools.product(FLOATS, repeat=3)
    if len(set(dtypes)) > 1 and not {np.float16, bfloat16} <= set(dtypes)
)
PAIRS = tuple(d for d in MIXED if len(set(d)) == 2)


def call_of(dtypes: tuple[Any, ...], **options: Any) -> dict[str, np.ndarray]:
    """q, k, v and dout; k and v have one head for the three of q."""
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 33, 40), (1, 40, 40), (1, 40, 24))
    arrays = (rng.standard_normal(s).astype(t) for s, t in zip(shapes, dtypes, strict=True))
    return {**dict(zip("qkv", arrays, strict=True)), **options}


def ids(dtypes: tuple[Any, ...]) -> str:
    return "-".join(np.dtype(t).name for t in dtypes)


def close(actual: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    """Within some units of the narrowest dtype that took part, of the largest element."""
    eps = float(np.finfo(np.float32).eps) * 64 if np.dtype(dtype).itemsize > 2 else 2.0**-8
    wide = expected.astype(np.float64)
    assert np.abs(actual.astype(np.float64) - wide).max() <= eps * np.abs(wide).max()


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtypes", MIXED, ids=ids)
def test_gradients_are_exact_and_lie_inside_their_memory(
    xp: ModuleType, dtypes: tuple[Any, ...], with_out: bool
) -> None:
    arrays = call_of(dtypes)
    q, k, v = (arrays[name] for name in "qkv")
    wide = [a.astype(np.float64) for a in (q, k, v)]
    out, lse = reference.attention(*wide, return_lse=True)
    dout = np.random.default_rng(1).standard_normal(out.shape)
    expected = reference.attention_backward(dout, *wide, out, lse)
    placed = {
        n: memory.place(xp, arrays[n], memory.Placement.dense(arrays[n].ndim), "nan") for n in "qkv"
    }
    rooms = {
        f"d{n}": memory.reserve(
            xp, a.view.shape, a.view.dtype, memory.Placement.dense(a.view.ndim), "nan"
        )
        for n, a in placed.items()
    }
    given = [placed[n].view for n in "qkv"]
    result = cuflash.attention(*given, return_lse=True)
    promoted = max(map(np.dtype, dtypes), key=lambda t: t.itemsize)
    assert result.out.dtype == promoted
    grads = cuflash.attention_backward(
        memory.to_device(xp, dout.astype(promoted)), *given, *result,
        grads_out=cuflash.Gradients(**{n: r.view for n, r in rooms.items()}) if with_out else None,
    )  # fmt: skip
    for name, own in zip(("dq", "dk", "dv"), dtypes, strict=True):
        gradient = getattr(grads, name)
        assert gradient.dtype == own
        assert not with_out or gradient is rooms[name].view
        close(memory.to_numpy(gradient), getattr(expected, name), own)
    for name, room in rooms.items():
        memory.assert_written_inside(name, room)
    for name, array in placed.items():
        memory.assert_unchanged(name, array)


@pytest.mark.parametrize("dtypes", PAIRS, ids=ids)
def test_packed_gradients(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    rng = np.random.default_rng(0)
    host = [rng.standard_normal((2, 50, 40)).astype(t) for t in dtypes]
    q, k, v = (memory.to_device(xp, a) for a in host)
    ends = xp.asarray(np.array([3, 20, 45], np.int32))
    out, lse = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True)
    grads = cuflash.attention_varlen_backward(out, q, k, v, out, lse, ends, ends)
    dout = memory.to_numpy(out).astype(np.float64)
    for first, last in ((3, 20), (20, 45)):
        own = [a[:, first:last].astype(np.float64) for a in host]
        forward = reference.attention(*own, return_lse=True)
        expected = reference.attention_backward(dout[:, first:last], *own, *forward)
        for name, dtype in zip(("dq", "dk", "dv"), dtypes, strict=True):
            actual = memory.to_numpy(getattr(grads, name))
            assert actual.dtype == dtype
            close(actual[:, first:last], getattr(expected, name), dtype)
            assert not actual[:, :3].any()
            assert not actual[:, 45:].any()


@pytest.mark.parametrize("dtypes", PAIRS, ids=ids)
def test_weights_and_logsumexp(xp: ModuleType, dtypes: tuple[Any, ...]) -> None:
    arrays = call_of(dtypes)
    q, k = (memory.to_device(xp, arrays[name]) for name in "qk")
    promoted = [memory.to_device(xp, arrays[n].astype(max(
        map(np.dtype, dtypes[:2]), key=lambda t: t.itemsize))) for n in "qk"]  # fmt: skip
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


def test_the_dtype_of_every_buffer_that_kernels_write() -> None:
    """Without a GPU: what is launched is never given a narrower array than kernels write."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._launch import plan
    from support.recorded_launches import recorded_launches

    seen = []
    plan_launch = plan.plan_launch

    def noted(config: Any, problem: Any, layouts: Any, *rest: Any, **more: Any) -> Any:
        sizes = {n: layouts[n].itemsize for n in ("dq", "dk", "dv") if n in layouts}
        seen.append(sizes)
        assert set(sizes.values()) <= {problem.dtype.itemsize}, sizes
        return plan_launch(config, problem, layouts, *rest, **more)

    for dtypes in MIXED:
        with recorded_launches() as (library, _), pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "plan_launch", noted)
            q, k, v = (library.asarray(a) for a in call_of(dtypes).values())
            result = cuflash.attention(q, k, v, return_lse=True)
            grads = cuflash.attention_backward(result.out, q, k, v, *result)
            assert [g.dtype for g in (grads.dq, grads.dk, grads.dv)] == list(map(np.dtype, dtypes))
    assert any(seen)
