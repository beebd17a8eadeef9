"""What does a call keep in scratch memory, and where?

In this order: lse and delta of each query row, bounds of segment ids, the semaphore ("turns") of
the tiles that add to dq, and their float32 sums of dq; or out and lse of every part of the keys.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from cuflash._kernels import segment_bounds
from cuflash._launch.grid import num_tiles
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem

_FLOAT_BYTES = 4
_SUMS_ALIGNMENT = 128
_BOUNDS_ALIGNMENT = 16  # a pair of the largest ids is read at once
_SLICE_ROWS = 16


class Workspace(NamedTuple):
    """The parts of a call's scratch memory, in bytes."""

    statistics: int  # lse and delta of each query row
    bounds: int
    bounds_of_keys: int  # where they begin among the bounds
    num_turns: int  # numbers of 4 bytes
    sums: int
    alignment: int
    size: int  # of all parts, wherever the memory begins
    out_parts: int = 0  # of split keys
    lse_parts: int = 0

    @classmethod
    def of(cls, problem: Problem, backward: bool, fused: Any = None, splits: int = 0) -> Workspace:
        """Of one call; ``fused`` is the configuration of a kernel of all gradients.

        ``splits`` are the parts of the keys of a forward, 0 where they are not split.
        """
        alignment, entries = statistics_bytes(problem), math.prod(problem.batch)
        statistics = alignment * entries * problem.seqlen_q if backward else 0
        bounds = keys = turns = sums = 0
        if problem.segment_ids_q is not None:
            statistics = -(-statistics // _BOUNDS_ALIGNMENT) * _BOUNDS_ALIGNMENT
            bounds, alignment = segment_bounds.room_for(problem), _BOUNDS_ALIGNMENT
            keys = segment_bounds.bounds_of(problem).first_k
        if fused is not None:
            # One counter of drawn tiles, and a turn for each block of queries.
            blocks = num_tiles(problem, problem.seqlen_q, fused.block_m) * fused.cluster_blocks
            turns = 1 + entries * int(blocks)
            sums = entries * _entry_bytes(problem, fused.block_m)
        size = statistics + bounds + _FLOAT_BYTES * turns + (_SUMS_ALIGNMENT + sums if sums else 0)
        lse_parts = problem.lse_dtype.itemsize * splits * entries * problem.seqlen_q
        out_parts = lse_parts * problem.head_dim_v
        if splits:
            size += _SUMS_ALIGNMENT + out_parts + lse_parts
        return cls(
            statistics, bounds, keys, turns, sums, alignment, size, out_parts, lse_parts
        )  # fmt: skip

    def addresses(self, start: int) -> dict[str, int]:
        """Where the parts lie that are there, by the names of the kernels' pointers."""
        found = {"rows": start} if self.statistics else {}
        bounds = start + self.statistics
        if self.bounds:
            found |= {"segment_bounds_q": bounds, "segment_bounds_k": bounds + self.bounds_of_keys}
        if self.num_turns:
            found["turns"] = bounds + self.bounds
            end = found["turns"] + _FLOAT_BYTES * self.num_turns
            found["sums"] = -(-end // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
        if self.lse_parts:
            first = -(-(bounds + self.bounds) // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
            found |= {"out_parts": first, "lse_parts": first + self.out_parts}
        return found


def parts_layouts(problem: Problem, splits: int) -> dict[str, Layout]:
    """Rows of (parts, head_dim_v) and of (parts,), entries in C order."""
    size = problem.lse_dtype.itemsize
    found = {}
    for name, row in (
        ("out_parts", splits * problem.head_dim_v * size),
        ("lse_parts", splits * size),
    ):
        steps = itertools.accumulate(
            problem.batch[:0:-1], int.__mul__, initial=problem.seqlen_q * row
        )
        found[name] = Layout(size, tuple(steps)[::-1] if problem.batch else (), row, size)
    return found


def statistics_bytes(problem: Problem) -> int:
    """Bytes of what the backward keeps of one query row."""
    return 2 * problem.lse_dtype.itemsize


def _entry_bytes(problem: Problem, block_m: int) -> int:
    """Bytes of the sums of dq of one batch entry, in whole slices of rows.

    Of packed sequences in whole blocks, as many as there may be.
    """
    rows = -(-problem.seqlen_q // _SLICE_ROWS) * _SLICE_ROWS
    if problem.cu_seqlens_q is not None:
        rows = num_tiles(problem, problem.seqlen_q, block_m) * block_m
    return _FLOAT_BYTES * rows * problem.head_dim


def dq_sums_layout(problem: Problem, block_m: int) -> Layout:
    """Batch entries in C order; within an entry as ``kernels_cu/sm90/dq_accum.cuh`` says."""
    own = _entry_bytes(problem, block_m)
    steps = itertools.accumulate(problem.batch[:0:-1], int.__mul__, initial=own)
    return Layout(_FLOAT_BYTES, tuple(steps)[::-1] if problem.batch else ())
