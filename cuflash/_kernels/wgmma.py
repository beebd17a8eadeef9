"""What do Hopper's kernels share? Warpgroups of 64 rows, panels of 64 columns, eligibility.

``against...`` returns why a kernel cannot serve a request, or an empty text. Layouts and addresses
are not checked here: whether tensor maps can describe them is known at launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from cuflash._kernels import portable
from cuflash._kernels.config import HEAD_DIMS, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import present, register_pressure
from cuflash._kernels.tables import Row, smallest, tile_of
from cuflash._problem.problem import HALVES, Problem

#: Columns of a block of scores with a product in ``kernels_cu/ptx/wgmma_products.cuh``.
WIDTHS = (32, 48, 64, 80, 96, 112, 128)
_KIB = 1024
#: Largest padded head size with registers for dk and dv in one pass.
WIDEST_PAIR = 128


def first_reason(*reasons: tuple[bool, str]) -> str:
    """The text of the first reason that applies; empty where none does."""
    return next((text for applies, text in reasons if applies), "")


def why_not(request: Request) -> str:
    """Why no kernel for Hopper runs on the device; empty where one does."""
    return first_reason(
        (request.capability != 90, f"sm_{request.capability} has no wgmma, which only sm_90 has"),
        (not request.tensor_maps, "the driver cannot encode tensor maps"),
    )


def why_not_halves(request: Request) -> str:
    """Why no 16-bit kernel for Hopper serves a request; empty where one may."""
    problem = request.problem
    return why_not(request) or first_reason(
        (
            problem.dtype not in HALVES,
            f"Hopper's kernels multiply 16-bit elements, not {problem.dtype}",
        ),
        (widest(problem) > HEAD_DIMS[-1], f"no tile is wider than {HEAD_DIMS[-1]}"),
        (not problem.seqlen_k, "there are no keys, and a tensor map needs at least one row"),
    )


def why_not_broadcast(request: Request) -> str:
    """Why no kernel for Hopper computes dq for a request; empty where one may."""
    broadcast = any(request.problem.q.summed)
    return "q is broadcast: its gradient is a sum over batch entries" if broadcast else ""


def leaves_tiles_empty(problem: Problem) -> str:
    """Why no 16-bit kernel for Hopper is chosen by default, though it could serve; or empty."""
    short = portable.is_short(problem) and not problem.merges_partial
    return (
        "so few queries and keys leave the tiles of Hopper's kernels mostly empty" if short else ""
    )


def widest(problem: Problem) -> int:
    """The larger head size."""
    return max(problem.head_dim, problem.head_dim_v)


def leaves_few_registers(problem: Problem) -> bool:
    """Do options need registers that only smaller tiles of a gradient leave?"""
    beside = sum(x is not None for x in (problem.bias, problem.formulas))
    return (problem.dropout > 0 or beside > 0) and register_pressure(problem) + beside > 2


def only_option(problem: Problem) -> str:
    """``softcap`` or ``slopes`` where that is the only option beside a causal bound; or empty."""
    others = (
        problem.formulas, problem.cu_seqlens_q, problem.window_left, problem.offset,
        problem.q_lengths, problem.kv_lengths,
    )  # fmt: skip
    options = present(problem, "cap", "add", "see", "weight")
    if len(options) != 1 or any(other is not None for other in others):
        return ""
    return {"softcap": "softcap", "alibi_slopes": "slopes"}.get(options.pop(), "")


class WarpgroupsConfig(KernelConfig):
    """A kernel for 8 or 16 bits: two or three warpgroups own 64 rows each, other warps load."""

    for_sm90 = tensor_maps = True
    params = "BackwardSm90Params"
    streams: ClassVar[Sequence[int]] = WIDTHS
    row_warps, other_warps = 0, 4

    def check(self) -> None:
        name, rows, blocks = self.owned, self.own_rows, self.cluster_blocks
        if rows not in (128, 192):
            raise ValueError(
                f"{name} = {rows // blocks} must be {128 // blocks} or {192 // blocks}: two or "
                "three warpgroups of 64 rows"
                + (f" in {blocks} thread blocks" if blocks > 1 else "")
            )
        warps = self.warps_for(rows // blocks)
        if warps > 16:
            raise ValueError(
                f"{name} = {rows} and {self.other_warps} other warps: registers suffice for 16 "
                "warps"
            )
        if warps != self.num_warps:
            raise ValueError(f"{name} = {rows} needs {warps} warps, got num_warps={self.num_warps}")
        if self.num_stages < 2:  # a buffer is released when the next one is in use
            raise ValueError(f"{self.num_stages=} must be at least 2")


class Ahead(NamedTuple):
    """Fields of a kernel for dq, or for dk and dv."""

    num_stages: int  # buffers of each streamed operand
    #: Are scores of the next block multiplied while ds of this block is computed? Ignored unless
    #: ``Score::is_product``.
    scores_ahead: bool


def fields(
    kernel: type[KernelConfig],
    request: Request,
    rows: Sequence[Row],
    holding: Mapping[str, bool] | None = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """All fields but those of one kernel alone; head sizes, tile and warps come from ``rows``."""
    sizes = smallest(rows, request.problem)
    values = tile_of(rows, holding or {}, sizes)
    tile = dict(zip(names or kernel.tunables, values, strict=True))
    found = portable.fields(kernel, request._replace(copy_bytes=16))
    found |= {"head_dim": sizes[0], "head_dim_v": sizes[1], "blocks_per_sm": 1, **tile}
    return found | {"num_warps": kernel.warps_for(tile[kernel.owned])}


def panel_bytes(config: KernelConfig, rows: int, *head_dims: int) -> int:
    """Bytes of shared memory of tiles in panels of 128 bytes, one tile for each head size."""
    return 128 * rows * sum(-(-config.element_bytes * head_dim // 128) for head_dim in head_dims)


def key_owner_bytes(config: KernelConfig, *kept_v: int) -> int:
    """Bytes of tiles of k and v, rings of q, dout, lse and delta, and whole KiB of barriers.

    ``kept_v``: rows of the tile of v if they are not ``block_n``.
    """
    (rows_v,) = kept_v or (config.block_n,)
    kept = panel_bytes(config, config.block_n, config.head_dim)
    kept += panel_bytes(config, rows_v, config.head_dim_v)
    streamed = panel_bytes(config, config.block_m, config.head_dim, config.head_dim_v)
    rest = config.num_stages * (8 * config.block_m + 16) + 16
    return int(kept + config.num_stages * streamed + -(-rest // _KIB) * _KIB)
