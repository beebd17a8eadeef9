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

import numpy as np

from cuflash._arrays import Array, Triple, write_rounded
from cuflash._host.scores import Entry, Scores, Tile, arithmetic
from cuflash._problem import philox
from cuflash._problem.operand import canonical_view
from cuflash._problem.options import Options
from cuflash._problem.philox import WHOLE, Origin
from cuflash._problem.problem import Problem, gradient_operand
from cuflash._results import Saved

_BLOCK_M = 256
_BLOCK_N = 512
_TILE_ELEMENTS = _BLOCK_M * _BLOCK_N


@np.errstate(all="ignore")
def forward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    out: Array,
    lse: Array,
    *,
    origin: Origin = WHOLE,
) -> None:
    """Fill ``out`` and ``lse``; ``origin`` places a part of a call for dropout."""
    dtype = arithmetic(problem.dtype)
    destinations = out, lse = canonical_view(out, problem.out), _rows_view(problem, lse)
    if options.score_mod is not None or options.mask_mod is not None:
        # A formula may raise at any tile, and then nothing has been written.
        out, lse = np.empty_like(out), np.empty_like(lse)
    for entry, scores, q, k, v in _parts(problem, qkv, options, origin):
        v, unit = _within_range(v, options.dropout)
        finite = bool(np.isfinite(v).all())
        for rows in _blocks(0, problem.seqlen_q, _BLOCK_M):
            q_block = q[..., rows, :].astype(dtype, copy=False)
            row_max = np.full(q_block.shape[:-1], scores.sink(rows), dtype)
            row_sum = np.where(np.isneginf(row_max), dtype.type(0), dtype.type(1))
            acc = np.zeros((*row_max.shape, problem.head_dim_v), dtype)
            for tile, seen in _tiles(scores, rows, problem.seqlen_k):
                score, _, _ = scores.logits(q_block, k[..., tile.cols, :], tile)
                if seen is not None:
                    score = np.where(seen, score, -np.inf)
                highest = np.maximum(row_max, score.max(-1))
                shift = np.where(np.isneginf(highest), 0, highest)
                rescale = np.exp(row_max - shift)
                score -= shift[..., None]
                p = np.exp(score, out=score)
                row_sum = row_sum * rescale + p.sum(-1)
                acc *= rescale[..., None]
                kept = scores.kept(tile)
                if kept is not None:
                    p *= kept
                acc += _product(p, v[..., tile.cols, :], seen, finite)
                row_max = highest
            empty = row_sum == 0
            acc /= np.where(empty, 1, row_sum)[..., None] * unit
            out[entry][..., rows, :] = acc
            lse[entry][..., rows] = np.where(
                empty, -np.inf, np.log(row_sum) + np.where(empty, 0, row_max)
            )
    for destination, filled in zip(destinations, (out, lse), strict=True):
        if destination is not filled:
            destination[...] = filled


@np.errstate(all="ignore")
def backward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    saved: Saved,
    gradients: dict[str, Array],
    *,
    origin: Origin = WHOLE,
) -> None:
    """Fill ``gradients``, by input name.

    One pass over query blocks: dq of a block is complete after its keys, dk and dv accumulate.
    """
    dtype = arithmetic(problem.dtype)
    dout, out = (
        canonical_view(a, gradient_operand(problem, "dout", a)) for a in (saved.dout, saved.out)
    )
    lse = _rows_view(problem, saved.lse)
    dlse = None if saved.dlse is None else _rows_view(problem, saved.dlse)
    results = {
        name: a
        if name == "scale"
        else canonical_view(a, gradient_operand(problem, name, a), keep_summed=True)
        for name, a in gradients.items()
    }
    sums = {name: np.zeros(view.shape, dtype) for name, view in results.items()}

    def add(name: str, entry: Entry, part: Array, *core: slice) -> None:
        """Add a part (carried batch axes, core), summed to what the input has."""
        summed = getattr(problem, name).summed
        own = tuple(
            i if not s else 0 if isinstance(i, int) else slice(None)
            for i, s in zip(entry, summed, strict=False)
        )
        target: Array = sums[name][(*own, ...)]
        extents = target.shape[target.ndim - len(core) :]
        parts = [slice(None) if n == 1 else s for s, n in zip(core, extents, strict=True)]
        target = target[(Ellipsis, *parts)]
        axes = tuple(i for i, n in enumerate(target.shape) if n == 1)
        target += part.sum(axes, keepdims=True)

    everything = slice(None)
    for entry, scores, q, k, v in _parts(problem, qkv, options, origin):
        finite_k = bool(np.isfinite(k).all())
        for rows in _blocks(0, problem.seqlen_q, _BLOCK_M):
            q_block, dout_block, out_block = (
                a[..., rows, :].astype(dtype, copy=False) for a in (q, dout[entry], out[entry])
            )
            lse_block = lse[entry][..., rows]
            # Of a row that is no query nothing is read, whatever it holds.
            empty = np.isneginf(lse_block) | ~scores.are_queries(rows)
            # dout of a row that sees nothing is not read; with a sink only its out = 0 tells.
            if empty.any():
                dout_block, out_block = (
                    np.where(empty[..., None], 0, a) for a in (dout_block, out_block)
                )
            delta = np.where(out_block == 0, 0, dout_block * out_block).sum(-1)
            if dlse is not None:
                delta -= np.where(empty, 0, dlse[entry][..., rows])
            shift = np.where(empty, 0, lse_block)[..., None]
            finite = finite_k and all(np.isfinite(a).all() for a in (q_block, dout_block))
            dq = np.zeros_like(q_block)
            for tile, seen in _tiles(scores, rows, problem.seqlen_k):
                k_block, v_block = (a[..., tile.cols, :] for a in (k, v))
                score, slope, mod_slope = scores.logits(q_block, k_block, tile)
                score -= shift
                p = np.exp(score, out=score)
                dscore = np.matmul(dout_block, np.swapaxes(v_block, -1, -2))
                kept = scores.kept(tile)
                if kept is not None:
                    dscore *= kept
                dscore -= delta[..., None]
                dscore *= p
                if kept is not None:
                    p *= kept
                if seen is not None:
                    p, dscore = np.where(seen, p, 0), np.where(seen, dscore, 0)
                if mod_slope is not None:
                    dscore *= mod_slope if seen is None else np.where(seen, mod_slope, 0)
                if "bias" in sums:
                    add("bias", entry, dscore, tile.rows, tile.cols)
                if "alibi_slopes" in sums:
                    add("alibi_slopes", entry, -(dscore * scores.distance(tile)).sum((-1, -2)))
                if slope is not None:
                    dscore *= slope if seen is None else np.where(seen, slope, 0)
                if "scale" in sums:
                    raw = np.matmul(q_block, np.swapaxes(k_block, -1, -2))
                    sums["scale"] += (dscore * raw).sum(where=True if seen is None else seen)
                dscore *= dtype.type(problem.scale)
                dq += _product(dscore, k_block, seen, finite)
                seen_t = None if seen is None else np.swapaxes(seen, -1, -2)
                if "k" in sums:
                    part = _product(np.swapaxes(dscore, -1, -2), q_block, seen_t, finite)
                    add("k", entry, part, tile.cols, everything)
                if "v" in sums:
                    part = _product(np.swapaxes(p, -1, -2), dout_block, seen_t, finite)
                    add("v", entry, part, tile.cols, everything)
            if "q" in sums:
                add("q", entry, dq, rows, everything)
            if "sink" in sums:
                share = np.where(empty, 0, np.exp(scores.sink(rows) - lse_block))
                add("sink", entry, -(share * delta).sum(-1))
    for name, view in results.items():
        write_rounded(view, sums[name])


def _within_range(v: Array, dropout: float) -> tuple[Array, Array]:
    """Values times powers of two, so that no sum over keys overflows; and the powers by column."""
    most = max(v.shape[-2], 1) * max(philox.kept_scale(dropout), 1.0)
    largest = np.maximum(v.max(-2, keepdims=True, initial=0), -v.min(-2, keepdims=True, initial=0))
    overflows = largest > np.finfo(v.dtype).max / (2 * most)
    unit = np.where(overflows, 0.5 ** math.ceil(math.log2(2 * most)), 1).astype(v.dtype)
    return v * unit if overflows.any() else v, unit


def _product(a: Array, b: Array, seen: Array | None, finite: bool) -> Array:
    """``a @ b`` with ``a`` 0 outside ``seen`` (None: all is seen).

    A non-finite element of ``b`` makes NaN of exactly the rows that see it.
    """
    if finite:
        return np.matmul(a, b)
    b_finite = np.isfinite(b)
    if seen is None:
        poisoned = ~b_finite.all(-2, keepdims=True)
    else:
        poisoned = np.matmul(seen.astype(a.dtype), (~b_finite).astype(a.dtype)) > 0
    return np.where(poisoned, np.nan, np.matmul(a, np.where(b_finite, b, 0)))


def _tiles(scores: Scores, rows: slice, seqlen_k: int) -> Iterator[tuple[Tile, Array | None]]:
    """Tiles where some query of ``rows`` sees some key, with visibility or None if all do.

    Blocks of keys start at fixed places and are whole, so that what other entries see, which
    ``key_range`` covers too, changes no bit of a row. (D78)
    """
    some, full = scores.key_range(rows)
    m = np.arange(rows.start, rows.stop)[:, None]
    for start in range(some.start // _BLOCK_N * _BLOCK_N, some.stop, _BLOCK_N):
        cols = slice(start, min(start + _BLOCK_N, seqlen_k))
        tile = Tile(rows, cols, m, np.arange(cols.start, cols.stop)[None, :])
        if full.start <= cols.start and cols.stop <= full.stop:
            yield tile, None
        elif (seen := scores.visible(tile)).any():
            yield tile, seen


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _parts(
    problem: Problem, qkv: Triple, options: Options, origin: Origin
) -> Iterator[tuple[Entry, Scores, Array, Array, Array]]:
    """Parts of the batch: their index, scores and queries, and their keys and values widened."""
    dtype, operands = arithmetic(problem.dtype), (problem.q, problem.k, problem.v)
    q, k, v = (canonical_view(a, o) for a, o in zip(qkv, operands, strict=True))
    for entry in _entries(problem):
        wide = (_unrepeated(a[entry]).astype(dtype, copy=False) for a in (k, v))
        yield entry, Scores(problem, options, entry, np, origin), q[entry], *wide


def _entries(problem: Problem) -> Iterator[Entry]:
    """Indices of the batch: integers, then one slice, so that a tile stays small."""
    batch = problem.batch
    if not batch:
        yield ()
        return
    tile = min(problem.seqlen_q, _BLOCK_M) * max(1, min(problem.seqlen_k, _BLOCK_N))
    axis = len(batch) - 1
    while axis and tile * math.prod(batch[axis:]) <= _TILE_ELEMENTS:
        axis -= 1
    chunk = max(1, _TILE_ELEMENTS // (tile * math.prod(batch[axis + 1 :])))
    for leading in itertools.product(*(range(n) for n in batch[:axis])):
        for part in _blocks(0, batch[axis], chunk):
            yield (*leading, part)


def _unrepeated(array: Array) -> Array:
    """View with extent 1 on batch axes of stride 0, so that what they repeat is widened once."""
    # D77.
    return array[tuple(slice(None) if stride else slice(1) for stride in array.strides[:-2])]


def _rows_view(problem: Problem, rows: Array) -> Array:
    """View of an array batch + (m,) in canonical order."""
    return rows.reshape(*problem.batch, problem.seqlen_q)
