"""Where do compiled kernels wait for the next process?

In the folder ``cuflash`` of CuPy's kernel cache, one file each: a cubin, then the digest of its
name and of the cubin. What lacks that digest is no kernel: cut off, changed, or under the name of
another. Files are only ever replaced as a whole, so that any number of processes share a folder.

Nothing here raises: where a file cannot be read or written, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DIGEST_BYTES = 32
_COMPILER = "compiler.json"
_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_CACHE_DIR = "CUPY_CACHE_DIR"
#: Not empty where it was cuflash that set the variable: what we can read of our own, we still read.
_kept_out: set[str] = set()


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
            content = path.read_bytes()
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


def _checked(name: str, content: bytes) -> bytes | None:
    cubin, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return cubin if digest == _digest(name, cubin) else None


def save_shared(shared: Path, name: str, cubin: bytes) -> Path:
    """Put a cubin into a folder for others; an OSError where that cannot be written.

    Whom the folder lets read and write, the file does, too.
    """
    path = shared / f"{name}.cubin"
    shared.mkdir(parents=True, exist_ok=True)
    _replace(path, cubin + _digest(name, cubin), shared.stat().st_mode & 0o666)
    return path


def verified(path: Path) -> bool:
    """Whether a file of kernels is whole and has the name of what it holds."""
    return _checked(path.stem, path.read_bytes()) is not None


def load(name: str) -> bytes | None:
    """The cubin of this name, or None."""
    if _in_memory():
        return None
    try:
        content = _path(name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        _warn_once(str(folder().parent))
        return None
    return _checked(name, content)


def save(name: str, cubin: bytes) -> None:
    """Keep a cubin; whatever was there before is replaced."""
    if _in_memory():
        return
    try:
        _replace(_path(name), cubin + _digest(name, cubin))
    except OSError:
        if load(name) is None:  # Windows refuses to replace what another process is reading
            _warn_once(str(folder().parent))


def _replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in its place as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
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
    return None if _in_memory() else _read_note(folder() / _COMPILER)


def save_compiler(note: dict[str, Any]) -> None:
    """Note what later processes may want to know of the compiler."""
    _write_note(folder() / _COMPILER, note)


def _read_note(path: Path) -> dict[str, Any] | None:
    import json

    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _write_note(path: Path, note: dict[str, Any]) -> None:
    import json

    if not _in_memory():
        with contextlib.suppress(OSError):
            _replace(path, json.dumps(note).encode())


@contextlib.contextmanager
def whatever_cupy_finds() -> Iterator[None]:
    """CuPy, imported within this, compiles from then on, whatever state its folder is in.

    Its own kernels (fills, sums, conversions) go to the folder above ours, and it raises where it
    cannot write there, or read what is there. The variable that keeps it out is read whenever it
    compiles; where somebody has set it, that holds.
    """
    cupys = folder().parent
    if not os.environ.get(_IN_MEMORY) and not _usable(cupys):
        _warn_once(str(cupys))
        os.environ[_IN_MEMORY] = "1"
        _kept_out.add("CuPy")
    if os.environ.get(_IN_MEMORY) != "1" or os.path.isdir(cupys):
        yield
        return
    # Some versions make the folder when they are imported, to be used or not.
    before = os.environ.get(_CACHE_DIR)
    os.environ[_CACHE_DIR] = os.sep  # is there everywhere; nothing is written to it
    try:
        yield
    finally:
        del os.environ[_CACHE_DIR]
        if before is not None:
            os.environ[_CACHE_DIR] = before


def _usable(cupys: Path) -> bool:
    """Whether files can be made in a folder, and all kernels that lie there be read."""
    try:
        cupys.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cupys)
        os.close(descriptor)
        os.unlink(temporary)
        with os.scandir(cupys) as entries:
            kernels = (entry for entry in entries if entry.name.endswith(".cubin"))
            return all(entry.is_file() and os.access(entry, os.R_OK) for entry in kernels)
    except OSError:
        return False


def _in_memory() -> bool:
    return os.environ.get(_IN_MEMORY) == "1" and not _kept_out


def _path(name: str) -> Path:
    return folder() / f"{name}.cubin"


def _digest(name: str, cubin: bytes) -> bytes:
    return hashlib.sha256(name.encode() + cubin).digest()


@functools.cache
def _warn_once(where: str) -> None:
    warnings.warn(
        f"the kernel cache {where} cannot be read or written, or holds something else: kernels "
        "are compiled in memory",
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
