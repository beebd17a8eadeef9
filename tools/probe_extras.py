"""What does the interpreter that runs this file lack for some extras? Prints a list as JSON.

    python tools/probe_extras.py pyproject.toml extra...

The CuPy of a GPU machine may come from conda or stand beside a system-wide CUDA, so it is asked to
work and not looked up by the name of its distribution.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement


def read_project(pyproject: bytes) -> dict[str, Any]:
    """Return the [project] table."""
    return tomllib.loads(pyproject.decode())["project"]


def satisfied(requirement: Requirement) -> bool:
    """Whether a distribution of a suitable version is installed, or not needed here."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(installed, prereleases=True)


def cupy_works(requirement: Requirement, needs_device: bool) -> bool:
    """Whether CuPy of a suitable version finds NVRTC and, if it must, a device."""
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
        devices = cupy.cuda.runtime.getDeviceCount() if needs_device else 0
    except (ImportError, RuntimeError):
        return False
    return requirement.specifier.contains(cupy.__version__) and devices >= needs_device


def missing(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Name the distributions, and the CUDA extras as a whole, that are not there."""
    table = project["optional-dependencies"]
    absent = []
    lines = list(project["dependencies"])
    for extra in extras:
        if extra.startswith(("cuda", "compile")):
            cupy_line = Requirement(table[extra][0])
            if not cupy_works(cupy_line, needs_device=extra.startswith("cuda")):
                absent.append(extra)
        else:
            lines += table[extra]
    return [line.name for line in map(Requirement, lines) if not satisfied(line)] + absent


if __name__ == "__main__":
    print(json.dumps(missing(read_project(Path(sys.argv[1]).read_bytes()), sys.argv[2:])))
