"""``backward_dq_sm90.cu``: dq of 16-bit elements on Hopper."""

from __future__ import annotations

from typing import Self

import numpy as np

from cuflash._kernels import wgmma
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math, register_pressure
from cuflash._kernels.tables import Row
from cuflash._problem.problem import Problem

#: The fastest tiles of benchmarks/sweeps on an H100 SXM, except (192, 128), which follows from
#: shared memory. Three buffers of narrow blocks beat two of wide blocks, and beat scores ahead.
#: A tile: block_m, block_n, num_stages, scores_ahead.
ROWS = (
    Row("", (64, 64), (128, 128, 3, False), "D102"),
    Row("", (96, 96), (128, 80, 3, False), "D102"),
    Row("", (128, 128), (128, 64, 3, False), "D102"),
    Row("", (192, 128), (128, 80, 2, False)),
    Row("", (192, 192), (128, 48, 3, False), "D102"),
    Row("", (256, 256), (128, 32, 3, False), "D102"),
    # The fastest for slopes and softcap; about 96 and 192 see docs/backward-sm90.md.
    Row("score math", (96, 96), (128, 96, 3, True)),
    Row("score math", (128, 128), (128, 80, 3, True), "D102"),
    Row("score math", (192, 192), (128, 64, 2, False)),
    Row("score math", (256, 256), (128, 48, 2, False), "D102"),
    # Under a causal bound the scores ahead of the last block are multiplied in vain. With a bias, a
    # formula, a softcap or a mask a score waits for every product, and there are no scores ahead.
    Row("score math, no scores ahead", (128, 128), (128, 64, 3, False), "D26"),
    # Several options take registers, with dropout, a bias or a formula among them, and segment ids
    # take the most: tiles without spills by NVRTC 12.9 and 13.5, not timed.
    Row("few registers", (64, 64), (128, 96, 3, False)),
    Row("few registers", (96, 96), (128, 64, 3, False)),
    Row("few registers", (128, 128), (128, 80, 3, False)),
    Row("few registers", (192, 128), (128, 48, 2, False)),
    Row("segments, left bound", (192, 128), (128, 64, 2, False)),
    Row("few registers, segments", (64, 64), (128, 64, 3, False)),
    Row("few registers, segments", (128, 128), (128, 64, 3, False)),
    Row("few registers, segments", (192, 128), (128, 64, 2, False)),
)


class BackwardQSm90Config(wgmma.WarpgroupsConfig):
    """``backward_dq_sm90.cu``: warpgroups that own 64 queries each, and one that loads."""

    kernel = "backward_dq_sm90"
    computes = "dq"
    parts = SCORED | {"own": wgmma.Ahead}
    tunables = ("block_m", "block_n", "num_stages", "scores_ahead")

    def check(self) -> None:
        super().check()
        if self.scores_ahead and self.num_stages < 3:  # the kernel would deadlock (D28)
            raise ValueError(
                f"{self.num_stages=} must be at least 3 with scores_ahead: the kernel waits for "
                "the next block before it releases the buffer of the previous one"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, rings of k and v, and a KiB of barriers."""
        rows = self.block_m + self.num_stages * self.block_n
        return wgmma.panel_bytes(self, rows, self.head_dim, self.head_dim_v) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        return wgmma.why_not_halves(request) or wgmma.why_not_broadcast(request)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        problem = request.problem
        waiting = (
            problem.bias, problem.formulas, problem.softcap, problem.mask, problem.window_right
        )  # fmt: skip
        holding = {
            "score math": needs_score_math(problem),
            "no scores ahead": any(option is not None for option in waiting),
            "few registers": wgmma.leaves_few_registers(problem) or _reads_wide_bias(problem),
            "segments": problem.segment_ids_q is not None,
            "left bound": problem.window_left is not None,
        }
        return (cls(**wgmma.fields(cls, request, ROWS, holding)),)


def _reads_wide_bias(problem: Problem) -> bool:
    """Is there a float64 bias beside another option that takes registers?"""
    bias = problem.bias
    return bias is not None and bias.dtype == np.float64 and register_pressure(problem) > 0
