"""``backward_dq_sm90.cu``: Hopper's gradient of q for 16 bits."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math
from cuflash._kernels.tables import Row, last_row, smallest
from cuflash._problem.problem import Problem


class Chosen(NamedTuple):
    """What a row of the table says."""

    block_m: int
    block_n: int
    num_stages: int
    scores_ahead: bool = False


#: The fastest of benchmarks/sweeps on an H100 SXM, but for (192, 128), which follows from shared
#: memory. Three buffers of narrow blocks win over two of wide ones, and over scores ahead.
ROWS = (
    Row("", (64, 64), Chosen(128, 128, 3), "D102"),
    Row("", (96, 96), Chosen(128, 80, 3), "D102"),
    Row("", (128, 128), Chosen(128, 64, 3), "D102"),
    Row("", (192, 128), Chosen(128, 80, 2)),
    Row("", (192, 192), Chosen(128, 48, 3), "D102"),
    Row("", (256, 256), Chosen(128, 32, 3), "D102"),
    # Of slopes and softcap the fastest; of 96 and 192 see docs/backward-sm90.md.
    Row("score math", (96, 96), Chosen(128, 96, 3, True)),
    Row("score math", (128, 128), Chosen(128, 80, 3, True), "D102"),
    Row("score math", (192, 192), Chosen(128, 64, 2)),
    Row("score math", (256, 256), Chosen(128, 48, 2), "D102"),
    # Under a causal bound the scores ahead of the last block are multiplied in vain, and there are
    # none where a score waits for every product.
    Row("score math, none ahead", (128, 128), Chosen(128, 64, 3), "D26"),
    # Several options take registers, dropout, a bias or a formula among them.
    Row("crowded", (64, 64), Chosen(128, 96, 3)),
    Row("crowded", (128, 128), Chosen(128, 80, 3)),
)


class Own(NamedTuple):
    """What this kernel alone is told."""

    num_stages: int  # buffers of k and of v
    scores_ahead: bool  # are the next scores multiplied while ds of this block is computed?


class BackwardQSm90Config(KernelConfig):
    """``backward_dq_sm90.cu``: warpgroups of 64 query rows each, and one that loads."""

    kernel = "backward_dq_sm90"
    params = "BackwardSm90Params"
    computes = "dq"
    parts = SCORED | {"own": Own}
    tunables = Chosen._fields
    for_sm90 = tensor_maps = True
    streams = wgmma.WIDTHS
    row_warps, other_warps = 0, 4

    def check(self) -> None:
        """Raise a ValueError for warpgroups or buffers that cannot be."""
        wgmma.check_gradient(self)
        if self.scores_ahead and self.num_stages < 3:  # that kernel would wait for itself (D28)
            raise ValueError(
                f"{self.num_stages=} must be at least 3 with scores ahead: the next block is "
                "waited for before the last one's buffer is released"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, rings of k and v, and a KiB of barriers."""
        rows = self.block_m + self.num_stages * self.block_n
        return wgmma.panel_bytes(self, rows, self.head_dim, self.head_dim_v) + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        broadcast = any(request.problem.q.summed)
        return wgmma.against_halves(request) or wgmma.first_reason(
            (broadcast, "q is broadcast, and its gradient a sum over batch entries")
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its row."""
        fields = portable.fields(request._replace(copy_bytes=16))
        sizes = smallest(ROWS, request.problem)
        row = last_row(ROWS, _words(request.problem), sizes)
        fields |= {"head_dim": sizes[0], "head_dim_v": sizes[1], **row.tile._asdict()}
        warps = row.tile.block_m // 16 + cls.other_warps
        return (cls(**fields, num_warps=warps, blocks_per_sm=1),)


def _words(problem: Problem) -> set[str]:
    """What holds of a problem, in the words of the table."""
    waiting = (
        problem.bias, problem.formulas, problem.softcap, problem.mask, problem.window_right
    )  # fmt: skip
    holding = {
        "score math": needs_score_math(problem),
        "none ahead": any(option is not None for option in waiting),
        "crowded": wgmma.crowds_gradient(problem),
    }
    return {word for word, holds in holding.items() if holds}
