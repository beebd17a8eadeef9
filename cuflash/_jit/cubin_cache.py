"""Where are compiled kernels stored for the next process?

In the folder ``cuflash`` of CuPy's kernel cache, one file each: a cubin, then the digest of its
name and of the cubin. A file without the right digest is not used: it is cut off, changed, or has
the name of another kernel. Anybody can compute a digest: files of other users than root are not
read. Files are only replaced as a whole, so any number of processes can share a folder.

``load`` and ``save`` do not raise: if a file cannot be read or written, each process compiles.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from cuflash._cupy import folder, in_memory, warn_once

MISSING = "does not exist"  # a problem of a file
_DIGEST_BYTES = 32


def name_of(*made_of: str) -> str:
    """Name of the kernel that these texts determine."""
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def shared_folders() -> tuple[Path, ...]:
    """Folders of kernels compiled ahead of time (D116), in the variable CUFLASH_KERNELS."""
    named = os.environ.get("CUFLASH_KERNELS", "")
    return tuple(Path(part) for part in named.split(os.pathsep) if part)


def load_shared(name: str) -> bytes | None:
    """The cubin of this name in one of the shared folders, or None. Nothing is written there."""
    for shared in shared_folders():
        path = shared / f"{name}.cubin"
        cubin, problem = _cubin_or_problem(path)
        if cubin is not None:
            return cubin
        if problem != MISSING:
            _warn_of_shared(str(path), problem)
    return None


def problem_of(path: Path) -> str:
    """Why the file of a kernel cannot be used; empty if it can."""
    return _cubin_or_problem(path)[1]


def _cubin_or_problem(path: Path) -> tuple[bytes | None, str]:
    try:
        cubin = _checked(path.stem, read(path))
    except FileNotFoundError:
        return None, MISSING
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    return cubin, "" if cubin is not None else "is truncated, changed, or another kernel's"


def read(path: Path, *, own: bool = False) -> bytes:
    """Content of a file; an OSError if it is no regular file, or other users may have written it.

    With ``own`` also if its owner is neither this user nor root: where all users may write, another
    user may have made the folder before us.

    The file is opened without blocking: a FIFO would wait for a writer.
    """
    not_waiting = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | not_waiting)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if _anybodys(status, path.parent):
            raise PermissionError(errno.EACCES, "other users may have written it", str(path))
        if own and not _of_us_or_root(status):
            raise PermissionError(errno.EACCES, "another user has written it", str(path))
        return file.read()


def _anybodys(status: os.stat_result, folder: Path) -> bool:
    """Whether all users may write the file; or its folder, for a file that another user owns.

    Root does not count as another user.
    """
    if sys.platform == "win32":  # has no such modes
        return False
    mode = status.st_mode if _of_us_or_root(status) else status.st_mode | folder.stat().st_mode
    return bool(mode & stat.S_IWOTH)


def _of_us_or_root(status: os.stat_result) -> bool:
    return sys.platform == "win32" or status.st_uid in (0, os.geteuid())


def _checked(name: str, content: bytes) -> bytes | None:
    cubin, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return cubin if digest == _digest(name, cubin) else None


def save_shared(shared: Path, name: str, cubin: bytes) -> Path:
    """Put a cubin into a shared folder; an OSError if the folder cannot be written.

    The file has the permissions of the folder, but never lets every user write.
    """
    path = shared / f"{name}.cubin"
    shared.mkdir(parents=True, exist_ok=True)
    replace(path, cubin + _digest(name, cubin), shared.stat().st_mode & 0o664)
    return path


def load(name: str) -> bytes | None:
    """The cubin of this name, or None."""
    if in_memory():
        return None
    try:
        content = read(_path(name), own=True)
    except FileNotFoundError:
        return None
    except OSError:
        warn_once(str(folder().parent))
        return None
    return _checked(name, content)


def save(name: str, cubin: bytes) -> None:
    """Store a cubin, in place of any file of this name."""
    if in_memory():
        return
    try:
        replace(_path(name), cubin + _digest(name, cubin))
    except OSError:
        if load(name) is None:  # Windows refuses to replace what another process is reading
            warn_once(str(folder().parent))


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file as a whole; a link of this name is replaced, not followed.

    A killed process leaves a file whose name begins with the name of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # it was moved
            os.unlink(temporary)


def load_note(name: str) -> dict[str, Any] | None:
    """The note of this name, about the kernel of that name or about the compiler; or None."""
    import json

    if in_memory():
        return None
    try:
        note = json.loads(read(folder() / f"{name}.json", own=True))
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def save_note(name: str, note: dict[str, Any]) -> None:
    """Write a note for later processes."""
    import json

    if not in_memory():
        with contextlib.suppress(OSError):
            replace(folder() / f"{name}.json", json.dumps(note).encode())


def _path(name: str) -> Path:
    return folder() / f"{name}.cubin"


def _digest(name: str, cubin: bytes) -> bytes:
    return hashlib.sha256(name.encode() + cubin).digest()


@functools.cache
def _warn_of_shared(path: str, what: str) -> None:
    warnings.warn(
        f"{path} {what}: this kernel is compiled instead",
        RuntimeWarning,
        stacklevel=2,
    )
