"""How do the portable kernels run without a GPU? Compiled by a C++ compiler, on fibers.

`host_kernel.h` replaces CUDA, and `host_ptx.h` the instructions of ``kernels_cu/ptx``. A launch
runs one thread block after another. NumPy replaces CuPy, so that plans, parameters and the sums
after the kernels are those of a GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash._jit import compilation
from cuflash._jit import source as jit_source
from cuflash._kernels.config import KernelConfig
from cuflash._launch import (
    cache,
    float8,
    kernel_launcher,
    plan,
    plan_cache,
    repeat,
    score_gradients,
    score_params,
)
from cuflash._launch import run as launch_run
from cuflash._problem import formulas
from cuflash._problem.options import Options
from cuflash._select import hardware

SUPPORT = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w")
_CLUSTER_PTX = ("cluster", "mbarrier")
_PTX = ("arithmetic", "cp_async", "dependents", "mma_sync", "once", "special", "tma")


class DeviceArray(np.ndarray):
    """A NumPy array with the addresses of a CuPy array."""

    @property
    def data(self) -> Any:
        block: Any = self
        while isinstance(block.base, np.ndarray):
            block = block.base
        mem = SimpleNamespace(ptr=block.ctypes.data)
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0, mem=mem)

    def get(self) -> Any:
        return np.asarray(self)


@functools.cache
def precompiled() -> str:
    """Folder of a precompiled `host_kernel.h`, which takes half of the time of a kernel to read."""
    folder = tempfile.mkdtemp(prefix="cuflash-host-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = ["-x", "c++-header", SUPPORT / "host_kernel.h", "-o", f"{folder}/host_kernel.h.gch"]
    subprocess.run([COMPILER, *FLAGS, *header], check=True)
    return folder


def on_device(array: Any) -> DeviceArray:
    return np.asarray(array).view(DeviceArray)


def options_on_device(options: Options) -> Options:
    """Give the arrays of options addresses."""
    arrays = {name: on_device(array) for name, array in options.arrays.items()}
    object.__setattr__(options, "arrays", arrays)
    return options


class HostDevice:
    """Compiles kernels into a folder, and runs them.

    Unwritten memory is full of ``unwritten``, by default NaN in every format.
    """

    unwritten = 0xFF

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: list[Any] = []
        self.launched: list[str] = []
        self.configs: list[KernelConfig] = []  # compiled ones
        self.copied_bytes = 0  # copied to shared memory, asynchronously
        self.compile = functools.cache(self._compile)

    def memory(self, shape: tuple[int, ...] | int, dtype: Any = np.float64) -> DeviceArray:
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        return on_device(np.full(size, self.unwritten, np.uint8).view(dtype).reshape(shape))

    def _compile(self, config: KernelConfig, _device: int) -> Any:
        texts = [(f"ptx/{n}.cuh", f'#include "{SUPPORT}/host_ptx.h"\n') for n in _PTX]
        texts += [(f"ptx/{n}.cuh", f'#include "{SUPPORT}/host_cluster.h"\n') for n in _CLUSTER_PTX]
        texts += config.texts()
        macros = {"HOST_KERNEL": config.entry, "HOST_PARAMS": config.params}
        text = "".join(
            (
                '#include "host_kernel.h"\n',
                *(f"#define {name} {value}\n" for name, value in macros.items()),
                jit_source.flatten(config.source, tuple(texts)),
                f'#include "{SUPPORT}/host_run.h"\n',
            )
        )
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        source, library = self.folder / f"{name}.cpp", self.folder / f"{name}.so"
        source.write_text(text)
        headers = [f"-I{precompiled()}", f"-I{SUPPORT}"]
        subprocess.run([COMPILER, *FLAGS, *headers, "-shared", source, "-o", library], check=True)
        self.configs.append(config)
        self.kernels.append((config.entry, ctypes.CDLL(str(library)).run))
        number = len(self.kernels) - 1
        return compilation.Kernel(number, config.num_threads, config.smem_bytes, None)

    def launch(self, kernel: int, grid: int, *rest: Any, cluster: int = 1) -> None:
        entry, run = self.kernels[kernel]
        self.launched.append(entry)
        address = ctypes.cast(rest[-2], ctypes.POINTER(ctypes.c_void_p))[0]
        self.copied_bytes += run(
            ctypes.c_uint(grid), ctypes.c_int(rest[2]), ctypes.c_uint(cluster),
            ctypes.c_void_p(address),
        )  # fmt: skip

    def extended_launch(self, kernel: compilation.Kernel, grid: int, attribute: bytes) -> Any:
        """Replace ``kernel_launcher.extended_launch``; launches a cluster if the attribute asks."""
        kind, cluster = struct.unpack_from("<i4xI", attribute)
        own = cluster if kind == kernel_launcher.CLUSTER else 1

        def run(stream: int, argument: int, _: int) -> None:
            self.launch(kernel.pointer, grid, 1, 1, kernel.num_threads, argument, 0, cluster=own)

        return run


def forget() -> None:
    plan_cache.forget()
    cache.forget()


@contextmanager
def host_device(
    folder: Path, capability: int = 80, *, multiprocessors: int = 4, tensor_maps: bool = False
) -> Iterator[HostDevice]:
    """Run launches on the host, which simulates a device of a compute capability."""
    device = HostDevice(folder)
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    limits = hardware.Limits(227 << 10, 228 << 10, 2048)
    host = hardware.Hardware(
        "host", f"sm_{capability}", multiprocessors, limits, 1 << 20, None, tensor_maps
    )
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    library = SimpleNamespace(
        cuda=cuda,
        empty=device.memory,
        ndarray=device.memory,
        zeros=lambda shape, dtype: on_device(np.zeros(shape, dtype)),
        zeros_like=lambda array: on_device(np.zeros_like(array)),
        asarray=on_device,
        copyto=np.copyto,
        broadcast_to=lambda array, shape: np.broadcast_to(array, shape, subok=True),
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch_run, repeat, score_params, cache, float8, kernel_launcher):
            patch.setattr(module, "cupy", library)
        runtime = SimpleNamespace(getDevice=lambda: 0, streamIsCapturing=lambda _: False)
        for module in (repeat, cache):
            patch.setattr(module, "runtime", runtime)
        patch.setattr(score_gradients, "cupy", np)
        formula_arrays = score_params.formula_arrays
        patch.setattr(
            score_params,
            "formula_arrays",
            lambda *a: {name: on_device(x) for name, x in formula_arrays(*a).items()},
        )
        for module in (launch_run, score_params, formulas):
            patch.setattr(module, "refuse_capture", lambda *_: None)
        patch.setattr(launch_run, "_on_device", lambda _: nullcontext())
        for module in (plan, cache, float8):
            patch.setattr(module, "compile_kernel", device.compile)
        patch.setattr(float8, "contiguous", lambda array: on_device(np.ascontiguousarray(array)))
        patch.setattr(kernel_launcher, "driver", SimpleNamespace(launchKernel=device.launch))
        patch.setattr(kernel_launcher, "extended_launch", device.extended_launch)
        forget()
        with hardware.assumed(host):
            yield device
        forget()
