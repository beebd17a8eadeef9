"""How do ranks exchange rows for heads, so that each rank has all rows of some of the heads?

Groups of ``across`` neighbouring ranks do this (Jacobs et al. 2023). With several groups, ranks of
different groups with the same heads form a ring: USP (Fang and Zhao 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cuflash._arrays import Array
from cuflash._launch.one_pass import contiguous, in_dtype, write_sum
from cuflash._problem.options import with_arrays
from cuflash._results import Saved
from cuflash.distributed import _ring
from cuflash.distributed._communicator import Schedule, Wait
from cuflash.distributed._layout import of_groups
from cuflash.distributed._parts import Heads
from cuflash.distributed._share import (
    Group,
    OptionGradients,
    Share,
    begun,
    rows_back,
    rows_first,
)

#: Axis of the rows, by kind of array.
ROWS = {"q": -2, "k": -2, "lse": -1, "segment_ids_q": -1}


@dataclass(frozen=True)
class _Neighbours:
    """A rank and the ranks with which it exchanges heads."""

    share: Share
    across: int

    def group(self, kind: str) -> Group:
        """The group, with its chunks of keys for the kind "k", else of queries."""
        first = self.share.rank // self.across * self.across
        chunks = self.share.keys if kind == "k" else self.share.queries
        return Group(self.share.rank, range(first, first + self.across), chunks)

    def heads(self, rank: int) -> Heads:
        """The query heads that a rank computes."""
        heads = self.share.heads or Heads(0, 1, 1)
        each, place = heads.total // self.across, rank % self.across
        return Heads(place * each, (place + 1) * each, heads.total)

    def own_heads(self, rank: int, kind: str) -> Any:
        """Index of the heads that a rank needs, in an array with its rows first.

        All ranks need keys without an axis of heads, or with one head.
        """
        heads = self.heads(rank)
        own = self.share.kv_heads(heads) if kind == "k" else slice(heads.start, heads.stop)
        if kind == "segment_ids_q" or own is None or own == slice(None):
            return ...
        return (..., own) if kind == "lse" else (..., own, slice(None))

    def collected(self, *arrays: tuple[str, Array]) -> Schedule:
        """Collect rows of the group for own heads, from (kind, canonical array) pairs.

        All arrays travel in one exchange.
        """
        found, xp = [], self.share.xp
        for kind, array in arrays:
            wire = xp.moveaxis(array, ROWS[kind], 0)
            if self.own_heads(self.share.rank, kind) is ...:
                wire = contiguous(wire)  # all of it is sent to each rank

            def part_for(other: int, kind: str = kind, wire: Array = wire) -> Array:
                return contiguous(wire[self.own_heads(other, kind)])

            found.append(self.group(kind).gather(part_for))
        ticket, brought = yield from begun(found)
        yield Wait(ticket)
        return [rows_back(a, ROWS[kind]) for (kind, _), a in zip(arrays, brought, strict=True)]

    def shared_rows(self, *others: tuple[str, Array]) -> Schedule:
        """A share with all rows of the group and own heads, and ``others`` with the same."""
        share, options = self.share, self.share.options
        arrays = [("q", share.q), ("k", share.k), ("k", share.v), *others]
        ids = options.arrays.get("segment_ids_q")
        if ids is not None and "segment_ids_q" not in share.shared:
            *found, ids = yield from self.collected(*arrays, ("segment_ids_q", ids))
            options = with_arrays(options, options.arrays | {"segment_ids_q": ids})
        else:
            found = yield from self.collected(*arrays)
        q, k, v, *rest = found
        return replace(
            share, rank=share.rank // self.across, q=q, k=k, v=v, options=options,
            queries=of_groups(share.queries, self.across), keys=of_groups(share.keys, self.across),
            heads=self.heads(share.rank), collected=True,
            peers=range(share.rank % self.across, share.size, self.across),
        ), rest  # fmt: skip

    def distributed(self, *arrays: tuple[str, Array, tuple[int, ...]]) -> Schedule:
        """From rows of the group for own heads, make own rows for all heads, in given shapes.

        This takes one exchange. Gradients of key/value heads that ranks share are summed.
        """
        found, results, xp = [], [], self.share.xp
        for kind, array, shape in arrays:
            result = xp.zeros(shape, array.dtype)
            wide, group = xp.moveaxis(result, ROWS[kind], 0), self.group(kind)
            shapes = {other: wide[self.own_heads(other, kind)].shape for other in group.ranks}
            came = {other: xp.empty(own, array.dtype) for other, own in shapes.items()}
            found.append(group.give_back(rows_first(array, ROWS[kind]), came))
            results.append((kind, result, wide))
        ticket, brought = yield from begun(found)
        yield Wait(ticket)
        for (kind, _, wide), came in zip(results, brought, strict=True):
            for other, part in came.items():
                target = wide[self.own_heads(other, kind)]
                write_sum(target, target, part)
        return [result for _, result, _ in results]


def forward(share: Share, across: int) -> Schedule:
    """Return ``out`` and lse of own rows, canonical, in the dtypes of results."""
    neighbours = _Neighbours(share, across)
    collected, _ = yield from neighbours.shared_rows()
    out, lse = yield from _ring.forward(collected)
    del collected  # frees memory before results are sent
    shape = (*share.problem.batch_shape, share.q.shape[-2])
    out_shape = (*shape, share.problem.head_dim_v)
    return (yield from neighbours.distributed(("q", out, out_shape), ("lse", lse, shape)))


def backward(share: Share, across: int, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Return gradients by name: of own rows (canonical), and of options."""
    neighbours, of_options = _Neighbours(share, across), OptionGradients(share, wanted)
    dout, out, *rows = saved
    collected, found = yield from neighbours.shared_rows(
        ("q", dout), ("q", out), *(("lse", a) for a in rows if a is not None)
    )
    totals = yield from _ring.of_qkv(collected, Saved(*found), wanted, of_options)
    del collected, found
    arrays = [("q" if n == "q" else "k", a, getattr(share, n).shape) for n, a in totals.items()]
    results = yield from neighbours.distributed(*arrays)
    own = {n: in_dtype(getattr(share, n).dtype, a) for n, a in zip(totals, results, strict=True)}
    return own | (yield from of_options.finished())
