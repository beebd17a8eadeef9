"""Into how many parts are the keys of a forward split? By array shapes and the device alone.

One thread block computes each part of each tile, and ``forward_combine.cu`` makes the parts one.
The parts are whole blocks of keys at places that follow from the arrays' extents, so that neither
lengths on a device nor what else runs there changes the bits of a row.
"""

from __future__ import annotations

import math
from typing import Any

from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._problem.problem import Problem

FEW_ROWS = 64  # of a tile of one query each of a few heads
#: Keys that are worth a second kernel: of 512 it takes 30 us with host and all, of one kernel 20;
#: of 4096 (77 queries) 32 and 38 (H100, 8 heads of 64, 2026-11-25).
FEWEST_KEYS = 2048
_KEYS_OF_A_ROW = 8  # and for each query; not measured
_LEAST = 256  # keys of a part
_OF_RAGGED = 4096  # keys of a part at most, where entries may be shorter than the array
_MOST = 256  # parts

def wanted(request: Request) -> bool:
    """Whether keys are many, and tiles leave half of the SMs idle or lengths may differ.

    Packed sequences are not split.
    """
    problem = request.problem
    fewest = max(FEWEST_KEYS, _KEYS_OF_A_ROW * problem.seqlen_q)
    if not request.num_sms or problem.cu_seqlens_q is not None or problem.seqlen_k < fewest:
        return False
    rows = FEW_ROWS if problem.seqlen_q <= FEW_ROWS else 128
    tiles = math.prod(problem.batch) * -(-problem.seqlen_q // rows)
    return bool(2 * tiles <= request.num_sms or _is_ragged(problem))


def suits(kernel: type[KernelConfig], request: Request) -> bool:
    """Whether a kernel is the one for parts of keys: few rows leave Hopper's tiles half empty."""
    few = request.problem.seqlen_q <= FEW_ROWS
    return kernel.splits_keys and not (kernel.for_sm90 and few)


def fields(problem: Problem) -> dict[str, Any]:
    """Fields of a kernel for parts of keys, of which out is as exact as lse."""
    return {"split_keys": True, "out_dtype": problem.lse_dtype.name}


def part_keys(problem: Problem, config: Any, parts: int) -> int:
    """The keys of a part: whole blocks."""
    blocks = -(-problem.seqlen_k // config.block_n)
    return -(-blocks // parts) * int(config.block_n)


def parts_of(problem: Problem, config: Any, num_sms: int) -> int:
    """The parts of each tile of a configuration: as many as fill the device once."""
    tiles = math.prod(problem.batch) * -(-problem.seqlen_q // config.block_m) * config.split_columns
    blocks = -(-problem.seqlen_k // config.block_n)
    parts = config.blocks_per_sm * num_sms // max(tiles, 1)
    if _is_ragged(problem):
        parts = max(parts, -(-problem.seqlen_k // _OF_RAGGED))
    parts = max(1, min(parts, problem.seqlen_k // _LEAST, _MOST))
    return int(-(-blocks // -(-blocks // parts)))


def _is_ragged(problem: Problem) -> bool:
    few = problem.seqlen_q <= FEW_ROWS
    return few and problem.kv_lengths is not None and problem.seqlen_k > _OF_RAGGED
