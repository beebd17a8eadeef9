"""Which batch entries see the same keys, so that PackGQA can make them rows of one matrix?

The query heads of a group do, or all heads over keys without a head axis. Few rows (decoding has
one) leave most of a tile empty, and each head reads the keys again. Together they fill a tile.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuflash._kernels.score_config import present
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem

_ROWS = ("q", "out", "lse")  # operands with a row for each query
FEW = 64  # most rows that are few: those of a warpgroup, or of half of a block's warps (D14)


def with_shared_rows(
    problem: Problem, layouts: dict[str, Layout]
) -> tuple[Problem, dict[str, Layout]]:
    """Problem and layouts with fewer entries of more rows, where rows are few; else unchanged.

    Operands of the returned problem still describe the caller's arrays. The returned layouts
    describe the rows.
    """
    alike = _with_equal_rows(problem)
    if alike is None:
        return problem, layouts
    shorter, moved = alike, layouts
    while shorter.batch and shorter.seqlen_q <= FEW:
        merged = _merged_last_axis(shorter, moved)
        if merged is None:
            break
        shorter, moved = merged
    return (problem, layouts) if moved is layouts else (shorter, moved)


def _with_equal_rows(problem: Problem) -> Problem | None:
    """The problem if its query alone decides what a row sees, with bounds adapted; else None."""
    differs = (problem.formulas, problem.q_lengths, problem.cu_seqlens_q)
    whole = problem.q_length_value in (None, problem.seqlen_q)
    of_pairs = present(problem, "add", "see", "weight")
    if not whole or of_pairs or problem.merges_partial or any(x is not None for x in differs):
        return None
    if problem.window_left is None and problem.window_right is None:
        return problem
    if problem.seqlen_q > 1:
        return _with_queries_in_rows(problem)
    if problem.window_left is not None or problem.offset is not None:
        return None
    # A single row sees the keys up to a bound, by default all keys.
    keys = problem.kv_length_value
    if problem.offset_value is not None:
        if problem.kv_lengths is not None:
            return None
        keys = problem.seqlen_k if keys is None else keys
        keys = max(0, min(keys, problem.offset_value + (problem.window_right or 0) + 1))
    return replace(problem, window_right=None, kv_length_value=keys)


def _with_queries_in_rows(problem: Problem) -> Problem | None:
    """The problem with ``num_queries``, by which kernels find the query and the bounds of a row.

    None for wide rows of float32, which leave no registers for that.
    """
    if problem.dtype == np.float32 and max(problem.head_dim, problem.head_dim_v) > 128:
        return None
    offset = problem.offset_value
    if offset is None and problem.offset is None and problem.kv_lengths is None:
        keys = problem.kv_length_value
        offset = (problem.seqlen_k if keys is None else keys) - problem.seqlen_q
    return replace(problem, num_queries=problem.seqlen_q, offset_value=offset)


def _merged_last_axis(
    problem: Problem, layouts: dict[str, Layout]
) -> tuple[Problem, dict[str, Layout]] | None:
    """The problem with its last batch axis merged into rows; None if operands differ along it."""
    extent, rows = problem.batch[-1], problem.seqlen_q
    moved = {}
    for name, layout in layouts.items():
        *batch, step = layout.batch
        row = layout.row
        if name in _ROWS and extent > 1:
            row = step if rows == 1 else row
            if step != rows * row:
                return None
        elif step != 0 and extent > 1:
            return None
        moved[name] = layout._replace(batch=tuple(batch), row=row)
    shorter = replace(
        problem, batch=problem.batch[:-1], seqlen_q=extent * rows, q_length_value=None
    )
    return shorter, moved
