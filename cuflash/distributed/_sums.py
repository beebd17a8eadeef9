"""How are the results of blocks summed on one rank, in float32 (in float64 for float64)?

The first part of each row is computed in place. Later parts of an output are merged with it, in the
epilogue of kernels that support this or after the kernel. Later parts of gradients are added.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module
from cuflash._launch.one_pass import write_sum


class Rows:
    """A set of rows, as sorted intervals: blocks begin and end at few different rows."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._present: list[tuple[int, int]] = []

    def add(self, rows: slice) -> None:
        """Add rows to the set."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted([*self._present, (rows.start, rows.stop)]):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            elif start < stop:
                found.append((start, stop))
        self._present = found

    def any(self, rows: slice) -> bool:
        """Whether any of ``rows`` is in the set."""
        return bool(self.runs(present=True, among=rows))

    def runs(self, *, present: bool, among: slice | None = None) -> list[slice]:
        """Intervals of rows that are in the set, or (not ``present``) of those that are not."""
        low, high = (among.start, among.stop) if among else (0, self._number)
        inside = [(max(a, low), min(b, high)) for a, b in self._present if a < high and low < b]
        if not present:
            ends = [low, *(end for pair in inside for end in pair), high]
            inside = list(zip(ends[::2], ends[1::2], strict=True))
        return [slice(a, b) for a, b in inside if a < b]


class Merged:
    """Output and lse over the keys so far.

    ``lse = log(exp(lse) + exp(part))``; a part without visible keys (0 and -inf) changes nothing.
    Parts have the dtype of lse. Rows with no further part are written in the dtype of the output.
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
        """The output so far that a part of these rows joins; None if no row has one yet."""
        if not self._written.any(rows):
            return None
        self._clear(rows, self._parts)
        return self._parts[..., rows, :]

    def room(self, rows: slice, *, last: bool) -> tuple[Array, Array]:
        """Arrays for out and lse of these rows; after the ``last`` part they are final."""
        self._written.add(rows)
        if last:
            self._done.add(rows)
        return (self._out if last else self._parts)[..., rows, :], self._lse[..., rows]

    def part(self, rows: slice) -> tuple[Array, Array]:
        """New arrays for out and lse of these rows, which :meth:`merge` takes afterwards."""
        parts, lse = self._parts[..., rows, :], self._lse[..., rows]
        return self._xp.empty(parts.shape, parts.dtype), self._xp.empty(lse.shape, lse.dtype)

    def merge(self, rows: slice, out: Array, lse: Array) -> None:
        """Merge out and lse of ``rows`` over other keys; ``out`` is overwritten."""
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
        """Output and lse; rows that no block computed are 0 and -inf."""
        for empty in self._clear(slice(0, self._lse.shape[-1]), self._out):
            self._done.add(empty)
        for rows in self._done.runs(present=False):
            if self._parts is not self._out:
                write_sum(self._out[..., rows, :], self._parts[..., rows, :])
        return self._out, self._lse

    def _clear(self, rows: slice, target: Array) -> list[slice]:
        """Set those of ``rows`` that hold nothing to 0 and -inf; return them."""
        found = self._written.runs(present=False, among=rows)
        for empty in found:
            target[..., empty, :] = 0
            self._lse[..., empty] = -np.inf
        self._written.add(rows)
        return found


class Summed:
    """A gradient to whose rows blocks add.

    The rows are the last axis but one of ``array``, which holds them from ``first`` on. An array
    that is ``full`` has been written.
    """

    def __init__(self, array: Array, first: int = 0, *, full: bool = False) -> None:
        self._array, self._all = array, slice(first, first + array.shape[-2])
        self._rows = Rows(self._all.stop)
        if full:
            self._rows.add(self._all)

    def begin(self, rows: slice) -> tuple[Array, bool]:
        """The array to write a part to, and whether :meth:`add` must be called afterwards."""
        target = self._part(rows)
        if not self._rows.any(rows):
            self._rows.add(rows)
            return target, False
        self._clear(rows)
        return array_module(target).empty(target.shape, target.dtype), True

    def add(self, rows: slice, part: Array) -> None:
        """Add a part that was written to a new array of :meth:`begin`."""
        target = self._part(rows)
        write_sum(target, target, part)

    def finish(self) -> None:
        """Clear rows that no block wrote."""
        self._clear(self._all)

    def joined(self, other: Summed) -> Summed:
        """The sum of two finished sums, in the larger array if that has the rows of both."""
        larger, *parts = sorted((self, other), key=lambda s: -s._array.shape[-2])
        if not parts[0]._array.shape[-2]:
            return larger
        starts, stops = zip(*((s._all.start, s._all.stop) for s in (self, other)), strict=True)
        rows = slice(min(starts), max(stops))
        if larger._all != rows:
            shape = (*self._array.shape[:-2], rows.stop - rows.start, self._array.shape[-1])
            parts.append(larger)
            larger = Summed(array_module(self._array).empty(shape, self._array.dtype), rows.start)
            larger.finish()
        for part in parts:
            larger.add(part._all, part._array)
        return larger

    def added_to(self, other: Array, dtype: Any) -> Array:
        """The sum with all rows in ``dtype``; in place of ``other`` if it has that dtype."""
        total = other if other.dtype == dtype else array_module(other).empty(other.shape, dtype)
        everything = slice(0, other.shape[-2])
        for rows in self._rows.runs(present=True):
            write_sum(total[..., rows, :], self._part(rows), other[..., rows, :])
        if total is not other:
            for rows in self._rows.runs(present=False, among=everything):
                write_sum(total[..., rows, :], other[..., rows, :])
        return total

    def _part(self, rows: slice) -> Array:
        first = self._all.start
        return self._array[..., rows.start - first : rows.stop - first, :]

    def _clear(self, rows: slice) -> None:
        for empty in self._rows.runs(present=False, among=rows):
            self._part(empty)[...] = 0
        self._rows.add(rows)


def added(target: Array, part: Array) -> None:
    """Add a part in place; it is summed over the axes along which the target is broadcast."""
    axes = tuple(
        i for i, (n, m) in enumerate(zip(target.shape, part.shape, strict=True)) if n == 1 != m
    )
    target += part.sum(axes, keepdims=True) if axes else part
