"""What does compiling need of a device? A stand-in, so that CuPy's own kernel cache runs without.

CuPy's compiler and its cache on disk are the real ones. What is replaced: the driver, which loads
a module, and NVRTC, whose product is a text that says what it was made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuflash import _compile

ARCH = "90"


class DriverError(Exception):
    """Stands for CUDADriverError, whose constructor asks the driver for its text."""


def product(source: str, options: tuple[str, ...], arch: str) -> bytes:
    """The cubin that the stand-in compiler makes; ``options`` without the architecture."""
    entry = next(line for line in source.splitlines() if "cuflash_" in line and "(" in line)
    made_of = hashlib.sha256(f"{source}{options}{arch}".encode()).hexdigest()
    return f"cubin {made_of} holds {entry.split('cuflash_')[1].split('(')[0]}".encode()


class Module:
    """A module that knows what it was loaded from."""

    def __init__(self) -> None:
        self.cubin = b""

    def load(self, cubin: bytes) -> None:
        """Refuse what is no cubin, as the driver does."""
        if not cubin.startswith(b"cubin "):
            raise DriverError("CUDA_ERROR_INVALID_IMAGE")
        self.cubin = cubin

    def get_function(self, name: str) -> Any:
        """Refuse the name of a kernel that is not in the cubin."""
        if not self.cubin.endswith(f" holds {name.removeprefix('cuflash_')}".encode()):
            raise DriverError("CUDA_ERROR_NOT_FOUND")
        return SimpleNamespace(cubin=self.cubin)

    def _set_mapping(self, mapping: Any) -> None:
        del mapping


class Compiler:
    """CuPy with this device; counts what NVRTC is asked to do."""

    def __init__(self, replace: Callable[[Any, str, Any], None], folder: Any) -> None:
        from cupy.cuda import _compiler_cache, compiler

        self.compilations = 0
        self.real = compiler
        self.folder = folder
        replace(compiler, "function", SimpleNamespace(Module=Module))
        replace(compiler, "_compile_using_nvrtc_no_warning", self._compile)
        replace(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}",))
        replace(
            compiler, "_kernel_cache_backend", _compiler_cache.DiskKernelCacheBackend(str(folder))
        )
        replace(_compile, "_nvrtc", self._compile_in_memory)
        self.cupy = SimpleNamespace(
            RawModule=self._raw_module,
            cuda=SimpleNamespace(
                compiler=compiler,
                driver=SimpleNamespace(CUDADriverError=DriverError),
                function=SimpleNamespace(Module=Module),
                Device=lambda *_: SimpleNamespace(compute_capability=ARCH),
            ),
        )

    def kernel(self, config: Any) -> bytes:
        """What the library would launch for a configuration."""
        function, _ = _compile._function(self.cupy, config)
        return bytes(function.cubin)

    def _raw_module(self, *, code: str, options: tuple[str, ...]) -> Any:
        def get_function(name: str) -> Any:
            module = self.real._compile_module_with_cache(code, options, arch=ARCH)
            return SimpleNamespace(kernel=module.get_function(name))

        return SimpleNamespace(get_function=get_function)

    def _compile(
        self, source: str, options: tuple[str, ...], arch: str, *_: Any
    ) -> tuple[bytes, None]:
        self.compilations += 1
        return product(source, tuple(options), f"sm_{arch}"), None

    def _compile_in_memory(self, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        self.compilations += 1
        *others, arch = options
        return product(source, tuple(others), arch.removeprefix("-arch=")), ""
