"""``backward_dscore_sm80.cu``: sums of the scores' gradient, for bias, slopes and scale."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, register_pressure
from cuflash._kernels.tables import Row
from cuflash._problem.problem import HALVES

GradOf = Literal["bias", "alibi_slopes", "scale"]
#: One sum for each pair, for each key (over its queries), or for each query (over its keys).
SumsTo = Literal["pairs", "keys", "queries"]

#: A tile: block_m, block_n, num_warps, blocks_per_sm.
ROWS = (
    *(Row("half", d, ((64, 64, 4, 2), (64, 64, 4, 1))) for d in (16, 32, 64, 96, 128)),
    Row("half", 192, ((64, 32, 4, 2), (64, 32, 4, 1))),
    Row("half", 256, ((64, 32, 4, 2), (64, 32, 4, 1))),
    Row("float32", 16, ((64, 32, 4, 3),), "D161"),
    Row("float32, general", 16, ((64, 32, 4, 2),)),  # for slopes, which else spill on sm_80
    Row("float32", 32, ((64, 16, 4, 2),)),
    *(Row("float32", d, ((64, 16, 4, 2), (64, 16, 4, 1))) for d in (64, 96, 128)),
    Row("float32", 192, ((64, 16, 4, 1), (32, 16, 2, 1))),
    Row("float32", 256, ((64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))),
    Row("float64", 16, ((64, 16, 4, 2),)),
    Row("float64", 32, ((64, 16, 4, 2),)),
    Row("float64", 64, ((64, 16, 4, 2), (64, 16, 4, 1))),
    Row("float64", 96, ((64, 16, 4, 1), (32, 16, 2, 1))),
    Row("float64", 128, ((64, 16, 4, 1), (32, 16, 2, 1))),
    Row("float64", 192, ((32, 16, 2, 1), (16, 16, 1, 1))),
    Row("float64", 256, ((32, 16, 2, 1), (16, 16, 1, 1))),
)


WIDEST_AHEAD = 64  # largest head size of 16 bits with room for a second entry's operands (D204)


class Own(NamedTuple):
    grad_of: GradOf  # the input whose gradient the sums are for
    sums_to: SumsTo
    sums_dtype: Floats = "none"  # dtype in which sums are stored; "none": the dtype of lse
    holds_bias: bool = False  # does each lane keep the bias of its pairs for all batch entries?
    num_stages: int = 1  # buffers of operands; with 2 the next entry's operands are loaded ahead


class BackwardScoreConfig(KernelConfig):
    kernel = "backward_dscore_sm80"
    params = "BackwardParams"
    computes = "sums"
    parts = SCORED | {"own": Own}

    @property
    def smem_bytes(self) -> int:
        """Tiles of q, dout, and k and v in TF32 parts; for each warp a sum of each column."""
        tiles = sum(
            self.tile_bytes(self.block_m, columns)
            + self.operand_parts * self.tile_bytes(self.block_n, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )
        tiles *= int(self.num_stages)
        return -(-(tiles + self.real_bytes * int(self.num_warps * self.block_n)) // 128) * 128

    def check(self) -> None:
        if self.num_stages not in (1, 2):
            raise ValueError(f"{self.num_stages=} must be 1 or 2")

    @classmethod
    def of(
        cls, request: Request, grad_of: GradOf, sums_to: SumsTo, sums_dtype: Floats = "none"
    ) -> Self:
        """The first tile of its table row that fits; ``simt`` if none does."""
        own = portable.fields(cls, request) | {
            "grad_of": grad_of, "sums_to": sums_to, "sums_dtype": sums_dtype,
        }  # fmt: skip
        problem, slopes = request.problem, grad_of == "alibi_slopes"
        by_entries = sums_to == "pairs" and problem.cu_seqlens_q is None and not request.simt
        if by_entries and problem.dtype in HALVES:
            narrow = max(own["head_dim"], own["head_dim_v"]) <= WIDEST_AHEAD
            own["holds_bias"] = narrow and portable.can_hold_bias(problem)  # not at 128 columns
            own["num_stages"] = 2 if narrow and problem.segment_ids_q is None else 1
        elif by_entries and portable.holds_bias(request, own):
            own |= {"holds_bias": True, "num_stages": 2}
        values = portable.candidates(cls, ROWS, request, own, general=slopes)
        if own.get("num_stages") == 2 and register_pressure(problem) <= 1:
            values = [values[0] | {"blocks_per_sm": 3}, *values]
        for found in portable.fitting(cls, values, request.smem_limit):
            return found
        return cls.of(request._replace(simt=True), grad_of, sums_to, sums_dtype)
