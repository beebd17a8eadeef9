"""Which kernels can be tuned, by which parameters, and how does a configuration travel as JSON?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuflash._errors import wrong_value
from cuflash._kernels import registry
from cuflash._kernels.config import KernelConfig
from cuflash._select.measured import with_values

#: Kernels by name whose tiles can be chosen.
KERNELS = {name: kernel for name, kernel in registry.KERNELS.items() if kernel.tunables}


def kernel_type(name: str) -> type[KernelConfig]:
    """The configuration of a kernel; a ValueError that lists the known ones."""
    if name not in KERNELS:
        raise wrong_value("kernel", repr(name), f"one of {', '.join(KERNELS)}")
    return KERNELS[name]


def tile_of(config: KernelConfig) -> dict[str, int]:
    """Values of the parameters, in order; truth values as 0 and 1."""
    return {name: int(getattr(config, name)) for name in config.tunables}


def with_tile(config: KernelConfig, values: Mapping[str, Any]) -> KernelConfig:
    """The configuration with other values; a ValueError names what is unknown or illegal."""
    for name, value in values.items():
        if name not in config.tunables:
            raise wrong_value(
                "parameter", repr(name), f"one of {', '.join(config.tunables)} of {config.kernel}"
            )
        if not isinstance(value, int):
            raise wrong_value(name, repr(value), "an int")
        if isinstance(getattr(config, name), bool) and value not in (0, 1):
            raise wrong_value(name, repr(value), "0 or 1")
    return with_values(config, values)


def config_as_json(config: KernelConfig) -> dict[str, Any]:
    """All fields and the kernel's name."""
    return {"kernel": config.kernel, **config.values()}


def config_from_json(given: Mapping[str, Any]) -> Any:
    """The configuration of :func:`config_as_json`, after JSON made lists of tuples."""
    values = dict(given)
    kernel = registry.KERNELS[values.pop("kernel")]
    if "formulas" in values:
        values["formulas"] = tuple((name, text) for name, text in values["formulas"])
    return kernel(**values)
