"""``forward_tf32_sm90.cu``: Hopper's forward for float32."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import tf32_sm90, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of

#: The fastest of benchmarks/sweeps on an H100 SXM; two stages where they fit. (D39, D43)
_BLOCK_M, _BLOCK_N = 128, 64


class Own(NamedTuple):
    """What this kernel alone is told."""

    sink: Floats
    num_stages: int  # buffers of k and of v


class ForwardTf32Sm90Config(KernelConfig):
    """``forward_tf32_sm90.cu``: warpgroups of 64 query rows, two that split k and v."""

    kernel = "forward_tf32_sm90"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": Own}
    tunables = ("block_m", "block_n", "num_stages")
    for_sm90 = True
    streams = (32, 64)
    row_warps = 0  # eight warps have no rows, the others 16 each

    def check(self) -> None:
        """Raise a ValueError for a tile that the kernel has no products of."""
        tf32_sm90.check(self, num_warps=16)
        if self.precision == "tf32" and self.block_n != 64:
            raise ValueError(f"block_n = {self.block_n} must be 64: there is no product of others")

    @property
    def result_columns(self) -> int:
        """Columns of out."""
        return int(self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """The q tile, rings of the TF32 parts of k and v, and a KiB of barriers."""
        streamed = self.num_stages * self.operand_parts * self.block_n
        streamed *= self.head_dim + self.head_dim_v
        return int(self.element_bytes * (self.block_m * self.head_dim + streamed)) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        problem = request.problem
        wide_segments = problem.segment_ids_q is not None and wgmma.widest(problem) > 64
        return tf32_sm90.against(request) or wgmma.first_reason(
            (wide_segments, "segment ids of 64 keys spill beside 128 columns of out")
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its only tile."""
        fields = tf32_sm90.fields(request, request.problem.out.dtype)
        sink = dtype_of(request.problem.sink)
        config = cls(**fields, block_m=_BLOCK_M, block_n=_BLOCK_N, num_warps=16, sink=sink)
        return (tf32_sm90.staged(config),)
