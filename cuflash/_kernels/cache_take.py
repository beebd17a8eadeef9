"""``cache_take.cu``: sequences of a cache become what others were."""

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
