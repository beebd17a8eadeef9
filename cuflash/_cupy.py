"""How is CuPy imported even if its kernel cache is unusable, and where are kernels kept?"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import ModuleType

_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_CACHE_DIR = "CUPY_CACHE_DIR"
_importing = threading.Lock()


def folder() -> Path:
    """The folder of cuflash's compiled kernels, inside CuPy's kernel cache."""
    cache = os.environ.get(_CACHE_DIR) or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(cache, "cuflash")


def in_memory() -> bool:
    """Whether CuPy's settings keep compiled kernels in memory only."""
    return os.environ.get(_IN_MEMORY) == "1"


def import_cupy() -> ModuleType:
    """Import CuPy so that it can compile even if its kernel cache is unusable.

    CuPy keeps its own kernels (fills, sums, conversions) in the folder above ours, and raises if it
    cannot write there or read a file there. In that case its reader of environment variables gets
    a new default: it takes CUPY_CACHE_IN_MEMORY as set unless the user has given it a value. The
    environment itself is not written, because all threads and child processes share it.
    """
    with _importing:
        cupys = folder().parent
        keeps_out = not os.environ.get(_IN_MEMORY) and not _usable(cupys)
        if keeps_out:
            warn_once(str(cupys))
        if (keeps_out or in_memory()) and "cupy" not in sys.modules and not cupys.is_dir():
            _import_without_a_folder()
        import cupy

        if keeps_out:
            compiler = cupy.cuda.compiler
            value_of = compiler._get_bool_env_variable
            compiler._get_bool_env_variable = lambda name, default: value_of(
                name, default or name == _IN_MEMORY
            )
    return cupy  # type: ignore[no-any-return]


def _import_without_a_folder() -> None:
    """Import the cache module of CuPy 14.2 so that it does not try to create its folder."""
    package = importlib.util.find_spec("cupy")
    file = Path((package and package.origin) or "").parent / "cuda" / "_compiler_cache.py"
    name = "cupy.cuda._compiler_cache"
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:  # an earlier CuPy has no such file
        return
    store = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(store)
    store.DiskKernelCacheBackend.__init__ = lambda *_: None  # it is never asked for kernels
    sys.modules[name] = store


def _usable(cupys: Path) -> bool:
    """Whether files can be created in a folder and all kernels in it can be read."""
    try:
        cupys.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cupys):  # nameless: a killed process leaves nothing
            pass
        with os.scandir(cupys) as entries:
            kernels = (entry for entry in entries if entry.name.endswith(".cubin"))
            return all(entry.is_file() and os.access(entry, os.R_OK) for entry in kernels)
    except OSError:
        return False


@functools.cache
def warn_once(where: str) -> None:
    """Warn, once for each folder, that kernels are not kept in the folder ``where``."""
    warnings.warn(
        f"the kernel cache {where} is not a readable, writable folder, or another user may have "
        "written to it: kernels are compiled in memory",
        RuntimeWarning,
        stacklevel=2,
    )
