"""How much of something has a device? One number at a time.

CuPy's dictionary of all of them also asks for clocks, which takes milliseconds of the first call.
"""

from __future__ import annotations

import functools

import cupy
from cupy_backends.cuda.api import runtime


@functools.cache
def attribute(name: str, device: int) -> int:
    """A number by CUDA's name for it, without the prefix cudaDevAttr. (D74)"""
    return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device))


def smem_limit(device: int) -> int:
    """Bytes of shared memory that one thread block may ask for."""
    return attribute("MaxSharedMemoryPerBlockOptin", device)


@functools.cache
def capability(device: int) -> int:
    """Of compute: 90 for sm_90."""
    return int(cupy.cuda.Device(device).compute_capability)
