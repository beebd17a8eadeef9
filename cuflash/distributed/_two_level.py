"""How do keys come to all groups of ranks, with the heads of a group's ranks exchanged?

With ``across`` ranks in a group, W of them in all: 1 is the ring (Liu et al. 2023), W is Ulysses
(Jacobs et al. 2023), what lies between is their product, USP (Fang and Zhao 2024). Ranks of a group
are neighbours: they collect all rows of the group for a part of the heads each. Step i computes
with keys and values of the group i before, which come straight from there, and float32 parts are
merged. In the gradient they come again, and their gradients go straight home, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from cuflash._arrays import Array, rounded
from cuflash._problem.options import with_arrays
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, Bounds, blocks_of, lasts_of
from cuflash.distributed._communicator import Compute, Exchange, Schedule, Wait
from cuflash.distributed._layout import rows_of
from cuflash.distributed._parts import Heads
from cuflash.distributed._share import (
    KV,
    Group,
    OptionGradients,
    Share,
    begun,
    rows_back,
    rows_first,
)
from cuflash.distributed._stages import Stage, stages_of
from cuflash.distributed._sums import Merged, Summed, rounded_sum

#: Kinds of arrays, and their axis of rows.
ROWS = {"q": -2, "k": -2, "lse": -1, "segment_ids_q": -1}


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

    def peer(self, number: int) -> int:
        """The rank at its own place in another group."""
        return number % self.groups * self.across + self.share.rank % self.across

    def group(self, kind: str, number: int | None = None) -> Group:
        """Its own group, or another, and who of it has which queries or keys."""
        first = (self.number if number is None else number) % self.groups * self.across
        chunks = self.share.keys if kind == "k" else self.share.queries
        return Group(self.share.rank, range(first, first + self.across), chunks)

    def heads(self, rank: int) -> Heads | None:
        """The query heads that a rank computes."""
        total = self.share.num_heads
        if self.across == 1 or total is None:
            return self.share.all_heads()
        each, place = total // self.across, rank % self.across
        return Heads(place * each, (place + 1) * each, total)

    def own_heads(self, rank: int, kind: str) -> Any:
        """Index of the heads that a rank needs, in an array with its rows first.

        Keys without an axis of heads, or with one head, all ranks need.
        """
        heads = self.heads(rank)
        if heads is None or kind == "segment_ids_q":
            return ...
        own = self.share.kv_heads(heads) if kind == "k" else slice(heads.start, heads.stop)
        if own is None or own == slice(None):
            return ...
        return (..., own) if kind == "lse" else (..., own, slice(None))

    def collected(self, *arrays: tuple[str, Array]) -> Schedule:
        """Rows of the group for own heads, of canonical arrays of each kind, in one exchange."""
        if self.across == 1:
            return [array for _, array in arrays]
        found = []
        for kind, array in arrays:
            wire = self.share.xp.moveaxis(array, ROWS[kind], 0)
            if self.own_heads(self.share.rank, kind) is ...:
                wire = self.share.xp.ascontiguousarray(wire)  # of which each rank gets all

            def part_for(other: int, kind: str = kind, wire: Array = wire) -> Array:
                part: Array = self.share.xp.ascontiguousarray(wire[self.own_heads(other, kind)])
                return part

            found.append(self.group(kind).gather(part_for))
        ticket, brought = yield from begun(found)
        yield Wait(ticket)
        return [rows_back(a, ROWS[kind]) for (kind, _), a in zip(arrays, brought, strict=True)]

    def operands(self, *others: tuple[str, Array]) -> Schedule:
        """Options, q, k, v and others of the group's rows for own heads."""
        options, share = self.share.options, self.share
        arrays = [("q", share.q), ("k", share.k), ("k", share.v), *others]
        ids = options.arrays.get("segment_ids_q")
        if self.across == 1 or ids is None or "segment_ids_q" in share.shared:
            return options, *(yield from self.collected(*arrays))
        *found, ids = yield from self.collected(*arrays, ("segment_ids_q", ids))
        return with_arrays(options, options.arrays | {"segment_ids_q": ids}), *found

    def distributed(self, *arrays: tuple[str, Array, tuple[int, ...]]) -> Schedule:
        """Own rows of all heads, of given shapes, from rows of the group for own heads.

        In one exchange. Parts of shared keys are summed.
        """
        if self.across == 1:
            return [array for _, array, _ in arrays]
        found, results = [], []
        for kind, array, shape in arrays:
            result = self.share.xp.zeros(shape, array.dtype)
            wide = self.share.xp.moveaxis(result, ROWS[kind], 0)

            def room_of(other: int, kind: str = kind, wide: Array = wide) -> Array:
                shape = wide[self.own_heads(other, kind)].shape
                return self.share.xp.empty(shape, wide.dtype)

            found.append(self.group(kind).give_back(rows_first(array, ROWS[kind]), room_of))
            results.append((kind, result, wide))
        ticket, brought = yield from begun(found)
        yield Wait(ticket)
        for (kind, _, wide), came in zip(results, brought, strict=True):
            for other, part in came.items():
                wide[self.own_heads(other, kind)] += part
        return [result for _, result, _ in results]

    @property
    def _rows_of_wire(self) -> int:
        """The axis of rows in what is sent: that of own arrays, or of what was collected."""
        return -2 if self.across == 1 else 0

    def wire(self, array: Array) -> Array:
        """A canonical array as it is sent; no copy of what was collected, or is in C order."""
        xp = self.share.xp
        return xp.ascontiguousarray(xp.moveaxis(array, -2, self._rows_of_wire))

    def of_wire(self, array: Array) -> Array:
        """Canonical view of what is sent."""
        return self.share.xp.moveaxis(array, self._rows_of_wire, -2)

    def room(self, like: Array, number: int) -> Array:
        """Memory for an array of wires like another, with the keys of a group."""
        shape = list(like.shape)
        shape[self._rows_of_wire] = rows_of(self.group("k", number).holder)
        return self.share.xp.empty(tuple(shape), like.dtype)

    def exchange(self, step: int, arrays: Any, coming: Any) -> Exchange:
        """Arrays for the group ``step`` behind, and ``coming`` from that ahead."""
        to, source = self.peer(self.number + step), self.peer(self.number - step)
        return Exchange(tuple((to, a) for a in arrays), tuple((source, a) for a in coming))

    def bring(self, own: tuple[Array, ...], step: int) -> Schedule:
        """Begin to get keys and values of the group ``step`` ahead, for own ones.

        Returns a ticket and what will have come.
        """
        coming = tuple(self.room(a, self.number - step) for a in own)
        return (yield self.exchange(step, own, coming)), coming

    def blocks(self, step: int, bounds: Bounds) -> tuple[Block, ...]:
        """Calls of the group's queries against keys of the group ``step`` ahead."""
        queries, keys = self.group("q").holder, self.group("k", self.number - step).holder
        has_sink = step == 0 and "sink" in self.share.options.arrays
        return blocks_of(queries, keys, bounds, sink=has_sink)


def forward(share: Share, across: int) -> Schedule:
    """``out`` and lse of own rows, canonical, in the dtypes of results."""
    grid, shape = _Grid(share, across), (*share.problem.batch_shape, share.q.shape[-2])
    out, lse = yield from _forward_of_group(grid)
    out_shape = (*shape, share.problem.head_dim_v)
    return (yield from grid.distributed(("q", out, out_shape), ("lse", lse, shape)))


def _forward_of_group(grid: _Grid) -> Schedule:
    """``out`` and lse of the group's rows and own heads; what was collected is let go of."""
    share, xp, problem = grid.share, grid.share.xp, grid.share.problem
    options, q, *found = yield from grid.operands()
    own = kv = tuple(map(grid.wire, found))
    heads = grid.heads(share.rank)
    parts = share.parts(heads, options)
    batch = problem.batch_shape
    if heads is not None:
        batch = (*batch[:-1], heads.stop - heads.start)
    lse_shape = (*batch, q.shape[-2])
    out = xp.empty((*lse_shape, problem.head_dim_v), problem.dtype)
    merged = Merged(xp, out, share.sums_dtype, lse_shape)

    def compute(block: Block, last: bool) -> None:
        k, v = map(grid.of_wire, kv)
        parts.forward_onto(merged, block, (q, k, v), last=last)

    steps = [grid.blocks(step, parts.bounds) for step in range(grid.groups)]
    last = lasts_of(steps)
    for step, blocks in enumerate(steps):
        coming = None
        if step + 1 < grid.groups:
            coming = yield from grid.bring(own, step + 1)
        for block in blocks:
            yield Compute(partial(compute, block, next(last)), block.pairs)
        if coming is not None:
            ticket, kv = coming
            yield Wait(ticket)
    return merged.finished()


def backward(share: Share, across: int, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Gradients of own rows, canonical, and of options, by name."""
    grid, of_options = _Grid(share, across), OptionGradients(share, wanted)
    totals = yield from _backward_of_group(grid, saved, wanted, of_options)
    arrays = [("q" if n == "q" else "k", a, getattr(share, n).shape) for n, a in totals.items()]
    found = yield from grid.distributed(*arrays)
    result = {n: rounded(a, getattr(share, n).dtype) for n, a in zip(totals, found, strict=True)}
    return result | (yield from of_options.finished())


def _backward_of_group(
    grid: _Grid, saved: Saved, wanted: tuple[str, ...], of_options: OptionGradients
) -> Schedule:
    """Gradients of the group's rows and own heads, canonical, by name."""
    share, xp, dtype = grid.share, grid.share.xp, grid.share.sums_dtype
    dout, out, *rows = saved
    options, q, k, v, *found = yield from grid.operands(
        ("q", dout), ("q", out), *(("lse", a) for a in rows if a is not None)
    )
    of_group, own = Saved(*found), (grid.wire(k), grid.wire(v))
    heads = grid.heads(share.rank)
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
        qkv = stage.of_q(q), k, v
        onto = {n: Summed(stage.of_kv(grid.of_wire(a))) for n, a in dkv.items()}
        sums = onto | ({"q": dq} if "q" in wanted else {})

        def compute(block: Block) -> None:
            of_options.add(parts, block, parts.backward(block, qkv, of_heads, wanted, sums))

        for block in grid.blocks(step, parts.bounds):
            yield Compute(partial(compute, block), block.pairs)
        for each in onto.values():
            each.finish()

    def of_own_keys(stage: Stage) -> Schedule:
        of_stage = Summed(stage.of_q(dq))
        yield from computed(0, stage, own, own_sums, of_stage)
        of_stage.finish()

    # Own keys come in two parts of the heads: while keys of other groups arrive, and while
    # gradients of own keys come home.
    first, *last = stages_of(heads, q, k, v, most=min(grid.groups, 2))
    dq, own_sums = xp.empty(q.shape, dtype), room(own)
    of_others = Summed(xp.empty(q.shape if grid.groups > 1 else (0, 0), dtype))
    returned: list[Array] = []
    back: list[Any] = []  # a ticket, and what comes home by it

    def taken() -> Schedule:
        """Add the gradients of own keys that another group computed."""
        yield Wait(back[0])
        came = back[1]
        back.clear()
        for total, array in zip(returned, came, strict=False):
            total += array
        if not returned:
            returned.extend(came)

    if grid.groups > 1:
        ticket, coming = yield from grid.bring(own, 1)
    yield from of_own_keys(first)
    for step in range(1, grid.groups):
        yield Wait(ticket)
        kv = coming
        if step + 1 < grid.groups:
            ticket, coming = yield from grid.bring(own, step + 1)
        parts = room(kv)
        yield from computed(step, Stage(heads), kv, parts, of_others)
        if back:
            yield from taken()
        if names:
            came = [xp.empty(a.shape, dtype) for a in own_sums.values()]
            back += (yield grid.exchange(-step, parts.values(), came)), came
    for stage in last:
        yield from of_own_keys(stage)
    if back:
        yield from taken()
    totals = {}
    if "q" in wanted:
        total = of_others.added_to(dq, share.q.dtype) if grid.groups > 1 else dq
        totals["q"] = rounded(total, share.q.dtype)
    for name, array, others in zip_longest(names, own_sums.values(), returned):
        if others is not None:
            rounds = getattr(share, name).dtype if grid.across == 1 else dtype
            array = rounded_sum(array, others, xp.empty(array.shape, rounds))
        totals[name] = grid.of_wire(array)
    return totals
