"""``forward_narrow.cu``: the forward of very small head sizes, on CUDA cores.

For points in space (three float32 columns, no values) the tiles are the fastest of
benchmarks/sweeps. For more columns and for float64 they are what registers hold.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from cuflash._kernels import narrow, portable, split_keys
from cuflash._kernels.config import SCORED, Tile
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of, needs_score_math
from cuflash._problem.problem import Problem

#: Speed of tiles of 256 rows over tiles of 128, H100 SXM, 2026-11-24: D62.
_GAIN = 1.05


class Own(NamedTuple):
    sink: Floats
    num_stages: int = 2
    split_keys: bool = False  # do several thread blocks share the keys of a tile (split-KV)?
    overlaps: bool = False  # does forward_combine.cu start before this kernel ends?


class ForwardNarrowConfig(narrow.NarrowConfig):
    """``forward_narrow.cu``: a thread owns one or more queries."""

    kernel = "forward_narrow"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": Own, "widths": narrow.Widths}
    row_numbers = 13
    splits_keys = True

    @property
    def numbers(self) -> int:
        """For a query: q; maxima and sums over one block and over all blocks; a run of scores."""
        return int(self.width + 2 * (2 + self.width_v) + 8)

    @property
    def smem_bytes(self) -> int:
        """A block of keys with value and bias of each."""
        return self.room(self.block_n, self.width + self.width_v + self.key_bias)

    @classmethod
    def eligible(cls, request: Request) -> str:
        return narrow.why_not(request)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its tile. How many queries a thread block owns changes no bit of a row."""
        problem = request.problem
        own = narrow.fields(cls, request) | _tile(request)._asdict()
        if split_keys.wanted(request):
            own |= split_keys.fields(cls, request)
        config = cls(
            **own,
            sink=dtype_of(problem.sink),
        )
        return (config,)


def _tile(request: Request) -> Tile:
    """The tile with as many rows as registers allow while every SM gets its share of rows."""
    problem = request.problem
    rows, blocks_per_sm = _rows(problem)
    if blocks := _blocks_of_eight_warps(problem):
        if portable.most_rows(request, 256) <= _GAIN * portable.most_rows(request, 128):
            return Tile(256, 128, 8, blocks)
        rows = 1
    elif portable.num_tiles(problem, 128 * rows) < 2 * request.num_sms:
        rows = 1
    return Tile(128 * rows, 128, 4, blocks_per_sm)


def _blocks_of_eight_warps(problem: Problem) -> int:
    """How many blocks of eight warps, one row to a thread, share an SM.

    0 where a row keeps too many numbers: then several rows to a thread are faster.
    """
    if problem.dtype == np.float64 or problem.head_dim + 2 * problem.head_dim_v > 4:
        return 0
    if not narrow.shares_bias(problem):
        return 0 if needs_score_math(problem) else 3
    bounds = (problem.window_left, problem.q_lengths, problem.kv_lengths, problem.cu_seqlens_q)
    few = problem.head_dim_v == 0 and all(bound is None for bound in bounds)
    return 4 if few else 0


def _rows(problem: Problem) -> tuple[int, int]:
    """Rows of a thread and thread blocks of four warps on an SM, as registers allow. (D63)"""
    shares_bias = narrow.shares_bias(problem)
    numbers = problem.head_dim + 2 * problem.head_dim_v + shares_bias  # kept for a row
    if problem.dtype == np.float64:
        return (2 if numbers <= 16 else 1), 2
    if needs_score_math(problem) and not shares_bias:
        return 2, 2
    return 4, 4 if numbers <= 4 else 3 if numbers <= 16 else 2
