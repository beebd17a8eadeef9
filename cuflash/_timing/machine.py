"""On which device and driver was a measurement made, and at which clocks?"""

from __future__ import annotations

import re
import shutil
import subprocess


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
    """Fields of device 0 from nvidia-smi; empty if that is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "-i", "0", "--format=csv,noheader,nounits"]
    command.append(f"--query-gpu={','.join(fields)}")
    done = subprocess.run(command, capture_output=True, text=True)
    return [value.strip() for value in done.stdout.split(",")] if done.returncode == 0 else []


def read_clocks() -> dict[str, str] | None:
    """Current clocks in MHz and power in W, and their limits."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
    return dict(zip(names, query_driver(*names), strict=False)) or None


def versions() -> dict[str, str]:
    """Versions of the driver, CuPy and NVRTC."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    driver = query_driver("driver_version")
    return {
        "driver": driver[0] if driver else str(cupy.cuda.runtime.driverGetVersion()),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, nvrtc.getVersion())),
    }
