"""Which generations of NVRTC can compile here, beside the one that CuPy has bound?

The wheels of NVRTC are plain shared libraries. One of another generation than CuPy's needs neither
a driver nor a second CuPy, and both work in one process. It has a folder of its own, because CuPy
for CUDA 12 takes NVRTC 13 where it finds both. (D73)
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from cuflash._jit import compilation
from setup_env import NVRTC_FOLDER

DISTRIBUTIONS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


@functools.cache
def compiler_of(generation: int) -> compilation.Compiler | None:
    """Return a compiler by NVRTC 12 or 13 (CuPy's own binding or a wheel), or None."""
    from cupy_backends.cuda.libs import nvrtc

    # CuPy binds its library on first use, and takes one that the process has loaded, of whatever
    # generation. So CuPy has to be asked before another library is loaded.
    if nvrtc.getVersion()[0] == generation:
        return compilation._nvrtc
    path = library_of(DISTRIBUTIONS[generation])
    return path and Library(path).compile


def all_cores() -> ThreadPoolExecutor:
    """Return one thread per core to compile with, since NVRTC runs without Python's lock.

    With three per core, Python's own choice for two cores, a kernel takes 1.1 times the CPU time.
    """
    return ThreadPoolExecutor(os.cpu_count())


def library_of(distribution: str) -> Path | None:
    """Find the shared library of a wheel, installed apart or in the environment."""
    for found in metadata.distributions(name=distribution, path=[str(NVRTC_FOLDER), *sys.path]):
        for file in found.files or []:
            if re.fullmatch(r"libnvrtc\.so\.\d+|nvrtc64_\d+_0\.dll", file.name):
                return Path(str(file.locate()))
    return None


class Library:
    """NVRTC as a shared library, by the names of its C interface."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Return (major, minor)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """Compile in memory; return (cubin, log)."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program), source.encode(), b"cuflash.cu", 0, None, None,
        )  # fmt: skip
        try:
            flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self._call("nvrtcCompileProgram", program, len(options), flags)
            except RuntimeError as error:
                raise compilation.NvrtcError(f"{error}\n{self._log(program)}") from error
            return self._read(program, "nvrtcGetCUBIN"), self._log(program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        return self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()

    def _read(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{getter}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(getter, program, text)
        return text.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")
