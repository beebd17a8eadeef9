"""Which of Hopper's kernels for float32 serve a problem, and with how many buffers?

Their tiles are the fastest of benchmarks/sweeps on an H100 SXM. (D39, D43)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cuflash._kernels.config_tf32_sm90 import (
    BackwardKVTf32Sm90Config,
    BackwardQTf32Sm90Config,
    ForwardTf32Sm90Config,
)
from cuflash._problem.problem import Problem
from cuflash._select import eligibility, portable, portable_tiles

AnyConfig = TypeVar(
    "AnyConfig", ForwardTf32Sm90Config, BackwardQTf32Sm90Config, BackwardKVTf32Sm90Config
)
#: Shared memory that a block of threads may ask for on sm_90.
_SMEM = 232448


def forward_config(problem: Problem, copy_bytes: int) -> ForwardTf32Sm90Config | None:
    """Choose Hopper's forward for float32; None where the portable one serves."""
    if eligibility.against_tf32_forward(problem):
        return None
    fields = _tile_fields(problem, copy_bytes, problem.out.dtype) | portable._sink_field(problem)
    return _staged(
        ForwardTf32Sm90Config(block_m=128, block_n=64, num_warps=16, num_stages=2, **fields)
    )


def backward_q_config(problem: Problem, copy_bytes: int) -> BackwardQTf32Sm90Config | None:
    """Choose Hopper's kernel of dq for float32; None where the portable one serves.

    So it does where q is broadcast, too: its gradient is a sum over batch entries.
    """
    if eligibility.against_tf32(problem) or any(problem.q.summed):
        return None
    fields = _tile_fields(problem, copy_bytes, problem.dtype)
    narrow = max(fields["head_dim"], fields["head_dim_v"]) == 64
    # 64 keys: 115.1 TFLOP/s on an H100 at head size 64, 32 in two stages: 93.5. Segment ids spill.
    # D44.
    block_n = 64 if narrow and problem.segment_ids_q is None else 32
    return _staged(
        BackwardQTf32Sm90Config(block_m=128, block_n=block_n, num_warps=12, num_stages=2, **fields)
    )


def backward_kv_configs(
    problem: Problem, copy_bytes: int, wanted: frozenset[str]
) -> tuple[BackwardKVTf32Sm90Config, ...] | None:
    """Choose Hopper's passes for dk, dv or both in float32; None where the portable ones serve.

    So they do where batch entries that are summed into one result have not the same k and v, too.
    """
    if eligibility.against_tf32(problem):
        return None
    fields = _tile_fields(problem, copy_bytes, problem.dtype)
    widest = max(fields["head_dim"], fields["head_dim_v"])
    passes = portable._kv_passes(
        problem, wanted, together=widest <= portable_tiles.FLOAT32.widest_pair
    )
    if not all(portable._shares_keys(problem, names) for names in passes):
        return None
    return tuple(
        _staged(
            BackwardKVTf32Sm90Config(
                block_m=32,
                block_n=128,
                num_warps=12,
                num_stages=2,
                shared_keys=True,
                grad_k="k" in names,
                grad_v="v" in names,
                **fields,
            )
        )
        for names in passes
    )


def _tile_fields(problem: Problem, copy_bytes: int, out_dtype: np.dtype[Any]) -> dict[str, Any]:
    fields = portable._fields(problem, copy_bytes, out_dtype)
    fields |= {name: 64 * -(-fields[name] // 64) for name in ("head_dim", "head_dim_v")}
    return fields | {"blocks_per_sm": 1, "column_parts": 1}


def _staged(config: AnyConfig) -> AnyConfig:
    """The configuration with as many of its two stages as shared memory holds."""
    return config if config.smem_bytes <= _SMEM else replace(config, num_stages=1)
