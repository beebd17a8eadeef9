"""What do Hopper's kernels for float32 share? Two warpgroups of 64 rows, TF32 parts."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import register_pressure
from cuflash._problem.problem import Problem

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)


class Stages(NamedTuple):
    """Fields of a gradient kernel, beside ``SCORED``."""

    num_stages: int  # buffers of each streamed operand


class Tf32Config(KernelConfig):
    """A float32 kernel: two warpgroups own 64 rows each, others split streamed operands."""

    params = "BackwardParams"
    tunables = ("block_m", "block_n", "num_stages")
    for_sm90 = True
    streams = (32, 64)
    row_warps, other_warps = 0, 4  # the others split operands into TF32 parts

    def check(self) -> None:
        num_warps = self.warps_for(128)
        if self.dtype != "float32":
            raise ValueError(f"{self.dtype=} must be float32")
        if self.own_rows != 128 or self.num_warps != num_warps:
            raise ValueError(
                f"{self.owned} = {self.own_rows} must be 128, and {self.num_warps=} {num_warps}"
            )
        if self.num_stages < 1:
            raise ValueError(f"{self.num_stages=} must be at least 1")
        if self.split_columns != 1:
            raise ValueError(f"{self.split_columns=} must be 1")
        if not {self.head_dim, self.head_dim_v} <= {64, 128}:
            raise ValueError(f"{self.head_dim=}, {self.head_dim_v=} must be 64 or 128")


def why_not(request: Request) -> str:
    """Why no float32 kernel for Hopper serves a request; empty where one may."""
    problem = request.problem
    options = register_pressure(problem) + (problem.bias is not None)
    options += problem.segment_ids_q is not None  # segments count twice: ids of both sides
    widest = wgmma.widest(problem)
    return wgmma.why_not(request) or wgmma.first_reason(
        (
            problem.dtype != np.float32,
            f"Hopper's TF32 products are for float32, not {problem.dtype}",
        ),
        (widest > 128, "registers hold no result wider than 128 columns"),
        (widest <= 32, "a tile of 64 columns would be half empty"),
        (problem.formulas is not None, "a formula's registers are unknown"),
        (options > 2, "registers hold at most two options that change scores"),
    )


def head_dims(problem: Problem) -> dict[str, int]:
    """Padded head sizes: multiples of 64, the columns of one product of a result."""
    sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    return {name: 64 * max(1, -(-size // 64)) for name, size in sizes.items()}


def fields(
    kernel: type[KernelConfig], request: Request, block_m: int, block_n: int
) -> dict[str, Any]:
    """Fields of every float32 kernel except ``num_stages``."""
    found = portable.fields(kernel, request) | head_dims(request.problem)
    found |= {"block_m": block_m, "block_n": block_n, "blocks_per_sm": 1}
    found["holds_bias"] = portable.can_hold_bias(request.problem)
    return found | {"num_warps": kernel.warps_for(found[kernel.owned])}


def staged(kernel: type[AnyConfig], request: Request, own: dict[str, Any]) -> tuple[AnyConfig, ...]:
    """A pass with two stages if shared memory holds them, else with one."""
    values = [own | {"num_stages": number} for number in (2, 1)]
    return portable.fitting(kernel, values, request.smem_limit)
