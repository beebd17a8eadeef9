"""Does an example use a GPU that cuflash supports, or the CPU?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash


class NoGpuError(RuntimeError):
    """No GPU can be used; the message gives the reason in one line."""


@dataclass(frozen=True)
class Device:
    """The array module (NumPy or CuPy), and a line that describes the machine."""

    xp: Any
    description: str

    @property
    def is_gpu(self) -> bool:
        """Whether arrays are on a GPU."""
        return self.xp is not np

    def synchronize(self) -> None:
        """Wait until the GPU has computed everything."""
        if self.is_gpu:
            self.xp.cuda.get_current_stream().synchronize()

    def to_host(self, array: Any) -> np.ndarray:
        """Return a NumPy array."""
        return array.get() if self.is_gpu else np.asarray(array)

    def serves(self, dtype: Any) -> bool:
        """Whether cuflash supports a dtype on this device."""
        probe = self.xp.zeros((1, 16), dtype=dtype)
        try:
            cuflash.attention(probe, probe, probe)
        except NotImplementedError:
            return False
        return True


def cpu(remark: str = "") -> Device:
    return Device(np, f"CPU, {os.cpu_count()} cores, NumPy {np.__version__}{remark}")


def gpu() -> Device:
    """Return the current GPU, if cuflash has kernels for it."""
    try:
        import cupy
    except ImportError:
        raise NoGpuError("CuPy is not installed") from None
    try:
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NoGpuError(f"CuPy finds none, {str(error).partition(':')[0]}") from None
    probe = cupy.zeros((1, 16), dtype=cupy.float16)
    try:
        cuflash.attention(probe, probe, probe)
    except NotImplementedError as error:
        raise NoGpuError(f"not for {name} yet, {error}") from None
    return Device(cupy, f"{name}, CuPy {cupy.__version__}")


def choose_device(wanted: str) -> Device:
    """Return the device for "auto", "cpu" or "gpu"."""
    if wanted == "cpu":
        return cpu()
    try:
        return gpu()
    except NoGpuError as error:
        if wanted == "gpu":
            raise
        return cpu(f" (no GPU: {error})")
