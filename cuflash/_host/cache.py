"""How do KV caches grow, and rows rotate, in NumPy? With the functions of ``_launch/cache.py``.

Nothing is written unless all keys find room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash._arrays import write_rounded
from cuflash._errors import wrong_value
from cuflash._host.scores import arithmetic
from cuflash._problem.float8 import divided

Array = np.ndarray


def grow(
    page_table: Array,
    lengths: Array,
    dropped: Array,  # noqa: ARG001  nothing is dropped
    counts: Array | None,
    starts: Array,
    sources: Array,
    taken: Array,
    *,
    page_size: int,
    max_length: int,
    num_tokens: int,
) -> None:
    """Give pages to the sequences of a cache, and advance their lengths.

    Sequences in their order take free pages, the lowest number first: one in place of a shared page
    to which a key is added, and others for keys that their pages do not hold.
    """
    start = lengths.astype(np.int64)
    end = start + (num_tokens if counts is None else counts)
    rows, column = np.arange(len(start)), np.arange(page_table.shape[1])
    named = pages_within(page_table, start, page_size, len(taken))
    times_named = np.bincount(named, minlength=len(taken))
    free = np.flatnonzero(times_named == 0)

    current = page_table[rows, np.minimum(start // page_size, len(column) - 1)]
    is_begun = (start % page_size > 0) & (end > start)
    is_copied = is_begun & (times_named[np.where(is_begun, current, 0)] > 1)
    first_new = -(-start // page_size)
    needed = (column >= (first_new - is_copied)[:, None]) & (column * page_size < end[:, None])
    left = len(free) - needed.sum(1).cumsum()
    if (short := (end > max_length) | (left < 0)).any():
        s = int(np.argmax(short))
        new = int(left[s] + needed[s].sum() - is_copied[s])
        room = min(max_length, (first_new[s] + new) * page_size) - start[s]
        raise wrong_value(
            "k", f"{end[s] - start[s]} keys for sequence {s} of length {start[s]}",
            f"at most {max(room, 0)}: max_length is {max_length}, and {len(free)} of {len(taken)} "
            "pages are free",
            "make the cache larger, or take(...) fewer sequences",
        )  # fmt: skip
    starts[...], lengths[...] = start, end
    sources[...] = np.where(is_copied, current, -1)
    page_table[needed] = free[: needed.sum()]


def pages_within(page_table: Array, lengths: Array, page_size: int, pages: int) -> Array:
    """The numbers of the pages that hold keys of sequences; raise if there is no such page."""
    columns = np.arange(page_table.shape[1])
    numbers = page_table[columns * page_size < np.asarray(lengths)[:, None]]
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < pages:
        got = f"page numbers from {numbers.min()} to {numbers.max()} within the lengths"
        raise wrong_value("page_table", got, f"page numbers from 0 to {pages - 1}")
    return numbers


def write(
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    frequencies: Array | None,
    page_table: Array,
    starts: Array,
    lengths: Array,
    sources: Array,
    *,
    rotation: str,
    num_pairs: int,
    scales: tuple[Any, Any] = (1.0, 1.0),
) -> None:
    """Write new keys and values into the pages of their sequences, after :func:`grow`.

    Pages of 8 bits take elements divided by ``scales``, of k and v: a number, or an array (heads,).
    """
    size = k_pages.shape[2]
    copied = np.flatnonzero(sources >= 0)
    replaced = page_table[copied, starts[copied] // size]
    s, i = np.nonzero(np.arange(k.shape[2]) < (lengths - starts)[:, None])  # each new key
    key = starts[s] + i
    page, slot = page_table[s, key // size], key % size
    if rotation != "none":
        turned = np.empty_like(k)
        positions = starts[:, None, None] + np.arange(k.shape[2])
        turn(k, turned, positions, frequencies, num_pairs, rotation, inverse=False)
        k = turned
    for pages, new, scale in zip((k_pages, v_pages), (k, v), scales, strict=True):
        pages[replaced] = pages[sources[copied]]
        added = new[s, :, i]
        if added.dtype != pages.dtype:
            factors = np.broadcast_to(np.asarray(scale, np.float32), pages.shape[1])
            added = divided(added, factors[:, None], pages.dtype)
        pages[page, :, slot] = added


def take(
    page_table: Array,
    lengths: Array,
    old_table: Array,
    old_lengths: Array,
    parents: Array,
    kept: Array | None,
) -> None:
    """Give each sequence the pages of its parent sequence; the old arrays are scratch memory."""
    if parents.size and not -1 <= parents.min() <= parents.max() < len(lengths):
        got = f"numbers from {parents.min()} to {parents.max()}"
        raise wrong_value("parents", got, f"sequences from 0 to {len(lengths) - 1}, or -1")
    old_table[...], old_lengths[...] = page_table, lengths
    found = np.where(parents < 0, 0, old_lengths[parents])
    page_table[...] = old_table[parents]
    lengths[...] = found if kept is None else np.clip(kept, 0, found)


@np.errstate(all="ignore")
def turn(
    x: Array,
    out: Array,
    positions: Any,
    frequencies: Array | None,
    num_pairs: int,
    rotation: str,
    *,
    inverse: bool,
) -> None:
    """Write the rows of ``x`` to ``out``, rotated by their positions, (..) + (rows,)."""
    r, dtype = num_pairs, arithmetic(x.dtype)
    if frequencies is None:
        frequencies = 10000.0 ** -(np.arange(r, dtype=np.float64) / r)
    places = np.atleast_1d(np.asarray(positions)).astype(np.float64)[..., None]
    angles = places * (-frequencies if inverse else frequencies)
    if rotation == "neighbours":
        first, second = slice(0, 2 * r, 2), slice(1, 2 * r, 2)
    else:
        first, second = slice(0, r), slice(r, 2 * r)
    cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
    a, b = x[..., first].astype(dtype), x[..., second].astype(dtype)
    out[..., 2 * r :] = x[..., 2 * r :]
    write_rounded(out[..., first], a * cos - b * sin)
    write_rounded(out[..., second], a * sin + b * cos)
