"""What do Hopper's kernels for float32 share? Two warpgroups of 64 rows, parts of TF32."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import register_pressure

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
#: Shared memory that a thread block may ask for on sm_90.
_SMEM = 232448


def check(config: KernelConfig, num_warps: int = 12) -> None:
    """Raise a ValueError unless two warpgroups own 64 rows each, and others split the rest."""
    if config.dtype != "float32":
        raise ValueError(f"{config.dtype=} must be float32")
    if config.own_rows != 128 or config.num_warps != num_warps:
        raise ValueError(
            f"{config.own_rows} rows, {config.num_warps=}: must be 128 and {num_warps}"
        )
    if config.num_stages < 1:
        raise ValueError(f"num_stages={config.num_stages} must be at least 1")
    if config.column_parts != 1:
        raise ValueError(f"{config.column_parts=} must be 1")
    if not {config.head_dim, config.head_dim_v} <= {64, 128}:
        raise ValueError(f"{config.head_dim=}, {config.head_dim_v=} must be 64 or 128")


def against(request: Request) -> str:
    """Why no kernel of Hopper for float32 serves a request."""
    problem = request.problem
    options = register_pressure(problem) + (problem.bias is not None)
    options += problem.segment_ids_q is not None  # ids of both sides: two
    widest = wgmma.widest(problem)
    return wgmma.against(request) or wgmma.first_reason(
        (
            problem.dtype != np.float32,
            f"Hopper's products of TF32 are for float32, not {problem.dtype}",
        ),
        (widest > 128, "registers hold no wider result"),
        (widest <= 32, "a tile of 64 columns would be half empty"),
        (problem.formulas is not None, "nobody knows how many registers a formula takes"),
        (options > 2, "registers hold two options that change scores"),
    )


def fields(request: Request, out_dtype: np.dtype[Any] | None = None) -> dict[str, Any]:
    """Fields of every kernel for float32."""
    own = portable.fields(request, out_dtype)
    own |= {name: 64 * -(-own[name] // 64) for name in ("head_dim", "head_dim_v")}
    return own | {"blocks_per_sm": 1, "num_stages": 2}


def staged(config: AnyConfig) -> AnyConfig:
    """The configuration with as many of its two stages as shared memory holds."""
    return config if config.smem_bytes <= _SMEM else config.replace(num_stages=1)
