"""When does a forward run on CUDA cores, and with how many rows for each thread?"""

from __future__ import annotations

import math

import numpy as np

from cuflash import _select
from cuflash._config import ForwardNarrowConfig
from cuflash._problem import Problem

#: Head sizes up to which products of CUDA cores are cheaper than the exponential.
WIDEST = 8
_NUM_WARPS = 4


def forward_config(
    problem: Problem, copy_bytes: int, multiprocessors: int
) -> ForwardNarrowConfig | None:
    """Choose the forward of narrow heads; None where tensor cores serve.

    The number of rows changes no bit of a row.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    # Tensor cores are fast enough for 16 bits, but for looking a bias up for each pair.
    wins = problem.dtype in (np.float32, np.float64) or _shares_bias(problem)
    if not wins or widest > WIDEST or problem.formulas:
        return None
    fields = _select._fields(problem, copy_bytes, problem.out.dtype) | _select._sink_field(problem)
    rows, blocks_per_sm = _rows(problem)
    tiles = math.prod(problem.batch) * -(-problem.seqlen_q // (32 * _NUM_WARPS * rows))
    if tiles < 2 * multiprocessors:
        rows = 1
    return ForwardNarrowConfig(
        **fields,
        block_m=32 * _NUM_WARPS * rows,
        block_n=128,
        num_warps=_NUM_WARPS,
        blocks_per_sm=blocks_per_sm,
        column_parts=1,
        width=problem.head_dim,
        width_v=problem.head_dim_v,
        key_bias=_shares_bias(problem),
    )


def _rows(problem: Problem) -> tuple[int, int]:
    """Rows of a thread and blocks of threads on a multiprocessor, as registers allow."""
    numbers = problem.head_dim + 2 * problem.head_dim_v  # that a row keeps
    general = _select._is_general(problem) and not _shares_bias(problem)
    if problem.dtype == np.float64:
        return (2 if numbers <= 16 else 1), 2
    if general:
        return 2, 2
    return 4, 4 if numbers <= 4 else 3 if numbers <= 16 else 2


def _shares_bias(problem: Problem) -> bool:
    """Whether a bias that all queries share is all that is added to scores, and hides keys."""
    if problem.bias is None or problem.bias.strides[-2] != 0:
        return False
    others = (problem.softcap, problem.alibi_slopes, problem.mask, problem.segment_ids_q)
    return all(option is None for option in others)
