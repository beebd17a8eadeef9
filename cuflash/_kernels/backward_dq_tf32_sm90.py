"""``backward_dq_tf32_sm90.cu``: Hopper's gradient of q for float32."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import tf32_sm90, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request


class Own(NamedTuple):
    """What this kernel alone is told."""

    num_stages: int  # buffers of k and of v


class BackwardQTf32Sm90Config(KernelConfig):
    """``backward_dq_tf32_sm90.cu``: warpgroups of 64 query rows, one that splits k and v."""

    kernel = "backward_dq_tf32_sm90"
    params = "BackwardParams"
    computes = "dq"
    parts = SCORED | {"own": Own}
    tunables = ("block_m", "block_n", "num_stages")
    for_sm90 = True
    streams = (32, 64)
    row_warps = 0  # four warps have no rows, the others 16 each

    def check(self) -> None:
        """Raise a ValueError for a tile that the kernel has no products of."""
        tf32_sm90.check(self)

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, rings of TF32 parts of k, v and k transposed, a KiB of barriers."""
        kept = self.block_m * (self.head_dim + self.head_dim_v)
        streamed = 2 * self.head_dim + self.head_dim_v
        streamed *= self.num_stages * self.operand_parts * self.block_n
        return int(self.element_bytes * (kept + streamed)) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        broadcast = any(request.problem.q.summed)
        return tf32_sm90.against(request) or wgmma.first_reason(
            (broadcast, "q is broadcast, and its gradient a sum over batch entries")
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """64 keys at head size 64, 32 at 128 and where segment ids would spill. (D44)"""
        fields = tf32_sm90.fields(request)
        narrow = max(fields["head_dim"], fields["head_dim_v"]) == 64
        block_n = 64 if narrow and request.problem.segment_ids_q is None else 32
        return (tf32_sm90.staged(cls(**fields, block_m=128, block_n=block_n, num_warps=12)),)
