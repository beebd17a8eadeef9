"""How does a kernel start while the one before it still runs? By an attribute of its launch.

The kernel itself waits before it reads what the other writes: ``kernels_cu/ptx/dependent_launch``.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import ctypes
import functools

from cuflash._jit import driver

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.lru_cache(maxsize=1024)
def _config(grid: int, block: int, smem_bytes: int, stream: int) -> Config:
    attribute = Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
    return Config((grid, 1, 1), (block, 1, 1), smem_bytes, stream, ctypes.pointer(attribute), 1)


def launch_kernel(
    kernel: int, grid: int, _y: int, _z: int, block: int, _v: int, _w: int, smem_bytes: int,
    stream: int, arguments: int, _extra: int,
) -> None:  # fmt: skip
    """Launch as ``driver.launchKernel`` of CuPy does, but early."""
    config = _config(grid, block, smem_bytes, stream)
    error = driver.function("cuLaunchKernelEx")(ctypes.byref(config), kernel, arguments, None)
    if error:
        raise RuntimeError(f"cuLaunchKernelEx: error {error}")
