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

Weights = tuple[Array, Array]  # exp(score - a shift of the row), and factors of rows


class Kept:
    """Weights of tiles. Times their factors they are probabilities."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[int, int, int], Weights] = {}
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

    def __contains__(self, rows: slice) -> bool:
        return rows.start >= self._first

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Memory for the weights of a tile."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            start, self._used = self._used, self._used + size
        return self._memory[start : start + size].view(dtype).reshape(shape)

    def add(
        self, piece: int, tile: Tile, seen: Array | None, weights: Array, factor: Array
    ) -> None:
        """Keep the weights of a tile of a piece of the batch."""
        wrong = ~np.isfinite(factor)
        if wrong.any():  # rows with a NaN: in the weights it stays where keys are seen
            weights[wrong] = np.nan
            hide(weights, seen, 0)
            factor[wrong] = 1
        self.tiles[piece, tile.rows.start, tile.cols.start] = weights, factor
