"""How many owners start their heaviest tiles together, longest processing time first?

An owner is what the tiles of one grid row belong to: a batch entry and its head. Tiles of one owner
stream the same operands and find them in the L2 cache if they run at the same time.
"""

from __future__ import annotations

from typing import Any

from cuflash._problem.problem import Problem
from cuflash._select.hardware import Hardware


def even_sections(num_owners: int, limit: int) -> int:
    """Owners of each section if none may have many more than ``limit``; see ``scheduler.cuh``."""
    return num_owners // -(-num_owners // max(limit, 1))


def owners_per_section(
    config: Any, problem: Problem, num_blocks: int, num_owners: int, streamed: int, own: Hardware
) -> int:
    """Owners of each section; ``streamed`` are the bytes that the tiles of one owner stream.

    Sections are of even size: a small last one would end in a tail.
    """
    if config.tensor_maps and config.computes == "out":
        limit = _owners_side_by_side(problem, config, num_blocks, own.multiprocessors)
    elif config.computes == "dqkv" or getattr(config, "window_right", False):
        limit = _most_owners(config, streamed, own)
    else:
        return 1
    return even_sections(num_owners, limit)


def _most_owners(config: Any, streamed_bytes: int, own: Hardware) -> int:
    """As many owners as balance the load, while they share what they stream.

    In general their streamed operands fit half of the L2 cache, but there are as many owners as
    leave about eight thread blocks to each.

    dk and dv on Hopper, with one thread block for each SM, always leave eight to each owner:
    docs/backward-sm90.md. Their tiles begin at different queries and share less than the tiles of
    dq. Pairs of thread blocks leave each owner sixteen pairs, but eight where tiles add in order
    under a causal bound and have fewer others to wait for. Tiles of the fused backward that add in
    any order leave sixteen, which share more of what they stream. Tiles that add in order wait for
    the tiles of their owner that start with them: below head size 128 more owners start together,
    up to half as many as there are SMs, as long as the L2 cache holds what they stream, keep and
    sum, thrice what is streamed; half of the cache without a causal bound, where all rows are under
    way. (D21)
    """
    sms, cache, fused = own.multiprocessors, own.l2_bytes, config.computes == "dqkv"
    if config.cluster_blocks > 1:
        return sms // (16 if config.deterministic and config.window_right else 32)
    if fused and not config.deterministic:
        return sms // 16
    if fused and config.head_dim < 128:
        fitting = cache // (1 if config.window_right else 2) // max(3 * streamed_bytes, 1)
        return max(sms // 8, min(fitting, sms // 2))
    if fused or (config.tensor_maps and config.computes == "dkv"):
        return sms // 8
    return max(cache // 2 // max(streamed_bytes, 1), sms // 4)


def _owners_side_by_side(problem: Problem, config: Any, num_blocks: int, sms: int) -> int:
    """The same for the persistent thread blocks of Hopper's forward: docs/forward-sm90.md."""
    if problem.cu_seqlens_q is not None:  # each owner leaves 16 tiles that share keys (D13)
        return sms // 16
    if not config.window_right:
        return 1
    # As many as 8 MiB hold, but 16 if 64 MiB hold them, and as many as give each SM a tile, or 16.
    keys = problem.seqlen_k
    if problem.window_keys is not None:
        keys = min(keys, problem.window_keys)
    streamed_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v)
    fitting = max((8 << 20) // streamed_bytes, min(16, (64 << 20) // streamed_bytes))
    return max(fitting, min(16, -(-sms // num_blocks)))
