"""How do keys come to all groups of ranks, with the heads of a group's ranks exchanged?

With ``across`` ranks in a group, W of them in all: 1 is the ring (Liu et al. 2023), W is Ulysses
(Jacobs et al. 2023), what lies between is their product, USP (Fang and Zhao 2024). Ranks of a group
are neighbours: they collect all rows of the group for a part of the heads each. Step i computes
with keys and values of the group i before, which come straight from there, and float32 parts are
merged. In the gradient they come again, and their gradients go straight home, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from cuflash._arrays import Array, rounded
from cuflash._problem.options import Options, with_arrays
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, blocks_of, lasts_of
from cuflash.distributed._communicator import Compute, Exchange, Schedule, Wait
from cuflash.distributed._layout import Chunks, joined, rows_of
from cuflash.distributed._parts import Heads
from cuflash.distributed._share import (
    KV,
    OptionGradients,
    Share,
    gathering,
    returning,
    rows_back,
    rows_first,
)
from cuflash.distributed._stages import Stage, stages_of
from cuflash.distributed._sums import Merged, Summed, rounded_sum


@dataclass(frozen=True)
class _Grid:
    """A rank's place: its group of ``across`` neighbours, and the ring of its peers in groups."""

    share: Share
    across: int

    @property
    def number(self) -> int:
        """Of its group."""
        return self.share.rank // self.across

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.share.size // self.across

    @property
    def group(self) -> range:
        """Ranks of its group."""
        return range(self.number * self.across, (self.number + 1) * self.across)

    def peer(self, number: int) -> int:
        """The rank at its own place in another group."""
        return number % self.groups * self.across + self.share.rank % self.across

    def rows(self, chunks: tuple[Chunks, ...], number: int) -> Chunks:
        """All rows of a group, in order."""
        first = number % self.groups * self.across
        return joined(tuple(c for own in chunks[first : first + self.across] for c in own))

    def heads(self, rank: int) -> Heads | None:
        """The query heads that a rank computes."""
        total = self.share.num_heads
        if self.across == 1 or total is None:
            return self.share.all_heads()
        each, place = total // self.across, rank % self.across
        return Heads(place * each, (place + 1) * each, total)

    def own_heads(self, rank: int, like: str) -> Any:
        """Index, in an array with its rows first like q, k or lse, of the heads that a rank needs.

        Keys without an axis of heads, or with one head, all ranks need.
        """
        heads = self.heads(rank)
        if heads is None or self.across == 1:
            return ...
        own = self.share.kv_heads(heads) if like == "k" else slice(heads.start, heads.stop)
        if own is None or own == slice(None):
            return ...
        return (..., own) if like == "lse" else (..., own, slice(None))

    def collected(self, *arrays: Array, like: str = "q") -> Schedule:
        """Rows of the group for own heads, of canonical arrays like q (out, dout), k or lse."""
        if self.across == 1:
            return arrays
        axis, xp = -1 if like == "lse" else -2, self.share.xp
        wires = [rows_first(a, axis) for a in arrays]

        def part_for(other: int) -> tuple[Array, ...]:
            index = self.own_heads(other, like)
            return tuple(xp.ascontiguousarray(w[index]) for w in wires)

        chunks = self.share.keys if like == "k" else self.share.queries
        holder = self.rows(chunks, self.number)
        ticket, found = yield from gathering(self.share.rank, self.group, chunks, holder, part_for)
        if ticket is not None:
            yield Wait(ticket)
        return tuple(rows_back(a, axis) for a in found)

    def distributed(self, array: Array, shape: tuple[int, ...], like: str = "q") -> Schedule:
        """Own rows of all heads, of ``shape``, from rows of the group for own heads.

        Parts of shared keys are summed.
        """
        if self.across == 1:
            return array
        share, xp = self.share, self.share.xp
        axis = -1 if like == "lse" else -2
        chunks = share.keys if like == "k" else share.queries
        holder = self.rows(chunks, self.number)
        result = xp.zeros(shape, array.dtype)
        wide = rows_first(result, axis)

        def room_of(other: int) -> Array:
            return xp.empty(wide[self.own_heads(other, like)].shape, array.dtype)

        ticket, came = yield from returning(
            share.rank, self.group, chunks, holder, rows_first(array, axis), room_of
        )
        yield Wait(ticket)
        for other in self.group:
            wide[self.own_heads(other, like)] += came[other]
        return rows_back(wide, axis)

    def wire(self, array: Array) -> Array:
        """A canonical array as it is sent; no copy of what was collected, or is in C order."""
        return self.share.xp.ascontiguousarray(array) if self.across == 1 else rows_first(array)

    def of_wire(self, array: Array) -> Array:
        """Canonical view of what is sent."""
        return array if self.across == 1 else rows_back(array)

    def room(self, like: Array, number: int, dtype: Any) -> Array:
        """Memory for an array of wires like another, with the keys of a group."""
        rows, xp = rows_of(self.rows(self.share.keys, number)), self.share.xp
        shape = list(like.shape)
        shape[-2 if self.across == 1 else 0] = rows
        return xp.empty(tuple(shape), dtype)

    def options(self) -> Schedule:
        """Options of the group's rows: ids of segments are collected."""
        ids = self.share.options.arrays.get("segment_ids_q")
        if self.across == 1 or ids is None or ids.shape[-1] == 1 != self.share.q.shape[-2]:
            return self.share.options
        wire, chunks = rows_first(ids, -1), self.share.queries
        holder = self.rows(chunks, self.number)
        ticket, (found,) = yield from gathering(
            self.share.rank, self.group, chunks, holder, lambda _: (wire,)
        )
        yield Wait(ticket)
        arrays = self.share.options.arrays | {"segment_ids_q": rows_back(found, -1)}
        options: Options = with_arrays(self.share.options, arrays)
        return options


def _exchanged(
    grid: _Grid, arrays: Sequence[Array], step: int, coming: tuple[Array, ...]
) -> Schedule:
    """Begin to send arrays to the group ``step`` behind, and to get ``coming`` from that ahead."""
    to, source = grid.peer(grid.number + step), grid.peer(grid.number - step)
    return (yield Exchange(tuple((to, a) for a in arrays), tuple((source, a) for a in coming)))


def _brought(grid: _Grid, own: tuple[Array, ...], step: int) -> Schedule:
    """Begin to get keys and values of the group ``step`` ahead, for which own ones go behind.

    Returns a ticket and what will have come.
    """
    coming = tuple(grid.room(a, grid.number - step, a.dtype) for a in own)
    return (yield from _exchanged(grid, own, step, coming)), coming


def forward(share: Share, across: int) -> Schedule:
    """``out`` and lse of own rows, canonical, in the dtypes of results."""
    grid, xp, problem = _Grid(share, across), share.xp, share.problem
    options = yield from grid.options()
    (q,) = yield from grid.collected(share.q)
    found = yield from grid.collected(share.k, share.v, like="k")
    own = kv = tuple(map(grid.wire, found))
    heads = grid.heads(share.rank)
    parts = share.parts(heads, options)
    queries = grid.rows(share.queries, grid.number)
    batch = problem.batch_shape
    if heads is not None:
        batch = (*batch[:-1], heads.stop - heads.start)
    lse_shape = (*batch, rows_of(queries))
    out = xp.empty((*lse_shape, problem.head_dim_v), problem.dtype)
    merged = Merged(xp, out, share.sums_dtype, lse_shape)

    def compute(block: Block, last: bool, k: Array, v: Array) -> None:
        parts.forward_onto(merged, block, q, grid.of_wire(k), grid.of_wire(v), last=last)

    steps = []
    for step in range(grid.groups):
        has_sink = step == 0 and "sink" in share.options.arrays
        keys = grid.rows(share.keys, grid.number - step)
        steps.append(blocks_of(queries, keys, parts.bounds, sink=has_sink))
    last = lasts_of(steps)
    for step, blocks in enumerate(steps):
        ticket = None
        if step + 1 < grid.groups:
            ticket, coming = yield from _brought(grid, own, step + 1)
        for block in blocks:
            yield Compute(partial(compute, block, next(last), *kv), block.pairs)
        if ticket is not None:
            yield Wait(ticket)
            kv = coming
    out, lse = merged.finished()
    shape = (*problem.batch_shape, share.q.shape[-2])
    out = yield from grid.distributed(out, (*shape, problem.head_dim_v))
    lse = yield from grid.distributed(lse, shape, "lse")
    return out, lse


def backward(share: Share, across: int, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Gradients of own rows, canonical, and of options, by name."""
    grid, xp, dtype = _Grid(share, across), share.xp, share.sums_dtype
    options = yield from grid.options()
    (q,) = yield from grid.collected(share.q)
    found = yield from grid.collected(share.k, share.v, like="k")
    own = tuple(map(grid.wire, found))
    dout, out = yield from grid.collected(saved.dout, saved.out)
    rows = [saved.lse] if saved.dlse is None else [saved.lse, saved.dlse]
    of_group = Saved(dout, out, *(yield from grid.collected(*rows, like="lse")))
    queries, heads = grid.rows(share.queries, grid.number), grid.heads(share.rank)
    of_options = OptionGradients(share, wanted)
    names = [n for n in KV if n in wanted]

    def room(kv: tuple[Array, ...]) -> dict[str, Array]:
        """For dk and dv, as wires."""
        return {n: xp.empty(a.shape, dtype) for n, a in zip(KV, kv, strict=True) if n in names}

    def computed(
        step: int, stage: Stage, kv: tuple[Array, ...], dkv: dict[str, Array], dq: Summed
    ) -> Schedule:
        """Gradients of a stage's heads by the keys of one group: dk and dv anew."""
        parts, of_heads = share.parts(stage.heads, options), stage.of_saved(of_group)
        k, v = (stage.of_kv(grid.of_wire(a)) for a in kv)
        onto = {n: Summed(stage.of_kv(grid.of_wire(a))) for n, a in dkv.items()}

        def compute(block: Block) -> None:
            sums = onto | ({"q": dq} if "q" in wanted else {})
            found = parts.backward(block, stage.of_q(q), k, v, of_heads, wanted, sums)
            of_options.add(parts, block, found)

        keys = grid.rows(share.keys, grid.number - step)
        has_sink = step == 0 and "sink" in share.options.arrays
        for block in blocks_of(queries, keys, parts.bounds, sink=has_sink):
            yield Compute(partial(compute, block), block.pairs)
        for sums in onto.values():
            sums.finish()

    def of_own_keys(stage: Stage) -> Schedule:
        of_stage = Summed(stage.of_q(dq))
        yield from computed(0, stage, own, own_sums, of_stage)
        of_stage.finish()

    # Own keys come in two parts of the heads: while keys of other groups arrive, and while
    # gradients of own keys come home.
    first, *last = stages_of(heads, q, *found, most=min(grid.groups, 2))
    dq, own_sums = xp.empty(q.shape, dtype), room(own)
    of_others = Summed(xp.empty(q.shape if grid.groups > 1 else (0, 0), dtype))
    back: Any = None
    returned: list[Array] = []

    def taken() -> Schedule:
        yield Wait(back)
        for total, array in zip(returned, came, strict=False):
            total += array
        if not returned:
            returned.extend(came)

    if grid.groups > 1:
        ticket, coming = yield from _brought(grid, own, 1)
    yield from of_own_keys(first)
    for step in range(1, grid.groups):
        yield Wait(ticket)
        kv = coming
        if step + 1 < grid.groups:
            ticket, coming = yield from _brought(grid, own, step + 1)
        parts = room(kv)
        yield from computed(step, Stage(heads), kv, parts, of_others)
        if back is not None:
            yield from taken()
        if names:
            came = tuple(xp.empty(a.shape, dtype) for a in own_sums.values())
            back = yield from _exchanged(grid, tuple(parts.values()), -step, came)
    for stage in last:
        yield from of_own_keys(stage)
    if back is not None:
        yield from taken()
    result = {}
    if "q" in wanted:
        found = of_others.added_to(dq, share.q.dtype) if grid.groups > 1 else dq
        found = rounded(found, share.q.dtype)
        result["q"] = yield from grid.distributed(found, share.q.shape)
    for name, array, others in zip_longest(names, own_sums.values(), returned):
        like = getattr(share, name)
        if others is not None:
            total = xp.empty(array.shape, like.dtype if grid.across == 1 else dtype)
            array = rounded_sum(array, others, total)
        found = yield from grid.distributed(grid.of_wire(array), like.shape, "k")
        result[name] = rounded(found, like.dtype)
    return result | (yield from of_options.finished())
