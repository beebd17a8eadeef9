"""``backward_sm90.cu``: dq, dk and dv in one pass. Tiles of keys add to float32 sums of dq."""

from __future__ import annotations

from cuflash._kernels import fused_backward, wgmma


class BackwardOnePassConfig(fused_backward.AllGradientsConfig):
    kernel = "backward_sm90"
    params = "BackwardOnePassParams"

    def check(self) -> None:
        super().check()
        if self.block_m % 64 or self.block_m // 64 * -(-self.head_dim // 64) != 2:
            raise ValueError(
                f"{self.block_m=} by {self.head_dim=} must be two parts of dq, each 64 by 64"
            )

    @property
    def smem_bytes(self) -> int:
        """``key_owner_bytes``, two tiles of ds, one tile of dq, rows of a mask or a bias."""
        ds = 2 * wgmma.panel_bytes(self, self.block_n, self.block_m)
        rows = 32 * int(self.block_n) * (int(self.mask_stages) + 2 * int(self.bias_stages))
        staged = 4 * int(self.block_m * self.head_dim) + rows
        return wgmma.key_owner_bytes(self) + ds + staged + 1024
