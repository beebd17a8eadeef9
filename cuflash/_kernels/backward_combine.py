"""``backward_combine.cu``: adds up dk and dv of parts of the queries, scales and rounds them."""

from __future__ import annotations

from typing import Self

from cuflash._kernels.config import SCORED, KernelConfig


class BackwardCombineConfig(KernelConfig):
    """``backward_combine.cu``; a thread block has 16 keys, a warp 32 columns of dk or dv."""

    kernel = "backward_combine"
    params = "BackwardParams"
    computes = "parts"
    parts = SCORED
    owned = "block_n"
    row_warps = 0  # columns are dealt out to warps

    @classmethod
    def after(cls, config: KernelConfig) -> Self:
        """The kernel for the parts of another."""
        values = config.values()
        values["num_warps"] = (config.head_dim + config.head_dim_v) // 32
        values["block_n"] = 16
        return cls(**{name: values[name] for part in SCORED.values() for name in part._fields})
