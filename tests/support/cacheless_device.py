"""What does compiling need of a device? Simulated here, so that the kernel cache runs without.

Replaced are the driver, which loads a module, and NVRTC, whose product is a text that names its
source, options and architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuflash._jit import compilation, compiler_id

ARCH = "90"
CUPY = "14.2.0"


class DriverError(Exception):
    """Replaces CUDADriverError, whose constructor asks the driver for its text."""


def product(source: str, options: tuple[str, ...], arch: str) -> bytes:
    """Return the cubin of the simulated compiler; ``options`` come without the architecture."""
    entry = next(line for line in source.splitlines() if "cuflash_" in line and "(" in line)
    made_of = hashlib.sha256(f"{source}{options}{arch}".encode()).hexdigest()
    return f"cubin {made_of} holds {entry.split('cuflash_')[1].split('(')[0]}".encode()


class Module:
    """A module that remembers its cubin."""

    def __init__(self) -> None:
        self.cubin = b""

    def load(self, cubin: bytes) -> None:
        """Refuse anything but a cubin, as the driver does."""
        if not cubin.startswith(b"cubin "):
            raise DriverError("CUDA_ERROR_INVALID_IMAGE")
        self.cubin = cubin

    def get_function(self, name: str) -> Any:
        """Refuse a kernel's name that the cubin does not have."""
        if not self.cubin.endswith(f" holds {name.removeprefix('cuflash_')}".encode()):
            raise DriverError("CUDA_ERROR_NOT_FOUND")
        return SimpleNamespace(cubin=self.cubin)


class Compiler:
    """CuPy with this device; counts compilations."""

    def __init__(self, replace: Callable[[Any, str, Any], None]) -> None:
        self.compilations = 0
        replace(compilation, "_nvrtc", self._compile)
        replace(compiler_id, "identity", lambda: "NVRTC")
        replace(compiler_id, "noted", lambda: None)

    def kernel(self, config: Any) -> bytes:
        """Return the cubin that cuflash would launch for a configuration."""
        cupy = SimpleNamespace(
            __version__=CUPY,
            cuda=SimpleNamespace(
                driver=SimpleNamespace(CUDADriverError=DriverError),
                function=SimpleNamespace(Module=Module),
                Device=lambda *_: SimpleNamespace(compute_capability=ARCH),
            ),
        )
        function, _ = compilation._function(cupy, config)
        return bytes(function.cubin)

    def _compile(self, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        self.compilations += 1
        *others, arch = options
        return product(source, tuple(others), arch.removeprefix("-arch=")), ""
