"""Which of Hopper's kernels for 16 bits serve a problem, and with which tiles?

Tables are keyed by the padded head sizes (of q and k, of v), smallest first. Measured on an H100
SXM: docs/forward-sm90.md, docs/backward-sm90.md, and benchmarks/sweeps since.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cuflash._kernels.config import BackwardKVSm90Config, BackwardQSm90Config, ForwardSm90Config
from cuflash._kernels.score_config import needs_score_math
from cuflash._problem.problem import Problem
from cuflash._select import eligibility, portable

#: What a call is planned for where no device is at hand: an H100 SXM.
_MULTIPROCESSORS = 132


class ForwardTile(NamedTuple):
    """One row of the tables of the forward: see ``ForwardSm90Config``."""

    block_m: int
    block_n: int
    num_stages: int
    num_q_stages: int
    overlap_quarters: int


ForwardTiles = dict[tuple[int, int], ForwardTile]
_FORWARD: ForwardTiles = {
    (64, 64): ForwardTile(192, 128, 4, 2, 0),  # D100
    (96, 96): ForwardTile(128, 128, 2, 2, 4),  # D17
    (128, 128): ForwardTile(128, 128, 2, 2, 4),  # D96
    (192, 128): ForwardTile(128, 128, 2, 1, 2),
    (192, 192): ForwardTile(128, 112, 2, 1, 2),
    (256, 256): ForwardTile(128, 80, 2, 1, 2),
}
# Where 192 rows leave some multiprocessors much more to do than others, smaller tiles are done
# sooner (H100 SXM, 2026-11-24: D15); a score that is multiplied by its scale
# before the exponential takes registers that 192 rows do not leave.
_FORWARD_FEW: ForwardTiles = {(64, 64): ForwardTile(128, 128, 4, 2, 1)}
_GAIN_OF_192_ROWS = 1.15
# Lengths from arrays are bounds to hold in registers, of which the widest tile leaves none.
_FORWARD_LENGTHS: ForwardTiles = {(256, 256): ForwardTile(128, 64, 2, 1, 2)}
# A narrow window is over after a few blocks: narrow blocks waste less at its ends, and three
# warpgroups hide more of where a tile ends and the next begins. (D16)
_FORWARD_NARROW: ForwardTiles = {(128, 128): ForwardTile(192, 64, 4, 2, 1)}
_FORWARD_NARROW_FEW: ForwardTiles = {(128, 128): ForwardTile(128, 64, 5, 2, 1)}
_NARROW = 4096  # keys that one query sees
# With softcap, bias, slopes, mask, segments, dropout or formulas: look-ups branch, which nothing
# may do while products are in flight, and all of these take registers.
_FORWARD_GENERAL: ForwardTiles = {
    (64, 64): ForwardTile(128, 128, 4, 2, 0),
    (96, 96): ForwardTile(128, 128, 2, 2, 0),
    (128, 128): ForwardTile(128, 128, 2, 2, 0),
    (192, 128): ForwardTile(128, 128, 2, 1, 0),
    (192, 192): ForwardTile(128, 96, 2, 1, 0),
    (256, 256): ForwardTile(128, 64, 2, 1, 0),
}
# A softcap alone leaves registers for more, by benchmarks/sweeps; with many rows for 192 of them.
# D102.
_FORWARD_SOFTCAP: ForwardTiles = {(128, 128): ForwardTile(128, 128, 2, 2, 4)}
_FORWARD_SOFTCAP_MANY: ForwardTiles = {(64, 64): ForwardTile(192, 128, 4, 2, 0)}
# A window bounded on the left besides.
_FORWARD_GENERAL_WINDOW: ForwardTiles = {
    (192, 128): ForwardTile(128, 112, 2, 1, 0),
    (192, 192): ForwardTile(128, 64, 2, 1, 0),
    (256, 256): ForwardTile(128, 48, 2, 1, 0),
}
# Packed sequences besides: where they begin takes registers, too.
_FORWARD_GENERAL_PACKED: ForwardTiles = {(256, 256): ForwardTile(128, 48, 2, 1, 0)}
# Segments besides, whose ids are looked up for each key, or a window and packing or a bias.
_FORWARD_GENERAL_CROWDED: ForwardTiles = {
    (192, 128): ForwardTile(128, 64, 2, 1, 0),
    (192, 192): ForwardTile(128, 48, 2, 1, 0),
}
# A bias: each of its values waits in a register for the product that it is added to. The widest
# blocks that spill nothing by NVRTC 12.9 and 13.5; one at 128 was timed, D10.
_FORWARD_GENERAL_BIAS: ForwardTiles = {
    (64, 64): ForwardTile(128, 96, 4, 2, 0),
    (96, 96): ForwardTile(128, 96, 2, 2, 0),
    (128, 128): ForwardTile(128, 96, 2, 2, 0),
    (192, 128): ForwardTile(128, 96, 2, 1, 0),
    (192, 192): ForwardTile(128, 64, 2, 1, 0),
    (256, 256): ForwardTile(128, 48, 2, 1, 0),
}


class GradientTile(NamedTuple):
    """One row of the tables of gradients: see ``BackwardSm90Config``."""

    block_m: int
    block_n: int
    num_stages: int
    scores_ahead: bool = False


GradientTiles = dict[tuple[int, int], GradientTile]
# The fastest of benchmarks/sweeps, but for (192, 128), which follows from shared memory. Three
# buffers of narrow blocks win over two of wide ones, and over scores ahead. (D102)
_BACKWARD_Q: GradientTiles = {
    (64, 64): GradientTile(128, 128, 3),
    (96, 96): GradientTile(128, 80, 3),
    (128, 128): GradientTile(128, 64, 3),
    (192, 128): GradientTile(128, 80, 2),
    (192, 192): GradientTile(128, 48, 3),
    (256, 256): GradientTile(128, 32, 3),
}
# Where a score takes more than a multiplication: of slopes and softcap the fastest of
# benchmarks/sweeps, of 96 and 192 those of docs/backward-sm90.md.
_BACKWARD_Q_GENERAL: GradientTiles = {
    (96, 96): GradientTile(128, 96, 3, True),
    (128, 128): GradientTile(128, 80, 3, True),
    (192, 192): GradientTile(128, 64, 2),
    (256, 256): GradientTile(128, 48, 2),
}
# Under a causal bound the scores ahead of the last block are multiplied in vain, and none are where
# a score waits for every product. (D26)
_BACKWARD_Q_NOT_AHEAD: GradientTiles = {(128, 128): GradientTile(128, 64, 3)}
# Where several options take registers, dropout, a bias or a formula among them.
_BACKWARD_Q_CROWDED: GradientTiles = {
    (64, 64): GradientTile(128, 96, 3),
    (128, 128): GradientTile(128, 80, 3),
}
# Up to 128 the fastest of benchmarks/sweeps; others follow from registers and shared memory. Rows
# serve dk and dv in one pass up to head size 128, larger ones one of them: registers hold no two
# results of 192 columns. (D104)
_BACKWARD_KV: GradientTiles = {
    (64, 64): GradientTile(96, 128, 3),
    (96, 96): GradientTile(80, 128, 3),
    (128, 128): GradientTile(64, 128, 3),
    (192, 128): GradientTile(64, 128, 2),
    (192, 192): GradientTile(64, 128, 2),
    (256, 256): GradientTile(48, 128, 2),
}
# Where a score takes more than a multiplication.
_BACKWARD_KV_GENERAL: GradientTiles = {
    (64, 64): GradientTile(64, 128, 3),
    (96, 96): GradientTile(64, 128, 3),
    (128, 128): GradientTile(48, 128, 3),
}
# Where several options do, as above: blocks that spill nothing by NVRTC 12.9 and 13.5, not timed.
_BACKWARD_KV_CROWDED: GradientTiles = {
    (96, 96): GradientTile(48, 128, 3),
    (128, 128): GradientTile(32, 128, 3),
    (192, 128): GradientTile(48, 128, 2),
    (192, 192): GradientTile(48, 128, 2),
    (256, 256): GradientTile(32, 128, 2),
}


def forward_config(
    problem: Problem, multiprocessors: int = _MULTIPROCESSORS
) -> ForwardSm90Config | None:
    """Choose the forward kernel of Hopper; None where the portable one serves.

    For 0 multiprocessors that of a call with rows enough for any number of them.
    """
    if eligibility.against_forward(problem):
        return None
    fields = portable._fields(problem, 16, problem.dtype) | portable._sink_field(problem)
    score = fields["score"]
    tiles = _FORWARD
    if needs_score_math(problem):
        tiles = _FORWARD_GENERAL
        if _has_softcap_alone(problem):
            tiles = tiles | _FORWARD_SOFTCAP
            if not _has_few_rows(problem, multiprocessors):
                tiles = tiles | _FORWARD_SOFTCAP_MANY
        packed, biased = score.cu_seqlens != "none", score.bias != "none"
        if packed:
            tiles = tiles | _FORWARD_GENERAL_PACKED
        if score.window_left:
            tiles = tiles | _FORWARD_GENERAL_WINDOW
        if biased:
            tiles = tiles | _FORWARD_GENERAL_BIAS
        if score.segment_ids != "none" or (score.window_left and (packed or biased)):
            tiles = tiles | _FORWARD_GENERAL_CROWDED
    else:
        lengths = not score.q_lengths == score.kv_lengths == "none"
        packed = score.cu_seqlens != "none"
        if lengths or packed:
            tiles = tiles | _FORWARD_LENGTHS
        narrow = problem.window_keys is not None and problem.window_keys <= _NARROW
        if fields["sink"] != "none" and (lengths or problem.offset is not None):
            narrow = False  # three warpgroups have no registers for a sink and bounds from arrays
        if narrow:
            tiles = tiles | _FORWARD_NARROW
        scaled = not score.scale_in_exponent
        if scaled or _has_few_rows(problem, multiprocessors):
            tiles = tiles | _FORWARD_FEW
        if scaled or _count(problem, 128) <= multiprocessors:
            if narrow:
                tiles = tiles | _FORWARD_NARROW_FEW
        elif packed and fields["sink"] == "none":  # many of them are short; with a sink as above
            tiles = tiles | _FORWARD_NARROW
    fields |= tile_fields(tiles, problem)
    return ForwardSm90Config(num_warps=fields["block_m"] // 16 + 4, **fields)


def _count(problem: Problem, block_m: int) -> int:
    """How many tiles of so many rows there are."""
    return math.prod(problem.batch) * -(-problem.seqlen_q // block_m)


def _has_few_rows(problem: Problem, multiprocessors: int) -> bool:
    """Whether tiles of 192 rows take longer than those of 128.

    The busiest multiprocessor decides. Under a causal bound the last tile has the most keys: the
    multiprocessor that has no other is the busiest.
    """

    def most(block_m: int) -> int:  # rows of one multiprocessor
        return -(-_count(problem, block_m) // multiprocessors) * block_m

    if multiprocessors == 0:
        return False
    alone = problem.window_right is not None and _count(problem, 192) <= multiprocessors
    return alone or most(192) > _GAIN_OF_192_ROWS * most(128)


def tile_fields(
    tiles: ForwardTiles | GradientTiles | dict[tuple[int, int], Any], problem: Problem
) -> dict[str, Any]:
    """The fields of the smallest row that holds the head sizes. (D12)"""
    (head_dim, head_dim_v), tile = next(
        (key, tile)
        for key, tile in tiles.items()
        if problem.head_dim <= key[0] and problem.head_dim_v <= key[1]
    )
    widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    return {**widths, **tile._asdict(), "blocks_per_sm": 1, "column_parts": 1}


def backward_q_config(problem: Problem) -> BackwardQSm90Config | None:
    """Choose Hopper's kernel of dq; None where the portable one serves.

    So it does where q is broadcast, too: its gradient is a sum over batch entries.
    """
    if eligibility.against_gradient(problem) or any(problem.q.summed):
        return None
    tiles = _BACKWARD_Q
    if needs_score_math(problem):
        tiles = tiles | _BACKWARD_Q_GENERAL
        waiting = (problem.bias, problem.formulas, problem.softcap, problem.mask)
        if problem.window_right is not None or any(x is not None for x in waiting):
            tiles = tiles | _BACKWARD_Q_NOT_AHEAD
    if eligibility.crowds_gradient(problem):
        tiles = tiles | _BACKWARD_Q_CROWDED
    fields = portable._fields(problem, 16, problem.dtype) | tile_fields(tiles, problem)
    return BackwardQSm90Config(num_warps=fields["block_m"] // 16 + 4, **fields)


def backward_kv_configs(
    problem: Problem, wanted: frozenset[str]
) -> tuple[BackwardKVSm90Config, ...] | None:
    """Choose Hopper's passes for dk, dv or both; None where the portable ones serve.

    So they do where batch entries that are summed into one result have not the same k and v, too.
    """
    if eligibility.against_gradient(problem):
        return None
    tiles = _BACKWARD_KV
    if needs_score_math(problem):
        tiles = tiles | _BACKWARD_KV_GENERAL
    if eligibility.crowds_gradient(problem):
        tiles = tiles | _BACKWARD_KV_CROWDED
    fields = portable._fields(problem, 16, problem.dtype) | tile_fields(tiles, problem)
    widest = max(fields["head_dim"], fields["head_dim_v"])
    passes = portable._kv_passes(problem, wanted, together=widest <= portable._HALF.widest_pair)
    if not all(portable._shares_keys(problem, names) for names in passes):
        return None
    return tuple(
        BackwardKVSm90Config(
            num_warps=fields["block_n"] // 16 + 4,
            grad_k="k" in names,
            grad_v="v" in names,
            **fields,
        )
        for names in passes
    )


def _has_softcap_alone(problem: Problem) -> bool:
    """Whether nothing but a softcap and a bound on the right takes registers."""
    scored = (problem.bias, problem.alibi_slopes, problem.formulas, problem.mask, problem.sink)
    ids = (problem.segment_ids_q, problem.cu_seqlens_q)
    bounds = (problem.window_left, problem.offset, problem.q_lengths, problem.kv_lengths)
    alone = all(other is None for other in (*scored, *ids, *bounds))
    return alone and problem.softcap is not None and problem.dropout == 0
