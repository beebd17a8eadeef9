"""``cache_grow.cu``: new lengths of the sequences of a KV cache, and the pages that they take."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels.config import KernelConfig

_PAGES_OF_A_WORD = 32
_FEWEST_WORDS = 1024


class Own(NamedTuple):
    page_words: int  # words of 32 bits in shared memory, one bit for each page
    num_warps: int = 32


class CacheGrowConfig(KernelConfig):
    kernel = "cache_grow"
    params = "CacheGrowParams"
    computes = "growth"
    parts = {"own": Own}  # noqa: RUF012

    @classmethod
    def of(cls, pages: int) -> Self:
        """The kernel for a cache of ``pages`` pages, and of more up to a power of two."""
        words = -(-pages // _PAGES_OF_A_WORD)
        return cls(page_words=max(_FEWEST_WORDS, 1 << (words - 1).bit_length()))

    @property
    def smem_bytes(self) -> int:
        """Two bits for each page, and a sum for each warp."""
        return int(4 * (2 * self.page_words + 32))
