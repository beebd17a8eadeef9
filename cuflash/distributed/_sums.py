"""How do results of blocks add up on one rank, in float32, or in float64 for float64?"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from cuflash._arrays import Array


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
        self._xp, self._first = xp, True
        self.out = xp.zeros(out_shape, dtype)
        self.lse = xp.full(lse_shape, -np.inf, dtype)

    def add(self, rows: slice, out: Array, lse: Array) -> None:
        """Merge the part that ``rows`` saw of other keys; ``out`` is taken over or overwritten."""
        first, self._first = self._first, False
        if first and out.shape == self.out.shape:
            self.out, self.lse = out, lse
            return
        xp, so_far = self._xp, self.lse[..., rows]
        with np.errstate(all="ignore"):
            highest = xp.maximum(so_far, lse)
            shift = xp.where(xp.isneginf(highest), 0, highest)
            old, new = xp.exp(so_far - shift), xp.exp(lse - shift)
            total = old + new
            self.lse[..., rows] = shift + xp.log(total)
            total = xp.where(total == 0, 1, total)
            target = self.out[..., rows, :]
            target *= (old / total)[..., None]
            out *= (new / total)[..., None]
            target += out


def added(target: Array, part: Array) -> None:
    """Add a part in place, summed over the axes along which the target has one element."""
    axes = tuple(
        i for i, (n, m) in enumerate(zip(target.shape, part.shape, strict=True)) if n == 1 != m
    )
    target += part.sum(axes, keepdims=True) if axes else part
