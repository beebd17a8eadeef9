"""``backward_combine.cu``: adds up, scales and rounds dk and dv of parts of the queries."""

from __future__ import annotations

from typing import Self

from cuflash._kernels.config import SCORED, KernelConfig


class BackwardCombineConfig(KernelConfig):
    """``backward_combine.cu``: a thread block owns 16 keys, a warp 32 columns of dk or dv."""

    kernel = "backward_combine"
    params = "BackwardParams"
    computes = "parts"
    parts = SCORED
    owned = "block_n"
    row_warps = 0  # warps own columns

    @classmethod
    def after(cls, config: KernelConfig) -> Self:
        """The kernel that adds up the parts of ``config``, a kernel of all gradients."""
        values = config.values()
        values["num_warps"] = (config.head_dim + config.head_dim_v) // 32
        values["block_n"] = 16
        return cls(**{name: values[name] for part in SCORED.values() for name in part._fields})
