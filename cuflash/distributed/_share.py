"""What does one rank hold of a call, and how are rows sent between ranks?

In messages, and in arrays with rows of several ranks, the sequence is the first axis: the rows of a
chunk are then contiguous, and are received in their final place without another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuflash._arrays import Array, array_module
from cuflash._host.scores import arithmetic
from cuflash._launch.one_pass import contiguous, in_dtype, write_sum
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem
from cuflash.distributed._communicator import Exchange, Schedule, Wait
from cuflash.distributed._layout import Chunks, joined, places, rows_of, within
from cuflash.distributed._parts import Heads, Parts
from cuflash.distributed._sums import added

KV = ("k", "v")


@dataclass(frozen=True)
class Share:
    """One rank's rows, canonical (batch axes, rows, features), and which peers hold the others.

    ``problem`` has the local queries and all keys of the call. After ranks have exchanged heads, a
    share has the rows of all of them for ``heads``, and its peers are the ranks with these heads.
    """

    rank: int  # index among the peers
    q: Array
    k: Array
    v: Array
    options: Options
    deterministic: bool
    problem: Problem
    queries: tuple[Chunks, ...]  # of each peer
    keys: tuple[Chunks, ...]
    shared: frozenset[str]  # options with one row that all queries of all ranks share
    heads: Heads | None  # query heads; None without such an axis
    peers: range  # ranks of the communicator, by index
    collected: bool = False  # rows of several ranks; the first axis in memory is the rows

    @property
    def size(self) -> int:
        """Number of peers."""
        return len(self.peers)

    @property
    def xp(self) -> ModuleType:
        """NumPy or CuPy."""
        return array_module(self.q)

    @property
    def sums_dtype(self) -> np.dtype[Any]:
        """The dtype in which results are summed."""
        return arithmetic(self.problem.dtype)

    def parts(self, heads: Heads | None) -> Parts:
        """The object that computes blocks of these heads."""
        return Parts(
            self.options, sum(map(rows_of, self.queries)), sum(map(rows_of, self.keys)),
            self.problem.precision, self.deterministic, heads,
        )  # fmt: skip

    def kv_heads(self, heads: Heads) -> slice | None:
        """Key/value heads that these query heads use; None if they use parts of several groups."""
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
    """Contiguous array with the rows as its first axis."""
    return contiguous(array_module(array).moveaxis(array, axis, 0))


def rows_back(array: Array, axis: int = -2) -> Array:
    """View that undoes :func:`rows_first`."""
    return array_module(array).moveaxis(array, 0, axis)


class Group(NamedTuple):
    """Ranks that collect each other's rows."""

    rank: int  # this rank
    ranks: range
    chunks: tuple[Chunks, ...]  # of each rank of the call

    @property
    def holder(self) -> Chunks:
        """Rows of all ranks of the group, in order of position."""
        return joined(tuple(c for rank in self.ranks for c in self.chunks[rank]))

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in self.ranks if rank != self.rank]

    def _pieces(self, rank: int) -> list[tuple[slice, slice]]:
        """For each chunk of a rank: its slice in the rank's rows and in the group's rows."""
        own, holder = self.chunks[rank], self.holder
        return [(at, within(c, holder)) for at, c in zip(places(own), own, strict=True)]

    def gather(self, part_for: Callable[[int], Array]) -> tuple[Exchange, Array]:
        """Collect rows of the group.

        ``part_for(other)`` is what this rank sends: contiguous, with own rows as the first axis.
        """
        part, pieces = part_for(self.rank), self._pieces(self.rank)
        arena = array_module(part).empty((rows_of(self.holder), *part.shape[1:]), part.dtype)
        for here, there in pieces:
            arena[there] = part[here]
        sends, receives = [], []
        for other in self.others:
            part = part_for(other)
            sends += [(other, part[here]) for here, _ in pieces]
            receives += [(other, arena[there]) for _, there in self._pieces(other)]
        return Exchange(tuple(sends), tuple(receives)), arena

    def spread(self, rows: Array) -> tuple[Exchange, Array]:
        """Collect rows of the group; own ``rows`` (in any layout) are sent from the result."""
        arena = array_module(rows).empty((rows_of(self.holder), *rows.shape[1:]), rows.dtype)
        sends = []
        for here, there in self._pieces(self.rank):
            write_sum(arena[there], rows[here])
            sends += [(other, arena[there]) for other in self.others]
        receives = [(r, arena[there]) for r in self.others for _, there in self._pieces(r)]
        return Exchange(tuple(sends), tuple(receives)), arena

    def give_back(self, arena: Array, came: dict[int, Array]) -> tuple[Exchange, dict[int, Array]]:
        """Send rows to the ranks that hold them; ``came[r]`` receives own rows from rank r."""
        pieces = self._pieces(self.rank)
        for here, there in pieces:
            came[self.rank][here] = arena[there]
        sends, receives = [], []
        for other in self.others:
            sends += [(other, arena[there]) for _, there in self._pieces(other)]
            receives += [(other, came[other][here]) for here, _ in pieces]
        return Exchange(tuple(sends), tuple(receives)), came


def begun(found: Sequence[tuple[Exchange, Any]]) -> Schedule:
    """Begin several exchanges as one. Returns a ticket and the arrays that each will fill."""
    ticket = yield sum((exchange for exchange, _ in found), start=Exchange())
    return ticket, [brought for _, brought in found]


def summed_over_ranks(share: Share, array: Array) -> Schedule:
    """The sum over all ranks, added in order of ranks so that all ranks get the same bits."""
    xp, shape = share.xp, array.shape
    array = xp.ascontiguousarray(array).reshape(-1)
    came = {other: xp.empty_like(array) for other in range(share.size) if other != share.rank}
    yield Wait((yield Exchange(tuple((other, array) for other in came), tuple(came.items()))))
    came[share.rank] = array
    total = came[0].copy()
    for other in range(1, share.size):
        total += came[other]
    return total.reshape(shape)


class OptionGradients:
    """Gradients of option arrays and of scale, summed over the blocks of one rank."""

    def __init__(self, share: Share, wanted: tuple[str, ...]) -> None:
        self._share = share
        shapes = {name: a.shape for name, a in share.options.arrays.items()} | {"scale": ()}
        dtypes = dict.fromkeys(shapes, share.sums_dtype) | {"scale": np.dtype(np.float64)}
        self._sums = {n: share.xp.zeros(shapes[n], dtypes[n]) for n in wanted if n in shapes}

    def add(self, parts: Parts, block: Any, gradients: dict[str, Array]) -> None:
        """Add the gradients of a block."""
        for name, target in self._sums.items():
            if name not in gradients:
                continue
            if name in ARRAYS:
                target = target[parts.rows_and_keys(name, block, target.shape)]
            added(target, gradients[name])

    def finished(self) -> Schedule:
        """Gradients by name, in the dtypes of inputs; equal on all ranks except for bias rows."""
        share, result = self._share, {}
        for name, target in self._sums.items():
            own_rows = name == "bias" and "bias" not in share.shared
            total = target if own_rows else (yield from summed_over_ranks(share, target))
            like = share.options.arrays.get(name)
            result[name] = in_dtype(np.float64 if like is None else like.dtype, total)
        return result
