"""``backward_dkv_sm90.cu``: dk and dv of 16-bit elements on Hopper."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math
from cuflash._kernels.tables import Row, smallest

#: Up to head size 128 the fastest tiles of benchmarks/sweeps on an H100 SXM. Others follow from
#: registers and shared memory. Up to head size 128 one pass computes dk and dv. Above, a pass
#: computes one of them: registers do not hold two results of 192 columns.
#: A tile: block_m, block_n, num_stages, scores_ahead.
ROWS = (
    Row("", (64, 64), (96, 128, 3, False), "D104"),
    Row("", (96, 96), (80, 128, 3, False), "D104"),
    Row("", (128, 128), (64, 128, 3, False), "D104"),
    Row("", (192, 128), (64, 128, 2, False)),
    Row("", (192, 192), (64, 128, 2, False)),
    Row("", (256, 256), (48, 128, 2, False)),
    Row("score math", (64, 64), (64, 128, 3, False), "D104"),
    Row("score math", (96, 96), (64, 128, 3, False), "D104"),
    Row("score math", (128, 128), (48, 128, 3, False), "D104"),
    Row("full slopes alone, measured", (128, 128), (48, 128, 3, True), "D103"),
    Row("causal slopes alone, measured", (128, 128), (64, 128, 2, False), "D103"),
    Row("causal softcap alone, measured", (128, 128), (64, 128, 2, True), "D103"),
    # Several options take registers: tiles without spills by NVRTC 12.9 and 13.5, not timed.
    Row("few registers", (96, 96), (48, 128, 3, False)),
    Row("few registers", (128, 128), (32, 128, 3, False)),
    Row("few registers", (192, 128), (48, 128, 2, False)),
    Row("few registers", (192, 192), (48, 128, 2, False)),
    Row("few registers", (256, 256), (32, 128, 2, False)),
)


class BackwardKVSm90Config(wgmma.WarpgroupsConfig):
    """``backward_dkv_sm90.cu``: dk, dv or both in one pass over the queries."""

    kernel = "backward_dkv_sm90"
    computes = "dkv"
    parts = SCORED | {"own": wgmma.Ahead, "results": portable.Results}
    tunables = ("block_m", "block_n", "num_stages", "scores_ahead")
    owned = "block_n"  # queries are streamed

    def check(self) -> None:
        super().check()
        if self.dropout and self.block_m > 64:  # KeptBits of score/dropout.cuh
            raise ValueError(f"block_m = {self.block_m} must be at most 64 with dropout")

    @property
    def smem_bytes(self) -> int:
        """``key_owner_bytes``; a pass for dv alone keeps only 8 rows of v."""
        return wgmma.key_owner_bytes(self, self.block_n if self.grad_k else 8)

    @classmethod
    def eligible(cls, request: Request) -> str:
        reason = wgmma.why_not_halves(request)
        return reason or portable.why_not_passes(request.problem, _passes(request))

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its table row for each pass."""
        problem, passes = request.problem, _passes(request)
        bound = "full" if problem.window_right is None else "causal"
        holding = {
            "score math": needs_score_math(problem),
            f"{bound} {wgmma.only_option(problem)} alone": passes == ["kv"],
            "measured": request.measured,
            "few registers": wgmma.leaves_few_registers(problem),
        }
        fields = wgmma.fields(cls, request, ROWS, holding)
        return tuple(cls(**fields, grad_k="k" in names, grad_v="v" in names) for names in passes)


def _passes(request: Request) -> list[str]:
    together = max(smallest(ROWS, request.problem)) <= wgmma.WIDEST_PAIR
    return portable.kv_passes(request.problem, request.keys, together=together)
