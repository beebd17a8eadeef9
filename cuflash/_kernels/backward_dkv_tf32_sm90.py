"""``backward_dkv_tf32_sm90.cu``: Hopper's gradients of k and v for float32."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import portable, tf32_sm90
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request


class Own(NamedTuple):
    """What this kernel alone is told."""

    num_stages: int  # buffers of q and of dout


class BackwardKVTf32Sm90Config(KernelConfig):
    """``backward_dkv_tf32_sm90.cu``: warpgroups of 64 keys, one that splits q and dout."""

    kernel = "backward_dkv_tf32_sm90"
    params = "BackwardParams"
    computes = "dkv"
    parts = SCORED | {"gradients": portable.Gradients, "own": Own}
    tunables = ("block_m", "block_n", "num_stages")
    for_sm90 = True
    owned = "block_n"  # queries are streamed
    streams = (32, 64)
    row_warps = 0  # four warps have no rows, the others 16 each

    def check(self) -> None:
        """Raise a ValueError for a tile that the kernel has no products of."""
        tf32_sm90.check(self)
        hidden = self.mask or self.mask_mod or not self.bias == self.segment_ids == "none"
        if hidden and self.block_m != 32:
            raise ValueError(f"block_m = {self.block_m} must be 32 where single pairs are hidden")

    @property
    def result_columns(self) -> int:
        """Columns of dk, or of dv alone; both are split alike."""
        return int(self.head_dim if self.grad_k else self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v; rings of TF32 parts of q, dout and their transposes, and of rows."""
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
        """Why it does not serve a request."""
        reason = tf32_sm90.against(request)
        return reason or portable.against_passes(request.problem, _passes(request))

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its only tile, for each pass. (D39)"""
        own = tf32_sm90.fields(request) | {"block_m": 32, "block_n": 128, "num_warps": 12}
        return tuple(
            tf32_sm90.staged(cls(**own, **portable.kv_fields(request.problem, names)))
            for names in _passes(request)
        )


def _passes(request: Request) -> list[list[str]]:
    fields = tf32_sm90.fields(request)
    together = max(fields["head_dim"], fields["head_dim_v"]) <= portable.held(request.problem).pair
    return portable.kv_passes(request.problem, request.keys, together=together)
