"""``forward_fp8_sm90.cu``: Hopper's forward for float8_e4m3fn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

from cuflash._kernels import wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import (
    Floats,
    dtype_of,
    needs_score_math,
    register_pressure,
    scale_in_exponent,
)
from cuflash._kernels.tables import Row
from cuflash._problem.problem import HALVES, Problem

#: Of each row block_m, block_n, num_stages, overlap_quarters, promotes.
ROWS = (
    Row("", (64, 64), (128, 128, 4, 4, True)),
    Row("", (128, 128), (128, 96, 3, 4, True)),
    Row("", (192, 128), (128, 96, 3, 4, True)),
    Row("", (256, 256), (128, 64, 3, 2, False)),
    # What lies in registers beside two sums, or beside a wide one.
    Row("dropout", (128, 128), (128, 64, 3, 4, True)),
    Row("dropout", (192, 128), (128, 64, 3, 4, True)),
    Row("light", (128, 128), (128, 128, 3, 4, True)),
    Row("light", (192, 128), (128, 128, 3, 4, True)),
    Row("light", (256, 256), (128, 128, 2, 2, False)),
)


#: Head sizes up to this one take products of 16 bits, which are as fast. (D171)
SLOWER_UP_TO = 192
_OF_A_ROW = ("block_m", "block_n", "num_stages", "overlap_quarters", "promotes")
_KIB = 1024


class Own(NamedTuple):
    sink: Floats
    num_stages: int  # buffers of k, of v and of its rows
    overlap_quarters: int  # of the exponentials, that run before p v has to be done; 0: none
    promotes: bool  # is p v of a block summed by itself, and added to o in float32?
    num_q_stages: int = 1
    column_parts: int = 1  # of a promoted sum, one after the other
    max_chains: int = 1  # in which a lane finds the maximum of its scores
    follows_weights: bool = False  # is a maximum formed only where weights outgrew the last one?
    weight_exponent: int = 8  # log2 of what weights are multiplied by
    scores_in_halves: bool = False  # is q k^T of a block two groups of products?


class ForwardFp8Sm90Config(wgmma.WarpgroupsConfig):
    """``forward_fp8_sm90.cu``: warpgroups of 64 query rows each, and one that loads and turns v."""

    kernel = "forward_fp8_sm90"
    params = "ForwardSm90Params"
    computes = "out"
    float8 = True
    parts = SCORED | {"own": Own}
    streams: ClassVar[Sequence[int]] = (64, 96, 128, 160, 192, 224)

    @property
    def smem_bytes(self) -> int:
        """Tiles of q, k, and v in rows and in columns, in panels of 128 bytes; barriers."""
        rows = self.num_stages * self.block_n
        tiles = wgmma.panel_bytes(self, self.block_m, self.head_dim)
        tiles += wgmma.panel_bytes(self, rows, self.head_dim, self.head_dim_v)
        tiles += wgmma.panel_bytes(self, self.num_stages * self.head_dim_v, self.block_n)
        return tiles + 2 * _KIB

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        return wgmma.against(request) or wgmma.first_reason(
            (wgmma.widest(problem) <= SLOWER_UP_TO, "products of 16 bits are as fast there"),
            (wgmma.widest(problem) > 256, "no tile is wider than 256"),
            (not problem.seqlen_k, "there are no keys, and a tensor map holds at least one row"),
            (not problem.head_dim_v, "there are no values, and a tensor map holds a column"),
            (problem.out.dtype not in HALVES, "it writes 16 bits"),
            (problem.head_dim_v % 8 != 0, "rows of out are stored by 16 bytes"),
            (problem.formulas is not None, "nobody knows how many registers a formula takes"),
            (register_pressure(problem) > 1 or problem.bias is not None, "options spill"),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        fields = wgmma.fields(cls, request, ROWS, _holding(request.problem), _OF_A_ROW)
        return (cls(**fields, sink=dtype_of(request.problem.sink)),)


def _holding(problem: Problem) -> dict[str, bool]:
    """What holds of a request, in the words of the table.

    A row of a light one has nothing to keep in registers but where a causal bound lies.
    """
    others = (
        problem.cu_seqlens_q, problem.window_left, problem.q_lengths, problem.kv_lengths,
        problem.sink,
    )  # fmt: skip
    plain = scale_in_exponent(problem) and not needs_score_math(problem)
    light = plain and all(other is None for other in others)
    return {"light": light, "dropout": bool(problem.dropout)}
