"""``cache_write.cu``: writes new keys and values of a KV cache into pages."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import Dtype, Float8, KernelConfig
from cuflash._kernels.rotary import Rotation

#: New keys that a thread block writes: ``tokens_of_block`` of the kernel.
TOKENS = 16


class Own(NamedTuple):
    dtype: Dtype
    rotation: Rotation  # how keys are rotated
    pages_dtype: Float8 = "none"  # of pages whose elements are rounded; "none": dtype
    num_warps: int = 4  # each warp writes one row at a time


class CacheWriteConfig(KernelConfig):
    kernel = "cache_write"
    params = "CacheWriteParams"
    computes = "rows"
    parts = {"own": Own}  # noqa: RUF012
