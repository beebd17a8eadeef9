"""Which versions, device and kernel sources does this installation use?"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Literal, overload

import ml_dtypes
import numpy as np

from cuflash._cupy import folder
from cuflash._errors import pip_install, shown, wrong_value


@overload
def show_config(mode: Literal["stdout"] = "stdout") -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, str]: ...
def show_config(mode: Literal["stdout", "dicts"] = "stdout") -> dict[str, str] | None:
    """Show the versions, the device and the folders that a bug report needs.

    It works without CuPy and without a GPU. Missing parts are listed as missing.

    Parameters
    ----------
    mode : {'stdout', 'dicts'}, default 'stdout'
        Print the table, or return it, as in `numpy.show_config`.

    Returns
    -------
    dict of str or None
        For ``mode="dicts"`` a dict from names to descriptions, otherwise None.

    Raises
    ------
    ValueError
        If `mode` is anything else.

    Examples
    --------
    >>> import cuflash
    >>> sorted(cuflash.show_config(mode="dicts"))[:3]
    ['cuflash', 'cupy', 'device']
    """
    if not isinstance(mode, str) or mode not in ("stdout", "dicts"):
        raise wrong_value("mode", shown(mode), "'stdout' or 'dicts'")
    table = {
        "cuflash": f"{_version()} ({Path(__file__).parents[1]})",
        "python": f"{platform.python_version()} ({platform.platform()})",
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        **_gpu_rows(),
        "kernel sources": _attempt(_kernel_sources),
        "kernel cache": _kernel_cache(),
    }
    if mode == "dicts":
        return table
    width = max(map(len, table))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in table.items()))  # noqa: T201
    return None


def _version() -> str:
    from cuflash import __version__

    return __version__


def _gpu_rows() -> dict[str, str]:
    """Describe CuPy, NVRTC, driver and device, each on its own: any of them can be missing."""
    try:
        import cupy
    except (ImportError, OSError) as error:  # OSError: CuPy cannot create its cache
        reason = "not installed" if isinstance(error, ModuleNotFoundError) else f"broken: {error}"
        fix = pip_install("cuda12", "cuda13")
        absent = dict.fromkeys(("nvrtc", "driver", "device"), "unknown without CuPy")
        return {"cupy": f"{reason} ({fix})", **absent}
    return {
        "cupy": f"{cupy.__version__} ({_distribution('cupy')})",
        "nvrtc": _attempt(_nvrtc),
        "driver": _attempt(_driver, cupy),
        "device": _attempt(_device, cupy),
    }


def _attempt(describe: Any, *arguments: Any) -> str:
    """Return a description, or why there is none; CuPy and the CUDA libraries raise many types."""
    try:
        return str(describe(*arguments))
    except Exception as error:
        return f"unavailable: {error}".splitlines()[0]


def _distribution(module: str) -> str:
    from importlib import metadata

    return ", ".join(sorted(set(metadata.packages_distributions().get(module, ["not from pip"]))))


def _nvrtc() -> str:
    from cupy_backends.cuda.libs import nvrtc

    major, minor = nvrtc.getVersion()
    return f"{major}.{minor}"


def _driver(cupy: Any) -> str:
    version = cupy.cuda.runtime.driverGetVersion()
    if version == 0:
        return "none"
    return f"supports CUDA {version // 1000}.{version % 1000 // 10}"


def _device(cupy: Any) -> str:
    count = cupy.cuda.runtime.getDeviceCount()
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    major, minor = properties["major"], properties["minor"]
    gigabytes = properties["totalGlobalMem"] / 2**30
    name = properties["name"].decode()
    return f"{device.id} of {count}: {name}, sm_{major}{minor}, {gigabytes:.0f} GiB"


def _kernel_sources() -> Path:
    from cuflash._jit.source import kernels_dir  # `import cuflash` needs none of it

    return kernels_dir()


def _kernel_cache() -> str:
    found = folder()
    return str(found) if os.path.isdir(found) else f"{found} (created when a kernel is compiled)"
