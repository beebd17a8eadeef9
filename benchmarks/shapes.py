"""Shapes that several benchmarks use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cuflash.tuning import Workload

TOKENS = 16_384
MODEL_WIDTH = 2048  # heads * head_dim


def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Workload:
    """Self-attention without grouped heads; --dtype replaces the dtype."""
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


def is_square(row: Mapping[str, Any]) -> bool:
    """Whether a row is plain self-attention: equal lengths, heads and head sizes, no options."""
    pairs = (("seqlen_q", "seqlen_k"), ("heads_q", "heads_kv"), ("head_dim", "head_dim_v"))
    same = all(row[a] == row[b] for a, b in pairs)
    options = any(row.get(name) for name in ("softcap", "dropout", "arrays", "seqlens"))
    return same and not options and row["window"] is None and row["tflops"] is not None


def size_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens and width of a row, which are equal along a line of a picture."""
    return row["batch"] * row["seqlen_q"], row["heads_q"] * row["head_dim"]


def is_training(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of the shapes of :func:`training`."""
    return is_square(row) and size_of(row) == (TOKENS, MODEL_WIDTH)
