"""How does attention run on NumPy arrays? The tiled online-softmax algorithm on the CPU.

FlashAttention-2, algorithm 1: query blocks are resident, key blocks stream past with a running
maximum and sum. Nothing of size M x N exists. Blocks that no query of a block can see are skipped.
Products go through BLAS; 16-bit operands are widened to float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash._arrays import Array, Triple
from cuflash._host.cores import Items, single_threaded_blas, worth
from cuflash._host.kept import Kept, Shifted
from cuflash._host.scores import arithmetic
from cuflash._host.tiles import (
    Parts,
    Piece,
    Workspace,
    blocks,
    fits,
    hide,
    largest_tile,
    operations,
    pieces_of,
    product,
    row_maxima,
    rows_view,
    slices,
    tiles,
    workspace,
)
from cuflash._problem import philox
from cuflash._problem.operand import canonical_view
from cuflash._problem.options import Options
from cuflash._problem.philox import WHOLE, Origin
from cuflash._problem.problem import Problem


@contextlib.contextmanager
def written_at_the_end(options: Options, *results: Array) -> Iterator[tuple[Array, ...]]:
    """Yield ``results`` to fill, or copies if a formula may raise: an error then writes nothing."""
    if options.score_mod is None and options.mask_mod is None:
        yield results
        return
    filled = tuple(map(np.empty_like, results))
    yield filled
    for result, own in zip(results, filled, strict=True):
        result[...] = own


@np.errstate(all="ignore")
def forward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    out: Array,
    lse: Array,
    *,
    origin: Origin = WHOLE,
    memory: Kept | None = None,
) -> None:
    """Fill ``out``, ``lse`` and ``memory``; ``origin`` places a part of a call for dropout."""
    dtype = arithmetic(problem.dtype)
    results = canonical_view(out, problem.out), rows_view(problem, lse)
    block_m, block_n = blocks(problem)
    parts = Parts(problem, qkv, options, origin)

    ones, lowest = np.ones(block_n, dtype), np.finfo(dtype).min

    def fill(index: int, piece: Piece, work: Workspace) -> None:
        entry, span = piece
        scores, q, k, v = parts.of(entry)
        v, unit, finite = _within_range(v, options.dropout)
        for rows in slices(span.start, span.stop, block_m):
            q_block = scores.queries(q[..., rows, :])
            rows_shape = q_block.shape[:-1]
            lse_rows, out_rows = lse[entry][..., rows], out[entry][..., rows, :]
            row_max: Any = None  # of the keys so far, as the sum and acc are
            row_sum: Any = None
            acc: Array | None = None
            if problem.sink is not None:  # it counts as a key without a value
                row_max = np.full(rows_shape, scores.sink(rows), dtype)
                row_sum = np.where(np.isneginf(row_max), dtype.type(0), dtype.type(1))
            keeper = memory if memory is not None and memory.keeps(rows) else None
            shifted: list[Shifted] = []
            for tile, seen in tiles(problem, scores, rows):
                k_block = k[..., tile.cols, :]
                shape = (*rows_shape, k_block.shape[-2])
                place = keeper.room(shape, dtype) if keeper else work("score", shape, dtype)
                score, _, _ = scores.logits(q_block, k_block, tile, place)
                hide(score, seen, -np.inf)
                highest = row_maxima(score)
                if row_max is not None:
                    np.maximum(highest, row_max, out=highest)
                shift = np.maximum(highest, lowest)  # finite in rows that have seen nothing
                score -= shift[..., None]
                p = np.exp(score, out=score)
                # BLAS adds the rows up in a third of the time of p.sum(-1).
                block_sum = np.matmul(p, ones[: p.shape[-1]])
                if row_max is not None:
                    rescale = np.exp(row_max - shift)
                    block_sum += row_sum * rescale
                    if acc is not None:
                        acc *= rescale[..., None]
                row_max, row_sum = highest, block_sum
                if keeper:
                    shifted.append((tile, seen, p, shift))
                kept = scores.kept(tile)
                if kept is not None:
                    p *= kept
                shape = (*rows_shape, problem.head_dim_v)
                place = out_rows
                if acc is not None or not fits(place, shape, dtype):
                    place = work("acc" if acc is None else "part", shape, dtype)
                part = product(p, v[..., tile.cols, :], seen, finite, place)
                if acc is None:
                    acc = part
                else:
                    acc += part
            if keeper:
                keeper.add(index, shifted, row_max, row_sum)
            if row_max is None:
                lse_rows[...] = -np.inf
            else:
                np.add(row_max, np.log(row_sum), out=lse_rows)
            if acc is None:
                out_rows[...] = 0
            else:
                # 0 in a row that has seen nothing, otherwise at least 1, the largest weight.
                divisor = np.maximum(row_sum, 1)[..., None]
                if unit is not None:
                    divisor = divisor * unit
                np.divide(acc, divisor, out=out_rows, casting="unsafe")

    def worker(items: Items[Piece]) -> None:
        with workspace() as work:
            for index, piece in items:
                fill(index, piece, work)

    with (
        written_at_the_end(options, *results) as (out, lse),
        single_threaded_blas(*largest_tile(problem)) as threads,
    ):
        # Formulas are functions of the caller, which may not be thread-safe.
        formulas = options.score_mod is not None or options.mask_mod is not None
        threads = 1 if formulas else worth(threads, operations(problem))
        if memory is None or not memory.begin(problem, options, threads):
            chosen = pieces_of(problem, threads)
        else:
            chosen = memory.pieces
        Items(chosen).work(worker, threads)


def _within_range(v: Array, dropout: float) -> tuple[Array, Array | None, bool]:
    """Return values times powers of two, so that no sum over keys overflows.

    Also return what undoes these powers, by column (None if no value was changed), and whether all
    values are finite.
    """
    most = max(v.shape[-2], 1) * max(philox.kept_scale(dropout), 1.0)
    limit = np.finfo(v.dtype).max / (2 * most)
    if -v.min(initial=0) <= limit and v.max(initial=0) <= limit:
        return v, None, True
    largest = np.maximum(v.max(-2, keepdims=True, initial=0), -v.min(-2, keepdims=True, initial=0))
    overflows = largest > limit
    unit = np.where(overflows, 0.5 ** math.ceil(math.log2(2 * most)), 1).astype(v.dtype)
    return v * unit if overflows.any() else v, unit, bool(np.isfinite(largest).all())
