"""``forward_fp8_sm90.cu``: the forward of float8_e4m3fn elements on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

from cuflash._kernels import wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of, needs_score_math, scale_in_exponent
from cuflash._kernels.tables import Row
from cuflash._problem.problem import HALVES

#: A tile: block_m, block_n, num_stages, overlap_quarters.
ROWS = (
    Row("", (64, 64), (192, 128, 4, 4), "D171"),
    Row("", (128, 128), (128, 128, 3, 4), "D171"),
)
_OF_A_ROW = ("block_m", "block_n", "num_stages", "overlap_quarters")
_KIB = 1024


class Own(NamedTuple):
    sink: Floats
    num_stages: int  # buffers of k, of v in columns, and of v in rows
    #: Quarters of a block's exponentials that run before p v of the previous block must be done.
    overlap_quarters: int
    num_q_stages: int = 1  # buffers of q


class ForwardFp8Sm90Config(wgmma.WarpgroupsConfig):
    """``forward_fp8_sm90.cu``: warpgroups own 64 queries each, one loads and transposes v."""

    kernel = "forward_fp8_sm90"
    params = "ForwardSm90Params"
    computes = "out"
    float8 = True
    parts = SCORED | {"own": Own}
    streams: ClassVar[Sequence[int]] = (64, 96, 128)

    @property
    def smem_bytes(self) -> int:
        """Tiles of q, k, v in rows and v in columns, in panels of 128 bytes; barriers."""
        rows = self.num_stages * self.block_n
        tiles = wgmma.panel_bytes(self, self.block_m, self.head_dim)
        tiles += wgmma.panel_bytes(self, rows, self.head_dim, self.head_dim_v)
        tiles += wgmma.panel_bytes(self, self.num_stages * self.head_dim_v, self.block_n)
        return tiles + 2 * _KIB

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        widest = wgmma.widest(problem)
        plain = scale_in_exponent(problem) and not needs_score_math(problem)
        bounds = (
            problem.cu_seqlens_q, problem.window_left, problem.q_lengths, problem.kv_lengths,
            problem.sink,
        )  # fmt: skip
        light = plain and all(bound is None for bound in bounds)
        return wgmma.why_not(request) or wgmma.first_reason(
            (64 < widest <= 96, "narrower 16-bit tiles are as fast"),
            (widest > 128, "registers cannot hold two accumulators of wider heads"),  # D195
            (not problem.seqlen_k, "there are no keys, and a tensor map needs at least one row"),
            (not problem.head_dim_v, "head_dim_v is 0, and a tensor map needs at least one column"),
            (problem.out.dtype not in HALVES, "the kernel writes 16-bit results"),
            (problem.head_dim_v % 8 != 0, "rows of out are no multiples of 16 bytes"),
            (not plain or (widest <= 64 and not light), "16-bit products are faster"),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        fields = wgmma.fields(cls, request, ROWS, names=_OF_A_ROW)
        return (cls(**fields, sink=dtype_of(request.problem.sink)),)
