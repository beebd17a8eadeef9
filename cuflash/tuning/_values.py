"""Which values may a parameter of a kernel have, and what do their combinations take?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuflash._kernels.config import KernelConfig

#: Rows of results that a multiprocessor's registers hold: 32 lanes have 2048 registers each, and 16
#: rows take 16 of a lane with 16 columns of scores and as many of results. A row of one of the
#: narrow forward's lanes takes 13.
_ROWS = range(16, 16 * 2048 // 16 + 1, 16)
_NARROW_ROWS = range(32, 32 * (2048 // 13) + 1, 32)


def superset(kind: type[KernelConfig] | KernelConfig) -> dict[str, Sequence[int]]:
    """Values of each parameter, among which all are that some device and problem can have."""
    own: Sequence[int] = _NARROW_ROWS if kind.kernel == "forward_narrow" else _ROWS
    if not _has_even_warps(kind):
        own = range(64, 257, 64)  # by warpgroups, of which sixteen warps have three at most
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


def _has_even_warps(kind: type[KernelConfig] | KernelConfig) -> bool:
    """Whether all warps do the same, with as many registers; else roles divide them."""
    return "num_warps" in kind.tunables


def shares_evenly(kind: type[KernelConfig] | KernelConfig, values: Mapping[str, int]) -> bool:
    """Whether warps whose number can be chosen have as many rows each."""
    num_warps = values.get("num_warps")
    return not num_warps or values[kind.owned] % (_warp_rows(kind) * num_warps) == 0


def _warp_rows(kind: type[KernelConfig] | KernelConfig) -> int:
    """Rows of which a warp has a multiple; partners share 16."""
    if kind.kernel == "forward_narrow":
        return 32
    return 16 // kind.row_warps


def lane_registers(config: Any) -> int:
    """Registers of a lane that a kernel's scores and results alone take; 0 where they always fit.

    The portable kernels keep scores of a block and sums of results of a warp's rows in registers
    at the same time.
    """
    if not _has_even_warps(config):
        return 0
    rows: int = config.own_rows // (_warp_rows(config) * config.num_warps)
    words = config.real_bytes // 4
    if config.kernel == "forward_narrow":  # q, maxima, sums in a block and of all, a run
        return int(rows * (config.width + 2 * (2 + config.width_v) + 8) * words)
    if config.computes == "out":
        columns = config.block_n + config.head_dim_v // config.column_parts
    elif config.computes == "dq":
        columns = 2 * config.block_n + config.head_dim // config.column_parts
    elif config.computes == "dkv":
        results = config.grad_k * config.head_dim + config.grad_v * config.head_dim_v
        columns = (1 + config.grad_k) * config.block_m + results // config.column_parts
    else:
        return 0
    return int(rows * columns // 2 * words // config.row_warps)
