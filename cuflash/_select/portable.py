"""Which kernel configuration serves a problem on a device? Tile choices as tables.

``block_n`` and the order of keys depend on head sizes and options alone, never on batch, heads or
seqlen_q, so that the bits of a row do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cuflash._errors import not_yet
from cuflash._kernels.config import (
    HEAD_DIMS,
    RESERVED_SMEM,
    DeltaConfig,
    ForwardConfig,
    Precision,
    TileConfig,
)
from cuflash._kernels.score_config import dtype_of, needs_score_math, score_config
from cuflash._problem.problem import HALVES, Problem
from cuflash._select.portable_tiles import CUDA_CORES, FLOAT32, FLOAT64, TF32, Tables, Tile, Tiles

AnyTileConfig = TypeVar("AnyTileConfig", bound=TileConfig)

# Rows are keyed by the larger padded head size. Of a row's tiles the first is taken that leaves
# room in shared memory for its blocks_per_sm: the first serves sm_90, the last the 99 KiB of sm_86,
# sm_89 and sm_120.
#
# 64 and 128: the fastest of the spill-free neighbours on an H100 SXM, 2026-11-21, bf16, 16,384
# tokens, seqlen 2048 and 8192, full and causal. Others follow from registers and shared memory.
# D30.
_FORWARD: Tiles = {
    16: (Tile(128, 64, 4, 3),),
    32: (Tile(128, 128, 4, 2),),
    64: (Tile(128, 96, 4, 2), Tile(128, 32, 4, 2)),
    96: (Tile(128, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: (Tile(128, 48, 4, 2), Tile(64, 32, 4, 2)),
    192: (Tile(64, 48, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    256: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
}
_BACKWARD_Q: Tiles = {
    16: (Tile(64, 64, 4, 4),),
    32: (Tile(128, 64, 4, 2),),
    64: (Tile(128, 48, 4, 2), Tile(64, 32, 4, 2)),
    96: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
    128: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    192: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
}
_BACKWARD_KV: Tiles = {
    16: (Tile(32, 128, 4, 3),),
    32: (Tile(32, 128, 4, 2),),
    64: (Tile(32, 128, 4, 2),),
    96: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)),
    192: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)),
    256: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1)),
}

# With softcap, bias, slopes, mask, segments, dropout or formulas: arithmetic that needs registers
# of its own; for the forward also with a scale that is no factor of exponents, a negative one.
_FORWARD_GENERAL: Tiles = {
    16: (Tile(128, 64, 4, 2),),
    32: (Tile(128, 64, 4, 2),),
    64: (Tile(64, 96, 4, 2),),
    96: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    192: (Tile(64, 48, 4, 2), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    256: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
}
_BACKWARD_Q_GENERAL: Tiles = {
    16: (Tile(64, 64, 4, 3),),
    32: (Tile(128, 32, 4, 2),),
    64: (Tile(64, 64, 4, 2),),
    96: (Tile(64, 32, 4, 2),),
    128: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    192: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
}
_BACKWARD_KV_GENERAL: Tiles = {
    16: (Tile(64, 64, 4, 2),),
    32: (Tile(64, 64, 4, 2),),
    64: (Tile(64, 64, 4, 2),),
    96: (Tile(32, 64, 4, 2),),
    128: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)),
    192: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 1)),
    256: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1)),
}
# What registers and shared memory hold; not timed.
_BACKWARD_SCORE: Tiles = {
    **{width: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)) for width in (16, 32, 64, 96, 128)},
    **{width: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)) for width in (192, 256)},
}
_HALF = Tables(
    _FORWARD,
    _FORWARD_GENERAL,
    _BACKWARD_Q,
    _BACKWARD_Q_GENERAL,
    _BACKWARD_KV,
    _BACKWARD_KV_GENERAL,
    _BACKWARD_SCORE,
    widest_pair=128,
    own_columns=256,
    own_columns_general=256,
    own_columns_backward=256,
    own_columns_backward_general=256,
)
_TABLES = {"float16": _HALF, "bfloat16": _HALF, "float32": FLOAT32, "float64": FLOAT64}


#: Compute capabilities whose tensor cores are twice as fast in float64 as their other units, and
#: the first with the matrix products and asynchronous copies that the portable kernels are made of.
_FLOAT64_TENSOR_CORES = (80, 90)
_FIRST_WITH_PRODUCTS = 80


def padded(head_dim: int, dtype: np.dtype[Any]) -> int:
    """The tile width that holds ``head_dim`` columns."""
    for width in HEAD_DIMS if dtype in HALVES else HEAD_DIMS[1:]:
        if head_dim <= width:
            return width
    raise not_yet(
        f"head_dim {head_dim} on a GPU", "a later version", f"up to {HEAD_DIMS[-1]} works"
    )


def forward_config(
    problem: Problem, smem_limit: int, copy_bytes: int, *, cuda_cores: bool = False
) -> ForwardConfig:
    """Choose the forward kernel; ``smem_limit`` is what one block of threads may ask for.

    Operands that do not fit there are multiplied on CUDA cores, where they lie.
    """
    fields = _fields(problem, copy_bytes, problem.out.dtype) | _sink_field(problem)
    fields["cuda_cores"] = cuda_cores
    general = needs_score_math(problem) or not fields["score"].scale_in_exponent
    tables = _tables(problem, cuda_cores)
    tiles = tables.forward_general if general else tables.forward
    own = tables.own_columns_general if general else tables.own_columns
    fields["column_parts"] = _parts(fields["head_dim_v"], own)
    widest = max(fields["head_dim"], fields["head_dim_v"])
    one_stage = tables.forward_one_stage_general if general else tables.forward_one_stage
    configs = [
        ForwardConfig(**fields, **t._asdict(), num_stages=1)
        for t in (one_stage or {}).get(widest, ())
    ]
    stages = tables.forward_stages
    configs += [ForwardConfig(**fields, **t, num_stages=stages) for t in _rows(tiles, fields)]
    if configs[-1].smem_bytes > smem_limit:
        parts = _parts(fields["head_dim_v"], own // 2)
        configs.append(replace(configs[-1], column_parts=parts))
    chosen = _fitting(configs, smem_limit)
    return chosen or forward_config(problem, smem_limit, copy_bytes, cuda_cores=True)


def _kv_passes(problem: Problem, wanted: frozenset[str], *, together: bool) -> list[list[str]]:
    """Which of dk and dv are computed together, if registers hold them ``together``."""
    sums: list[str] = [name for name in ("k", "v") if name in wanted]
    together = together and problem.k.summed == problem.v.summed
    return [sums] if together and sums else [[name] for name in sums]


def _tables(problem: Problem, cuda_cores: bool) -> Tables:
    if cuda_cores:
        return CUDA_CORES[max(4, problem.dtype.itemsize)]
    return TF32 if _precision(problem) == "tf32" else _TABLES[problem.dtype.name]


def _parts(columns: int, own: int) -> int:
    """Into how many parts of at most ``own`` the columns of a result are split."""
    return next(n for n in range(1, columns) if columns % (16 * n) == 0 and columns <= n * own)


def _rows(tiles: Tiles, fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [t._asdict() for t in tiles[max(fields["head_dim"], fields["head_dim_v"])]]


def _fits(config: TileConfig, smem_limit: int) -> bool:
    """Whether the blocks of threads that are to share a multiprocessor can."""
    needed = config.blocks_per_sm * (config.smem_bytes + RESERVED_SMEM)
    return needed <= smem_limit + RESERVED_SMEM


def _fitting(configs: list[AnyTileConfig], smem_limit: int) -> AnyTileConfig | None:
    """The first configuration whose blocks fit a multiprocessor together; the last if it fits."""
    for config in configs:
        if _fits(config, smem_limit):
            return config
    return configs[-1] if configs[-1].smem_bytes <= smem_limit else None


def _shares_keys(problem: Problem, names: list[str]) -> bool:
    """Whether the batch entries summed into one result have the same k, and v where it is read."""
    summed = problem.k.summed if "k" in names else problem.v.summed
    read = [problem.k.summed, problem.v.summed] if "k" in names else [problem.k.summed]
    return all(own[i] for own in read for i, is_summed in enumerate(summed) if is_summed)


def delta_config(
    problem: Problem, out_dtype: np.dtype[Any], copy_bytes: int, *, grad_lse: bool
) -> DeltaConfig:
    """Choose the kernel of delta = rowsum(dout * out) - dlse."""
    fields: dict[str, Any] = {"dtype": problem.dtype.name, "out_dtype": out_dtype.name}
    return DeltaConfig(
        **fields,
        copy_bytes=16 if copy_bytes == 16 else problem.dtype.itemsize,
        head_dim_v=padded(problem.head_dim_v, problem.dtype),
        num_warps=4,
        block_m=64,
        grad_lse=grad_lse,
    )


def _fields(problem: Problem, copy_bytes: int, out_dtype: np.dtype[Any]) -> dict[str, Any]:
    return {
        "dtype": problem.dtype.name,
        "out_dtype": out_dtype.name,
        "precision": _precision(problem),
        "wide_float64": False,
        "copy_bytes": copy_bytes,
        "head_dim": padded(problem.head_dim, problem.dtype),
        "head_dim_v": padded(problem.head_dim_v, problem.dtype),
        "score": score_config(problem),
    }


def for_architecture(config: Any, capability: int) -> Any:
    """The configuration with what the device decides, of compute capability 90 for sm_90."""
    if getattr(config, "dtype", "") != "float64" or not hasattr(config, "wide_float64"):
        return config
    return replace(config, wide_float64=capability >= 90)


def on_cuda_cores(problem: Problem, capability: int) -> bool:
    """Whether a device multiplies without tensor cores: before sm_80, and float64 on most."""
    of_float64 = problem.dtype == np.float64 and capability not in _FLOAT64_TENSOR_CORES
    return of_float64 or capability < _FIRST_WITH_PRODUCTS


def _precision(problem: Problem) -> Precision:
    """TF32 is a permission that only float32 can take."""
    return "tf32" if problem.precision == "tf32" and problem.dtype == np.float32 else "ieee"


def _sink_field(problem: Problem) -> dict[str, str]:
    """What the forward alone needs to know: the backward finds the sink in lse."""
    return {"sink": dtype_of(problem.sink)}
