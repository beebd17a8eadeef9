"""``cache_take.cu``: sequences of a KV cache take over the pages of parent sequences."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import KernelConfig


class Own(NamedTuple):
    num_warps: int = 8


class CacheTakeConfig(KernelConfig):
    kernel = "cache_take"
    params = "CacheTakeParams"
    computes = "table"
    parts = {"own": Own}  # noqa: RUF012
