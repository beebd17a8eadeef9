"""What do both kernels of all gradients share? Hopper computes dq, dk and dv in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math
from cuflash._kernels.tables import Row, smallest


class Chosen(NamedTuple):
    """What a row of the table says."""

    block_m: int
    block_n: int
    num_stages: int
    keys_in_registers: bool


#: The fastest of benchmarks/sweeps on an H100 SXM; up to 128 of backward_sm90, else of
#: backward_pair_sm90.
ROWS = (
    Row("", (64, 64), Chosen(128, 128, 2, True), "D101"),
    Row("", (96, 96), Chosen(64, 128, 3, False), "D101"),
    Row("", (128, 128), Chosen(64, 128, 2, False), "D101"),
    Row("", (192, 128), Chosen(64, 64, 2, False), "D101"),
    Row("", (192, 192), Chosen(64, 64, 2, False), "D101"),
    Row("", (256, 256), Chosen(64, 64, 2, False), "D101"),
)
WIDEST_ALONE = 128  # padded head size that one thread block holds the results of


class Own(NamedTuple):
    """What these kernels alone are told."""

    num_stages: int  # buffers of q and of dout
    keys_in_registers: bool  # are k and v of a tile?
    ordered: bool  # do tiles add one after the other?


def against(request: Request, *, pair: bool) -> str:
    """Why one of both kernels does not serve a request.

    Head sizes are refused that leave columns of the sums of dq empty, or where registers do not
    hold dk, dv and a part of dq.
    """
    problem = request.problem
    reason = wgmma.against_halves(request) or wgmma.first_reason(
        (needs_score_math(problem), "a score takes more than a product and bounds"),
        (any(problem.q.summed), "q is broadcast, and its gradient a sum over batch entries"),
        (problem.k.summed != problem.v.summed, "k and v are broadcast along different axes"),
        (problem.cu_seqlens_q is not None, "each packed sequence would begin with rows of its own"),
        (
            problem.head_dim not in {row.head_dims[0] for row in ROWS},
            "columns of the sums of dq would be empty",
        ),
        (problem.head_dim_v > problem.head_dim, "registers hold no wider results"),
        (not portable.shares_keys(problem, "kv"), "entries of one result have other keys"),
    )
    if not reason and pair != (smallest(ROWS, problem)[0] > WIDEST_ALONE):
        return "the other kernel of all gradients is for this head size"
    return reason


def fields(request: Request, kernel: type[KernelConfig]) -> dict[str, Any]:
    """All fields of a configuration."""
    sizes = smallest(ROWS, request.problem)
    tile = next(row.tile for row in ROWS if row.head_dims == sizes)
    warps = kernel.cluster_blocks * tile.block_n // 16 + kernel.other_warps
    return portable.fields(request._replace(copy_bytes=16)) | {
        "head_dim": sizes[0],
        "head_dim_v": sizes[1],
        **tile._asdict(),
        "num_warps": warps,
        "blocks_per_sm": 1,
        "ordered": request.deterministic,
    }


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
