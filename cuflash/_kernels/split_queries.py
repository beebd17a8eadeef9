"""Into how many parts does one pass split queries, and dq its sums? By shapes and device alone.

A tile of keys walks all queries of all heads that share the keys. Where tiles are fewer than
multiprocessors, each tile has several thread blocks, with some of the heads or some of the blocks
of queries, and ``backward_combine.cu`` adds up their dk and dv. Where a block of queries waits for
many tiles of keys, which add to its dq one after the other, dq has several sums, and
``backward_convert.cu`` adds them up.
"""

from __future__ import annotations

import math
from typing import Any

from cuflash._problem.problem import Problem

#: In blocks of queries: what a tile takes beside them, and what the kernel that adds parts takes,
#: for itself and for each part of a tile of 64 + 64 columns. (D141)
_OF_A_TILE = 1.0
_OF_COMBINING = 3.0
_OF_A_PART = 0.03
_CLOSE = 1.03  # estimates that tell no difference: fewer parts take less memory
_MOST_SUMS = 64  # of dq


def entries_that_share(problem: Problem) -> int:
    """Batch entries of the same keys: heads of a group, broadcast axes."""
    return math.prod(e for e, s in zip(problem.batch, problem.k.summed, strict=True) if s)


def may_split_rows(config: Any) -> bool:
    """Whether registers hold where a part of one entry's queries begins. (D145)"""
    arrays = (config.bias, config.alibi_slopes, config.segment_ids)
    taken = config.softcap or config.mask or config.dropout or config.score_mod or config.mask_mod
    return config.head_dim <= 96 or not (taken or any(dtype != "none" for dtype in arrays))


def parts_of(problem: Problem, config: Any, num_sms: int) -> int:
    """Parts of the queries of each tile of keys: the fewest that are done first by an estimate."""
    if not num_sms or config.cluster_blocks > 1:  # of pairs not measured
        return 1
    side_by_side = num_sms // int(config.cluster_blocks)  # tiles
    shared = entries_that_share(problem)
    owners = math.prod(problem.batch) // shared
    tiles = -(-problem.seqlen_k // int(config.own_rows))
    blocks = -(-problem.seqlen_q // int(config.block_m))
    if problem.window_keys is not None:  # of each tile of keys as few
        blocks = min(blocks, -(-(problem.window_keys + config.own_rows) // int(config.block_m)))
    whole = problem.cu_seqlens_q is not None or problem.window_keys is not None
    rows = 1 if whole or not may_split_rows(config) else blocks  # of an entry that parts share
    candidates = [n for n in range(1, shared + 1) if shared % n == 0]
    candidates += [shared * 2**i for i in range(1, rows.bit_length())]
    width = int(config.head_dim + config.head_dim_v) / 128

    def takes(parts: int) -> float:
        own, at_all = shared * blocks / parts + _OF_A_TILE, owners * tiles * parts
        added = (_OF_COMBINING + _OF_A_PART * at_all * width) if parts > 1 else 0.0
        if problem.window_right is None:
            return -(-at_all // side_by_side) * own + added
        # The first keys are seen by twice the queries that others are on average. Of each further
        # entry the others have to wait for them, where they run at the same time.
        further = max(1 - parts / shared, 0.0)
        waiting = min(side_by_side / at_all, 1.0) * further
        return max(own, at_all / side_by_side * own / 2 * (1 + waiting)) + added

    longest = _CLOSE * min(map(takes, candidates))
    return next(parts for parts in candidates if takes(parts) <= longest)


def sums_of_dq(problem: Problem, config: Any, num_sms: int) -> int:
    """Sums of dq: as many as leave two blocks of queries or more to each multiprocessor.

    Four where each tile of keys sees all queries, and keys are no more than twice as many. (D142)
    """
    if not config.deterministic or config.cluster_blocks > 1 or not num_sms:
        return 1
    blocks = math.prod(problem.batch) * -(-problem.seqlen_q // int(config.block_m))
    tiles = -(-problem.seqlen_k // int(config.own_rows))
    bounded = config.window_left or config.window_right or config.cu_seqlens != "none"
    most = (2 if bounded or problem.seqlen_k > 2 * problem.seqlen_q else 4) * num_sms
    # A sum takes about as long to add up as a tile waits for the one before.
    return max(1, min(most // max(blocks, 1), math.isqrt(2 * tiles), _MOST_SUMS))
