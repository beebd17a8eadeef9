"""What does a call keep in scratch memory, and where?

A gradient has in this order: lse and delta of each query row, bounds of segment ids, the semaphore
("turns") of the tiles that add to dq, their float32 sums of dq, and dk and dv of every part of the
queries. A forward has the bounds, and out and lse of every part of the keys.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from cuflash._kernels import segment_bounds
from cuflash._kernels.split_queries import entries_that_share
from cuflash._launch.grid import num_tiles
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem

_FLOAT_BYTES = 4
_SUMS_ALIGNMENT = 128
_BOUNDS_ALIGNMENT = 16  # a pair of the largest ids is read at once
_SLICE_ROWS = 16  # rows of a slice of a warp


class Workspace(NamedTuple):
    """The parts of a call's scratch memory, in bytes."""

    statistics: int  # lse and delta of each query row
    bounds: int  # bounds of segment ids
    bounds_of_keys: int  # offset of the bounds of keys among the bounds
    num_turns: int  # a counter of drawn tiles, and turns: numbers of 4 bytes
    sums: int  # float32 sums of dq
    alignment: int  # of the memory
    size: int  # of all parts, at whatever aligned address the memory begins
    out_parts: int = 0  # out of all parts of the keys
    lse_parts: int = 0  # lse of all parts of the keys
    dkv_parts: int = 0  # dk and dv of all parts of the queries

    @classmethod
    def of(
        cls, problem: Problem, backward: bool, fused: Any = None, splits: int = 0, dq_sums: int = 1
    ) -> Workspace:
        """The scratch memory of a call; ``fused`` is the configuration of a one-pass kernel.

        ``splits`` are the parts of the keys of a forward, or of the queries of a gradient; 0 where
        they are not split.
        """
        alignment, entries = statistics_bytes(problem), math.prod(problem.batch)
        statistics = alignment * entries * problem.seqlen_q if backward else 0
        bounds = keys = turns = sums = dkv_parts = 0
        if problem.segment_ids_q is not None:
            statistics = -(-statistics // _BOUNDS_ALIGNMENT) * _BOUNDS_ALIGNMENT
            bounds, alignment = segment_bounds.room_for(problem), _BOUNDS_ALIGNMENT
            keys = segment_bounds.bounds_of(problem).first_k
        if fused is not None:
            # One counter of drawn tiles, and a turn for each block of queries.
            blocks = num_tiles(problem, problem.seqlen_q, fused.block_m) * fused.cluster_blocks
            turns, sums = 1 + entries * int(blocks) * dq_sums, dq_sums * _all_bytes(problem, fused)
            dkv_parts = splits * _part_bytes(problem, fused)
        size = statistics + bounds + _FLOAT_BYTES * turns + (_SUMS_ALIGNMENT + sums if sums else 0)
        lse_parts = 0 if backward else problem.lse_dtype.itemsize * splits * entries
        lse_parts *= problem.seqlen_q
        out_parts = lse_parts * problem.head_dim_v
        if splits:
            size += _SUMS_ALIGNMENT + out_parts + lse_parts + dkv_parts
        return cls(
            statistics, bounds, keys, turns, sums, alignment, size, out_parts, lse_parts, dkv_parts
        )  # fmt: skip

    def addresses(self, start: int) -> dict[str, int]:
        """Addresses of the parts that are not empty, by the names of the kernels' pointers."""
        found = {"rows": start} if self.statistics else {}
        bounds = start + self.statistics
        if self.bounds:
            found |= {"segment_bounds_q": bounds, "segment_bounds_k": bounds + self.bounds_of_keys}
        if self.num_turns:
            found["turns"] = bounds + self.bounds
            end = found["turns"] + _FLOAT_BYTES * self.num_turns
            found["sums"] = -(-end // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
        if self.dkv_parts:
            end = found["sums"] + self.sums
            found["dkv_parts"] = -(-end // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
        if self.lse_parts:
            first = -(-(bounds + self.bounds) // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT
            found |= {"out_parts": first, "lse_parts": first + self.out_parts}
        return found

    def of_lse_parts(self, memory: Any) -> Any:
        """The bytes of ``memory`` that hold lse of the parts of the keys."""
        first = self.addresses(memory.data.ptr)["lse_parts"] - memory.data.ptr
        return memory.reshape(-1).view("u1")[first : first + self.lse_parts]


def parts_layouts(problem: Problem, splits: int) -> dict[str, Layout]:
    """Layouts of out_parts, with rows (parts, head_dim_v), and of lse_parts, with rows (parts,).

    Batch entries are in C order.
    """
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
    """Bytes of lse and delta of one query row."""
    return 2 * problem.lse_dtype.itemsize


def _entry_bytes(problem: Problem, config: Any) -> int:
    """Bytes of the sums of dq of one batch entry, in whole slices of rows.

    Packed sequences have whole blocks, as many as there can be.
    """
    rows = -(-problem.seqlen_q // _SLICE_ROWS) * _SLICE_ROWS
    if problem.cu_seqlens_q is not None:
        rows = num_tiles(problem, problem.seqlen_q, config.block_m) * config.block_m
    return _FLOAT_BYTES * rows * int(config.head_dim)


def _all_bytes(problem: Problem, config: Any) -> int:
    """Bytes of one sum of dq of all batch entries."""
    return math.prod(problem.batch) * _entry_bytes(problem, config)


def _part_bytes(problem: Problem, config: Any) -> int:
    """Bytes of dk and dv of one part of the queries: ``kernels_cu/sm90/dkv_parts.cuh``."""
    owners = math.prod(problem.batch) // entries_that_share(problem)
    rows = num_tiles(problem, problem.seqlen_k, _SLICE_ROWS) * _SLICE_ROWS
    return _FLOAT_BYTES * owners * rows * int(config.head_dim + config.head_dim_v)


def dq_sums_layout(problem: Problem, config: Any) -> Layout:
    """Batch entries in C order; within an entry as in ``kernels_cu/sm90/dq_accum.cuh``.

    Where dq has several sums, the row stride leads from one sum of all entries to the next.
    """
    entry = _entry_bytes(problem, config)
    steps = itertools.accumulate(problem.batch[:0:-1], int.__mul__, initial=entry)
    batch = tuple(steps)[::-1] if problem.batch else ()
    return Layout(_FLOAT_BYTES, batch, row=_all_bytes(problem, config))
