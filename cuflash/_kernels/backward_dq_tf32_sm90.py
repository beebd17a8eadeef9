"""``backward_dq_tf32_sm90.cu``: dq of float32 on Hopper."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable, tf32_sm90, wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request


class BackwardQTf32Sm90Config(tf32_sm90.Tf32Config):
    """``backward_dq_tf32_sm90.cu``: two warpgroups own 64 queries each, one splits k and v."""

    kernel = "backward_dq_tf32_sm90"
    computes = "dq"
    parts = SCORED | {"own": tf32_sm90.Stages, "held": portable.BiasInRegisters}

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout; rings of k, v and k transposed in TF32 parts; a KiB of barriers."""
        kept = self.block_m * (self.head_dim + self.head_dim_v)
        streamed = 2 * self.head_dim + self.head_dim_v
        streamed *= self.num_stages * self.operand_parts * self.block_n
        return int(self.element_bytes * (kept + streamed)) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        return tf32_sm90.why_not(request) or wgmma.why_not_broadcast(request)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """64 keys at head size 64, 32 at 128 and where segment ids would spill. (D44)"""
        problem = request.problem
        narrow = wgmma.widest(problem) <= 64 and problem.segment_ids_q is None
        fields = tf32_sm90.fields(cls, request, 128, 64 if narrow else 32)
        return tf32_sm90.staged(cls, request, fields)
