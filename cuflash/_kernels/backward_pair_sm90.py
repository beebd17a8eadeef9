"""``backward_pair_sm90.cu``: dq, dk and dv in one pass, by clusters of two thread blocks."""

from __future__ import annotations

from cuflash._kernels import fused_backward, wgmma


class BackwardPairConfig(fused_backward.AllGradientsConfig):
    """``backward_pair_sm90.cu``: each thread block of a pair owns ``block_n`` keys."""

    kernel = "backward_pair_sm90"
    cluster_blocks = 2

    def check(self) -> None:
        super().check()
        if self.block_m != 64 or self.block_n != 64 or self.keys_in_registers:
            raise ValueError("block_m and block_n must be 64, and keys_in_registers False")
        if self.head_dim % 64 or self.head_dim_v % 64 or self.head_dim < 128:
            raise ValueError(
                f"{self.head_dim=} and {self.head_dim_v=} must be multiples of 64 from 128 on"
            )

    @property
    def smem_bytes(self) -> int:
        """``key_owner_bytes``, half of the partner's keys, ds of both thread blocks.

        Below head size 256 also half of the columns of a block of dq in float32.
        """
        shared = wgmma.panel_bytes(self, self.block_n, self.head_dim // 2, 64, 64)
        staged = 2 * int(self.block_m * self.head_dim) if self.head_dim < 256 else 0
        return wgmma.key_owner_bytes(self) + shared + staged + 1024
