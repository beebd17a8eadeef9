"""How is a row of a table of tiles chosen? The last row with words that all hold is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cuflash._problem.problem import Problem


class Row(NamedTuple):
    """One line of a table: when it holds, for which head sizes, with which values."""

    when: str  # words that must all hold for a request, as "general, packed"; empty: any request
    head_dims: Any  # padded head sizes (of q and k, of v), or the larger of both
    tile: Any  # values of the kernel's tunables, or several such tuples: the first that fits
    measured: str = ""  # entry of docs/decisions.md; empty: chosen by what registers hold


def smallest(rows: Iterable[Row], problem: Problem) -> tuple[int, int]:
    """The smallest head sizes (of q and k, of v) of a table that a problem fits. (D12)"""
    found: tuple[int, int] = next(
        row.head_dims
        for row in rows
        if problem.head_dim <= row.head_dims[0] and problem.head_dim_v <= row.head_dims[1]
    )
    return found


def tile_of(rows: Sequence[Row], holding: Mapping[str, bool], head_dims: Any) -> Any:
    """The tile of the last row for these head sizes with words that all hold."""
    return next(
        row.tile
        for row in reversed(rows)
        if row.head_dims == head_dims
        and (not row.when or all(holding.get(word, False) for word in row.when.split(", ")))
    )
