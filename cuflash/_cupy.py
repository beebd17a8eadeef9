"""How is CuPy imported, and where does it keep kernels, whatever state its folder is in?"""

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
    """Where compiled kernels of cuflash are: beside the kernels of CuPy, as its settings say."""
    cache = os.environ.get(_CACHE_DIR) or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(cache, "cuflash")


def in_memory() -> bool:
    """Whether CuPy's settings say that kernels are not kept."""
    return os.environ.get(_IN_MEMORY) == "1"


def import_cupy() -> ModuleType:
    """CuPy, which compiles from then on, whatever state its folder is in.

    Its own kernels (fills, sums, conversions) go to the folder above ours, and it raises where it
    cannot write there, or read what is there. It is kept out of there by what it takes for the
    value of a variable that nobody has set: where somebody has, that holds. The environment, which
    all threads and child processes share, is not written.
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
    """Let CuPy 14.2 be imported; it makes its folder then, to be used or not, or raises."""
    package = importlib.util.find_spec("cupy")
    file = Path((package and package.origin) or "").parent / "cuda" / "_compiler_cache.py"
    name = "cupy.cuda._compiler_cache"
    spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:  # an earlier CuPy
        return
    store = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(store)
    store.DiskKernelCacheBackend.__init__ = lambda *_: None  # nobody asks it for kernels
    sys.modules[name] = store


def _usable(cupys: Path) -> bool:
    """Whether files can be made in a folder, and all kernels that lie there be read."""
    try:
        cupys.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cupys):  # has no name that a killed process could leave
            pass
        with os.scandir(cupys) as entries:
            kernels = (entry for entry in entries if entry.name.endswith(".cubin"))
            return all(entry.is_file() and os.access(entry, os.R_OK) for entry in kernels)
    except OSError:
        return False


@functools.cache
def warn_once(where: str) -> None:
    """Say that kernels are not kept in the folder ``where``."""
    warnings.warn(
        f"the kernel cache {where} cannot be read or written, or holds something else, or what any "
        "user may have written: kernels are compiled in memory",
        RuntimeWarning,
        stacklevel=2,
    )
