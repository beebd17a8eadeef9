"""Which rows of a sequence does each rank hold?

A layout cuts a sequence into chunks of consecutive rows. Rank r of W ranks holds

    contiguous   chunk r of W chunks
    zigzag       chunks r and 2 W - 1 - r of 2 W chunks: all ranks have equal work if causal

If the sequence has at least 32 rows for each rank, chunks begin at multiples of 16 rows, because
dropout draws its random numbers in groups of 16. Shorter sequences are cut evenly, and a chunk may
be empty.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.checks import integer_value, is_integer

LAYOUTS = ("contiguous", "zigzag")
MOST_RANKS = 1 << 16
_MOST = 1 << 48  # rows, or bytes
_UNIT = 16


class Chunk(NamedTuple):
    """Consecutive rows of a whole sequence."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


Chunks = tuple[Chunk, ...]


def checked_layout(layout: Any) -> str:
    """A checked name of a layout."""
    expected = " or ".join(map(repr, LAYOUTS))
    if not isinstance(layout, str):
        raise wrong_type("layout", shown(layout), expected)
    if layout not in LAYOUTS:
        raise wrong_value("layout", shown(layout), expected)
    return layout


def chunks_of(length: int, size: int, layout: str) -> tuple[Chunks, ...]:
    """The chunks of each rank, in order of position and without empty chunks."""
    number = size * (2 if layout == "zigzag" else 1)
    unit = _UNIT if length >= 2 * _UNIT * size else 1
    ends = [min(length, round(i * length / (number * unit)) * unit) for i in range(number)]
    chunks = [Chunk(a, b) for a, b in zip(ends, [*ends[1:], length], strict=True)]
    held: list[Chunks]
    if layout == "zigzag":
        held = [(chunks[r], chunks[-1 - r]) for r in range(size)]
    else:
        held = [(chunk,) for chunk in chunks]
    return tuple(joined(own) for own in held)


@functools.lru_cache(maxsize=1024)
def joined(chunks: Chunks) -> Chunks:
    """The same rows in order; neighbouring chunks are joined, empty ones dropped."""
    result: list[Chunk] = []
    for chunk in sorted(chunk for chunk in chunks if chunk.rows):
        if result and result[-1].stop == chunk.start:
            result[-1] = Chunk(result[-1].start, chunk.stop)
        else:
            result.append(chunk)
    return tuple(result)


@functools.lru_cache(maxsize=1024)
def in_a_row(held: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    """As many rows for each rank, but as one chunk for each rank, in order of ranks."""
    ends = [0, *itertools.accumulate(map(rows_of, held))]
    return tuple(joined((Chunk(*pair),)) for pair in itertools.pairwise(ends))


def of_groups(held: Sequence[Chunks], size: int) -> tuple[Chunks, ...]:
    """The chunks of each group of ``size`` neighbouring ranks."""
    groups = (held[i : i + size] for i in range(0, len(held), size))
    return tuple(joined(tuple(c for own in group for c in own)) for group in groups)


def rows_of(chunks: Chunks) -> int:
    """Number of rows of all chunks."""
    return sum(chunk.rows for chunk in chunks)


def places(chunks: Chunks) -> list[slice]:
    """The slice of each chunk in an array that has only these rows."""
    ends = [0, *itertools.accumulate(chunk.rows for chunk in chunks)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def within(chunk: Chunk, holder: Chunks) -> slice:
    """The slice of a chunk in an array with the rows of ``holder``, which must contain it."""
    for own, place in zip(holder, places(holder), strict=True):
        if own.start <= chunk.start and chunk.stop <= own.stop:
            return slice(
                place.start + chunk.start - own.start, place.start + chunk.stop - own.start
            )
    raise LookupError(f"{chunk} is not in {holder}")


def counted(name: str, value: Any, least: int, most: int = _MOST) -> int:
    """An int from ``least`` to ``most``."""
    expected = "a positive int" if least else "an int >= 0"
    if not is_integer(value):
        raise wrong_type(name, shown(value), expected)
    number = integer_value(name, value, expected)
    if number < least:
        raise wrong_value(name, shown(value), expected)
    if number > most:
        raise wrong_value(name, shown(value), f"at most {most}")
    return number


def counted_rank(rank: Any, size: Any) -> tuple[int, int]:
    """A checked rank and number of ranks."""
    size, rank = counted("size", size, 1, MOST_RANKS), counted("rank", rank, 0)
    if rank >= size:
        raise wrong_value("rank", rank, f"a rank below size, {size}")
    return rank, size


def positions(length: int, rank: int, size: int, *, layout: str = "zigzag") -> np.ndarray:
    """Positions, in the whole sequence, of the rows that a rank holds, in the rank's order.

    Rotary embeddings, learned positions and losses must use these positions.

    Parameters
    ----------
    length : int
        Rows of the whole sequence.
    rank, size : int
        The rank, and the number of ranks.
    layout : {"zigzag", "contiguous"}
        As in :func:`cuflash.distributed.attention`.

    Returns
    -------
    int64 array, (rows,)

    Raises
    ------
    TypeError, ValueError
        For an invalid length or rank, or an unknown layout.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.positions(8, 1, 2)
    array([2, 3, 4, 5])
    >>> distributed.positions(8, 0, 2)
    array([0, 1, 6, 7])
    """
    rank, size = counted_rank(rank, size)
    held = chunks_of(counted("length", length, 0), size, checked_layout(layout))[rank]
    return np.concatenate([np.arange(0), *(np.arange(*chunk) for chunk in held)])
