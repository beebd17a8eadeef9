"""``cache_write.cu``: new keys and values of a cache, into pages."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import Dtype, KernelConfig
from cuflash._kernels.rotary import Rotation

#: New keys that a thread block writes: ``tokens_of_block`` of the kernel.
TOKENS = 16


class Own(NamedTuple):
    dtype: Dtype
    rotation: Rotation  # of keys
    num_warps: int = 4  # each has a row


class CacheWriteConfig(KernelConfig):
    kernel = "cache_write"
    params = "CacheWriteParams"
    computes = "rows"
    parts = {"own": Own}  # noqa: RUF012
