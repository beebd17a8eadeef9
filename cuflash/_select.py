"""Which kernel configuration serves a problem on a device? Tile choices as tables.

``block_n`` and the order of keys depend on head sizes and options alone, never on batch, heads or
seqlen_q, so that the bits of a row do not depend on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash import _philox, _sm90_refusals, _tuned
from cuflash._config import (
    HEAD_DIMS,
    RESERVED_SMEM,
    BackwardKVSm90Config,
    BackwardQSm90Config,
    DeltaConfig,
    ForwardConfig,
    ForwardSm90Config,
    KernelConfig,
    Precision,
    TileConfig,
)
from cuflash._errors import not_yet, problem_with
from cuflash._problem import HALVES, Operand, Problem
from cuflash._tiles import CUDA_CORES, FLOAT32, FLOAT64, TF32, Tables, Tile, Tiles

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
AnyTileConfig = TypeVar("AnyTileConfig", bound=TileConfig)

# Rows are keyed by the larger padded head size. Of a row's tiles the first is taken that leaves
# room in shared memory for its blocks_per_sm: the first serves sm_90, the last the 99 KiB of sm_86,
# sm_89 and sm_120.
#
# 64 and 128: the fastest of the spill-free neighbours on an H100 SXM, 2026-11-21, bf16, 16,384
# tokens, seqlen 2048 and 8192, full and causal. Others follow from registers and shared memory.
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
# What registers and shared memory hold; neither is measured yet.
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


class Sm90Tile(NamedTuple):
    """One row of the tables of Hopper: see ``ForwardSm90Config``."""

    block_m: int
    block_n: int
    num_stages: int
    num_q_stages: int
    overlap_quarters: int


Sm90Tiles = dict[tuple[int, int], Sm90Tile]
# Keyed by the padded head sizes (of q and k, of v), smallest first. Measured on an H100 SXM:
# docs/forward-sm90.md.
_FORWARD_SM90: Sm90Tiles = {
    (64, 64): Sm90Tile(192, 128, 4, 2, 0),
    (96, 96): Sm90Tile(128, 128, 2, 2, 4),
    (128, 128): Sm90Tile(128, 128, 2, 2, 4),
    (192, 128): Sm90Tile(128, 128, 2, 1, 2),
    (192, 192): Sm90Tile(128, 112, 2, 1, 2),
    (256, 256): Sm90Tile(128, 80, 2, 1, 2),
}
# Where 192 rows leave some multiprocessors much more to do than others, smaller tiles are done
# sooner (H100 SXM, 2026-11-24: docs/measured-facts.md); a score that is multiplied by its scale
# before the exponential takes registers that 192 rows do not leave.
_FORWARD_SM90_FEW: Sm90Tiles = {(64, 64): Sm90Tile(128, 128, 4, 2, 1)}
_GAIN_OF_192_ROWS = 1.15
# Lengths from arrays are bounds to hold in registers, of which the widest tile leaves none.
_FORWARD_SM90_LENGTHS: Sm90Tiles = {(256, 256): Sm90Tile(128, 64, 2, 1, 2)}
# A narrow window is over after a few blocks: narrow blocks waste less at its ends, and three
# warpgroups hide more of where a tile ends and the next begins.
_FORWARD_SM90_NARROW: Sm90Tiles = {(128, 128): Sm90Tile(192, 64, 4, 2, 1)}
_FORWARD_SM90_NARROW_FEW: Sm90Tiles = {(128, 128): Sm90Tile(128, 64, 5, 2, 1)}
_NARROW = 4096  # keys that one query sees
# With softcap or mask: tanh and look-ups branch, which nothing may do while products are in flight,
# and take registers.
_FORWARD_SM90_GENERAL: Sm90Tiles = {
    (64, 64): Sm90Tile(128, 128, 4, 2, 0),
    (96, 96): Sm90Tile(128, 128, 2, 2, 0),
    (128, 128): Sm90Tile(128, 128, 2, 2, 0),
    (192, 128): Sm90Tile(128, 128, 2, 1, 0),
    (192, 192): Sm90Tile(128, 96, 2, 1, 0),
    (256, 256): Sm90Tile(128, 64, 2, 1, 0),
}
# A softcap alone leaves registers for more, by benchmarks/sweeps; with many rows for 192 of them.
_FORWARD_SM90_SOFTCAP: Sm90Tiles = {(128, 128): Sm90Tile(128, 128, 2, 2, 4)}
_FORWARD_SM90_SOFTCAP_MANY: Sm90Tiles = {(64, 64): Sm90Tile(192, 128, 4, 2, 0)}
# A window bounded on the left besides.
_FORWARD_SM90_GENERAL_WINDOW: Sm90Tiles = {
    (192, 128): Sm90Tile(128, 112, 2, 1, 0),
    (192, 192): Sm90Tile(128, 64, 2, 1, 0),
    (256, 256): Sm90Tile(128, 48, 2, 1, 0),
}
# Packed sequences besides: where they begin takes registers, too.
_FORWARD_SM90_GENERAL_PACKED: Sm90Tiles = {(256, 256): Sm90Tile(128, 48, 2, 1, 0)}
# Segments besides, whose ids are looked up for each key, or a window and packing or a bias.
_FORWARD_SM90_GENERAL_CROWDED: Sm90Tiles = {
    (192, 128): Sm90Tile(128, 64, 2, 1, 0),
    (192, 192): Sm90Tile(128, 48, 2, 1, 0),
}
# A bias: each of its values waits in a register for the product that it is added to. The widest
# blocks that spill nothing by NVRTC 12.9 and 13.5; one at 128 was timed, docs/measured-facts.md.
_FORWARD_SM90_GENERAL_BIAS: Sm90Tiles = {
    (64, 64): Sm90Tile(128, 96, 4, 2, 0),
    (96, 96): Sm90Tile(128, 96, 2, 2, 0),
    (128, 128): Sm90Tile(128, 96, 2, 2, 0),
    (192, 128): Sm90Tile(128, 96, 2, 1, 0),
    (192, 192): Sm90Tile(128, 64, 2, 1, 0),
    (256, 256): Sm90Tile(128, 48, 2, 1, 0),
}
#: Compute capabilities whose tensor cores are twice as fast in float64 as their other units, and
#: the first with the matrix products and asynchronous copies that the portable kernels are made of.
_FLOAT64_TENSOR_CORES = (80, 90)
_FIRST_WITH_PRODUCTS = 80
#: What a call is planned for where no device is at hand: an H100 SXM.
_MULTIPROCESSORS = 132


class GradientSm90Tile(NamedTuple):
    """One row of the tables of Hopper's gradient: see ``BackwardSm90Config``."""

    block_m: int
    block_n: int
    num_stages: int
    scores_ahead: bool = False


GradientSm90Tiles = dict[tuple[int, int], GradientSm90Tile]
# The fastest of benchmarks/sweeps, but for (192, 128), which follows from shared memory. Three
# buffers of narrow blocks win over two of wide ones, and over scores ahead.
_BACKWARD_Q_SM90: GradientSm90Tiles = {
    (64, 64): GradientSm90Tile(128, 128, 3),
    (96, 96): GradientSm90Tile(128, 80, 3),
    (128, 128): GradientSm90Tile(128, 64, 3),
    (192, 128): GradientSm90Tile(128, 80, 2),
    (192, 192): GradientSm90Tile(128, 48, 3),
    (256, 256): GradientSm90Tile(128, 32, 3),
}
# Where a score takes more than a multiplication: of slopes and softcap the fastest of
# benchmarks/sweeps, of 96 and 192 those of docs/backward-sm90.md.
_BACKWARD_Q_SM90_GENERAL: GradientSm90Tiles = {
    (96, 96): GradientSm90Tile(128, 96, 3, True),
    (128, 128): GradientSm90Tile(128, 80, 3, True),
    (192, 192): GradientSm90Tile(128, 64, 2),
    (256, 256): GradientSm90Tile(128, 48, 2),
}
# Under a causal bound the scores ahead of the last block are multiplied in vain, and none are where
# a score waits for every product.
_BACKWARD_Q_SM90_NOT_AHEAD: GradientSm90Tiles = {(128, 128): GradientSm90Tile(128, 64, 3)}
# Where several options take registers, dropout, a bias or a formula among them.
_BACKWARD_Q_SM90_CROWDED: GradientSm90Tiles = {
    (64, 64): GradientSm90Tile(128, 96, 3),
    (128, 128): GradientSm90Tile(128, 80, 3),
}
# Up to 128 the fastest of benchmarks/sweeps; others follow from registers and shared memory. Rows
# serve dk and dv in one pass up to head size 128, larger ones one of them: registers hold no two
# results of 192 columns.
_BACKWARD_KV_SM90: GradientSm90Tiles = {
    (64, 64): GradientSm90Tile(96, 128, 3),
    (96, 96): GradientSm90Tile(80, 128, 3),
    (128, 128): GradientSm90Tile(64, 128, 3),
    (192, 128): GradientSm90Tile(64, 128, 2),
    (192, 192): GradientSm90Tile(64, 128, 2),
    (256, 256): GradientSm90Tile(48, 128, 2),
}
# Where a score takes more than a multiplication.
_BACKWARD_KV_SM90_GENERAL: GradientSm90Tiles = {
    (64, 64): GradientSm90Tile(64, 128, 3),
    (96, 96): GradientSm90Tile(64, 128, 3),
    (128, 128): GradientSm90Tile(48, 128, 3),
}
# Where several options do, as above: blocks that spill nothing by NVRTC 12.9 and 13.5, not timed.
_BACKWARD_KV_SM90_CROWDED: GradientSm90Tiles = {
    (96, 96): GradientSm90Tile(48, 128, 3),
    (128, 128): GradientSm90Tile(32, 128, 3),
    (192, 128): GradientSm90Tile(48, 128, 2),
    (192, 192): GradientSm90Tile(48, 128, 2),
    (256, 256): GradientSm90Tile(32, 128, 2),
}


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
    general = _is_general(problem) or not fields["scale_in_exponent"]
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


def forward_sm90_config(
    problem: Problem, multiprocessors: int = _MULTIPROCESSORS
) -> ForwardSm90Config | None:
    """Choose the forward kernel of Hopper; None where the portable one serves."""
    if _sm90_refusals.against_forward(problem):
        return None
    fields = _fields(problem, 16, problem.dtype) | _sink_field(problem)
    tiles = _FORWARD_SM90
    if _is_general(problem):
        tiles = _FORWARD_SM90_GENERAL
        if _has_softcap_alone(problem):
            tiles = tiles | _FORWARD_SM90_SOFTCAP
            if not _has_few_rows(problem, multiprocessors):
                tiles = tiles | _FORWARD_SM90_SOFTCAP_MANY
        packed, biased = fields["cu_seqlens"] != "none", fields["bias"] != "none"
        if packed:
            tiles = tiles | _FORWARD_SM90_GENERAL_PACKED
        if fields["window_left"]:
            tiles = tiles | _FORWARD_SM90_GENERAL_WINDOW
        if biased:
            tiles = tiles | _FORWARD_SM90_GENERAL_BIAS
        if fields["segment_ids"] != "none" or (fields["window_left"] and (packed or biased)):
            tiles = tiles | _FORWARD_SM90_GENERAL_CROWDED
    else:
        lengths = not fields["q_lengths"] == fields["kv_lengths"] == "none"
        packed = fields["cu_seqlens"] != "none"
        if lengths or packed:
            tiles = tiles | _FORWARD_SM90_LENGTHS
        narrow = problem.window_keys is not None and problem.window_keys <= _NARROW
        if fields["sink"] != "none" and (lengths or problem.offset is not None):
            narrow = False  # three warpgroups have no registers for a sink and bounds from arrays
        if narrow:
            tiles = tiles | _FORWARD_SM90_NARROW
        scaled = not fields["scale_in_exponent"]
        if scaled or _has_few_rows(problem, multiprocessors):
            tiles = tiles | _FORWARD_SM90_FEW
        if scaled or _count(problem, 128) <= multiprocessors:
            if narrow:
                tiles = tiles | _FORWARD_SM90_NARROW_FEW
        elif packed and fields["sink"] == "none":  # many of them are short; with a sink as above
            tiles = tiles | _FORWARD_SM90_NARROW
    fields |= _sm90_row(tiles, problem)
    return ForwardSm90Config(num_warps=fields["block_m"] // 16 + 4, **fields)


def _count(problem: Problem, block_m: int) -> int:
    """How many tiles of so many rows there are."""
    return math.prod(problem.batch) * -(-problem.seqlen_q // block_m)


def _has_few_rows(problem: Problem, multiprocessors: int) -> bool:
    """Whether tiles of 192 rows take longer than those of 128, by what the busiest processor has.

    Under a causal bound the last tile has the most keys: alone on a processor, it is the busiest.
    """

    def most(block_m: int) -> int:  # rows of one multiprocessor
        return -(-_count(problem, block_m) // multiprocessors) * block_m

    alone = problem.window_right is not None and _count(problem, 192) <= multiprocessors
    return alone or most(192) > _GAIN_OF_192_ROWS * most(128)


def _sm90_row(
    tiles: (
        dict[tuple[int, int], Sm90Tile]
        | dict[tuple[int, int], GradientSm90Tile]
        | dict[tuple[int, int], Any]
    ),
    problem: Problem,
) -> dict[str, Any]:
    """The fields of the smallest row that holds the head sizes."""
    (head_dim, head_dim_v), tile = next(
        (key, tile)
        for key, tile in tiles.items()
        if problem.head_dim <= key[0] and problem.head_dim_v <= key[1]
    )
    widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    return {**widths, **tile._asdict(), "blocks_per_sm": 1, "column_parts": 1}


def backward_q_sm90_config(problem: Problem) -> BackwardQSm90Config | None:
    """Choose Hopper's kernel of dq; None where the portable one serves.

    So it does where q is broadcast, too: its gradient is a sum over batch entries.
    """
    if _sm90_refusals.against_gradient(problem) or any(problem.q.summed):
        return None
    tiles = _BACKWARD_Q_SM90
    if _is_general(problem):
        tiles = tiles | _BACKWARD_Q_SM90_GENERAL
    more = (problem.bias, problem.formulas, problem.softcap, problem.mask)
    if problem.window_right is not None or any(x is not None for x in more):
        tiles = tiles | _BACKWARD_Q_SM90_NOT_AHEAD
    if _sm90_refusals.crowds_gradient(problem):
        tiles = tiles | _BACKWARD_Q_SM90_CROWDED
    fields = _fields(problem, 16, problem.dtype) | _sm90_row(tiles, problem)
    return BackwardQSm90Config(num_warps=fields["block_m"] // 16 + 4, **fields)


def backward_kv_sm90_configs(
    problem: Problem, wanted: frozenset[str]
) -> tuple[BackwardKVSm90Config, ...] | None:
    """Choose Hopper's passes for dk, dv or both; None where the portable ones serve.

    So they do where batch entries that are summed into one result have not the same k and v, too.
    """
    if _sm90_refusals.against_gradient(problem):
        return None
    tiles = _BACKWARD_KV_SM90
    if _is_general(problem):
        tiles = tiles | _BACKWARD_KV_SM90_GENERAL
    if _sm90_refusals.crowds_gradient(problem):
        tiles = tiles | _BACKWARD_KV_SM90_CROWDED
    fields = _fields(problem, 16, problem.dtype) | _sm90_row(tiles, problem)
    widest = max(fields["head_dim"], fields["head_dim_v"])
    passes = _kv_passes(problem, wanted, together=widest <= _HALF.widest_pair)
    if not all(_shares_keys(problem, names) for names in passes):
        return None
    return tuple(
        BackwardKVSm90Config(
            num_warps=fields["block_n"] // 16 + 4,
            grad_k="k" in names,
            grad_v="v" in names,
            **fields,
        )
        for names in passes
    )


def _kv_passes(problem: Problem, wanted: frozenset[str], *, together: bool) -> list[list[str]]:
    """Which of dk and dv are computed together, if registers hold them ``together``."""
    sums: list[str] = [name for name in ("k", "v") if name in wanted]
    together = together and problem.k.summed == problem.v.summed
    return [sums] if together and sums else [[name] for name in sums]


def overridden(chosen: AnyTileConfig, config: Any, device: int) -> AnyTileConfig:
    """The tile that the caller, or else a table of what was measured, wants instead.

    What follows from the problem stays.
    """
    if config is None:
        if not _tuned.has_row(chosen):
            return chosen
        from cuflash import _device  # which imports CuPy

        return _tuned.applied(chosen, _tuned.device_name(device), _device.smem_limit(device))
    if type(config) is not type(chosen):
        raise problem_with(
            "config", TypeError, got=type(config).__name__, expected=type(chosen).__name__
        )
    names = {*Tile._fields, *Sm90Tile._fields, *GradientSm90Tile._fields, "keys_in_registers"} & {
        f.name for f in fields(config)
    }
    try:
        return replace(chosen, **{name: getattr(config, name) for name in names})
    except ValueError as error:
        raise problem_with(
            "config", ValueError, got=f"{type(config).__name__} with {_tuned.tile_text(config)}",
            expected="a tile that is legal for this call", fix=str(error).replace("self.", ""),
        ) from None  # fmt: skip


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


def _is_general(problem: Problem) -> bool:
    scored = (problem.softcap, problem.bias, problem.alibi_slopes, problem.formulas)
    present = any(x is not None for x in (*scored, problem.mask, problem.segment_ids_q))
    return present or _philox.threshold(problem.dropout) > 0


def _has_softcap_alone(problem: Problem) -> bool:
    """Whether nothing but a softcap and a bound on the right takes registers."""
    scored = (problem.bias, problem.alibi_slopes, problem.formulas, problem.mask, problem.sink)
    ids = (problem.segment_ids_q, problem.cu_seqlens_q)
    bounds = (problem.window_left, problem.offset, problem.q_lengths, problem.kv_lengths)
    alone = all(other is None for other in (*scored, *ids, *bounds))
    return alone and problem.softcap is not None and _philox.threshold(problem.dropout) == 0


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
        **score_fields(problem),
    }


def for_architecture(config: AnyConfig, capability: int) -> AnyConfig:
    """The configuration with what the device decides, of compute capability 90 for sm_90."""
    if not isinstance(config, TileConfig) or config.dtype != "float64":
        return config
    return replace(config, wide_float64=capability >= 90)


def on_cuda_cores(problem: Problem, capability: int) -> bool:
    """Whether a device multiplies without tensor cores: before sm_80, and float64 on most."""
    of_float64 = problem.dtype == np.float64 and capability not in _FLOAT64_TENSOR_CORES
    return of_float64 or capability < _FIRST_WITH_PRODUCTS


def _precision(problem: Problem) -> Precision:
    """TF32 is a permission that only float32 can take."""
    return "tf32" if problem.precision == "tf32" and problem.dtype == np.float32 else "ieee"


def score_fields(problem: Problem) -> dict[str, Any]:
    """The configuration fields that say which score options are present."""
    if max(problem.seqlen_q, problem.seqlen_k) >= 1 << 29:
        raise problem_with(
            "q, k", ValueError, got=f"{problem.seqlen_q} queries, {problem.seqlen_k} keys",
            expected="fewer than 2^29 of each",
        )  # fmt: skip
    changes = (problem.softcap, problem.bias, problem.alibi_slopes)
    plain = all(x is None for x in changes) and not (
        problem.formulas is not None and problem.formulas.score_mod
    )
    # Beyond these bounds scale * log2(e) leaves the normal range of float32.
    scale_in_exponent = plain and 1e-30 < problem.scale < 1e30
    return {
        "window_left": problem.window_left is not None,
        "window_right": problem.window_right is not None,
        "scale_in_exponent": scale_in_exponent,
        "softcap": problem.softcap is not None,
        "bias": _dtype_field(problem.bias),
        "alibi_slopes": _dtype_field(problem.alibi_slopes),
        "mask": problem.mask is not None,
        "segment_ids": _dtype_field(problem.segment_ids_q),
        "offset": _offset_field(problem),
        "q_lengths": _dtype_field(problem.q_lengths),
        "kv_lengths": _dtype_field(problem.kv_lengths),
        "score_mod": problem.formulas is not None and problem.formulas.score_mod,
        "mask_mod": problem.formulas is not None and problem.formulas.mask_mod,
        "formulas": () if problem.formulas is None else problem.formulas.texts,
        "dropout": _philox.threshold(problem.dropout) > 0,
        "cu_seqlens": _dtype_field(problem.cu_seqlens_q),
    }


def _sink_field(problem: Problem) -> dict[str, str]:
    """What the forward alone needs to know: the backward finds the sink in lse."""
    return {"sink": _dtype_field(problem.sink)}


def _dtype_field(operand: Operand | None) -> str:
    return "none" if operand is None else operand.dtype.name


def _offset_field(problem: Problem) -> str:
    bounds = (problem.window_left, problem.window_right)
    if bounds == (None, None) and problem.alibi_slopes is None:
        return "value"
    if problem.offset is not None:
        return problem.offset.dtype.name
    own = problem.q_lengths or problem.kv_lengths or problem.cu_seqlens_q
    if problem.offset_value is None and own:
        return "lengths"
    return "value"
