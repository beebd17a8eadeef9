"""How does a kernel start while the one before it still runs? By an attribute of its launch.

The kernel itself waits before it reads what the other writes: ``kernels_cu/ptx/dependent_launch``.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from cuflash._jit import driver
from cuflash._jit.compilation import Kernel

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


def launcher(kernel: Kernel, grid: int) -> Callable[[int, int, int], None]:
    """What launches a kernel: (stream, address of its argument's address, 0)."""
    function = driver.function("cuLaunchKernelEx")

    @functools.lru_cache(maxsize=64)
    def config_on(stream: int) -> Config:
        attribute = Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
        return Config(
            (grid, 1, 1), (kernel.num_threads, 1, 1), kernel.smem_bytes, stream,
            ctypes.pointer(attribute), 1,
        )  # fmt: skip

    def launch(stream: int, arguments: int, _: int) -> None:
        error = function(ctypes.byref(config_on(stream)), kernel.pointer, arguments, None)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: error {error}")

    return launch
