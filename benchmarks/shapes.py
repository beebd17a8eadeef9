"""Which shapes do the benchmarks share?"""

from __future__ import annotations

from collections.abc import Iterable

from cuflash.tuning import Workload

TOKENS = 16_384
MODEL_WIDTH = 2048  # heads * head_dim


def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Workload:
    """Self-attention without groups; the dtype is set by --dtype."""
    return Workload(
        batch, heads, heads, seqlen, seqlen, head_dim, head_dim, "bfloat16", causal=causal
    )


def training(head_dims: Iterable[int], seqlens: Iterable[int]) -> list[Workload]:
    """16,384 tokens, heads * head_dim = 2048, full and causal."""
    return [
        square(TOKENS // seqlen, MODEL_WIDTH // head_dim, seqlen, head_dim, causal)
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    ]
