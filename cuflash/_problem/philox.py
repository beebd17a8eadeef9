"""Which scores does dropout keep? Philox4x32-7, the same bits in NumPy, CuPy and the kernels.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") maps a counter of four
32-bit words and a key, the seed's two words, to four random words. It takes seven rounds, the
fewest that pass BigCrush (ten before version 0.2). Each word holds 16 bits for each of two scores.
One thread holds the eight scores of one counter in two neighbouring fragments of a tensor-core
product::

    queries q and q + 8,   keys k, k + 1, k + 8 and k + 9,        q mod 16 < 8, k mod 16 in 0 2 4 6

    counter = (4 (k div 16) + (k mod 8) div 2,  8 (q div 16) + q mod 8,  entry low, entry high)
    number  = 4 ((q div 8) mod 2) + 2 ((k div 8) mod 2) + k mod 2
    bits    = half (number mod 2) of word (number div 2)

where ``entry`` is the flat index of batch and head within the call. A score is dropped iff
``bits < round(65536 p)``. Weights that are kept are divided by ``1 - round(65536 p) / 65536``.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from cuflash._arrays import Array

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_WORD = 0xFFFFFFFF
BLOCK = 16


class Origin(NamedTuple):
    """Place in a whole call of the first score of a part, so that both draw the same mask."""

    entry: int = 0
    heads_elsewhere: int = 0  # heads of each batch entry that the part lacks
    query: int = 0
    key: int = 0


WHOLE = Origin()


def threshold(p: float) -> int:
    """How many of the 65536 values of 16 random bits drop a score."""
    return round(65536 * p)


def rounded(p: float) -> float:
    """The probability ``p``, rounded to what 16 random bits can give."""
    return threshold(p) / 65536


def kept_scale(p: float) -> float:
    """Factor of the weights that are kept; 0 if none is."""
    dropped = threshold(p)
    return 65536 / (65536 - dropped) if dropped < 65536 else 0.0


def kept(entries: Array, rows: slice, cols: slice, p: float, seed: int, xp: ModuleType) -> Array:
    """Which scores of a tile are kept: entries.shape + (rows, cols), bool."""
    first_m, first_n = rows.start // BLOCK, cols.start // BLOCK
    last_m, last_n = -(-rows.stop // BLOCK), -(-cols.stop // BLOCK)
    y = xp.arange(8 * first_m, 8 * last_m, dtype=np.uint64)[:, None]
    x = xp.arange(4 * first_n, 4 * last_n, dtype=np.uint64)
    entries = xp.asarray(entries, dtype=np.uint64)[..., None, None]
    words = _philox(
        [x, y, entries & np.uint64(_WORD), entries >> np.uint64(32)], (seed & _WORD, seed >> 32), xp
    )
    lead = words[0].shape[:-2]
    # Axes: entries, block, row div 8, row mod 8, block, column div 8, x mod 4, column mod 2.
    blocks = xp.empty((*lead, last_m - first_m, 2, 8, last_n - first_n, 2, 4, 2), bool)
    halves = (half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16)))
    for number, half in enumerate(halves):
        part = blocks[..., number // 4, :, :, number // 2 % 2, :, number % 2]
        part[...] = (half >= np.uint64(threshold(p))).reshape(part.shape)
    whole = blocks.reshape(*lead, BLOCK * (last_m - first_m), BLOCK * (last_n - first_n))
    m, n = rows.start - BLOCK * first_m, cols.start - BLOCK * first_n
    return whole[..., m : m + rows.stop - rows.start, n : n + cols.stop - cols.start]


def _philox(counter: list[Array], key: tuple[int, int], xp: ModuleType) -> list[Array]:
    """Four random words, as uint64 arrays, for counter words that broadcast."""
    c = list(xp.broadcast_arrays(*counter))
    k0, k1 = key
    for _ in range(_ROUNDS):
        products = [c[0] * np.uint64(_MULTIPLIERS[0]), c[2] * np.uint64(_MULTIPLIERS[1])]
        high = [product >> np.uint64(32) for product in products]
        low = [product & np.uint64(_WORD) for product in products]
        c = [high[1] ^ c[1] ^ np.uint64(k0), low[1], high[0] ^ c[3] ^ np.uint64(k1), low[0]]
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c
