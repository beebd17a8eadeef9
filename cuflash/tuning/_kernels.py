"""Which kernels can be tuned, by which values of which parameters, and what is JSON of them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuflash._errors import wrong_value
from cuflash._kernels import registry
from cuflash._kernels.config import KernelConfig
from cuflash._select.measured import with_values

#: Kernels with tiles to choose, by name.
KERNELS = {name: kernel for name, kernel in registry.KERNELS.items() if kernel.tunables}
#: Rows of results that an SM's registers hold: 32 lanes have 2048 registers each, and 16 rows take
#: 16 of a lane with 16 columns of scores and as many of results.
_ROWS = range(16, 16 * 2048 // 16 + 1, 16)


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


def superset(kind: type[KernelConfig] | KernelConfig) -> dict[str, Sequence[int]]:
    """Values of each parameter: all that some device and problem can have, and others."""
    own: Sequence[int] = _ROWS
    if kind.row_numbers:
        own = range(32, 32 * (2048 // kind.row_numbers) + 1, 32)
    if "num_warps" not in kind.tunables:
        own = range(64, 257, 64)  # by warpgroups; sixteen warps have three at most
    known: dict[str, Sequence[int]] = {
        kind.owned: own,
        "block_n" if kind.owned == "block_m" else "block_m": kind.streams,
        "num_warps": range(1, 33),
        "blocks_per_sm": range(1, 33),
        "num_stages": (1, 2) if kind.kernel == "forward_sm80" else range(1, 33),
        "num_q_stages": (1, 2),
        "overlap_quarters": range(5),
        "scores_ahead": (0, 1),
        "keys_in_registers": (0, 1),
    }
    return {name: known[name] for name in kind.tunables}


def shares_evenly(kind: type[KernelConfig] | KernelConfig, values: Mapping[str, int]) -> bool:
    """Whether all warps have as many rows; where their number cannot be chosen they do."""
    num_warps = values.get("num_warps")
    return not num_warps or values[kind.owned] % (_warp_rows(kind) * num_warps) == 0


def _warp_rows(kind: type[KernelConfig] | KernelConfig) -> int:
    """A warp has a multiple of so many rows; partners share 16."""
    return 32 if kind.row_numbers else 16 // kind.row_warps


def lane_registers(config: Any) -> int:
    """Registers of a lane that a kernel's scores and results alone take; 0 where they always fit.

    The portable kernels keep scores of a block and sums of results of a warp's rows in registers
    at the same time.
    """
    if "num_warps" not in config.tunables:
        return 0
    rows: int = config.own_rows // (_warp_rows(config) * config.num_warps)
    words = config.real_bytes // 4
    if config.row_numbers:
        return int(rows * config.numbers * words)
    if config.computes == "out":
        columns = config.block_n + config.head_dim_v // config.split_columns
    elif config.computes == "dq":
        columns = 2 * config.block_n + config.head_dim // config.split_columns
    elif config.computes == "dkv":
        results = config.grad_k * config.head_dim + config.grad_v * config.head_dim_v
        columns = (1 + config.grad_k) * config.block_m + results // config.split_columns
    else:
        return 0
    return int(rows * columns // 2 * words // config.row_warps)
