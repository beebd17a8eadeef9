"""Which one-GPU calls (blocks) compute a set of queries against a set of keys?

There is one call for each pair of chunks in which some query may see some key. The rows of a chunk
are consecutive, so one offset describes all positions. If only causal or window bounds depend on
positions, neighbouring pairs without masked scores become one call. So do equal chunks of queries
and keys under a causal mask with offset 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cuflash.distributed._layout import Chunk, Chunks, places, rows_of


class Bounds(NamedTuple):
    """Query m sees key n iff m + offset - left <= n <= m + offset + right; None is no bound."""

    left: int | None
    right: int | None
    offset: int | None  # None if the host does not know it, or if it differs between batch entries
    #: No other option depends on a position.
    alone: bool


class Block(NamedTuple):
    """One call: rows in the arrays of queries and of keys, and the positions of the first rows."""

    rows: slice
    keys: slice
    first_query: int
    first_key: int
    bounded: bool  # the bounds hide some key from some query
    with_sink: bool = False

    @property
    def pairs(self) -> int:
        """Number of scores, halved if bounded: a rough size, to compare the work of ranks."""
        number: int = (self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start)
        return number // 2 if self.bounded else number


@functools.lru_cache(maxsize=1024)
def blocks_of(
    queries: Chunks, keys: Chunks, bounds: Bounds, *, sink: bool = False
) -> tuple[Block, ...]:
    """Return the blocks. With ``sink`` every query is in exactly one block that has the sink."""
    if not rows_of(queries):
        return ()
    plain = bounds.alone and bounds.offset is not None
    causal = (bounds.left, bounds.right, bounds.offset) == (None, 0, 0)
    if plain and causal and queries == keys:
        whole = slice(0, rows_of(queries))
        return (Block(whole, whole, 0, 0, bounded=True, with_sink=sink),)
    found = []
    for rows, query in zip(places(queries), queries, strict=True):
        own = []
        for columns, key in zip(places(keys), keys, strict=True):
            seen = _seen(query, key, bounds)
            if seen is not None:
                own.append(Block(rows, columns, query.start, key.start, bounded=not seen))
        if sink:
            own = own or [Block(rows, slice(0, 0), query.start, 0, bounded=False)]
            own[0] = own[0]._replace(with_sink=True)
        found += _beside(own) if bounds.alone else own
    return tuple(_below(found) if bounds.alone else found)


def lasts_of(steps: Sequence[Sequence[Block]]) -> Iterator[bool]:
    """Yield for each block, step by step, whether no later block has any of its rows."""
    blocks = [block for step in steps for block in step]
    for number, block in enumerate(blocks):
        later = (other.rows for other in blocks[number + 1 :])
        yield all(r.stop <= block.rows.start or block.rows.stop <= r.start for r in later)


def _seen(query: Chunk, key: Chunk, bounds: Bounds) -> bool | None:
    """Whether every query sees every key; None if no query sees any key."""
    left, right, offset = bounds.left, bounds.right, bounds.offset
    if left is None and right is None:
        return True
    if offset is None:
        return False
    first, last = query.start + offset, query.stop - 1 + offset
    low, high = key.start, key.stop - 1
    if (left is not None and high < first - left) or (right is not None and low > last + right):
        return None
    return (left is None or low >= last - left) and (right is None or high <= first + right)


def _beside(blocks: list[Block]) -> list[Block]:
    """Join blocks with neighbouring keys that all queries see."""
    result: list[Block] = []
    for block in blocks:
        last = result[-1] if result else None
        if last and not (last.bounded or block.bounded) and last.keys.stop == block.keys.start:
            result[-1] = last._replace(keys=slice(last.keys.start, block.keys.stop))
        else:
            result.append(block)
    return result


def _below(blocks: list[Block]) -> list[Block]:
    """Join blocks with neighbouring queries that see all of the same keys."""
    result: list[Block] = []
    for block in blocks:
        for i, other in enumerate(result):
            same = (other.keys, other.bounded, other.with_sink, other.rows.stop) == (
                block.keys, False, block.with_sink, block.rows.start
            )  # fmt: skip
            if same and not block.bounded:
                result[i] = other._replace(rows=slice(other.rows.start, block.rows.stop))
                break
        else:
            result.append(block)
    return result
