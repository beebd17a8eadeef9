"""On which device, driver and state of the sources was a measurement made?"""

from __future__ import annotations

import datetime as dt
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._jit import source
from cuflash._timing.machine import read_clocks, versions

#: Entries of a result that describe where and how it was measured.
META_KEYS = ("device", "driver", "cupy", "nvrtc", "clocks", "date", "commit", "command")


def commit() -> str:
    """The commit, marked if files differ from it; without git, the digest of the kernels."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[1]))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "cuflash", "kernels_cu", "benchmarks"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return f"kernels {source.digest()}"
    return head + ("-dirty" if changed.strip() else "")


def short_commit(commit: str) -> str:
    """Short form of :func:`commit`: a commit, or a digest of the sources if git was absent."""
    kind, _, digest = commit.rpartition(" ")
    changed = " and changes" if digest.endswith("-dirty") else ""
    return f"{kind or 'commit'} {digest[:9]}{changed}"


def describe_machine(xp: ModuleType, device_name: str, command: str) -> dict[str, Any]:
    """The "meta" part of a result."""
    meta: dict[str, Any] = dict.fromkeys(META_KEYS)
    meta |= {"device": device_name, "command": command, "commit": commit()}
    meta["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    if xp is not np:
        meta |= versions() | {"clocks": read_clocks()}
    return meta


def gpu_module() -> ModuleType | None:
    """CuPy, or None if there is no CuPy or no device."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except (ImportError, RuntimeError):
        return None
