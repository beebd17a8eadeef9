"""Which kernels can be tuned, with which values of which parameters; configurations as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuflash._errors import wrong_value
from cuflash._kernels import registry
from cuflash._kernels.config import KernelConfig
from cuflash._select.measured import with_values

#: Kernels with tunable tiles, by name.
KERNELS = {name: kernel for name, kernel in registry.KERNELS.items() if kernel.tunables}
#: Rows of results that fit into an SM's registers. Each of 32 lanes has 2048 registers in all warps
#: together. 16 rows take 16 registers of a lane, with 16 columns of scores and 16 of results.
_ROWS = range(16, 16 * 2048 // 16 + 1, 16)


def kernel_type(name: str) -> type[KernelConfig]:
    """The configuration class of a kernel; ValueError with the known names for an unknown one."""
    if name not in KERNELS:
        raise wrong_value("kernel", repr(name), f"one of {', '.join(KERNELS)}")
    return KERNELS[name]


def tile_of(config: KernelConfig) -> dict[str, int]:
    """Values of the parameters, in order; bools as 0 and 1."""
    return {name: int(getattr(config, name)) for name in config.tunables}


def with_tile(config: KernelConfig, values: Mapping[str, Any]) -> KernelConfig:
    """The configuration with other values; ValueError for an unknown name or an illegal value."""
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
    """All fields of a configuration, and the kernel's name."""
    return {"kernel": config.kernel, **config.values()}


def config_from_json(given: Mapping[str, Any]) -> Any:
    """The inverse of :func:`config_as_json`, after JSON has turned tuples into lists."""
    values = dict(given)
    kernel = registry.KERNELS[values.pop("kernel")]
    if "formulas" in values:
        values["formulas"] = tuple((name, text) for name, text in values["formulas"])
    return kernel(**values)


def superset(kind: type[KernelConfig] | KernelConfig) -> dict[str, Sequence[int]]:
    """Values of each parameter: all that may be legal on any device for any problem, and others."""
    own: Sequence[int] = _ROWS
    if kind.row_numbers:
        own = range(32, 32 * (2048 // kind.row_numbers) + 1, 32)
    if "num_warps" not in kind.tunables:
        own = range(64, 257, 64)  # 64 for each warpgroup; blocks of 16 warps have at most three
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
    """Whether all warps have equally many rows; always so if num_warps cannot be chosen."""
    num_warps = values.get("num_warps")
    return not num_warps or values[kind.owned] % (_warp_rows(kind) * num_warps) == 0


def _warp_rows(kind: type[KernelConfig] | KernelConfig) -> int:
    """A warp's rows are a multiple of this number; partner warps share 16 rows."""
    return 32 if kind.row_numbers else 16 // kind.row_warps


def lane_registers(config: Any) -> int:
    """Registers of a lane for scores and results alone; 0 for kernels in which they always fit.

    The portable kernels keep the scores of a block and the sums of results in registers at the same
    time, for all rows of a warp.
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
