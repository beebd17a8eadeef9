"""How do results of blocks add up on one rank, in float32, or in float64 for float64?

What comes first is computed in place. Later parts of an output join it in the epilogue of a kernel
that can, or are merged after it; those of gradients are added.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module
from cuflash._launch.one_pass import write_sum


class Rows:
    """Some rows of an array, as intervals in order: blocks begin and end in few places."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._present: list[tuple[int, int]] = []

    def add(self, rows: slice) -> None:
        """They are present from now on."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted([*self._present, (rows.start, rows.stop)]):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            elif start < stop:
                found.append((start, stop))
        self._present = found

    def any(self, rows: slice) -> bool:
        """Whether one of ``rows`` is present."""
        return bool(self.runs(present=True, among=rows))

    def runs(self, *, present: bool, among: slice | None = None) -> list[slice]:
        """Those that are present, or that are not: neighbours together."""
        low, high = (among.start, among.stop) if among else (0, self._number)
        inside = [(max(a, low), min(b, high)) for a, b in self._present if a < high and low < b]
        if not present:
            ends = [low, *(end for pair in inside for end in pair), high]
            inside = list(zip(ends[::2], ends[1::2], strict=True))
        return [slice(a, b) for a, b in inside if a < b]


class Merged:
    """Output and lse over the keys so far.

    ``lse = log(exp(lse) + exp(part))``; a part that sees nothing, and nothing so far, is neutral.
    Parts are in the dtype of lse, and only rows that no other part joins in that of the output.
    """

    def __init__(
        self, xp: ModuleType, out: Array, lse_dtype: np.dtype[Any], lse_shape: tuple[int, ...]
    ) -> None:
        self._xp, self._out = xp, out
        self._lse = xp.empty(lse_shape, lse_dtype)
        self._written, self._done = Rows(lse_shape[-1]), Rows(lse_shape[-1])

    @functools.cached_property
    def _parts(self) -> Array:
        same = self._out.dtype == self._lse.dtype
        return self._out if same else self._xp.empty(self._out.shape, self._lse.dtype)

    def so_far(self, rows: slice) -> Array | None:
        """What a part of these rows joins, where some hold a part."""
        if not self._written.any(rows):
            return None
        self._clear(rows, self._parts)
        return self._parts[..., rows, :]

    def room(self, rows: slice, *, last: bool) -> tuple[Array, Array]:
        """Where to write out and lse of these rows; the ``last`` part of them is what remains."""
        self._written.add(rows)
        if last:
            self._done.add(rows)
        return (self._out if last else self._parts)[..., rows, :], self._lse[..., rows]

    def part(self, rows: slice) -> tuple[Array, Array]:
        """Where to write out and lse of these rows, to be merged."""
        parts, lse = self._parts[..., rows, :], self._lse[..., rows]
        return self._xp.empty(parts.shape, parts.dtype), self._xp.empty(lse.shape, lse.dtype)

    def merge(self, rows: slice, out: Array, lse: Array) -> None:
        """Merge a part that ``rows`` saw of other keys; ``out`` is overwritten."""
        xp, so_far = self._xp, self._lse[..., rows]
        with np.errstate(all="ignore"):
            highest = xp.maximum(so_far, lse)
            shift = xp.where(xp.isneginf(highest), 0, highest)
            old, new = xp.exp(so_far - shift), xp.exp(lse - shift)
            total = old + new
            self._lse[..., rows] = shift + xp.log(total)
            total = xp.where(total == 0, 1, total)
            target = self._parts[..., rows, :]
            target *= (old / total)[..., None]
            out *= (new / total)[..., None]
            target += out

    def finished(self) -> tuple[Array, Array]:
        """Output and lse; of rows that no block had, 0 and -inf."""
        for empty in self._clear(slice(0, self._lse.shape[-1]), self._out):
            self._done.add(empty)
        for rows in self._done.runs(present=False):
            if self._parts is not self._out:
                write_sum(self._out[..., rows, :], self._parts[..., rows, :])
        return self._out, self._lse

    def _clear(self, rows: slice, target: Array) -> list[slice]:
        """Make those of ``rows`` neutral that hold nothing."""
        found = self._written.runs(present=False, among=rows)
        for empty in found:
            target[..., empty, :] = 0
            self._lse[..., empty] = -np.inf
        self._written.add(rows)
        return found


class Summed:
    """A gradient, of which blocks add to rows. ``array`` has rows as its last axis but one."""

    def __init__(self, array: Array) -> None:
        self._array, self._rows = array, Rows(array.shape[-2])

    def begin(self, rows: slice) -> tuple[Array, bool]:
        """Where to write a part, and whether it has to be added then."""
        target = self._array[..., rows, :]
        if not self._rows.any(rows):
            self._rows.add(rows)
            return target, False
        self._clear(rows)
        return array_module(target).empty(target.shape, target.dtype), True

    def add(self, rows: slice, part: Array) -> None:
        """Add a part that :meth:`begin` gave room for."""
        target = self._array[..., rows, :]
        write_sum(target, target, part)

    def finish(self) -> None:
        """Clear rows that no block had."""
        self._clear(slice(0, self._array.shape[-2]))

    def added_to(self, other: Array, dtype: Any) -> Array:
        """The sum with another, in ``dtype``; the other is written where it has that."""
        total = other if other.dtype == dtype else array_module(other).empty(other.shape, dtype)
        for rows in self._rows.runs(present=True):
            write_sum(total[..., rows, :], self._array[..., rows, :], other[..., rows, :])
        if total is not other:
            for rows in self._rows.runs(present=False):
                write_sum(total[..., rows, :], other[..., rows, :])
        return total

    def _clear(self, rows: slice) -> None:
        for empty in self._rows.runs(present=False, among=rows):
            self._array[..., empty, :] = 0
        self._rows.add(rows)


def added(target: Array, part: Array) -> None:
    """Add a part in place, summed over the axes along which the target has one element."""
    axes = tuple(
        i for i, (n, m) in enumerate(zip(target.shape, part.shape, strict=True)) if n == 1 != m
    )
    target += part.sum(axes, keepdims=True) if axes else part
