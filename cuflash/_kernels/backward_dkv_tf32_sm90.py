"""``backward_dkv_tf32_sm90.cu``: dk and dv of float32 on Hopper."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable, tf32_sm90
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request


class BackwardKVTf32Sm90Config(tf32_sm90.Tf32Config):
    """``backward_dkv_tf32_sm90.cu``: two warpgroups own 64 keys each, one splits q and dout."""

    kernel = "backward_dkv_tf32_sm90"
    computes = "dkv"
    parts = SCORED | portable.KV_PARTS | {"own": tf32_sm90.Stages, "held": portable.BiasInRegisters}
    owned = "block_n"  # queries are streamed

    def check(self) -> None:
        super().check()
        hidden = self.mask or self.mask_mod or not self.bias == self.segment_ids == "none"
        if hidden and self.block_m != 32:
            raise ValueError(
                f"block_m = {self.block_m} must be 32 with a bias, a mask or segment ids"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v; rings of q, dout and their transposes in TF32 parts, lse and delta."""
        kept, streamed = self.head_dim, self.head_dim
        if self.grad_k:
            kept += self.head_dim_v
            streamed += self.head_dim + self.head_dim_v
        if self.grad_v:
            streamed += self.head_dim_v
        streamed *= self.num_stages * self.operand_parts
        rest = self.num_stages * (8 * self.block_m + 5 * 16)
        tiles = self.element_bytes * (self.block_n * kept + self.block_m * streamed)
        return int(tiles + -(-rest // 1024) * 1024)

    @classmethod
    def eligible(cls, request: Request) -> str:
        reason = tf32_sm90.why_not(request)
        return reason or portable.why_not_passes(request.problem, _passes(request))

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its only tile for each pass. (D39)"""
        found: tuple[Self, ...] = ()
        fields = tf32_sm90.fields(cls, request, 32, 128)
        for names in _passes(request):
            own = fields | portable.kv_fields(request.problem, names)
            found += tf32_sm90.staged(cls, request, own)
        return found


def _passes(request: Request) -> list[str]:
    together = max(tf32_sm90.head_dims(request.problem).values()) <= portable.held(request).pair
    return portable.kv_passes(request.problem, request.keys, together=together)
