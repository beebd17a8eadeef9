"""What do both kernels of all gradients share? Hopper computes dq, dk and dv in one pass."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math
from cuflash._kernels.tables import Row, smallest

#: The fastest of benchmarks/sweeps on an H100 SXM; up to 128 of backward_sm90, else of
#: backward_pair_sm90.
#: Of each row block_m, block_n, num_stages, keys_in_registers.
ROWS = (
    Row("", (32, 32), (128, 128, 2, True), "D143"),
    Row("", (64, 64), (128, 128, 2, True), "D101"),
    Row("", (96, 96), (64, 128, 3, False), "D101"),
    Row("", (128, 128), (64, 128, 2, False), "D101"),
    Row("", (192, 128), (64, 64, 2, False), "D101"),
    Row("", (192, 192), (64, 64, 2, False), "D101"),
    Row("", (256, 256), (64, 64, 2, False), "D101"),
)
WIDEST_ALONE = 128  # padded head size that one thread block holds the results of


class Own(NamedTuple):
    """What these kernels alone are told."""

    num_stages: int  # buffers of q and of dout
    keys_in_registers: bool  # are k and v of a tile?
    deterministic: bool  # do tiles add one after the other?
    split_queries: bool = False  # are the queries of a tile dealt out to several thread blocks?
    split_rows: bool = False  # even those of one batch entry?


class AllGradientsConfig(wgmma.WarpgroupsConfig):
    """A kernel of dq, dk and dv: warps that load and write, and a warpgroup that multiplies dq."""

    computes = "dqkv"
    parts = SCORED | {"own": Own}
    tunables = ("block_m", "block_n", "num_stages", "keys_in_registers")
    owned = "block_n"  # queries are streamed
    other_warps = 8

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request.

        Head sizes are refused where registers do not hold dk, dv and a part of dq.
        """
        problem = request.problem
        reason = wgmma.against_halves(request) or wgmma.against_broadcast(request)
        reason = reason or wgmma.first_reason(
            (needs_score_math(problem), "a score takes more than a product and bounds"),
            (problem.k.summed != problem.v.summed, "k and v are broadcast along different axes"),
            (
                problem.cu_seqlens_q is not None,
                "each packed sequence would begin with rows of its own",
            ),
            (problem.head_dim_v > problem.head_dim, "registers hold no wider results"),
            (not portable.shares_keys(problem, "kv"), "entries of one result have other keys"),
        )
        pair = cls.cluster_blocks == 2
        if not reason and pair != (smallest(ROWS, problem)[0] > WIDEST_ALONE):
            return "the other kernel of all gradients is for this head size"
        return reason

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        return (cls(**wgmma.fields(cls, request, ROWS), deterministic=request.deterministic),)


def wins(request: Request, config: KernelConfig) -> bool:
    """Whether one pass is chosen without being asked for: docs/backward-sm90.md.

    What a device has shown right and faster: plain and causal scores, up to head size 128 windows
    and for heads that share keys. (D20)
    """
    return bool(
        (config.head_dim <= 128 or not (config.window_left or any(request.problem.k.summed)))
        and config.scale_in_exponent
        and config.offset == "value"
        and config.q_lengths == config.kv_lengths == "none"
    )
