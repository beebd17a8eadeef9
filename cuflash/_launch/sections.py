"""How many owners start their heaviest tiles together, longest processing time first?

An owner is a batch entry of one head, or the entries that share one result. Its tiles stream the
same operands, and find them in the L2 cache if they run at the same time.
"""

from __future__ import annotations

from typing import Any

from cuflash._problem.problem import Problem
from cuflash._select.hardware import Hardware


def even_sections(num_owners: int, limit: int) -> int:
    """Owners of each section: about ``limit``, for even sections; see ``scheduler.cuh``."""
    return num_owners // -(-num_owners // max(limit, 1))


def owners_per_section(
    config: Any, problem: Problem, num_blocks: int, num_owners: int, streamed: int, own: Hardware
) -> int:
    """Owners of each section; ``streamed`` are the bytes that the tiles of one owner stream.

    Sections have even sizes: a small last section would end in a tail.
    """
    if config.tensor_maps and config.computes == "out":
        limit = _owners_drawn_together(problem, config, num_blocks, own.multiprocessors)
    elif config.computes == "dqkv" or getattr(config, "window_right", False):
        limit = _most_owners(config, streamed, own)
    else:
        return 1
    return even_sections(num_owners, limit)


def _most_owners(config: Any, streamed_bytes: int, own: Hardware) -> int:
    """Most owners of a section: they balance the load, and share what they stream.

    In general the streamed operands of a section fit half of the L2 cache, but a section has at
    least as many owners as leave about eight thread blocks to each.

    dk and dv on Hopper, with one thread block for each SM, always leave eight to each owner:
    docs/backward-sm90.md. Their tiles begin at different queries and share less than tiles of dq.
    Pairs of thread blocks leave sixteen pairs to each owner, but eight where tiles add in order
    under a causal bound, and wait for fewer others. One-pass tiles that add in any order leave
    sixteen thread blocks, which share more of what they stream. One-pass tiles that add in order
    wait for the tiles of their owner that start with them: under a causal bound four to six tiles
    of each owner start together. Below head size 128 they may be as few as two, if the L2 cache
    holds what these owners stream, keep and sum: thrice what they stream. Without a causal bound,
    where all rows are under way, that has to fit half of the cache. (D21)
    """
    sms, cache, causal = own.multiprocessors, own.l2_bytes, config.window_right
    if config.cluster_blocks > 1:
        return sms // (16 if config.deterministic and causal else 32)
    if config.computes == "dqkv":
        if not config.deterministic:
            return sms // 16
        if config.head_dim >= 128:
            return sms * 2 // 11 if causal else sms // 8
        fitting = cache // (1 if causal else 2) // max(3 * streamed_bytes, 1)
        return max(sms // (4 if causal else 8), min(fitting, sms // 2))
    if config.tensor_maps and config.computes == "dkv":
        return sms // 8
    return max(cache // 2 // max(streamed_bytes, 1), sms // 4)


def _owners_drawn_together(problem: Problem, config: Any, num_blocks: int, sms: int) -> int:
    """Most owners of a section of Hopper's forward, which is persistent: docs/forward-sm90.md."""
    if problem.cu_seqlens_q is not None:  # 16 tiles of each owner run at once and share keys (D13)
        return sms // 16
    if not config.window_right:
        return 1
    # As many owners as stream 8 MiB, or up to 16 that stream 64 MiB; but as many as give each SM a
    # tile, up to 16.
    keys = problem.seqlen_k
    if problem.window_keys is not None:
        keys = min(keys, problem.window_keys)
    streamed_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v)
    fitting = max((8 << 20) // streamed_bytes, min(16, (64 << 20) // streamed_bytes))
    return max(fitting, min(16, -(-sms // num_blocks)))
