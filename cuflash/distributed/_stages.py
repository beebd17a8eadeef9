"""Which heads are computed together? All, or parts one after the other, while others travel.

A part has the query heads of some key/value heads.
"""

from __future__ import annotations

from typing import NamedTuple

from cuflash._arrays import Array
from cuflash._results import Saved
from cuflash.distributed._parts import Heads


class Stage(NamedTuple):
    """Heads that are computed together; all of them where there is no axis to cut."""

    heads: Heads | None
    q: slice | None = None
    kv: slice | None = None

    def of_q(self, array: Array) -> Array:
        """An array like q: its own heads."""
        return array if self.q is None else array[..., self.q, :, :]

    def of_lse(self, array: Array) -> Array:
        """An array like lse: its own heads."""
        return array if self.q is None else array[..., self.q, :]

    def of_kv(self, array: Array) -> Array:
        """An array like k: its own heads."""
        return array if self.kv is None else array[..., self.kv, :, :]

    def of_saved(self, saved: Saved) -> Saved:
        """What a gradient reads beside q, k and v: its own heads."""
        dlse = None if saved.dlse is None else self.of_lse(saved.dlse)
        return Saved(self.of_q(saved.dout), self.of_q(saved.out), self.of_lse(saved.lse), dlse)


def stages_of(heads: Heads | None, q: Array, k: Array, v: Array, *, most: int) -> list[Stage]:
    """The ``heads`` that q has, in equal parts, at most so many."""
    extents = [a.shape[-3] if a.ndim > 2 else 1 for a in (q, k, v)]
    number = None if heads is None else heads.stop - heads.start
    heads_kv = extents[1]
    alike = extents[0] == number and extents[1] == extents[2] and heads_kv > 1
    if heads is None or number is None or not alike or number % heads_kv:
        return [Stage(heads)]
    parts = max(n for n in range(1, most + 1) if heads_kv % n == 0)
    of_q, of_kv = number // parts, heads_kv // parts
    return [
        Stage(
            Heads(heads.start + i * of_q, heads.start + (i + 1) * of_q, heads.total),
            slice(i * of_q, (i + 1) * of_q), slice(i * of_kv, (i + 1) * of_kv),
        )
        for i in range(parts)
    ]  # fmt: skip
