"""Which probabilities does a forward keep for its pullback?

A gradient recomputes probabilities, by one product of five and an exponential. A forward for a
pullback keeps those of its last queries, which see the most keys under a causal mask, up to a fixed
number of bytes. Which queries these are depends on shapes only: kept and recomputed probabilities
are rounded differently.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash._host.scores import Tile, arithmetic
from cuflash._host.tiles import Piece, gradient_pieces, hide
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem

KEPT_BYTES = 2**25  # of one pullback

Shifted = tuple[Tile, Array | None, Array, Array]  # visibility, exp(score - shift), shift of rows


class Kept:
    """Weights of tiles, and factors of their rows. The products are probabilities."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        self.pieces: list[Piece] = []
        self._memory = np.empty(0, np.uint8)
        self._used = 0
        self._lock = threading.Lock()
        self._first: float = math.inf  # query that is kept

    def begin(self, problem: Problem, options: Options, threads: int) -> bool:
        """Take memory, if the derivative of a score needs nothing but its probability."""
        if problem.softcap is not None or options.score_mod is not None or options.dropout:
            return False
        size = math.prod(problem.batch) * problem.seqlen_k * arithmetic(problem.dtype).itemsize
        rows = min(problem.seqlen_q, KEPT_BYTES // max(size, 1))
        self._first = problem.seqlen_q - rows
        self._memory = np.empty(rows * size, np.uint8)
        self.pieces = gradient_pieces(problem, threads, independent=True)
        return True

    def keeps(self, rows: slice) -> bool:
        """Whether the weights of these queries are kept."""
        return bool(rows.start >= self._first)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for the weights of a tile."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            start, self._used = self._used, self._used + size
        return self._memory[start : start + size].view(dtype).reshape(shape)

    def add(self, piece: int, tiles: list[Shifted], row_max: Array, row_sum: Array) -> None:
        """Keep the tiles of some rows of a piece; the maximum and the sum are of whole rows."""
        for tile, seen, weights, shift in tiles:
            factor = np.where(row_sum == 0, 0, np.exp(shift - row_max) / row_sum)
            wrong = ~np.isfinite(factor)
            if wrong.any():  # a row with a NaN, which the weights then have where keys are seen
                weights[wrong] = np.nan
                hide(weights, seen, 0)
                factor[wrong] = 1
            self.tiles[piece, tile.rows.start, tile.cols.start] = weights, factor
