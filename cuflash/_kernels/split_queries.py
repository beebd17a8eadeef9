"""How many parts of queries and sums of dq has a one-pass backward? Shapes and device decide.

A tile of keys walks all queries of all heads that share the keys. Where there are fewer tiles than
SMs, several thread blocks share a tile: each takes some of the heads or some of the blocks of
queries, and ``backward_combine.cu`` adds up their dk and dv. Tiles of keys add to the dq of a block
of queries one after the other. Where they are many, dq has several sums, which
``backward_convert.cu`` adds up.
"""

from __future__ import annotations

import math
from typing import Any

from cuflash._problem.problem import Problem

#: Times, in units of the time of one block of queries. (D141)
_OF_A_TILE = 1.0  # a tile, beside its blocks
_OF_COMBINING = 3.0  # the kernel that adds up parts, beside the parts
_OF_A_PART = 0.03  # one part of a tile of 64 + 64 columns in that kernel
_CLOSE = 1.03  # estimates within this factor count as equal: fewer parts take less memory
_MOST_SUMS = 64  # most sums of dq
#: Most tiles of keys where the one that adds last to a block of queries stores its dq, full and
#: causal, by padded head size. (D205)
_MOST_TILES_TO_FINISH = {32: (1, 2), 64: (16, 8), 96: (4, 8), 128: (4, 8)}


def entries_that_share(problem: Problem) -> int:
    """Batch entries that share keys: heads of a group, broadcast axes."""
    return math.prod(e for e, s in zip(problem.batch, problem.k.summed, strict=True) if s)


def may_split_rows(config: Any) -> bool:
    """Whether there is a register for the start of a part of one entry's queries. (D145)"""
    arrays = (config.bias, config.alibi_slopes, config.segment_ids)
    taken = config.softcap or config.mask or config.dropout or config.score_mod or config.mask_mod
    return config.head_dim <= 96 or not (taken or any(dtype != "none" for dtype in arrays))


def parts_of(problem: Problem, config: Any, num_sms: int) -> int:
    """Parts of the queries of each tile of keys: the fewest with the least estimated time."""
    if not num_sms or config.cluster_blocks > 1:  # not measured for clusters
        return 1
    side_by_side = num_sms // int(config.cluster_blocks)  # tiles that run at the same time
    shared = entries_that_share(problem)
    owners = math.prod(problem.batch) // shared
    tiles = -(-problem.seqlen_k // int(config.own_rows))
    blocks = -(-problem.seqlen_q // int(config.block_m))
    if problem.window_keys is not None:  # the blocks that see a tile of keys
        blocks = min(blocks, -(-(problem.window_keys + config.own_rows) // int(config.block_m)))
    whole = problem.cu_seqlens_q is not None or problem.window_keys is not None
    rows = 1 if whole or not may_split_rows(config) else blocks  # most parts of one entry
    candidates = _divisors(shared)
    candidates += [shared * 2**i for i in range(1, rows.bit_length())]
    width = int(config.head_dim + config.head_dim_v) / 128

    def takes(parts: int) -> float:
        own, at_all = shared * blocks / parts + _OF_A_TILE, owners * tiles * parts
        added = (_OF_COMBINING + _OF_A_PART * at_all * width) if parts > 1 else 0.0
        if problem.window_right is None:
            return -(-at_all // side_by_side) * own + added
        # Under a causal bound the first keys are seen by twice as many queries as the average. In
        # each further entry, tiles that run at the same time wait for the tile of these keys.
        further = max(1 - parts / shared, 0.0)
        waiting = min(side_by_side / at_all, 1.0) * further
        return max(own, at_all / side_by_side * own / 2 * (1 + waiting)) + added

    longest = _CLOSE * min(map(takes, candidates))
    return next(parts for parts in candidates if takes(parts) <= longest)


def finishes_dq(problem: Problem, config: Any, num_sms: int, share: int = 1) -> bool:
    """Whether the tile of keys that adds last to a block of queries stores its dq.

    It takes longer over its blocks than other tiles, and saves the kernel that reads the sums: this
    pays where it is one of few. With segments it is not known which tile that is, and with the
    other options that are excluded registers spill. Where tiles are fewer than ``1 / share`` of
    these few, it takes less time than adding in any order. (D205)
    """
    full, causal = _MOST_TILES_TO_FINISH.get(int(config.head_dim), (0, 0))
    tiles = -(-problem.seqlen_k // int(config.own_rows))
    arrays = (problem.q_lengths, problem.kv_lengths, problem.offset)
    alone = problem.window_right is None or any(array is not None for array in arrays)
    lacks_registers = problem.window_left is not None and (alone or config.head_dim == 32)
    return bool(
        config.deterministic
        and config.cluster_blocks == 1
        and share * tiles <= (full if problem.window_right is None else causal)
        and sums_of_dq(problem, config, num_sms) == 1
        and config.out_dtype == config.dtype
        and problem.segment_ids_q is None
        and problem.cu_seqlens_q is None
        and not lacks_registers
    )


def _divisors(number: int) -> list[int]:
    """All divisors, from the least; there may be millions of entries that share keys."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def sums_of_dq(problem: Problem, config: Any, num_sms: int) -> int:
    """Sums of dq: as many as give each SM up to two blocks of queries, counted for each sum.

    Up to four where each tile of keys sees all queries and keys are at most twice as many. (D142)
    """
    if not config.deterministic or config.cluster_blocks > 1 or not num_sms:
        return 1
    blocks = math.prod(problem.batch) * -(-problem.seqlen_q // int(config.block_m))
    tiles = -(-problem.seqlen_k // int(config.own_rows))
    bounded = config.window_left or config.window_right or config.cu_seqlens != "none"
    most = (2 if bounded or problem.seqlen_k > 2 * problem.seqlen_q else 4) * num_sms
    # A sum takes about as long to add up as a tile waits for the one before.
    return max(1, min(most // max(blocks, 1), math.isqrt(2 * tiles), _MOST_SUMS))
