"""What does one rank hold of a call, and how do rows travel between ranks?

On the way, and where rows of several ranks are joined, the sequence is the first axis: rows of a
chunk are then contiguous, and arrive where they belong without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module, rounded
from cuflash._host.scores import arithmetic
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem
from cuflash.distributed._communicator import Exchange, Schedule, exchanged
from cuflash.distributed._layout import Chunks, places, rows_of, within
from cuflash.distributed._parts import Heads, Parts
from cuflash.distributed._sums import added

KV = ("k", "v")


@dataclass(frozen=True)
class Share:
    """One rank's share: its rows, canonical (batch axes, rows, features), and who has the others.

    ``problem`` is of the local queries and all keys.
    """

    rank: int
    q: Array
    k: Array
    v: Array
    options: Options
    queries: tuple[Chunks, ...]  # of each rank
    keys: tuple[Chunks, ...]
    problem: Problem
    deterministic: bool
    shared_bias_rows: bool = False  # the bias has one row, for all queries of all ranks

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.queries)

    @property
    def xp(self) -> ModuleType:
        """NumPy or CuPy."""
        return array_module(self.q)

    @property
    def sums_dtype(self) -> np.dtype[Any]:
        """In which results add up."""
        return arithmetic(self.problem.dtype)

    @property
    def num_heads(self) -> int | None:
        """Query heads, or None without such an axis."""
        return self.problem.batch_shape[-1] if self.problem.batch_shape else None

    def parts(self, heads: Heads | None, options: Options | None = None) -> Parts:
        """How blocks of these heads are computed."""
        return Parts(
            options or self.options, sum(map(rows_of, self.queries)), sum(map(rows_of, self.keys)),
            self.problem.precision, self.deterministic, heads,
        )  # fmt: skip

    def all_heads(self) -> Heads | None:
        """Every query head, or None without such an axis."""
        number = self.num_heads
        return None if number is None else Heads(0, number, number)

    def kv_heads(self, heads: Heads) -> slice | None:
        """Key/value heads of some query heads; None where these are a part of several."""
        given = {a.shape[-3] if a.ndim > 2 else 1 for a in (self.k, self.v)}
        if given <= {0, 1}:
            return slice(None)
        if len(given) > 1 or heads.total % max(given):
            return None
        group = heads.total // max(given)
        found = slice(heads.start // group, -(-heads.stop // group))
        whole = heads.start % group == heads.stop % group == 0
        return found if whole or found.stop - found.start == 1 else None


def rows_first(array: Array, axis: int = -2) -> Array:
    """Contiguous, with the rows as its first axis."""
    xp = array_module(array)
    return xp.ascontiguousarray(xp.moveaxis(array, axis, 0))


def rows_back(array: Array, axis: int = -2) -> Array:
    """View of what :func:`rows_first` gave."""
    return array_module(array).moveaxis(array, 0, axis)


def gathering(
    rank: int,
    group: Sequence[int],
    chunks: Sequence[Chunks],
    holder: Chunks,
    part_for: Callable[[int], tuple[Array, ...]],
) -> Schedule:
    """Begin to collect, from each rank of a group, the parts that it has for this one.

    ``part_for(other)`` are contiguous arrays of own rows. Returns a ticket, which is None for a
    group of one, and arrays of the rows ``holder``.
    """
    own = part_for(rank)
    if len(group) == 1:
        return None, own
    xp = array_module(own[0])
    arenas = tuple(xp.empty((rows_of(holder), *a.shape[1:]), a.dtype) for a in own)
    sends: list[tuple[int, Array]] = []
    receives: list[tuple[int, Array]] = []
    for other in group:
        theirs = [within(chunk, holder) for chunk in chunks[other]]
        mine = places(chunks[rank])
        if other == rank:
            for a, arena in zip(own, arenas, strict=True):
                for source, target in zip(mine, theirs, strict=True):
                    arena[target] = a[source]
            continue
        sends += [(other, a[place]) for a in part_for(other) for place in mine]
        receives += [(other, arena[place]) for arena in arenas for place in theirs]
    ticket = yield Exchange(tuple(sends), tuple(receives))
    return ticket, arenas


def returning(
    rank: int,
    group: Sequence[int],
    chunks: Sequence[Chunks],
    holder: Chunks,
    arena: Array,
    room_of: Callable[..., Array],
) -> Schedule:
    """Begin to send rows of ``holder`` back to the ranks of a group that they are of.

    ``room_of(other)`` makes an array for own rows as another rank returns them. Returns a ticket,
    None for a group of one, and what came by rank.
    """
    mine = [within(chunk, holder) for chunk in chunks[rank]]
    if len(group) == 1:
        return None, {rank: arena}
    came: dict[int, Array] = {}
    sends: list[tuple[int, Array]] = []
    receives: list[tuple[int, Array]] = []
    for other in group:
        came[other] = room = room_of(other)
        here = places(chunks[rank])
        if other == rank:
            for source, target in zip(mine, here, strict=True):
                room[target] = arena[source]
            continue
        sends += [(other, arena[within(chunk, holder)]) for chunk in chunks[other]]
        receives += [(other, room[place]) for place in here]
    ticket = yield Exchange(tuple(sends), tuple(receives))
    return ticket, came


def summed_over_ranks(share: Share, array: Array) -> Schedule:
    """The sum over all ranks, in order of ranks, so that each has the same bits."""
    if share.size == 1:
        return array
    xp, shape = share.xp, array.shape
    array = xp.ascontiguousarray(array).reshape(-1)
    came = {other: xp.empty_like(array) for other in range(share.size) if other != share.rank}
    yield from exchanged(tuple((other, array) for other in came), tuple(came.items()))
    came[share.rank] = array
    total = came[0].copy()
    for other in range(1, share.size):
        total += came[other]
    return total.reshape(shape)


class OptionGradients:
    """Sums of the gradients of option arrays and of scale on one rank."""

    def __init__(self, share: Share, wanted: tuple[str, ...]) -> None:
        self._share = share
        shapes = {name: a.shape for name, a in share.options.arrays.items()} | {"scale": ()}
        dtypes = dict.fromkeys(shapes, share.sums_dtype) | {"scale": np.dtype(np.float64)}
        self._sums = {n: share.xp.zeros(shapes[n], dtypes[n]) for n in wanted if n in shapes}

    def add(self, parts: Parts, block: Any, gradients: dict[str, Array]) -> None:
        """Add what a block gave."""
        for name, target in self._sums.items():
            if name not in gradients:
                continue
            if name in ARRAYS:
                target = target[parts.rows_and_keys(name, block, target.shape)]
            added(target, gradients[name])

    def finished(self) -> Schedule:
        """Gradients by name, in the dtypes of inputs; the same on every rank but bias rows."""
        share, result = self._share, {}
        for name, target in self._sums.items():
            own_rows = name == "bias" and not share.shared_bias_rows
            total = target if own_rows else (yield from summed_over_ranks(share, target))
            like = share.options.arrays.get(name)
            result[name] = rounded(total, np.float64 if like is None else like.dtype)
        return result
