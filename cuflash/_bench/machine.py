"""Which device, driver and state of the sources was measured?"""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._api.show_config import show_config
from cuflash._jit import source

META_KEYS = ("device", "driver", "cupy", "nvrtc", "clocks", "date", "commit", "command")


def device_slug(name: str) -> str:
    """The model of a device as part of a file name: 'NVIDIA H100 80GB HBM3' is 'h100'."""
    words = []
    for word in re.split(r"[ -]+", name):
        if word in ("NVIDIA", "GeForce", "Tesla", "Quadro"):
            continue
        if re.fullmatch(r"\d+GB|SXM\d*|PCI[eE]|HBM\d*\w*|Laptop", word):
            break
        words.append(word.lower())
    return "-".join(words) or "unknown"


def query_driver(*fields: str) -> list[str]:
    """What nvidia-smi says about device 0; nothing where it is absent."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "-i", "0", "--format=csv,noheader,nounits"]
    command.append(f"--query-gpu={','.join(fields)}")
    done = subprocess.run(command, capture_output=True, text=True)
    return [value.strip() for value in done.stdout.split(",")] if done.returncode == 0 else []


def read_clocks() -> dict[str, str] | None:
    """Clocks in MHz and power in W, now and at most."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
    return dict(zip(names, query_driver(*names), strict=False)) or None


def commit() -> str:
    """The commit that was measured, marked where files differ; without git, the kernels' digest."""
    git = ("git", "-C", str(Path(__file__).resolve().parents[2]))
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
    """What was measured, shortened: a commit, or the digest of the sources where git was absent."""
    kind, _, digest = commit.rpartition(" ")
    changed = " and changes" if digest.endswith("-dirty") else ""
    return f"{kind or 'commit'} {digest[:9]}{changed}"


def describe_machine(xp: ModuleType, device_name: str, command: str) -> dict[str, Any]:
    """The meta part of a result."""
    meta: dict[str, Any] = dict.fromkeys(META_KEYS)
    meta |= {"device": device_name, "command": command, "commit": commit()}
    meta["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    if xp is not np:
        import cupy
        from cupy_backends.cuda.libs import nvrtc

        driver = query_driver("driver_version")
        meta["driver"] = driver[0] if driver else str(cupy.cuda.runtime.driverGetVersion())
        meta["cupy"] = cupy.__version__
        meta["nvrtc"] = ".".join(map(str, nvrtc.getVersion()))
        meta["clocks"] = read_clocks()
    return meta


def gpu_module() -> ModuleType | None:
    """CuPy, where it has a device."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except (ImportError, RuntimeError):
        return None


def no_device() -> str:
    """That no device can be used, and why, in the words of `cuflash.show_config`."""
    found = show_config(mode="dicts")
    name = "device" if found["device"].startswith("unavailable") else "cupy"
    return f"no NVIDIA device can be used ({name} {found[name]})"
