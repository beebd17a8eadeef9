"""The ring: keys of all ranks reach the queries of each rank, one rank's keys in each step.

In step i a rank computes with keys and values of the rank i before it (Liu et al. 2023), which that
rank sends directly, and merges float32 results. In the gradient keys and values are sent again.
Each rank sends dk and dv back to the rank of their keys, in float32, from the first to the last
chunk of keys of which its queries see some. Under USP each rank of the ring is in a group of ranks
that exchange heads, and its share has all rows of the group.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from cuflash._arrays import Array
from cuflash._launch.one_pass import contiguous, in_dtype
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, Bounds, blocks_of, lasts_of
from cuflash.distributed._communicator import Compute, Exchange, Schedule, Wait
from cuflash.distributed._layout import rows_of
from cuflash.distributed._parts import Stage, stages_of
from cuflash.distributed._share import KV, OptionGradients, Share, rows_back, rows_first
from cuflash.distributed._sums import Merged, Summed


def _wire(share: Share, array: Array) -> Array:
    """A canonical array as it is sent. Collected and C-contiguous arrays are not copied."""
    return rows_first(array) if share.collected else contiguous(array)


def _of_wire(share: Share, array: Array) -> Array:
    """Canonical view of an array as it is sent."""
    return rows_back(array) if share.collected else array


def _room(share: Share, like: Array, rows: int, dtype: Any) -> Array:
    """An empty array ``like`` one that is sent, with another number of rows."""
    shape = list(like.shape)
    shape[0 if share.collected else -2] = rows
    return share.xp.empty(tuple(shape), dtype)


def _exchange(
    share: Share, step: int, arrays: Iterable[Array], coming: Iterable[Array]
) -> Exchange:
    """Send ``arrays`` to the rank ``step`` after this one; fill ``coming`` from ``step`` before."""
    to, source = (share.peers[(share.rank + s) % share.size] for s in (step, -step))
    return Exchange(tuple((to, a) for a in arrays), tuple((source, a) for a in coming))


def _bring(share: Share, own: list[Array], step: int) -> Schedule:
    """Begin to receive k and v of the rank ``step`` before, and to send own ones ``step`` after.

    Returns a ticket and the arrays that will be filled.
    """
    rows = rows_of(share.keys[(share.rank - step) % share.size])
    coming = [_room(share, array, rows, array.dtype) for array in own]
    return (yield _exchange(share, step, own, coming)), coming


def _blocks(share: Share, step: int, bounds: Bounds) -> tuple[Block, ...]:
    """The blocks of own queries against the keys of the rank ``step`` before."""
    keys = share.keys[(share.rank - step) % share.size]
    has_sink = step == 0 and "sink" in share.options.arrays
    return blocks_of(share.queries[share.rank], keys, bounds, sink=has_sink)


def _seen(share: Share, keys_of: int, queries_of: int, bounds: Bounds) -> slice:
    """A rank's rows of keys, from the first to the last chunk that queries of another rank see."""
    blocks = blocks_of(share.queries[queries_of], share.keys[keys_of], bounds)
    ends = [(b.keys.start, b.keys.stop) for b in blocks] or [(0, 0)]
    return slice(min(start for start, _ in ends), max(stop for _, stop in ends))


def forward(share: Share) -> Schedule:
    """Return ``out`` and lse of own rows and heads, canonical, in the dtypes of results."""
    xp, problem, parts = share.xp, share.problem, share.parts(share.heads)
    own = kv = [_wire(share, a) for a in (share.k, share.v)]
    heads = () if share.heads is None else (share.heads.stop - share.heads.start,)
    lse_shape = (*problem.batch_shape[:-1], *heads, share.q.shape[-2])
    out = xp.empty((*lse_shape, problem.head_dim_v), problem.dtype)
    merged = Merged(xp, out, share.sums_dtype, lse_shape)

    def compute(block: Block, last: bool) -> None:
        k, v = (_of_wire(share, a) for a in kv)
        parts.forward_onto(merged, block, (share.q, k, v), last=last)

    steps = [_blocks(share, step, parts.bounds) for step in range(share.size)]
    last = lasts_of(steps)
    for step, blocks in enumerate(steps):
        coming = None
        if step + 1 < share.size:
            coming = yield from _bring(share, own, step + 1)
        for block in blocks:
            yield Compute(partial(compute, block, next(last)), parts.scores(block))
        if coming is not None:
            ticket, kv = coming
            yield Wait(ticket)
    return merged.finished()


def backward(share: Share, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Return gradients by name: of own rows (canonical), and of options."""
    of_options = OptionGradients(share, wanted)
    gradients = yield from of_qkv(share, saved, wanted, of_options)
    return gradients | (yield from of_options.finished())


def of_qkv(
    share: Share, saved: Saved, wanted: tuple[str, ...], of_options: OptionGradients
) -> Schedule:
    """Return gradients of own rows and heads, canonical; dk and dv of collected keys in float32."""
    xp, dtype = share.xp, share.sums_dtype
    own = [_wire(share, a) for a in (share.k, share.v)]
    bounds = share.parts(share.heads).bounds

    def room(rows: slice) -> dict[str, Array]:
        """Empty arrays for dk and dv of ``rows`` of keys, as they are sent."""
        like = {n: array for n, array in zip(KV, own, strict=True) if n in wanted}
        return {n: _room(share, a, rows.stop - rows.start, dtype) for n, a in like.items()}

    def sums_of(arrays: dict[str, Array], rows: slice, *, full: bool = False) -> dict[str, Summed]:
        return {n: Summed(_of_wire(share, a), rows.start, full=full) for n, a in arrays.items()}

    def computed(
        step: int, stage: Stage, kv: list[Array], onto: dict[str, Summed], dq: Summed
    ) -> Schedule:
        """Compute the gradients of a stage's heads for the keys of one rank.

        They are added to ``onto`` (dk and dv) and ``dq``.
        """
        parts, of_heads = share.parts(stage.heads), stage.of_saved(saved)
        k, v = (stage.of_kv(_of_wire(share, a)) for a in kv)
        qkv = stage.of_q(share.q), k, v
        sums = onto | ({"q": dq} if "q" in wanted else {})

        def compute(block: Block) -> None:
            of_options.add(parts, block, parts.backward(block, qkv, of_heads, wanted, sums))

        for block in _blocks(share, step, bounds):
            yield Compute(partial(compute, block), parts.scores(block))
        for each in onto.values():
            each.finish()

    def of_own_keys(stage: Stage) -> Schedule:
        of_stage = Summed(stage.of_q(dq))
        onto = {n: Summed(stage.of_kv(_of_wire(share, a))) for n, a in own_sums.items()}
        yield from computed(0, stage, own, onto, of_stage)
        of_stage.finish()

    # Own keys are computed in two stages of heads: the first while keys of another rank arrive, the
    # last while gradients of own keys come back.
    several = share.size > 1
    first, *last = stages_of(share.heads, share.q, share.k, share.v, most=1 + several)
    dq, own_sums = xp.empty(share.q.shape, dtype), room(slice(0, share.k.shape[-2]))
    of_others = Summed(xp.empty(share.q.shape if several else (0, 0), dtype))
    returned: dict[str, Summed] = {}
    back: list[Any] = []  # a ticket, and the gradients of own keys that it brings

    def taken() -> Schedule:
        """Add the gradients of own keys that another rank computed."""
        yield Wait(back[0])
        for name, came in back[1].items():
            returned[name] = returned[name].joined(came) if name in returned else came
        back.clear()

    if several:
        ticket, coming = yield from _bring(share, own, 1)
    yield from of_own_keys(first)
    for step in range(1, share.size):
        yield Wait(ticket)
        kv = coming
        if step + 1 < share.size:
            ticket, coming = yield from _bring(share, own, step + 1)
        of, by = ((share.rank + s) % share.size for s in (-step, step))
        seen, seen_here = _seen(share, of, share.rank, bounds), _seen(share, share.rank, by, bounds)
        parts = room(seen)
        yield from computed(step, Stage(share.heads), kv, sums_of(parts, seen), of_others)
        if back:
            yield from taken()
        if own_sums:
            came = room(seen_here)
            back += (
                (yield _exchange(share, -step, parts.values(), came.values())),
                sums_of(came, seen_here, full=True),
            )
    for stage in last:
        yield from of_own_keys(stage)
    if back:
        yield from taken()
    totals = {}
    if "q" in wanted:
        rounds = share.q.dtype
        totals["q"] = of_others.added_to(dq, rounds) if several else in_dtype(rounds, dq)
    for name, array in own_sums.items():
        rounds = dtype if share.collected else getattr(share, name).dtype
        array, others = _of_wire(share, array), returned.get(name)
        totals[name] = others.added_to(array, rounds) if others else in_dtype(rounds, array)
    return totals
