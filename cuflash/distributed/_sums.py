"""How do results of blocks add up on one rank, in float32, or in float64 for float64?

What comes first is computed in place. Later parts join it in the epilogue of a kernel that can, or
are merged, or added, after it.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from cuflash._arrays import Array, array_module


class Rows:
    """Which rows of a result some block has written; of the others nothing is known."""

    def __init__(self, number: int, *, written: bool = False) -> None:
        self._written = np.full(number, written)

    def are_new(self, rows: slice) -> bool:
        """Whether nothing has written any of them; they count as written from now on."""
        new = not self._written[rows].any()
        self._written[rows] = True
        return new

    def unwritten(self, rows: slice) -> Array:
        """Numbers of those among ``rows`` that nothing has written."""
        return np.flatnonzero(~self._written[rows]) + (rows.start or 0)


class Merged:
    """Output and lse over the keys so far, in the dtype of lse.

    ``lse = log(exp(lse) + exp(part))``; a part that sees nothing, and nothing so far, is neutral.
    """

    def __init__(
        self,
        xp: ModuleType,
        out_shape: tuple[int, ...],
        lse_shape: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._xp, self._rows = xp, Rows(lse_shape[-1])
        self._out, self._lse = xp.empty(out_shape, dtype), xp.empty(lse_shape, dtype)

    def begin(self, rows: slice) -> tuple[Array, Array, bool]:
        """Views of ``rows``, and whether they hold a part already, which others have to join."""
        self._clear(rows, whole=False)
        holds = not self._rows.are_new(rows)
        return self._out[..., rows, :], self._lse[..., rows], holds

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
            target = self._out[..., rows, :]
            target *= (old / total)[..., None]
            out *= (new / total)[..., None]
            target += out

    def finished(self) -> tuple[Array, Array]:
        """Output and lse; of rows that no block had, 0 and -inf."""
        self._clear(slice(0, self._lse.shape[-1]), whole=True)
        return self._out, self._lse

    def _clear(self, rows: slice, *, whole: bool) -> None:
        """Make rows that hold nothing neutral, where others of them hold something."""
        new = self._rows.unwritten(rows)
        if len(new) and (whole or len(new) < rows.stop - rows.start):
            self._out[..., new, :] = 0
            self._lse[..., new] = -np.inf


class Summed:
    """A gradient, of which blocks add to rows. ``array`` has rows as its last axis but one."""

    def __init__(self, array: Array, *, written: bool = False) -> None:
        self.array, self._rows = array, Rows(array.shape[-2], written=written)

    def begin(self, rows: slice) -> tuple[Array, bool]:
        """Where to write a part, and whether it has to be added then."""
        new = self._rows.unwritten(rows)
        target = self.array[..., rows, :]
        if self._rows.are_new(rows):
            return target, False
        if len(new):
            self.array[..., new, :] = 0
        return array_module(target).empty(target.shape, target.dtype), True

    def add(self, rows: slice, part: Array) -> None:
        """Add a part that :meth:`begin` gave room for."""
        self.array[..., rows, :] += part

    def finished(self) -> Array:
        """The array; zeros in rows that no block had."""
        new = self._rows.unwritten(slice(0, self.array.shape[-2]))
        if len(new):
            self.array[..., new, :] = 0
        return self.array


def added(target: Array, part: Array) -> None:
    """Add a part in place, summed over the axes along which the target has one element."""
    axes = tuple(
        i for i, (n, m) in enumerate(zip(target.shape, part.shape, strict=True)) if n == 1 != m
    )
    target += part.sum(axes, keepdims=True) if axes else part
