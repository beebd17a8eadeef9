"""``backward_convert.cu``: scales and rounds the float32 sums of dq of a one-pass kernel."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels.config import SCORED, KernelConfig


class Own(NamedTuple):
    """Fields of this kernel alone."""

    grad_bias: bool = False  # did the one-pass kernel write the gradient of a bias?
    finishes_dq: bool = False  # has the one-pass kernel stored dq of all blocks that see a key?
    overlaps: bool = True  # does it start while sums are added, and wait for them?


class BackwardConvertConfig(KernelConfig):
    """``backward_convert.cu``: its blocks of queries are those of the one-pass kernel."""

    kernel = "backward_convert"
    params = "BackwardParams"
    computes = "convert"
    parts = SCORED | {"own": Own}
    row_warps = 0  # warps own slices of 16 rows and 64 columns

    @property
    def starts_early(self) -> bool:
        """Whether it starts while sums are added."""
        return bool(self.overlaps)

    @classmethod
    def after(cls, config: KernelConfig) -> Self:
        """The kernel that converts the sums of ``config``, a kernel of all gradients."""
        values = config.values() | {"overlaps": True}
        values["block_n"] = config.own_rows  # keys of a tile, which adds to one of the sums
        values["num_warps"] = config.block_m // 16 * -(-config.head_dim // 64)
        return cls(**{name: values[name] for part in cls.parts.values() for name in part._fields})
