"""Which NVRTC has CuPy bound? Kernels are stored under its identity.

Only the library itself tells its version, and loading it takes 6 to 9 ms. A process that loaded it
writes a note beside the kernels. The next process reads the note instead, if nothing around the
library has changed. A note decides where a kernel is looked up first. It never decides the name
that a kernel is stored under, which comes from the library. (D72, D73)
"""

from __future__ import annotations

import contextlib
import functools
import os
import site
from typing import Any

from cuflash._errors import pip_install
from cuflash._jit import cubin_cache

#: Where wheels put the library, and variables that name other places.
_WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu13/bin", "nvidia/cuda_nvrtc/bin")
_VARIABLES = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")


def version() -> tuple[int, int]:
    """(major, minor) of the library; raise an ImportError with pip extras if there is none."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        found: tuple[int, int] = nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"compiling needs CuPy and NVRTC; {pip_install('compile12')} on a machine without a "
            f"GPU, {pip_install('cuda12', 'cuda13')} on one with a GPU"
        ) from error
    return found


@functools.cache
def identity() -> str:
    """Version and size of the library: patches of one version differ in size."""
    major, minor = version()
    found = f"NVRTC {major}.{minor} of 0 bytes"
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib

        # The library is loaded above: this only finds its file. Without it the version has to do.
        path = load_nvidia_dynamic_lib("nvrtc").abs_path or ""
        found = f"NVRTC {major}.{minor} of {_state(path)[0]} bytes"
        cubin_cache.save_note("compiler", {"identity": found, **_conditions(path)})
    return found


@functools.cache
def noted() -> str | None:
    """What :func:`identity` returns, without loading the library; None without a valid note."""
    note = cubin_cache.load_note("compiler")
    if note is None or not isinstance(note.get("file"), str):
        return None
    try:
        holds = note == {"identity": note.get("identity")} | _conditions(note["file"])
    except (OSError, ValueError):
        return None
    return str(note["identity"]) if holds else None


def _conditions(path: str) -> dict[str, Any]:
    """What must not have changed for a note to be valid."""
    size, modified = _state(path)
    places = [os.path.join(folder, wheel) for folder in _site_folders() for wheel in _WHEELS]
    return {
        "file": path,
        "size": size,
        "modified": modified,
        "wheels": {place: _state(place)[1] for place in places if os.path.isdir(place)},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
    }


def _state(path: str) -> tuple[int, int]:
    """Size of a file in bytes, and time of its last change."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _site_folders() -> list[str]:
    own = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    return [*site.getsitepackages(), *([own] if own else [])]
