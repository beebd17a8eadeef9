"""``backward_convert.cu``: scales and rounds the sums of dq that one pass over the scores made."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels.config import SCORED, KernelConfig


class Own(NamedTuple):
    """What this kernel alone is told."""

    grad_bias: bool = False  # did the other kernel write the gradient of a bias?


class BackwardConvertConfig(KernelConfig):
    """``backward_convert.cu``; it has the tiles of the kernel that added."""

    kernel = "backward_convert"
    params = "BackwardParams"
    computes = "convert"
    parts = SCORED | {"own": Own}
    row_warps = 0  # rows are dealt out to threads

    @classmethod
    def after(cls, config: KernelConfig) -> Self:
        """The kernel for the sums of another."""
        values = config.values()
        values["block_n"] = config.own_rows  # keys of a tile, which add to one of the sums
        values["num_warps"] = config.block_m // 16 * -(-config.head_dim // 64)
        return cls(**{name: values[name] for part in cls.parts.values() for name in part._fields})
