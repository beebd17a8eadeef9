"""Where do the float32 sums of dq lie to which tiles of keys add, and the turns of the tiles?"""

from __future__ import annotations

import itertools
import math
from typing import Any

from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem

FLOAT_BYTES = 4
_SUMS_ALIGNMENT = 128
_SLICE_ROWS = 16


def workspace_size(problem: Problem, config: Any) -> int:
    """Bytes beside the row statistics: one float32 for each element of q, and turns."""
    return turns_size(problem, config) + _SUMS_ALIGNMENT + _sums_size(problem)


def addresses(problem: Problem, config: Any, workspace: int) -> dict[str, int]:
    """Where turns and sums lie, from the end of the row statistics on."""
    end = workspace + turns_size(problem, config)
    return {"turns": workspace, "dq sums": sums_behind(end)}


def turns_size(problem: Problem, config: Any) -> int:
    """The number of tiles drawn, and turns for each block of queries."""
    turns = -(-problem.seqlen_q // config.block_m) * config.cluster_blocks
    return FLOAT_BYTES * (1 + math.prod(problem.batch) * int(turns))


def sums_behind(turns_end: int) -> int:
    """Where sums lie if the turns end there."""
    return -(-turns_end // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT


def _entry_bytes(problem: Problem) -> int:
    """Of the sums of one batch entry: whole slices of rows."""
    return FLOAT_BYTES * -(-problem.seqlen_q // _SLICE_ROWS) * _SLICE_ROWS * problem.head_dim


def _sums_size(problem: Problem) -> int:
    return math.prod(problem.batch) * _entry_bytes(problem)


def layout(problem: Problem) -> Layout:
    """Batch entries in C order; within an entry as ``kernels_cu/sm90/dq_accum.cuh`` says."""
    steps = itertools.accumulate(problem.batch[:0:-1], int.__mul__, initial=_entry_bytes(problem))
    return Layout(FLOAT_BYTES, tuple(steps)[::-1] if problem.batch else ())
