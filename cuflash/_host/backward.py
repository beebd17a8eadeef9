"""How is the gradient computed on NumPy arrays? Algorithm 2 of FlashAttention-2, on the CPU.

Probabilities are recomputed from lse, tile by tile. One pass over query blocks: dq of a block is
complete after its keys, dk and dv accumulate. Each piece of the batch, or of an entry's queries,
has its own sums. They are added in the order of the pieces, whichever threads computed them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from cuflash._arrays import Array, Triple, write_rounded
from cuflash._host.cores import Items, single_threaded_blas, worth
from cuflash._host.kept import Kept
from cuflash._host.scores import Entry, arithmetic
from cuflash._host.tiles import (
    Parts,
    Piece,
    Workspace,
    blocks,
    fits,
    gradient_pieces,
    hide,
    largest_tile,
    operations,
    product,
    rows_view,
    slices,
    tiles,
    workspace,
)
from cuflash._problem.operand import canonical_view
from cuflash._problem.options import Options
from cuflash._problem.philox import WHOLE, Origin
from cuflash._problem.problem import Problem, gradient_operand
from cuflash._results import Saved

_ALL = slice(None)


@np.errstate(all="ignore")
def backward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    saved: Saved,
    gradients: dict[str, Array],
    *,
    origin: Origin = WHOLE,
    memory: Kept | None = None,
) -> None:
    """Fill ``gradients``, by input name. ``memory`` holds what the forward kept."""
    only_qkv = gradients.keys() <= {"q", "k", "v"}
    if not only_qkv or (memory is not None and not memory.tiles):
        memory = None  # pieces of a forward would decide the bits of sums of options
    weights_of = {} if memory is None else memory.tiles
    dtype = arithmetic(problem.dtype)
    dout, out = (
        canonical_view(a, gradient_operand(problem, "dout", a)) for a in (saved.dout, saved.out)
    )
    lse = rows_view(problem, saved.lse)
    dlse = None if saved.dlse is None else rows_view(problem, saved.dlse)
    results = {
        name: a
        if name == "scale"
        else canonical_view(a, gradient_operand(problem, name, a), keep_summed=True)
        for name, a in gradients.items()
    }
    # A formula may raise at any tile, and then nothing may have been written.
    formulas = options.score_mod is not None or options.mask_mod is not None
    sums = {
        name: np.zeros(view.shape, dtype) if formulas or view.dtype != dtype else view
        for name, view in results.items()
    }
    for array in sums.values():
        array[...] = 0
    block_m, _ = blocks(problem)
    parts, limit = Parts(problem, qkv, options, origin), float(np.finfo(dtype).max) / 4

    def places(entry: Entry, span: slice) -> dict[str, Array]:
        """Views of the sums to which a piece adds: those of its entries and its rows."""
        return {
            name: _rows_of(array, span) if name in ("q", "bias") else array
            for name, array in ((name, _entries_of(problem, name, sums, entry)) for name in sums)
        }

    def add_up(index: int, piece: Piece, work: Workspace, own: dict[str, Array]) -> None:
        """Add the gradients of a piece to ``own``, which has the shapes of its ``places``."""
        entry, span = piece
        scores, q, k, v = parts.of(entry)
        finite_k, largest_v = bool(np.isfinite(k).all()), _largest(v)
        for rows in slices(span.start, span.stop, block_m):
            # Rows of q and of a bias are counted from the start of the piece.
            local = slice(rows.start - span.start, rows.stop - span.start)
            q_block, dout_block, out_block = (
                a[..., rows, :].astype(dtype, copy=False) for a in (q, dout[entry], out[entry])
            )
            lse_block = lse[entry][..., rows]
            # Rows beyond the queries' length count as empty, whatever they hold.
            empty = np.isneginf(lse_block)
            if not scores.has_all_queries:
                empty = empty | ~scores.are_queries(rows)
            # dout of a row that sees no key is not used. With a sink such a row has a finite lse,
            # and only its out = 0 tells.
            if empty.any():
                dout_block, out_block = (
                    np.where(empty[..., None], 0, a) for a in (dout_block, out_block)
                )
                lse_block = np.where(empty, 0, lse_block)
            delta = _delta(dout_block, out_block)
            if dlse is not None:
                delta -= np.where(empty, 0, dlse[entry][..., rows])
            largest_dout = _largest(dout_block)
            finite = finite_k and math.isfinite(largest_dout) and np.isfinite(q_block).all()
            # Then a probability of 0 makes a derivative of 0.
            bounded = largest_v * largest_dout * v.shape[-1] < limit and np.isfinite(delta).all()
            queries = scores.queries(q_block)
            # Where queries have the scale, the keys that dscore multiplies get it as a factor.
            factor = dtype.type(problem.scale if scores.scales_queries else 1)
            q_times = queries if scores.scales_queries else q_block
            dq: Any = None
            for tile, seen in tiles(problem, scores, rows):
                k_block, v_block = (a[..., tile.cols, :] for a in (k, v))
                shape = (*queries.shape[:-1], k_block.shape[-2])
                weights = weights_of.get((index, rows.start, tile.cols.start))
                if weights is None:
                    score, slope, mod_slope = scores.logits(
                        queries, k_block, tile, work("score", shape, dtype)
                    )
                    score -= lse_block[..., None]
                    p = np.exp(score, out=score)
                    hide(p, seen, 0)
                    dout_rows, delta_rows = dout_block, delta
                else:  # rows of dout have the factor that makes probabilities of the weights
                    p, per_row = weights
                    dout_rows, delta_rows = dout_block * per_row[..., None], delta * per_row
                    slope = mod_slope = None
                v_t = np.swapaxes(v_block, -1, -2)
                dscore = np.matmul(dout_rows, v_t, out=work("dscore", shape, dtype))
                kept = scores.kept(tile)
                if kept is not None:
                    dscore *= kept
                dscore -= delta_rows[..., None]
                dscore *= p
                if kept is not None:
                    p *= kept
                if kept is not None or not bounded:
                    hide(dscore, seen, 0)
                if mod_slope is not None:
                    dscore *= mod_slope if seen is None else np.where(seen, mod_slope, 0)
                if "bias" in own:
                    _add(own["bias"], dscore, local, tile.cols)
                if "alibi_slopes" in own:
                    _add(own["alibi_slopes"], -(dscore * scores.distance(tile)).sum((-1, -2)))
                if slope is not None:
                    dscore *= slope if seen is None else np.where(seen, slope, 0)
                if "scale" in own:
                    raw = np.matmul(q_block, np.swapaxes(k_block, -1, -2))
                    own["scale"] += (dscore * raw).sum(where=True if seen is None else seen)
                if not scores.scales_queries:
                    dscore *= dtype.type(problem.scale)
                if "q" in own:
                    place = own["q"][..., local, :]
                    if dq is not None or not fits(place, queries.shape, dtype):
                        place = work("dq" if dq is None else "part", queries.shape, dtype)
                    part = product(dscore, k_block * factor, seen, finite, place)
                    dq = part if dq is None else np.add(dq, part, out=dq)
                seen_t = None if seen is None else np.swapaxes(seen, -1, -2)
                for name, factors, other in (("k", dscore, q_times), ("v", p, dout_rows)):
                    if name in own:
                        place = target = own[name][..., tile.cols, :]
                        shape_t = (*shape[:-2], shape[-1], other.shape[-1])
                        # The first block of queries finds zeros.
                        if rows.start != span.start or not fits(target, shape_t, dtype):
                            place = work("part", shape_t, dtype)
                        part = product(np.swapaxes(factors, -1, -2), other, seen_t, finite, place)
                        if part is not target:
                            _add(target, part, _ALL, _ALL)
            if dq is not None and not np.may_share_memory(dq, own["q"]):
                _add(own["q"], dq, local, _ALL)
            if "sink" in own:
                share = np.where(empty, 0, np.exp(scores.sink(rows) - lse_block))
                _add(own["sink"], -(share * delta).sum(-1))

    def worker(items: Items[Piece]) -> None:
        with workspace() as work:
            for index, piece in items:
                own = places(*piece)
                shared = {name: own[name] for name in own if not _alone(problem, name, piece[1])}
                own |= {name: np.zeros(target.shape, dtype) for name, target in shared.items()}
                add_up(index, piece, work, own)
                if shared:  # in all pieces or in none
                    items.in_turn(index, partial(_add_all, shared, own))

    with single_threaded_blas(*largest_tile(problem)) as threads:
        # Formulas are functions of the caller, which may not be thread-safe.
        threads = 1 if formulas else worth(threads, operations(problem))
        if memory is None:
            chosen = gradient_pieces(problem, threads, independent=only_qkv)
        else:
            chosen = memory.pieces
        Items(chosen).work(worker, threads)
    for name, view in results.items():
        if view is not sums[name]:
            write_rounded(view, sums[name])


def _largest(array: Array) -> float:
    """The largest absolute value, or NaN if there is a NaN."""
    return max(float(array.max(initial=0)), -float(array.min(initial=0)))


def _delta(dout: Array, out: Array) -> Array:
    """rowsum(dout * out), to which an out of 0 adds 0, whatever dout is."""
    delta = np.vecdot(dout, out)
    finite = np.isfinite(delta)
    if finite.all():
        return delta
    return np.where(finite, delta, np.where(out == 0, 0, dout * out).sum(-1))


def _alone(problem: Problem, name: str, piece: slice) -> bool:
    """Whether no other piece adds to the elements of a gradient that this piece adds to."""
    whole = (piece.start, piece.stop) == (0, problem.seqlen_q)
    return (name == "q" or (name in "kv" and whole)) and not any(getattr(problem, name).summed)


def _entries_of(problem: Problem, name: str, sums: dict[str, Array], entry: Entry) -> Array:
    """View of the sum of some entries, with extent 1 on axes along which the input is broadcast."""
    if name == "scale":
        return sums[name]
    own = tuple(
        i if not s else 0 if isinstance(i, int) else _ALL
        for i, s in zip(entry, getattr(problem, name).summed, strict=False)
    )
    view: Array = sums[name][(*own, ...)]
    return view


def _rows_of(array: Array, rows: slice) -> Array:
    return array if array.shape[-2] == 1 else array[..., rows, :]


def _add(target: Array, part: Array, *core: slice) -> None:
    """Add ``part`` (carried batch axes, core) to ``core`` of ``target``; extents may be 1 there."""
    extents = target.shape[target.ndim - len(core) :]
    selected = (_ALL if n == 1 else s for n, s in zip(extents, core, strict=True))
    target = target[(..., *selected)]
    pairs = zip(target.shape, part.shape, strict=True)
    axes = tuple(i for i, (n, m) in enumerate(pairs) if n != m)
    target += part.sum(axes, keepdims=True) if axes else part


def _add_all(targets: dict[str, Array], own: dict[str, Array]) -> None:
    for name, target in targets.items():
        target += own[name]
