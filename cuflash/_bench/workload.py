"""Which shape, with which options, is measured or tuned?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

Array = Any
DTYPES = {t.__name__: np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64)}
PASSES = ("fwd", "bwd")
TOKENS = 16_384
MODEL_WIDTH = 2048  # heads * head_dim


@dataclass(frozen=True)
class Workload:
    """One shape with its options: all of a result row that is not a result."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    precision: str = "ieee"
    layout: str = "bhsd"
    deterministic: bool = True

    def visible_pairs(self) -> float:
        """Query-key pairs that the call has to look at, per head.

        Causal over equal lengths counts as one half, as publications do; every other mask by the
        pairs themselves.
        """
        if self.window is None and not self.causal:
            return float(self.seqlen_q * self.seqlen_k)
        if self.window is None and self.seqlen_q == self.seqlen_k:
            return self.seqlen_q * self.seqlen_k / 2
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        diagonal = np.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q
        last = np.full(self.seqlen_q, self.seqlen_k - 1) if right is None else diagonal + right
        first = np.zeros(self.seqlen_q, int) if left is None else diagonal - left
        seen = np.minimum(last, self.seqlen_k - 1) - np.maximum(first, 0) + 1
        return float(np.maximum(seen, 0).sum())

    def flops(self, pass_: str) -> float:
        """Floating-point operations by the field's count: backward is 2.5 times forward."""
        forward = 2 * self.batch * self.heads_q * (self.head_dim + self.head_dim_v)
        return forward * self.visible_pairs() * {"fwd": 1.0, "bwd": 2.5}[pass_]

    def input_bytes(self, pass_: str) -> int:
        """Bytes that one call reads and writes at least."""
        q = self.batch * self.heads_q * self.seqlen_q
        k = self.batch * self.heads_kv * self.seqlen_k
        forward = q * (self.head_dim + self.head_dim_v) + k * (self.head_dim + self.head_dim_v)
        return DTYPES[self.dtype].itemsize * forward * (2 if pass_ == "bwd" else 1)

    def inputs(self, xp: ModuleType, copies: int = 1, seed: int = 0) -> list[tuple[Array, ...]]:
        """Sets of q, k, v, dout: standard normal, rounded, (batch, heads, seqlen, dim)."""
        random = xp.random.RandomState(seed)
        shapes = (
            (self.batch, self.heads_q, self.seqlen_q, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim),
            (self.batch, self.heads_kv, self.seqlen_k, self.head_dim_v),
            (self.batch, self.heads_q, self.seqlen_q, self.head_dim_v),
        )
        wide = {} if xp is np else {"dtype": np.float32}
        drawn = (
            random.standard_normal((copies, *shape), **wide).astype(DTYPES[self.dtype])
            for shape in shapes
        )
        return list(zip(*drawn, strict=True))

    def score_options(self) -> dict[str, Any]:
        """The keywords that cuflash gets."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.window}
        options["enable_gqa"] = self.heads_q != self.heads_kv
        return {name: value for name, value in options.items() if value not in (None, False)}


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
