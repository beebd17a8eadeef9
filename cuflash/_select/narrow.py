"""When does a forward run on CUDA cores, and with how many rows for each thread?

Tiles of points in space, three columns of float32 with no values, are the fastest of
benchmarks/sweeps; those of more columns, and of float64, are what registers hold.
"""

from __future__ import annotations

import math

import numpy as np

from cuflash._kernels.config import ForwardNarrowConfig
from cuflash._kernels.score_config import needs_score_math, present
from cuflash._problem.problem import Problem
from cuflash._select import portable
from cuflash._select.portable_tiles import Tile

#: Head sizes up to which products of CUDA cores are cheaper than the exponential.
WIDEST = 8
#: By how much a tile of 256 rows is faster, H100 SXM, 2026-11-24: D62.
_GAIN = 1.05


def forward_config(
    problem: Problem, copy_bytes: int, multiprocessors: int
) -> ForwardNarrowConfig | None:
    """Choose the forward of narrow heads; None where tensor cores serve.

    The number of rows changes no bit of a row.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    # Tensor cores are fast enough for 16 bits, but for looking a bias up for each pair. (D64)
    wins = problem.dtype in (np.float32, np.float64) or _shares_bias(problem)
    if not wins or widest > WIDEST or problem.formulas:
        return None
    fields = portable._fields(problem, copy_bytes, problem.out.dtype) | portable._sink_field(
        problem
    )
    tile = _tile(problem, multiprocessors)
    return ForwardNarrowConfig(
        **fields,
        **tile._asdict(),
        column_parts=1,
        width=problem.head_dim,
        width_v=problem.head_dim_v,
        key_bias=_shares_bias(problem),
    )


def _tile(problem: Problem, multiprocessors: int) -> Tile:
    """As many rows as registers allow and each multiprocessor has its share of."""

    def tiles(block_m: int) -> int:
        return math.prod(problem.batch) * -(-problem.seqlen_q // block_m)

    def most_rows(block_m: int) -> int:  # of one multiprocessor
        return -(-tiles(block_m) // multiprocessors) * block_m

    rows, blocks_per_sm = _rows(problem)
    if blocks := _blocks_of_eight_warps(problem):
        if most_rows(256) <= _GAIN * most_rows(128):
            return Tile(256, 128, 8, blocks)
        rows = 1
    elif tiles(128 * rows) < 2 * multiprocessors:
        rows = 1
    return Tile(128 * rows, 128, 4, blocks_per_sm)


def _blocks_of_eight_warps(problem: Problem) -> int:
    """How many share a multiprocessor, each thread with one row; 0 where rows keep too much.

    More rows to a thread are faster then.
    """
    if problem.dtype == np.float64 or problem.head_dim + 2 * problem.head_dim_v > 4:
        return 0
    if not _shares_bias(problem):
        return 0 if needs_score_math(problem) else 3
    bounds = (problem.window_left, problem.q_lengths, problem.kv_lengths, problem.cu_seqlens_q)
    few = problem.head_dim_v == 0 and all(bound is None for bound in bounds)
    return 4 if few else 0


def _rows(problem: Problem) -> tuple[int, int]:
    """Rows of a thread and blocks of four warps on a multiprocessor, as registers allow. (D63)"""
    shares_bias = _shares_bias(problem)
    numbers = problem.head_dim + 2 * problem.head_dim_v + shares_bias  # that a row keeps
    general = needs_score_math(problem) and not shares_bias
    if problem.dtype == np.float64:
        return (2 if numbers <= 16 else 1), 2
    if general:
        return 2, 2
    return 4, 4 if numbers <= 4 else 3 if numbers <= 16 else 2


def _shares_bias(problem: Problem) -> bool:
    """Whether a bias that all queries share is all that is added to scores, and hides keys."""
    if problem.bias is None or problem.bias.strides[-2] != 0:
        return False
    return present(problem, "cap", "add", "see") == {"bias"}
