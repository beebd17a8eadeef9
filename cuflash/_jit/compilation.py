"""How does a configuration become a kernel? This is the only file that compiles with NVRTC."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cuflash import _arrays
from cuflash._errors import CompileError
from cuflash._jit import compiler_id, cubin_cache
from cuflash._jit import driver as cuda_driver
from cuflash._jit.source import flatten
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.params import STRUCTS, with_reals

#: ``-default-device``: lambdas are device functions. ``-fmad=false``: roundings are as written.
#: Else a product and a sum would be contracted for one register and not for another, and the bits
#: of a row would depend on its place in the tile. (D80)
OPTIONS = ("--std=c++17", "-default-device", "-ftz=true", "-fmad=false")
_FIRST_WITH_GRID_CONSTANTS = 70  # before sm_70 __grid_constant__ is an error
_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
#: (source, options) -> (cubin, log); raises NvrtcError.
Compiler = Callable[[str, tuple[str, ...]], tuple[bytes, str]]


class Kernel(NamedTuple):
    """A compiled kernel on one device."""

    pointer: int  # CUfunction
    num_threads: int  # threads of a thread block
    smem_bytes: int  # dynamic shared memory of a thread block
    owner: Any  # the module, which this keeps loaded


class Report(NamedTuple):
    """What the compiler says about one kernel. No device is needed."""

    registers: int  # registers of a thread
    spill_bytes: int  # of stores and loads together
    stack_bytes: int  # of stack frames
    warnings: tuple[str, ...]  # lines of the log
    cubin: bytes


def source_of(config: KernelConfig, arch: str = "sm_80") -> str:
    """Self-contained CUDA text of a kernel."""
    struct = config.params
    size = with_reals(STRUCTS[struct], config.real_bytes).itemsize
    pinned = (
        f"static_assert(sizeof(cuflash::{struct}) == {size}, "
        f'"cuflash/_kernels/params.py mirrors {struct}");\n'
    )
    text = flatten(config.source, config.texts()) + pinned
    if int(arch.removeprefix("sm_").removesuffix("a")) < _FIRST_WITH_GRID_CONSTANTS:
        text = text.replace("__grid_constant__ ", "")
    return text


@functools.cache
def compile_kernel(config: KernelConfig, device: int) -> Kernel:
    """Compile for ``device``, or load what another process compiled; may raise a CompileError."""
    import cupy
    from cupy_backends.cuda.api import driver

    with cupy.cuda.Device(device):
        function, owner = _function(cupy, config)
        limit = cuda_driver.attribute("MaxSharedMemoryPerBlockOptin", device)
        if config.smem_bytes > limit:
            raise ValueError(
                f"config: got {config.smem_bytes} bytes of shared memory, "
                f"expected at most {limit} on this device"
            )
        driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SMEM, config.smem_bytes)
    return Kernel(function.ptr, config.num_threads, config.smem_bytes, owner)


def _function(cupy: Any, config: KernelConfig) -> tuple[Any, Any]:
    """The function of a kernel on the current device, and the module that holds it."""
    arch = architecture(config, int(cupy.cuda.Device().compute_capability))
    made_of = _made_of(config, arch)
    for kept in _kept(made_of, cupy.__version__):
        if kept is not None:
            # The driver may be too old for the cubin, or somebody stored another one with a digest.
            with contextlib.suppress(cupy.cuda.driver.CUDADriverError):
                return _loaded(cupy, kept, config)
    cubin, _ = _compiled(config, made_of)
    name = cubin_cache.name_of(*made_of, compiler_id.identity(), cupy.__version__)
    cubin_cache.save(name, cubin)
    return _loaded(cupy, cubin, config)


def _made_of(config: KernelConfig, arch: str) -> tuple[str, ...]:
    """The source of a kernel and the compiler's options: all that decides a cubin but versions."""
    return (source_of(config, arch), *OPTIONS, f"-arch={arch}")


def _kept(made_of: tuple[str, ...], version: str) -> Iterator[bytes | None]:
    """Stored cubins of this source, best first; None for a missing one. NVRTC is loaded last."""
    if cubin_cache.shared_folders():
        yield cubin_cache.load_shared(cubin_cache.name_of(*made_of))
    noted = compiler_id.noted()
    if noted is not None:
        yield cubin_cache.load(cubin_cache.name_of(*made_of, noted, version))
    own = compiler_id.identity()
    if own != noted:
        yield cubin_cache.load(cubin_cache.name_of(*made_of, own, version))


def _loaded(cupy: Any, cubin: bytes, config: KernelConfig) -> tuple[Any, Any]:
    module = cupy.cuda.function.Module()
    module.load(cubin)
    return module.get_function(config.entry), module


def architecture(config: KernelConfig, capability: int) -> str:
    """The architecture that a kernel is compiled for: wgmma and setmaxnreg need the "a"."""
    if config.source.endswith("_sm90.cu"):
        return "sm_90a"
    return f"sm_{capability}"


def stored_name(config: KernelConfig, arch: str) -> str:
    """Name under which this kernel is stored for a run."""
    version = _arrays.imported_cupy().__version__
    return cubin_cache.name_of(*_made_of(config, arch), compiler_id.identity(), version)


def shared_name(config: KernelConfig, arch: str) -> str:
    """Name of this kernel in a shared folder, which does not depend on the compiler."""
    return cubin_cache.name_of(*_made_of(config, arch))


def compile_static(config: KernelConfig, arch: str, compiler: Compiler | None = None) -> Report:
    """Compile for ``arch`` ("sm_80") with the options a run would use, and read the log.

    ``compiler`` replaces the NVRTC that CuPy has bound.
    """
    made_of = (*_made_of(config, arch), "--ptxas-options=-v")
    cubin, log = _compiled(config, made_of, compiler)

    def numbers(pattern: str) -> list[int]:
        """One number for each function: the kernel, and the functions that it calls."""
        found = [int(n) for n in re.findall(pattern, log)]
        if not found:
            raise CompileError(
                f"{config.entry}: no '{pattern}' in the log", config=config, log=log, source=None
            )
        return found

    return Report(
        registers=max(numbers(r"Used (\d+) registers")),
        spill_bytes=sum(numbers(r"(\d+) bytes spill stores"))
        + sum(numbers(r"(\d+) bytes spill loads")),
        stack_bytes=sum(numbers(r"(\d+) bytes stack frame")),
        warnings=tuple(
            line for line in log.splitlines() if "warning" in line.lower() or "C75" in line
        ),
        cubin=cubin,
    )


class NvrtcError(Exception):
    """A source that does not compile; its text is the compiler's log."""


def _compiled(
    config: KernelConfig, made_of: tuple[str, ...], compiler: Compiler | None = None
) -> tuple[bytes, str]:
    source, *options = made_of
    try:
        return (compiler or _nvrtc)(source, tuple(options))
    except NvrtcError as error:
        raise _compile_error(config, str(error), source) from error


def _nvrtc(source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Compile in memory: (cubin, log)."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source, "cuflash.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise NvrtcError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
        # CuPy drops the last byte, a zero, as the end of a string.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _compile_error(config: KernelConfig, log: str, source: str) -> CompileError:
    """The error, with the source written to CUFLASH_DUMP or the folder for temporary files."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    path: str | None = None
    where = "the source could not be written"
    with contextlib.suppress(OSError):
        folder = Path(os.environ.get("CUFLASH_DUMP") or tempfile.gettempdir())
        file = folder / f"{config.entry}-{digest}.cu"
        cubin_cache.replace(file, source.encode())
        path = str(file)
        where = f"the source is in {path}"
    return CompileError(
        f"{config.entry} did not compile; {where}\n{config}\n{log}",
        config=config,
        log=log,
        source=path,
    )
