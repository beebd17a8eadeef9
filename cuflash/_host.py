"""How does attention run on NumPy arrays? The tiled online-softmax algorithm on the CPU.

FlashAttention-2, algorithm 1, and its gradient: query blocks are resident, key blocks stream past
with a running maximum and sum, and the gradient recomputes probabilities from lse. Nothing of size
M x N exists. Blocks that no query of a block can see are skipped. Products go through BLAS;
16-bit operands are widened to float32.

Arrays are canonical views, batch axes first. Leading batch axes are looped over; as many entries
as keep a tile small are carried in it, so that many short sequences cost few Python steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash._options import Options
from cuflash._problem import Operand, Problem, canonical_view, gradient_operand

_BLOCK_M = 256
_BLOCK_N = 512
_TILE_ELEMENTS = _BLOCK_M * _BLOCK_N
_Entry = tuple[int | slice, ...]


def arithmetic(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of scores and sums: float64 for float64, float32 for everything else."""
    return dtype if dtype == np.float64 else np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Range:
    """Keys [first, last) that some query of a block may see; all do in [full_first, full_last)."""

    first: int
    last: int
    full_first: int
    full_last: int

    def full(self, start: int, stop: int) -> bool:
        """Whether every query of the block sees every key of [start, stop)."""
        return self.full_first <= start and stop <= self.full_last


class Scores:
    """Final scores and visibility of any tile of one batch entry, in logical indices.

    Every per-entry value has shape (trailing batch axes, 1, 1), ready to broadcast with a tile.
    """

    def __init__(self, problem: Problem, options: Options, entry: _Entry, xp: ModuleType) -> None:
        self._xp = xp
        self._problem = problem
        self._dtype = arithmetic(problem.dtype)

        def of_entry(name: str) -> Array | None:
            operand: Operand | None = getattr(problem, name)
            if operand is None:
                return None
            return canonical_view(xp.asarray(getattr(options, name)), operand)[entry]

        def value(name: str, plain: int | None, default: Any) -> Any:
            array = of_entry(name)
            if array is None:
                return default if plain is None else plain
            return array.astype(np.int64)[..., None, None]

        self.q_length = value("q_lengths", problem.q_length_value, problem.seqlen_q)
        self.kv_length = value("kv_lengths", problem.kv_length_value, problem.seqlen_k)
        self.offset = value("offset", problem.offset_value, self.kv_length - self.q_length)
        self._mask = of_entry("mask")
        self._bias = of_entry("bias")

    def scores(self, q: Array, k: Array, rows: Any, cols: Any) -> tuple[Array, Array | None]:
        """Scores (.., rows, cols) of keys taken as visible, and softcap's derivative or None.

        A bias of -inf hides a key whatever its score, NaN included.
        """
        xp, problem = self._xp, self._problem
        score = xp.matmul(q, xp.swapaxes(k, -1, -2))
        score *= self._dtype.type(problem.scale)
        slope = None
        if problem.softcap is not None:
            cap = self._dtype.type(problem.softcap)
            score /= cap
            xp.tanh(score, out=score)
            slope = 1 - score * score
            score *= cap
        if self._bias is not None:
            bias = self._bias[..., rows, :][..., cols].astype(self._dtype)
            score = xp.where(xp.isneginf(bias), -xp.inf, score + bias)
        return score, slope

    def visible(self, m: Array, n: Array, rows: Any, cols: Any) -> Array:
        """Visibility of queries ``m`` (.., 1) and keys ``n`` (1, ..), without the bias."""
        problem = self._problem
        seen = (m < self.q_length) & (n < self.kv_length)
        if problem.window_left is not None:
            seen = seen & (n >= m + (self.offset - problem.window_left))
        if problem.window_right is not None:
            seen = seen & (n <= m + (self.offset + problem.window_right))
        if self._mask is not None:
            seen = seen & self._mask[..., rows, :][..., cols]
        return seen

    def key_range(self, start: int, stop: int) -> Range:
        """Keys that the queries [start, stop) of any carried entry may see."""
        problem = self._problem
        q_low, _ = _extremes(self.q_length)
        kv_low, kv_high = _extremes(self.kv_length)
        offset_low, offset_high = _extremes(self.offset)
        first, last, full_first, full_last = 0, kv_high, 0, kv_low
        if problem.window_left is not None:
            first = start + offset_low - problem.window_left
            full_first = stop - 1 + offset_high - problem.window_left
        if problem.window_right is not None:
            last = stop + offset_high + problem.window_right
            full_last = min(kv_low, start + offset_low + problem.window_right + 1)
        if self._mask is not None or stop > q_low:
            full_last = 0
        return Range(max(first, 0), min(last, kv_high), max(full_first, 0), full_last)

    @property
    def queries(self) -> int:
        """Number of leading queries that may see anything."""
        return _extremes(self.q_length)[1]


@np.errstate(all="ignore")
def forward(
    problem: Problem, q: Array, k: Array, v: Array, options: Options, out: Array, lse: Array
) -> None:
    """Fill ``out`` and ``lse`` of the problem."""
    dtype = arithmetic(problem.dtype)
    out = canonical_view(out, problem.out)
    lse = _rows_view(problem, lse)
    q, k, v = _views(problem, q, k, v)
    for entry in _entries(problem):
        scores = Scores(problem, options, entry, np)
        k_entry, v_entry = (a[entry].astype(dtype, copy=False) for a in (k, v))
        finite = bool(np.isfinite(v_entry).all())
        for rows in _blocks(0, problem.seqlen_q, _BLOCK_M):
            q_block = q[entry][..., rows, :].astype(dtype, copy=False)
            shape = q_block.shape[:-1]
            row_max = np.full(shape, -np.inf, dtype)
            row_sum = np.zeros(shape, dtype)
            acc = np.zeros((*shape, problem.head_dim_v), dtype)
            for cols, seen in _key_blocks(scores, rows):
                score, _ = scores.scores(q_block, k_entry[..., cols, :], rows, cols)
                if seen is not None:
                    score = np.where(seen, score, -np.inf)
                shown = None if finite else ~np.isneginf(score)
                highest = np.maximum(row_max, score.max(-1))
                shift = np.where(np.isneginf(highest), 0, highest)
                rescale = np.exp(row_max - shift)
                score -= shift[..., None]
                p = np.exp(score, out=score)
                row_sum = row_sum * rescale + p.sum(-1)
                acc *= rescale[..., None]
                acc += _product(p, v_entry[..., cols, :], shown)
                row_max = highest
            empty = row_sum == 0
            acc /= np.where(empty, 1, row_sum)[..., None]
            out[entry][..., rows, :] = acc
            lse[entry][..., rows] = np.where(
                empty, -np.inf, np.log(row_sum) + np.where(empty, 0, row_max)
            )


@np.errstate(all="ignore")
def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    options: Options,
    gradients: dict[str, Array],
) -> None:
    """Fill ``gradients``, by input name.

    One pass over query blocks: dq of a block is complete after its keys, dk and dv accumulate.
    """
    dtype = arithmetic(problem.dtype)
    scale = dtype.type(problem.scale)
    q, k, v = _views(problem, q, k, v)
    dout, out = (canonical_view(a, gradient_operand(problem, "dout", a)) for a in (dout, out))
    lse, dlse = _rows_view(problem, lse), None if dlse is None else _rows_view(problem, dlse)
    results = {
        name: canonical_view(a, gradient_operand(problem, name, a), keep_summed=True)
        for name, a in gradients.items()
    }
    sums = {name: np.zeros(view.shape, dtype) for name, view in results.items()}
    summed = {name: getattr(problem, name).summed for name in ("q", "k", "v")}

    def add(name: str, entry: _Entry, rows: slice, part: Array) -> None:
        if name not in sums:
            return
        kept = len(entry) - 1 if entry else 0  # axes from the slice on are still there
        axes = tuple(i for i, is_summed in enumerate(summed[name][kept:]) if is_summed)
        own = tuple(
            i if not s else 0 if isinstance(i, int) else slice(None)
            for i, s in zip(entry, summed[name], strict=False)
        )
        sums[name][own][..., rows, :] += part.sum(axes, keepdims=True) if axes else part

    for entry in _entries(problem):
        scores = Scores(problem, options, entry, np)
        k_entry, v_entry = (a[entry].astype(dtype, copy=False) for a in (k, v))
        finite_k = bool(np.isfinite(k_entry).all())
        for rows in _blocks(0, scores.queries, _BLOCK_M):
            q_block, dout_block, out_block = (
                a[entry][..., rows, :].astype(dtype, copy=False) for a in (q, dout, out)
            )
            lse_block = lse[entry][..., rows]
            empty = np.isneginf(lse_block)[..., None]
            if empty.any():
                dout_block = np.where(empty, 0, dout_block)
                out_block = np.where(empty, 0, out_block)
            finite = finite_k and all(np.isfinite(a).all() for a in (q_block, dout_block))
            delta = np.einsum("...d,...d->...", dout_block, out_block)
            if dlse is not None:
                delta = delta - np.where(empty[..., 0], 0, dlse[entry][..., rows])
            shift = np.where(empty[..., 0], 0, lse_block)[..., None]
            dq = np.zeros_like(q_block)
            for cols, seen in _key_blocks(scores, rows):
                k_block, v_block = k_entry[..., cols, :], v_entry[..., cols, :]
                score, slope = scores.scores(q_block, k_block, rows, cols)
                hidden = np.isneginf(score)
                if seen is not None:
                    hidden |= ~seen
                score -= shift
                p = np.exp(score, out=score)
                dscore = np.matmul(dout_block, np.swapaxes(v_block, -1, -2))
                dscore -= delta[..., None]
                dscore *= p
                if slope is not None:
                    dscore *= slope
                dscore *= scale
                p[hidden] = 0
                dscore[hidden] = 0
                shown = None if finite else ~hidden
                shown_t = None if finite else np.swapaxes(~hidden, -1, -2)
                dq += _product(dscore, k_block, shown)
                if "k" in sums:
                    add("k", entry, cols, _product(np.swapaxes(dscore, -1, -2), q_block, shown_t))
                if "v" in sums:
                    add("v", entry, cols, _product(np.swapaxes(p, -1, -2), dout_block, shown_t))
            add("q", entry, rows, dq)
    for name, view in results.items():
        view[...] = sums[name]


def _product(a: Array, b: Array, seen: Array | None) -> Array:
    """``a @ b`` with ``a`` 0 outside ``seen``; None promises that ``b`` is finite.

    A non-finite element of ``b`` reaches exactly the rows that see it.
    """
    if seen is None:
        return np.matmul(a, b)
    finite = np.isfinite(b)
    poisoned = np.matmul(seen.astype(a.dtype), (~finite).astype(a.dtype)) > 0
    return np.where(poisoned, np.nan, np.matmul(a, np.where(finite, b, 0)))


def _key_blocks(scores: Scores, rows: slice) -> Iterator[tuple[slice, Array | None]]:
    """Key blocks that some query of ``rows`` may see, with visibility or None if all do."""
    keys = scores.key_range(rows.start, rows.stop)
    if rows.start >= scores.queries:
        return
    m = np.arange(rows.start, rows.stop)[:, None]
    for cols in _blocks(keys.first, keys.last, _BLOCK_N):
        if keys.full(cols.start, cols.stop):
            yield cols, None
        else:
            n = np.arange(cols.start, cols.stop)[None, :]
            yield cols, scores.visible(m, n, rows, cols)


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _entries(problem: Problem) -> Iterator[_Entry]:
    """Indices of the batch: integers, then one slice, so that a tile stays small."""
    batch = problem.batch
    if not batch:
        yield ()
        return
    tile = min(problem.seqlen_q, _BLOCK_M) * min(problem.seqlen_k, _BLOCK_N)
    axis = len(batch) - 1
    while axis and tile * math.prod(batch[axis:]) <= _TILE_ELEMENTS:
        axis -= 1
    chunk = max(1, _TILE_ELEMENTS // (tile * math.prod(batch[axis + 1 :])))
    for leading in itertools.product(*(range(n) for n in batch[:axis])):
        for part in _blocks(0, batch[axis], chunk):
            yield (*leading, part)


def _views(problem: Problem, *arrays: Array) -> Iterator[Array]:
    operands = (problem.q, problem.k, problem.v)
    return (canonical_view(a, o) for a, o in zip(arrays, operands, strict=True))


def _rows_view(problem: Problem, rows: Array) -> Array:
    """View of an array batch + (m,) in canonical order."""
    return rows.reshape(*problem.batch, problem.seqlen_q)


def _extremes(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value.min()), int(value.max()))
