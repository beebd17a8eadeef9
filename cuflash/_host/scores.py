"""What does a score mean on the CPU path? The counterpart of kernels_cu/score/score.cuh.

This is the only file of the CPU path that knows scale, softcap, bias, ALiBi, formulas, causal,
window, mask, segments and lengths. Queries and keys have indices within a batch entry. The file
also says which blocks of keys contain visible pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash._problem import philox
from cuflash._problem.operand import canonical_view
from cuflash._problem.options import Options
from cuflash._problem.philox import WHOLE, Origin
from cuflash._problem.problem import Problem
from cuflash._problem.score_mod import lent, result_of

Entry = tuple[int | slice, ...]


def arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of scores and sums: float64 for float64, float32 for everything else."""
    return dtype if dtype == np.float64 else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys of one tile: selectors of array axes, and the indices that they select."""

    rows: Any
    cols: Any
    m: Array  # (rows, 1)
    n: Array  # (1, cols)

    def of(self, matrix: Array) -> Array:
        """The tile's part of an array (.., m, n)."""
        return matrix[..., self.rows, :][..., self.cols]


class Scores:
    """Final scores and visibility of any tile of some batch entries.

    Every per-entry value has shape (carried batch axes, 1, 1), ready to broadcast with a tile.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        entry: Entry,
        xp: ModuleType,
        origin: Origin = WHOLE,
    ) -> None:
        self._xp, self._problem, self._options = xp, problem, options
        self._dtype = arithmetic(problem.dtype)
        self.scales_queries = abs(problem.scale) <= 1
        self._arrays = {
            name: xp.asarray(canonical_view(array, getattr(problem, name))[entry])
            for name, array in options.arrays.items()
        }

        def integers(name: str, plain: int | None, default: Any) -> Any:
            if name in self._arrays:
                return self._arrays[name].astype(np.int64)[..., None, None]
            return default if plain is None else plain

        self.q_length = integers("q_lengths", problem.q_length_value, problem.seqlen_q)
        self.kv_length = integers("kv_lengths", problem.kv_length_value, problem.seqlen_k)
        self.offset = integers("offset", problem.offset_value, self.kv_length - self.q_length)
        self.has_all_queries = isinstance(self.q_length, int) and self.q_length >= problem.seqlen_q
        structure = (self.q_length, self.kv_length, self.offset)
        self.alike = all(isinstance(value, int) for value in structure)
        named = self._arrays.keys() & {"mask", "bias", "segment_ids_q"}
        self._pairwise = bool(named) or options.mask_mod is not None
        self._entry, self._origin = entry, origin
        sink = self._arrays.get("sink")
        self._sink = None if sink is None else self._narrowed(sink)[..., None]

    @cached_property
    def _places(self) -> tuple[Array, Array, Array]:
        """Flat indices of entries in the whole call, as dropout counts; their batch and head."""
        xp, batch_shape, origin = self._xp, self._problem.batch_shape, self._origin
        heads = max(batch_shape[-1], 1) if batch_shape else 1
        entries = xp.asarray(entry_indices(self._problem.batch, self._entry))
        entries = origin.entry + entries + entries // heads * origin.heads_elsewhere
        return entries, *xp.divmod(entries, heads + origin.heads_elsewhere)

    def are_queries(self, rows: slice) -> Array:
        """Which of ``rows`` lie before the length: (carried batch axes, rows) or fewer axes."""
        return (self._xp.arange(rows.start, rows.stop)[:, None] < self.q_length)[..., 0]

    def sink(self, rows: slice) -> Any:
        """The sink's score in each of ``rows``; -inf where there is no query, or no sink."""
        if self._sink is None:
            return -np.inf
        return self._xp.where(self.are_queries(rows), self._sink, -np.inf)

    def queries(self, q: Array) -> Array:
        """A copy of queries for ``logits``: times the scale, if that is at most 1.

        This saves one pass over each tile of scores. A larger factor could overflow.
        """
        q = q.astype(self._dtype)
        if self.scales_queries:
            q *= self._dtype.type(self._problem.scale)
        return q

    def logits(
        self, q: Array, k: Array, tile: Tile, out: Array | None = None
    ) -> tuple[Array, Array | None, Array | None]:
        """Scores as if every key were visible; derivatives of softcap and score_mod or None.

        ``q`` comes from ``queries``; ``out`` is memory for the product.
        """
        xp, problem = self._xp, self._problem
        score = xp.matmul(q, xp.swapaxes(k, -1, -2), out=out)
        if not self.scales_queries:
            score *= self._dtype.type(problem.scale)
        slope = None
        if problem.softcap is not None:
            # Else 0 / 0 or 0 * inf could occur. A cap above max has the effect of max.
            limits = np.finfo(self._dtype)
            cap = self._dtype.type(min(max(problem.softcap, float(limits.tiny)), float(limits.max)))
            score /= cap
            xp.tanh(score, out=score)
            slope = 1 - score * score
            score *= cap
        if "bias" in self._arrays:
            score += self._narrowed(tile.of(self._arrays["bias"]))
        if "alibi_slopes" in self._arrays:
            slopes = self._narrowed(self._arrays["alibi_slopes"])
            score -= slopes[..., None, None] * self.distance(tile)
        mod_slope = None
        if self._options.score_mod is not None:
            mod, shape = self._options.score_mod, score.shape
            mod_slope = mod.host_grad(score.copy(), *self._names(tile), **lent(mod.arrays))
            mod_slope = result_of("score_mod.host_grad", mod_slope, shape, "iuf", xp)
            changed = mod.host(score, *self._names(tile), **lent(mod.arrays))
            score = result_of("score_mod.host", changed, shape, "iuf", xp)
            score, mod_slope = (self._narrowed(a) for a in (score, mod_slope))
        return score, slope, mod_slope

    def _narrowed(self, array: Array) -> Array:
        """A copy in the dtype of scores. Finite numbers stay finite: only -inf hides. (D79)"""
        if array.dtype.itemsize > self._dtype.itemsize:
            limit = float(np.finfo(self._dtype).max)
            clipped = self._xp.clip(array, -limit, limit)
            array = self._xp.where(self._xp.isinf(array), array, clipped)
        return array.astype(self._dtype)

    def _names(self, tile: Tile) -> tuple[Array, ...]:
        """Batch, head, query and key indices for formulas: copies, which they may overwrite."""
        m, n = tile.m + self._origin.query, tile.n + self._origin.key
        return (*(a[..., None, None].copy() for a in self._places[1:]), m, n)

    def distance(self, tile: Tile) -> Array:
        """``|m + offset - n|`` of each pair, which ALiBi multiplies by the slope."""
        return self._xp.abs(tile.m + self.offset - tile.n).astype(self._dtype)

    def visible(self, tile: Tile) -> Array:
        """Which pairs are visible; a bias of -inf hides a pair, whatever the score."""
        problem = self._problem
        if self.alike and not self._pairwise and isinstance(tile.rows, slice):
            return self._band(tile.rows, tile.cols)
        seen = (tile.m < self.q_length) & (tile.n < self.kv_length)
        if problem.window_left is not None:
            seen = seen & (tile.n >= tile.m + (self.offset - problem.window_left))
        if problem.window_right is not None:
            seen = seen & (tile.n <= tile.m + (self.offset + problem.window_right))
        if "mask" in self._arrays:
            seen = seen & tile.of(self._arrays["mask"])
        if "bias" in self._arrays:
            seen = seen & ~self._xp.isneginf(tile.of(self._arrays["bias"]))
        if self._options.mask_mod is not None:
            mod, names = self._options.mask_mod, self._names(tile)
            allowed = mod.host(*names, **lent(mod.arrays))
            shape = np.broadcast_shapes(*(a.shape for a in names))
            seen = seen & result_of("mask_mod.host", allowed, shape, "b", self._xp)
        if "segment_ids_q" in self._arrays:
            ids_q = self._arrays["segment_ids_q"][..., tile.rows][..., :, None]
            seen = seen & (ids_q == self._arrays["segment_ids_k"][..., tile.cols][..., None, :])
        return seen

    def _band(self, rows: slice, cols: slice) -> Array:
        """Which pairs are visible by lengths and window, where these are equal in all entries."""
        problem, shape = self._problem, (rows.stop - rows.start, cols.stop - cols.start)
        step = rows.start + self.offset - cols.start
        low, high = -shape[0], shape[1]  # beyond these an edge of the window crosses no pair
        if problem.window_left is not None:
            low = max(low, min(step - problem.window_left, high))
        if problem.window_right is not None:
            high = min(high, max(step + problem.window_right, -shape[0]))
        queries, keys = self.q_length - rows.start, self.kv_length - cols.start
        return _band(shape, min(queries, shape[0]), min(keys, shape[1]), low, high)

    def kept(self, tile: Tile) -> Array | None:
        """Factor of each weight after dropout, or None without dropout."""
        p, seed = self._options.dropout, self._options.seed
        if seed is None or not philox.threshold(p):
            return None
        rows, cols = (
            slice(first + s.start, first + s.stop) if first else s
            for first, s in ((self._origin.query, tile.rows), (self._origin.key, tile.cols))
        )
        kept = philox.kept(self._places[0], rows, cols, p, seed, self._xp)
        return kept * self._dtype.type(philox.kept_scale(p))

    def key_range(self, rows: slice) -> tuple[slice, slice]:
        """Keys that some query of ``rows`` may see by lengths and window, and keys that all see.

        Both hold for the queries of all carried entries.
        """
        problem = self._problem
        q_low, q_high = _extremes(self.q_length)
        kv_low, kv_high = _extremes(self.kv_length)
        offset_low, offset_high = _extremes(self.offset)
        first, last, full_first, full_last = 0, kv_high, 0, kv_low
        if problem.window_left is not None:
            first = rows.start + offset_low - problem.window_left
            full_first = rows.stop - 1 + offset_high - problem.window_left
        if problem.window_right is not None:
            last = rows.stop + offset_high + problem.window_right
            full_last = min(kv_low, rows.start + offset_low + problem.window_right + 1)
        if rows.start >= q_high:
            last = 0
        if rows.stop > q_low or self._pairwise:
            full_last = 0
        return slice(max(first, 0), min(last, kv_high)), slice(max(full_first, 0), full_last)


@lru_cache(maxsize=8)
def _band(shape: tuple[int, int], queries: int, keys: int, low: int, high: int) -> Array:
    """Pairs (m, n) of a tile with m < queries, n < keys and low <= n - m <= high.

    Tiles along a diagonal share one array, and so do the heads of a call.
    """
    m, n = np.arange(shape[0])[:, None], np.arange(shape[1])
    band: Array = (n <= m + high) & (n >= m + low)
    band &= (m < queries) & (n < keys)
    band.flags.writeable = False
    return band


def entry_indices(batch: tuple[int, ...], entry: Entry) -> Array:
    """Flat index in the batch of each carried entry, with the carried axes."""
    flat: Array = np.zeros((), np.int64)
    whole = (slice(None),) * (len(batch) - len(entry))
    for extent, chosen in zip(batch, (*entry, *whole), strict=True):
        index = chosen if isinstance(chosen, int) else np.arange(extent)[chosen]
        flat = (flat * extent)[..., None] + index if np.ndim(index) else flat * extent + index
    return flat


def _extremes(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value.min()), int(value.max()))
