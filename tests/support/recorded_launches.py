"""Which kernels would a call launch on an H100? All of its path runs but NVRTC and the driver.

NumPy replaces CuPy as in `host_device`. Launches are listed and do nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import _arrays
from cuflash._jit import compilation
from cuflash._kernels.config import KernelConfig
from cuflash._launch import (
    cache,
    float8,
    kernel_launcher,
    plan,
    run,
    tensor_map,
    tile_counters,
)
from cuflash._select import hardware as select_hardware
from support.host_device import DeviceArray, host_device


@contextmanager
def recorded_launches() -> Iterator[tuple[Any, list[KernelConfig]]]:
    """Yield the simulated CuPy, and the configurations of kernels launched inside.

    Unwritten memory is 0.
    """
    hardware = select_hardware.typical("sm_90")
    compiled: list[KernelConfig] = []
    launched: list[KernelConfig] = []

    def compile_kernel(config: KernelConfig, _: int) -> compilation.Kernel:
        compiled.append(config)
        number: Any = len(compiled) - 1
        return compilation.Kernel(number, config.num_threads, config.smem_bytes, None)

    def launch(number: int, *_: Any) -> None:
        launched.append(compiled[number])

    with (
        host_device(Path()) as device,
        select_hardware.assumed(hardware),
        pytest.MonkeyPatch.context() as patch,
    ):
        device.unwritten = 0
        library = _standing_for_cupy(run.cupy)
        patch.setitem(sys.modules, "cupy", library)
        patch.setattr(_arrays, "imported_cupy", lambda: library)
        patch.setattr(float8, "dequantized", lambda *_: None)  # compiled by CuPy itself
        patch.setattr(tile_counters, "address", lambda *_: 0)
        patch.setattr(tensor_map, "encode", lambda *_: bytes(tensor_map.MAP_BYTES))
        patch.setattr(tensor_map, "with_addresses", lambda maps, _: maps)
        patch.setattr(kernel_launcher, "driver", SimpleNamespace(launchKernel=launch))
        patch.setattr(
            kernel_launcher, "extended_launch", lambda kernel, *_: lambda *_: launch(kernel.pointer)
        )
        for module in (plan, cache, float8):
            patch.setattr(module, "compile_kernel", compile_kernel)
        patch.setattr(float8, "cupy", library)
        yield library, launched


def _standing_for_cupy(library: Any) -> Any:
    """Return a CuPy for calls that look it up by name, beside what modules have imported."""
    cuda = dict(vars(library.cuda))
    cuda["runtime"] = SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=RuntimeError)
    as_strided = functools.partial(np.lib.stride_tricks.as_strided, subok=True)
    lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
    own = {"ndarray": DeviceArray, "cuda": SimpleNamespace(**cuda), "lib": lib}
    return SimpleNamespace(**vars(library) | own)
