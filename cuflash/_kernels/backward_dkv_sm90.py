"""``backward_dkv_sm90.cu``: Hopper's gradients of k and v for 16 bits."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math
from cuflash._kernels.tables import Row, last_row, smallest


class Chosen(NamedTuple):
    """What a row of the table says."""

    block_m: int
    block_n: int
    num_stages: int
    scores_ahead: bool = False


#: Up to 128 the fastest of benchmarks/sweeps on an H100 SXM; others follow from registers and
#: shared memory. Rows serve dk and dv in one pass up to head size 128, larger ones one of them:
#: registers hold no two results of 192 columns.
ROWS = (
    Row("", (64, 64), Chosen(96, 128, 3), "D104"),
    Row("", (96, 96), Chosen(80, 128, 3), "D104"),
    Row("", (128, 128), Chosen(64, 128, 3), "D104"),
    Row("", (192, 128), Chosen(64, 128, 2)),
    Row("", (192, 192), Chosen(64, 128, 2)),
    Row("", (256, 256), Chosen(48, 128, 2)),
    Row("score math", (64, 64), Chosen(64, 128, 3), "D104"),
    Row("score math", (96, 96), Chosen(64, 128, 3), "D104"),
    Row("score math", (128, 128), Chosen(48, 128, 3), "D104"),
    Row("full slopes alone, measured", (128, 128), Chosen(48, 128, 3, True), "D103"),
    Row("causal slopes alone, measured", (128, 128), Chosen(64, 128, 2), "D103"),
    Row("causal softcap alone, measured", (128, 128), Chosen(64, 128, 2, True), "D103"),
    # Several options take registers: blocks that spill nothing by NVRTC 12.9 and 13.5, not timed.
    Row("crowded", (96, 96), Chosen(48, 128, 3)),
    Row("crowded", (128, 128), Chosen(32, 128, 3)),
    Row("crowded", (192, 128), Chosen(48, 128, 2)),
    Row("crowded", (192, 192), Chosen(48, 128, 2)),
    Row("crowded", (256, 256), Chosen(32, 128, 2)),
)


class Own(NamedTuple):
    """What this kernel alone is told."""

    num_stages: int  # buffers of q and of dout
    scores_ahead: bool  # as of backward_dq_sm90; only where a score is a product
    grad_k: bool
    grad_v: bool

    def check(self) -> None:
        """Raise a ValueError for a pass without a result."""
        if not (self.grad_k or self.grad_v):
            raise ValueError(f"{self.grad_k=}, {self.grad_v=}: nothing to compute")


class BackwardKVSm90Config(KernelConfig):
    """``backward_dkv_sm90.cu``: dk, dv or both in one pass over the queries."""

    kernel = "backward_dkv_sm90"
    params = "BackwardSm90Params"
    computes = "dkv"
    parts = SCORED | {"own": Own}
    tunables = Chosen._fields
    for_sm90 = tensor_maps = True
    owned = "block_n"  # queries are streamed
    streams = wgmma.WIDTHS
    row_warps, other_warps = 0, 4

    def check(self) -> None:
        """Raise a ValueError for warpgroups or buffers that cannot be."""
        wgmma.check_gradient(self)
        if self.dropout and self.block_m > 64:  # KeptBits of score/dropout.cuh
            raise ValueError(f"block_m = {self.block_m} must be at most 64 with dropout")

    @property
    def smem_bytes(self) -> int:
        """Tiles of every kernel that owns keys; a pass for dv alone keeps no tile of v."""
        return wgmma.key_owner_bytes(self, self.block_n if self.grad_k else 8)

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request."""
        reason = wgmma.against_halves(request)
        return reason or portable.against_passes(request.problem, _passes(request))

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its row, for each pass."""
        passes = _passes(request)
        fields = portable.fields(request._replace(copy_bytes=16))
        sizes = smallest(ROWS, request.problem)
        tile = last_row(ROWS, _words(request, len(passes[0]) if passes else 0), sizes).tile
        fields |= {"head_dim": sizes[0], "head_dim_v": sizes[1], **tile._asdict()}
        warps = tile.block_n // 16 + cls.other_warps
        return tuple(
            cls(
                **fields, num_warps=warps, blocks_per_sm=1,
                grad_k="k" in names, grad_v="v" in names,
            )
            for names in passes
        )  # fmt: skip


def _passes(request: Request) -> list[list[str]]:
    together = max(smallest(ROWS, request.problem)) <= wgmma.WIDEST_PAIR
    return portable.kv_passes(request.problem, request.keys, together=together)


def _words(request: Request, results: int) -> set[str]:
    """What holds of a pass for so many of dk and dv, in the words of the table."""
    problem = request.problem
    bound = "full" if problem.window_right is None else "causal"
    holding = {
        "score math": needs_score_math(problem),
        f"{bound} {wgmma.only_option(problem)} alone": results == 2,
        "measured": request.measured,
        "crowded": wgmma.crowds_gradient(problem),
    }
    return {word for word, holds in holding.items() if holds}
