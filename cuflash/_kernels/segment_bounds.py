"""``segment_bounds.cu``: least and greatest segment id of every 64 queries and every 64 keys.

Kernels use these bounds to skip blocks of other segments: see ``schedule/segments.cuh``. Batch
entries that share their ids share the bounds.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Self

import numpy as np

from cuflash._kernels.config import KernelConfig
from cuflash._kernels.score_config import Integers
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.problem import Problem

#: Neighbouring ids that share a pair of bounds: ``bounded_ids`` of ``params.cuh``.
IDS = 64
_LARGEST = 8  # most bytes of an id


class Own(NamedTuple):
    num_warps: int  # warps of a thread block; each finds one pair of bounds
    segment_ids: Integers  # dtype of the ids


class SegmentBoundsConfig(KernelConfig):
    kernel = "segment_bounds"
    params = "SegmentBoundsParams"
    computes = "bounds"
    parts = {"own": Own}  # noqa: RUF012

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """The kernel that finds the bounds of a problem with segments."""
        q, _ = operands_of(problem)
        return cls(num_warps=8, segment_ids="int32" if q.dtype == np.int32 else "int64")


class Bounds(NamedTuple):
    """Layout of a problem's bounds in memory: bounds of queries, then bounds of keys."""

    batch: tuple[int, ...]  # extents, packed sequences first; 1 on axes along which ids are shared
    pairs_q: int  # pairs of bounds of the queries of a batch entry
    pairs_k: int  # pairs of bounds of the keys of a batch entry
    itemsize: int  # bytes of a pair

    def layouts(self, packed: bool) -> dict[str, Layout]:
        """Layouts by the names of the kernels' pointers."""
        return {
            "segment_bounds_q": self._layout(self.pairs_q, packed),
            "segment_bounds_k": self._layout(self.pairs_k, packed),
        }

    def _layout(self, pairs: int, packed: bool) -> Layout:
        batch = self.strides(pairs)
        sequence = batch[0] if packed else 0
        return Layout(self.itemsize, batch[1:] if packed else batch, sequence=sequence)

    def strides(self, pairs: int) -> tuple[int, ...]:
        """Bytes from one batch entry to the next, along each axis."""
        steps = itertools.accumulate(self.batch[::-1], int.__mul__, initial=pairs * self.itemsize)
        return tuple(
            0 if n == 1 else step for n, step in zip(self.batch, tuple(steps)[-2::-1], strict=True)
        )

    @property
    def first_k(self) -> int:
        """Byte offset of the bounds of keys."""
        return math.prod(self.batch) * self.pairs_q * self.itemsize


def bounds_of(problem: Problem) -> Bounds:
    """Layout of the bounds of a problem with segments."""
    q, k = operands_of(problem)
    batch = problem.batch
    if problem.cu_seqlens_q is not None:
        batch = (problem.cu_seqlens_q.shape[0] - 1, *batch)
    own = tuple(n if q.strides[axis] or k.strides[axis] else 1 for axis, n in enumerate(batch))
    pairs_q, pairs_k = (-(-operand.shape[-1] // IDS) for operand in (q, k))
    return Bounds(own, pairs_q, pairs_k, 2 * q.dtype.itemsize)


def room_for(problem: Problem) -> int:
    """Bytes of memory for the bounds, enough for ids of any dtype; 0 without segments."""
    if problem.segment_ids_q is None:
        return 0
    bounds = bounds_of(problem)
    return math.prod(bounds.batch) * (bounds.pairs_q + bounds.pairs_k) * 2 * _LARGEST


def operands_of(problem: Problem) -> tuple[Operand, Operand]:
    """The operands of both arrays of ids; a ValueError without segments."""
    q, k = problem.segment_ids_q, problem.segment_ids_k
    if q is None or k is None:
        raise ValueError("a problem without segments has no bounds")
    return q, k
