"""When do all gradients of Hopper come from one pass over the scores, and with which tiles?"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

from cuflash._kernels.config import BackwardConvertConfig, BackwardOnePassConfig, BackwardPairConfig
from cuflash._kernels.score_config import needs_score_math
from cuflash._problem.problem import Problem
from cuflash._select import eligibility, portable, sm90


class OnePassTile(NamedTuple):
    """One row of the table of all gradients in one pass: see ``BackwardOnePassConfig``."""

    block_m: int
    block_n: int
    num_stages: int
    keys_in_registers: bool


#: The fastest of benchmarks/sweeps on an H100 SXM. (D101)
TILES: dict[tuple[int, int], OnePassTile] = {
    (64, 64): OnePassTile(128, 128, 2, True),
    (96, 96): OnePassTile(64, 128, 3, False),
    (128, 128): OnePassTile(64, 128, 2, False),
    (192, 128): OnePassTile(64, 64, 2, False),
    (192, 192): OnePassTile(64, 64, 2, False),
    (256, 256): OnePassTile(64, 64, 2, False),
}


def config_of(problem: Problem, *, ordered: bool) -> BackwardOnePassConfig | None:
    """Choose Hopper's kernel of all gradients; None where those of their own serve, that is

    * where a score takes more than a product and bounds: softcap, bias, slopes, a mask, segments,
      dropout, formulas;
    * where q is broadcast, or k and v are along different axes;
    * for packed sequences, of which each would begin with rows of its own;
    * for head sizes that leave columns of the sums of dq empty, or of which registers do not hold
      dk, dv and a part of dq.
    """
    if (
        eligibility.against_gradient(problem)
        or needs_score_math(problem)
        or any(problem.q.summed)
        or problem.k.summed != problem.v.summed
        or problem.cu_seqlens_q is not None
        or (problem.head_dim, problem.head_dim) not in TILES
        or problem.head_dim_v > problem.head_dim
        or not portable._shares_keys(problem, ["k", "v"])
    ):
        return None
    fields = portable._fields(problem, 16, problem.dtype) | sm90.tile_fields(TILES, problem)
    kind = BackwardOnePassConfig if fields["head_dim"] <= 128 else BackwardPairConfig
    rows = kind.cluster_blocks * fields["block_n"]
    return kind(num_warps=rows // 16 + kind.other_warps, ordered=ordered, **fields)


def wins(problem: Problem, config: BackwardOnePassConfig) -> bool:
    """Whether one pass is chosen without being asked for: docs/backward-sm90.md.

    What a device has shown right and faster: plain and causal scores, up to head size 128 windows
    and heads that share keys, too. (D20)
    """
    return (
        (config.head_dim <= 128 or not (config.window_left or any(problem.k.summed)))
        and config.scale_in_exponent
        and config.offset == "value"
        and config.q_lengths == config.kv_lengths == "none"
    )


def convert_config(config: BackwardOnePassConfig) -> BackwardConvertConfig:
    """Choose the kernel that scales and rounds the sums of dq."""
    own = {f.name: getattr(config, f.name) for f in fields(BackwardConvertConfig)}
    panels = -(-config.head_dim // 64)
    return BackwardConvertConfig(**own | {"num_warps": config.block_m // 16 * panels})
