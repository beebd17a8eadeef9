"""Which shapes do the benchmarks share?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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


def _everyday(
    batch: int, heads: int | tuple[int, int], seqlen: int | tuple[int, int], head_dim: int,
    *, v: int | None = None, causal: bool = False,
) -> Workload:  # fmt: skip
    heads = heads if isinstance(heads, tuple) else (heads, heads)
    seqlen = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    return Workload(batch, *heads, *seqlen, head_dim, v or head_dim, "bfloat16", causal=causal)


#: Shapes that no tile was tuned for, one or a few of each kind that users bring.
EVERYDAY = [
    *(_everyday(4, 2048 // d, 4096, d) for d in (16, 32, 40, 48, 72, 80, 112, 160, 224)),
    *(_everyday(4, 2048 // d, 4096, d, causal=True) for d in (72, 80, 160)),
    _everyday(8, 64, 2048, 32),
    _everyday(128, 8, 512, 32),
    _everyday(2, 16, 8192, 96, causal=True),
    _everyday(4, 16, 4096, 192, v=128, causal=True),
    _everyday(4, 8, 4096, 192),
    _everyday(4, 8, 2500, 256, causal=True),
    # shared heads: multi-query and grouped
    *(_everyday(1, (32, 1), n, d, causal=c) for n, d, c in
      ((2048, 128, False), (4096, 64, True), (4096, 128, True), (16_384, 128, True))),
    *(_everyday(1, (32, 2), 4096, d, causal=True) for d in (64, 128)),
    *(_everyday(1, (48, 8), n, 128, causal=True) for n in (2048, 4096)),
    # few tiles
    *(_everyday(8, 8, mn, 64) for mn in ((4096, 77), (77, 4096))),
    *(_everyday(1, 8, mn, 64) for mn in ((512, 50_000), (50_000, 512), (2048, 2048))),
    # vision and short text
    _everyday(128, 12, 197, 64),
    _everyday(64, 16, 577, 64),
    _everyday(512, 8, 64, 64),
    _everyday(16, 8, 256, 64, causal=True),
    # odd lengths
    _everyday(2, 32, 7777, 64, causal=True),
    _everyday(4, 16, (3333, 5001), 128),
]  # fmt: skip


def is_square(row: Mapping[str, Any]) -> bool:
    """Whether a row is one point of a line over lengths: self-attention of whole heads."""
    pairs = (("seqlen_q", "seqlen_k"), ("heads_q", "heads_kv"), ("head_dim", "head_dim_v"))
    same = all(row[a] == row[b] for a, b in pairs)
    options = any(row.get(name) for name in ("softcap", "dropout", "arrays", "seqlens"))
    return same and not options and row["window"] is None and row["tflops"] is not None


def size_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens and width of a row, which are the same along a line."""
    return row["batch"] * row["seqlen_q"], row["heads_q"] * row["head_dim"]


def is_training(row: Mapping[str, Any]) -> bool:
    """Whether a row is one of the shapes of :func:`training`."""
    return is_square(row) and size_of(row) == (TOKENS, MODEL_WIDTH)
