"""Where do compiled kernels wait for the next process?

In the folder ``cuflash`` of CuPy's kernel cache, one file each: a cubin, then the digest of its
name and of the cubin. What lacks that digest is no kernel: cut off, changed, or under the name of
another. Anybody can compute it: where all users may write, files of others are not read. Files are
only ever replaced as a whole, so that any number of processes share a folder.

Nothing here raises: where a file cannot be read or written, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

_DIGEST_BYTES = 32
_COMPILER = "compiler.json"
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_CACHE_DIR = "CUPY_CACHE_DIR"
_importing = threading.Lock()


def folder() -> Path:
    """Where the files are: CuPy's settings hold."""
    cache = os.environ.get(_CACHE_DIR) or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(cache, "cuflash")


def name_of(*made_of: str) -> str:
    """Name of the kernel that these texts determine."""
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def shared_folders() -> tuple[Path, ...]:
    """Folders of kernels compiled ahead of time (D116), in the variable CUFLASH_KERNELS."""
    named = os.environ.get("CUFLASH_KERNELS", "")
    return tuple(Path(part) for part in named.split(os.pathsep) if part)


def load_shared(name: str) -> bytes | None:
    """The cubin of this name in one of the shared folders, or None; no other is written to."""
    for shared in shared_folders():
        path = shared / f"{name}.cubin"
        try:
            content = read(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _warn_of_shared(str(path), f"cannot be read ({error.strerror})")
            continue
        cubin = _checked(name, content)
        if cubin is not None:
            return cubin
        _warn_of_shared(str(path), "is cut off, changed, or another kernel's")
    return None


def read(path: Path) -> bytes:
    """Content of a file; an OSError for what is none, or what any user may have written.

    Opening a FIFO to read it would wait for somebody who writes.
    """
    not_waiting = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | not_waiting)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if _anybodys(status, path.parent):
            raise PermissionError(errno.EACCES, "any user may have written it", str(path))
        return file.read()


def _anybodys(status: os.stat_result, folder: Path) -> bool:
    """Whether all may write the file, or the folder with its owner neither root nor this user."""
    if sys.platform == "win32":  # has no such modes
        return False
    own = status.st_uid in (0, os.geteuid())
    mode = status.st_mode if own else status.st_mode | folder.stat().st_mode
    return bool(mode & stat.S_IWOTH)


def _checked(name: str, content: bytes) -> bytes | None:
    cubin, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return cubin if digest == _digest(name, cubin) else None


def save_shared(shared: Path, name: str, cubin: bytes) -> Path:
    """Put a cubin into a folder for others; an OSError where that cannot be written.

    Whom the folder lets read and write, the file does, too; but not all write.
    """
    path = shared / f"{name}.cubin"
    shared.mkdir(parents=True, exist_ok=True)
    replace(path, cubin + _digest(name, cubin), shared.stat().st_mode & 0o664)
    return path


def verified(path: Path) -> bool:
    """Whether a file of kernels can be read, is whole and has the name of what it holds."""
    try:
        return _checked(path.stem, read(path)) is not None
    except OSError:
        return False


def load(name: str) -> bytes | None:
    """The cubin of this name, or None."""
    if in_memory():
        return None
    try:
        content = read(_path(name))
    except FileNotFoundError:
        return None
    except OSError:
        _warn_once(str(folder().parent))
        return None
    return _checked(name, content)


def save(name: str, cubin: bytes) -> None:
    """Keep a cubin; whatever was there before is replaced."""
    if in_memory():
        return
    try:
        replace(_path(name), cubin + _digest(name, cubin))
    except OSError:
        if load(name) is None:  # Windows refuses to replace what another process is reading
            _warn_once(str(folder().parent))


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in its place as a whole; a link there is replaced, and not followed.

    What a killed process leaves has the name of the file and more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it is in its place
            os.unlink(temporary)


def load_note(name: str) -> dict[str, Any] | None:
    """What was noted about a kernel, where that kernel is still here."""
    return None if load(name) is None else _read_note(_path(name).with_suffix(".json"))


def save_note(name: str, note: dict[str, Any]) -> None:
    """Note something about a kernel that is here, beside it."""
    _write_note(_path(name).with_suffix(".json"), note)


def load_compiler() -> dict[str, Any] | None:
    """What was noted about the compiler."""
    return None if in_memory() else _read_note(folder() / _COMPILER)


def save_compiler(note: dict[str, Any]) -> None:
    """Note what later processes may want to know of the compiler."""
    _write_note(folder() / _COMPILER, note)


def _read_note(path: Path) -> dict[str, Any] | None:
    import json

    try:
        note = json.loads(read(path))
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def _write_note(path: Path, note: dict[str, Any]) -> None:
    import json

    if not in_memory():
        with contextlib.suppress(OSError):
            replace(path, json.dumps(note).encode())


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
            _warn_once(str(cupys))
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


def in_memory() -> bool:
    """Whether CuPy's settings say that kernels are not kept."""
    return os.environ.get(_IN_MEMORY) == "1"


def _path(name: str) -> Path:
    return folder() / f"{name}.cubin"


def _digest(name: str, cubin: bytes) -> bytes:
    return hashlib.sha256(name.encode() + cubin).digest()


@functools.cache
def _warn_once(where: str) -> None:
    warnings.warn(
        f"the kernel cache {where} cannot be read or written, or holds something else, or what any "
        "user may have written: kernels are compiled in memory",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_of_shared(path: str, what: str) -> None:
    warnings.warn(
        f"{path} {what}: this kernel is compiled instead",
        RuntimeWarning,
        stacklevel=2,
    )
