"""Do kernels leave out blocks of other segments, and nothing else?

A call with segment ids has the bits of a call with the equivalent mask, which leaves out no block.
The portable kernels run compiled by a C++ compiler, and all kernels on a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._problem.operand import canonical_view
from cuflash._problem.problem import describe
from cuflash._results import Saved

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._kernels import segment_bounds
from cuflash._launch import run, score_params
from support.host_device import COMPILER, host_device, on_device, options_on_device

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 2, 330, 410
WIDE = 416  # a multiple of 16: kernels read 16 bytes of such a mask at once
LARGEST = np.iinfo(np.int64).max


def sorted_ids(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.sort(rng.integers(0, 5, (BATCH, 1, n)), -1)


def ids_of(kind: str, n: int) -> np.ndarray:
    """Return ids (BATCH, 1, n) or (n,)."""
    rng = np.random.default_rng([n, len(kind)])
    if kind == "sorted":
        return sorted_ids(rng, n)
    if kind == "backwards":
        return -sorted_ids(rng, n)
    if kind == "runs out of order":  # segments come again, with others between
        return np.repeat(rng.integers(0, 3, (BATCH, 1, -(-n // 50))), 50, -1)[..., :n]
    if kind == "shuffled":
        return rng.integers(0, 3, (BATCH, 1, n))
    if kind == "one":
        return np.full(n, 7)
    if kind == "the largest":
        return np.where(sorted_ids(rng, n) > 2, LARGEST, -LARGEST - 1)
    assert kind == "most see nothing"
    return np.where(np.arange(n) < n // 8, 3, n + np.arange(n) // 100)


KINDS = (
    "sorted", "backwards", "runs out of order", "shuffled", "one", "the largest",
    "most see nothing",
)  # fmt: skip


def inputs(d: int, d_v: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(d_v)
    shapes = {"q": (SEQLEN_Q, d), "k": (SEQLEN_K, d), "v": (SEQLEN_K, d_v), "dout": (SEQLEN_Q, d_v)}
    return {
        name: rng.standard_normal((BATCH, HEADS, *shape)).astype(np.float16)
        for name, shape in shapes.items()
    }


def options_of(kind: str, dtype: Any, **others: Any) -> dict[str, dict[str, Any]]:
    """Return the same visibility as segments, and as masks with rows of SEQLEN_K and WIDE bytes."""
    q, k = (ids_of(kind, n).astype(dtype) for n in (SEQLEN_Q, SEQLEN_K))
    seen = q[..., :, None] == k[..., None, :]
    wide = np.ones((*seen.shape[:-1], WIDE), bool)
    wide[..., :SEQLEN_K] = seen
    return {
        "segments": {**others, "segment_ids": (q, k)},
        "mask": {**others, "mask": seen},
        "wide mask": {**others, "mask": wide},
    }


@pytest.mark.full
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", ["runs out of order", "most see nothing"])
def test_segments_have_the_bits_of_a_mask_and_less_to_copy(kind: str, tmp_path: Path) -> None:
    arrays = {name: on_device(array) for name, array in inputs(16, 16).items()}
    found = {}
    with host_device(tmp_path) as device:
        for name, given in options_of(kind, np.int64, causal=True).items():
            if "mask" in given:
                given["mask"] = given["mask"][..., :SEQLEN_K]
            options = options_on_device(cuflash.Options(**given))
            q, k, v, dout = (arrays[n] for n in ("q", "k", "v", "dout"))
            problem = describe(q, k, v, options)
            out, lse = (
                on_device(np.empty_like(v, shape=dout.shape)),
                on_device(np.empty(q.shape[:-1], np.float32)),
            )
            before = device.copied_bytes
            run.forward(problem, (q, k, v), options, out, lse)
            gradients = {n: on_device(np.empty_like(arrays[n])) for n in ("q", "k", "v")}
            saved = Saved(dout, out, lse)
            run.backward(problem, (q, k, v), options, saved, gradients)
            found[name] = ([out, lse, *gradients.values()], device.copied_bytes - before)
    for name in ("mask", "wide mask"):
        for by_segments, by_mask in zip(found["segments"][0], found[name][0], strict=True):
            np.testing.assert_array_equal(by_segments, by_mask, name)
    assert found["segments"][1] < 0.9 * found["mask"][1]


@pytest.mark.gpu
@pytest.mark.parametrize("others", [{}, {"causal": True}, {"window": (130, 60)}], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 60), (64, 64), (128, 128), (256, 256)], ids=str)
def test_segments_have_the_bits_of_a_mask(
    head_dims: tuple[int, int], others: dict[str, Any]
) -> None:
    """Segments have the bits of masks, at head sizes where both have one tile and order of sums.

    At head size 256 a pair of thread blocks computes gradients of a bound beside a mask, but not
    beside segments.
    """
    import cupy

    names = ("out", "lse", "dq", "dk", "dv")[: 2 if head_dims == (256, 256) and others else None]

    arrays = {name: cupy.asarray(array) for name, array in inputs(*head_dims).items()}
    q, k, v, dout = (arrays[n] for n in ("q", "k", "v", "dout"))
    for kind in KINDS:
        found = {}
        for name, given in options_of(kind, np.int64, **others).items():
            if "mask" in given:
                given["mask"] = cupy.asarray(given["mask"])[..., :SEQLEN_K]
            else:
                given["segment_ids"] = tuple(map(cupy.asarray, given["segment_ids"]))
            options = cuflash.Options(**given)
            out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
            grads = cuflash.attention_backward(dout, q, k, v, out, lse, options=options)
            found[name] = [out, lse, grads.dq, grads.dk, grads.dv]
        for name in ("mask", "wide mask"):
            for what, by_segments, by_mask in zip(
                names, found["segments"], found[name], strict=False
            ):
                cupy.testing.assert_array_equal(by_segments, by_mask, f"{kind}: {name}: {what}")


def test_unsigned_ids_are_no_negative_ones() -> None:
    """Unsigned ids never equal negative ones, though kernels compare 64 bits."""
    q = np.array([2**63 + 5, 3, 2**64 - 1, 2**64 - 2], np.uint64)
    k = np.array([-(2**63) + 5, 3, -1, -2, LARGEST], np.int64)
    ones = np.ones((4, 1)), np.ones((5, 1)), np.ones((5, 1))
    _, lse = cuflash.reference.attention(*ones, segment_ids=(q, k), return_lse=True)
    np.testing.assert_array_equal(np.isfinite(lse), [False, True, False, False])
    dtypes = {q.dtype, k.dtype}
    as_kernels_read = [score_params._as_int64(ids, dtypes) for ids in (q, k)]
    seen = as_kernels_read[0][:, None] == as_kernels_read[1]
    np.testing.assert_array_equal(seen.any(1), np.isfinite(lse))
    both = score_params._as_int64(q, {q.dtype})
    assert len(set(both.tolist())) == 4


@pytest.mark.gpu
def test_unsigned_ids_are_no_negative_ones_on_a_gpu() -> None:
    import cupy

    q, k, v = (cupy.ones((4, 8), np.float16) for _ in range(3))
    ids_q = cupy.asarray(np.array([2**63 + 5, 3, 2**64 - 1, 2**64 - 2], np.uint64))
    ids_k = cupy.asarray(np.array([-(2**63) + 5, 3, -1, -2], np.int64))
    for pair, seen in (((ids_q, ids_k), [0, 1, 0, 0]), ((ids_k, ids_q), [0, 1, 0, 0])):
        _, lse = cuflash.attention(q, k, v, segment_ids=pair, return_lse=True)
        np.testing.assert_array_equal(cupy.asnumpy(cupy.isfinite(lse)), np.array(seen, bool))


def test_bounds_lie_where_ids_differ() -> None:
    q, k, v = (np.zeros((5, 3, n, 8), np.float16) for n in (100, 200, 200))
    shared = describe(
        q, k, v, cuflash.Options(segment_ids=(np.zeros(100, int), np.zeros(200, int)))
    )
    bounds = segment_bounds.bounds_of(shared)
    assert bounds.batch == (1, 1)
    assert (bounds.pairs_q, bounds.pairs_k) == (2, 4)
    assert segment_bounds.room_for(shared) == 16 * (2 + 4)
    ids = (np.zeros((5, 1, 100), np.int32), np.zeros((3, 200), np.int32))
    own = segment_bounds.bounds_of(describe(q, k, v, cuflash.Options(segment_ids=ids)))
    assert own.batch == (5, 3)
    assert own.strides(own.pairs_k) == (3 * 4 * 8, 4 * 8)
    assert own.first_k == math.prod(own.batch) * 2 * 8


COPIED = {
    "another dtype": lambda q, k: (q.astype(np.int16), k.astype(np.int16)),
    "two dtypes": lambda q, k: (q.astype(np.int32), k),
    "not contiguous": lambda q, k: (q[..., ::-1], k[..., ::-1]),
    "one id": lambda q, k: (np.broadcast_to(np.int8(1), q.shape), k),
}


@pytest.mark.parametrize("axes", ["batch", "heads", "both", "none"])
@pytest.mark.parametrize("how", COPIED)
def test_copies_of_broadcast_ids_need_the_memory_that_was_counted(
    how: str, axes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``workspace_size`` counts before ids are copied: copies share what the ids shared."""
    monkeypatch.setattr(score_params, "cupy", np)
    monkeypatch.setattr(score_params, "refuse_capture", lambda *_: None)
    first = {"batch": (1, 3), "heads": (5, 1), "both": (1, 1), "none": (5, 3)}[axes]
    rng = np.random.default_rng(0)
    ids_q, ids_k = COPIED[how](*(rng.integers(0, 9, (*first, n)) for n in (100, 200)))
    ids_q, ids_k = (np.broadcast_to(ids, (5, 3, ids.shape[-1])) for ids in (ids_q, ids_k))
    q, k, v = (np.zeros((5, 3, n, 8), np.float16) for n in (100, 200, 200))
    options = cuflash.Options(segment_ids=(ids_q, ids_k))
    problem = describe(q, k, v, options)
    copied, held = score_params.arrays_of(problem, options, q, {})
    assert held["segment_ids_q"] is not ids_q
    assert segment_bounds.bounds_of(copied).batch == segment_bounds.bounds_of(problem).batch
    assert segment_bounds.room_for(copied) == segment_bounds.room_for(problem)
    for name, ids in (("segment_ids_q", ids_q), ("segment_ids_k", ids_k)):
        read = canonical_view(held[name], getattr(copied, name))
        np.testing.assert_array_equal(read, ids)
        assert read.strides[-1] == held[name].itemsize


@pytest.mark.gpu
def test_a_captured_call_needs_its_room() -> None:
    import cupy

    q, k, v, _ = (cupy.asarray(a) for a in inputs(64, 64).values())
    ids = tuple(cupy.asarray(ids_of("sorted", n)) for n in (SEQLEN_Q, SEQLEN_K))
    options = cuflash.Options(segment_ids=ids)
    expected, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
    room = cupy.empty(cuflash.workspace_size(q, k, v, options=options), np.uint8)
    out = (cupy.zeros_like(expected), cupy.zeros_like(lse))
    cupy.cuda.Device().synchronize()  # the zeros are written before the graph runs
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=rf"workspace: .* {room.nbytes} bytes"):
            cuflash.attention(q, k, v, options=options, out=out, return_lse=True)
        cuflash.attention(q, k, v, options=options, out=out, workspace=room, return_lse=True)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    cupy.testing.assert_array_equal(out[0], expected)
    with pytest.raises(ValueError, match=r"workspace: .* at least"):
        cuflash.attention(q, k, v, options=options, workspace=room[:-1])
