"""``backward_pair_sm90.cu``: all gradients in one pass, by pairs of thread blocks."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import fused_backward, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request


class BackwardPairConfig(KernelConfig):
    """``backward_pair_sm90.cu``: each thread block of a pair owns ``block_n`` keys."""

    kernel = "backward_pair_sm90"
    params = "BackwardSm90Params"
    computes = "dqkv"
    parts = SCORED | {"own": fused_backward.Own}
    tunables = fused_backward.Chosen._fields
    for_sm90 = tensor_maps = True
    owned = "block_n"  # queries are streamed
    streams = wgmma.WIDTHS
    cluster_blocks = 2
    row_warps, other_warps = 0, 8  # four that load and keep turns, a warpgroup that multiplies dq

    def check(self) -> None:
        """Raise a ValueError for warpgroups, buffers or head sizes that cannot be."""
        wgmma.check_gradient(self)
        if self.block_m != 64 or self.block_n != 64 or self.keys_in_registers:
            raise ValueError("a warpgroup holds 64 queries by 64 keys, and no keys in registers")
        if self.head_dim % 64 or self.head_dim_v % 64 or self.head_dim < 128:
            raise ValueError(f"{self.head_dim=} and {self.head_dim_v=} must be panels of 64")

    @property
    def smem_bytes(self) -> int:
        """Tiles of every kernel that owns keys, half of the partner's keys, ds of both."""
        shared = wgmma.panel_bytes(self, self.block_n, self.head_dim // 2, 64, 64)
        return wgmma.key_owner_bytes(self) + shared + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        return fused_backward.against(request, pair=True)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its row."""
        return (cls(**fused_backward.fields(request, cls)),)
