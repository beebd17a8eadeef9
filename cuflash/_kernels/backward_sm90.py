"""``backward_sm90.cu``: all gradients in one pass, dq as sums that tiles of keys add to."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import fused_backward, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request


class BackwardOnePassConfig(KernelConfig):
    """``backward_sm90.cu``."""

    kernel = "backward_sm90"
    params = "BackwardSm90Params"
    computes = "dqkv"
    parts = SCORED | {"own": fused_backward.Own}
    tunables = fused_backward.Chosen._fields
    for_sm90 = tensor_maps = True
    owned = "block_n"  # queries are streamed
    streams = wgmma.WIDTHS
    row_warps, other_warps = 0, 8  # four that load and write, a warpgroup that multiplies dq

    def check(self) -> None:
        """Raise a ValueError for warpgroups, buffers or parts of dq that cannot be."""
        wgmma.check_gradient(self)
        if self.block_m % 64 or self.block_m // 64 * -(-self.head_dim // 64) != 2:
            raise ValueError(
                f"{self.block_m=} by {self.head_dim=} must be two parts of dq: 64 rows, 64 columns"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of every kernel that owns keys, two tiles of ds, one of dq; in whole KiB."""
        ds = 2 * wgmma.panel_bytes(self, self.block_n, self.block_m)
        return wgmma.key_owner_bytes(self) + ds + 4 * int(self.block_m * self.head_dim) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        return fused_backward.against(request, pair=False)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its row."""
        return (cls(**fused_backward.fields(request, cls)),)
