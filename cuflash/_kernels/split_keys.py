"""Into how many parts are the keys of a forward split? Array shapes and the device decide.

This is split-KV: one thread block computes each part of a tile, and ``forward_combine.cu`` combines
the parts. A few thread blocks that form a cluster combine their parts by themselves.
A part is whole blocks of keys. Its place follows from the extents of the arrays and, for a packed
sequence, from the length of the sequence. So neither lengths on the device nor other work there
changes the bits of a row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cuflash._kernels import portable
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import needs_score_math, scale_in_exponent
from cuflash._problem.float8 import E4M3
from cuflash._problem.problem import HALVES, Problem

FEW_ROWS = portable.ROWS_OF_FOUR_WARPS  # most rows of an entry, PackGQA included, that are few
WIDTHS_OF_FEW_ROWS = (64, 128, 256)  # padded head sizes with tiles of up to 32 rows
WIDEST_PAIRS = 128  # largest head size where two results of a pair fit beside the tiles
MOST_CLUSTER_PARTS = 8  # thread blocks of a cluster that every device with clusters can run at once


class Bounds(NamedTuple):
    """When keys are split, and into how many parts. Fields count keys unless they say otherwise."""

    min_keys: int  # fewest keys that are worth a second kernel
    min_keys_in_pages: int  # the same for pages and few rows
    min_keys_beside_tiles: int  # fewest keys for each 16 rows, where most SMs have a tile
    min_keys_per_query: int  # fewest keys for each query that are worth it
    min_part_keys: int  # fewest keys of a part
    max_short_parts: int  # tiles of few rows may have up to this number of shorter parts
    min_short_keys: int  # fewest keys of a shorter part
    max_ragged_part_keys: int  # most keys of a part, where entries may be shorter than the array
    max_parts: int  # most parts of a tile
    max_packed_parts: int  # most parts of a packed sequence


#: From ``min_keys`` on keys in order are split like keys in pages, if the tile is the same. (D196)
BOUNDS = Bounds(2048, 512, 4096, 8, 256, 16, 64, 4096, 256, 32)


class InClusters(NamedTuple):
    """For how many keys the thread blocks of a tile form a cluster, up to so many rows."""

    rows: int  # most rows of a tile
    min_keys: int  # fewest keys
    max_keys: int  # most keys


#: The second is for head size 64 in 16 bits, without score options and sink. (D196)
IN_CLUSTERS = (InClusters(FEW_ROWS, 512, 2048), InClusters(96, 2048, 4096))


def wanted(request: Request) -> bool:
    """Whether to split keys: many, where tiles leave half of the SMs idle or lengths may differ."""
    problem, bounds = request.problem, BOUNDS
    if problem.merges_partial or not request.num_sms:
        return False
    if in_clusters(request):
        return True
    in_pages = problem.pages is not None and few(problem)
    fewest = bounds.min_keys_in_pages if in_pages else bounds.min_keys
    if problem.seqlen_k < max(fewest, bounds.min_keys_per_query * problem.seqlen_q):
        return False
    if problem.cu_seqlens_q is not None:
        return _is_ragged(problem)
    tiles = math.prod(problem.batch) * -(-problem.seqlen_q // (FEW_ROWS if few(problem) else 128))
    return bool(2 * tiles <= request.num_sms or _is_ragged(problem))


def has_tiles_of_few_rows(request: Request) -> bool:
    """Whether few rows see many keys: small tiles read keys faster than Hopper's kernel. (D181)

    Hopper's kernel reads as fast where one tile for each SM nearly fills the device, up to a number
    of keys that follows from the rows.
    """
    problem, bounds = request.problem, BOUNDS
    widest = portable.padded(max(problem.head_dim, problem.head_dim_v))
    beside = bounds.min_keys_beside_tiles * -(-problem.seqlen_q // portable.ROWS_OF_ONE_WARP)
    fewest = beside if request.capability == 90 and _are_two_parts(request) else bounds.min_keys
    return bool(
        request.num_sms
        and not request.simt
        and not problem.merges_partial
        and problem.cu_seqlens_q is None
        and problem.dtype in HALVES
        and widest in WIDTHS_OF_FEW_ROWS
        and problem.seqlen_q <= portable.ROWS_OF_TWO_WARPS
        and problem.seqlen_k >= fewest
    )


def in_pairs(request: Request) -> bool:
    """Whether pairs of thread blocks share the tiles of few rows, two on each SM. (D181)"""
    problem = request.problem
    return bool(
        _has_clusters(request)
        and has_tiles_of_few_rows(request)
        and portable.padded(max(problem.head_dim, problem.head_dim_v)) <= WIDEST_PAIRS
        and _are_two_parts(request)
        and problem.pages is None
        and not problem.has_8_bit_keys
        and not (_is_ragged(problem) and problem.seqlen_k > 2 * BOUNDS.max_ragged_part_keys)
    )


def in_clusters(request: Request) -> bool:
    """Whether the thread blocks of a tile form a cluster, which combines the tile's parts.

    They do where all tiles run at once, with one thread block on each SM, and in pairs.
    """
    problem, bounds = request.problem, IN_CLUSTERS[not few(request.problem)]
    if not _has_clusters(request):
        return False
    if in_pairs(request):
        return True
    columns = portable.padded(problem.head_dim_v)
    if bounds.rows > FEW_ROWS and (
        problem.dtype not in HALVES
        or max(columns, portable.padded(problem.head_dim)) != 64
        or needs_score_math(problem)
        or not scale_in_exponent(problem)
        or problem.sink is not None
        or problem.pages is not None
    ):
        return False
    received = bounds.rows * columns * problem.lse_dtype.itemsize
    return bool(
        problem.seqlen_q <= bounds.rows
        and bounds.min_keys <= problem.seqlen_k <= bounds.max_keys
        and problem.cu_seqlens_q is None
        and MOST_CLUSTER_PARTS * math.prod(problem.batch) <= request.num_sms
        and columns <= portable.held(request).out_general
        and 3 * received <= request.smem_limit  # the rest is for tiles of q, k and v
    )


def _are_two_parts(request: Request) -> bool:
    """Whether two parts of each tile give two thread blocks to most SMs."""
    least = portable.LEAST_SHARE_IN_USE * request.num_sms
    return least <= math.prod(request.problem.batch) <= request.num_sms


def _has_clusters(request: Request) -> bool:
    """Whether the portable kernel may run in clusters."""
    device = request.capability >= 90 and request.tensor_maps and request.clusters
    of_8_bits = request.problem.dtype == E4M3  # these operands are dequantised first
    return bool(device and not request.simt and not of_8_bits)


def suits(kernel: type[KernelConfig], request: Request) -> bool:
    """Whether a kernel is the right one for split keys. (D180)

    Few rows leave tiles of the other kernels half empty.
    """
    of_few_rows = few(request.problem) or in_clusters(request)
    return kernel.splits_keys and (kernel.of_few_rows or not of_few_rows)


def few(problem: Problem) -> bool:
    """Whether a tile of few rows holds all queries of an entry, or of an average sequence."""
    return portable.mean_rows(problem) <= FEW_ROWS


def fields(kernel: type[KernelConfig], request: Request) -> dict[str, Any]:
    """Fields of a kernel that splits keys. Outside clusters parts of out have the dtype of lse."""
    if kernel.of_few_rows and in_clusters(request):
        return {"split_keys": True, "clusters": True}
    own = {"split_keys": True, "out_dtype": request.problem.lse_dtype.name}
    return own | {"overlaps": request.capability >= 90}


def part_keys(problem: Problem, config: Any, parts: int) -> int:
    """Keys of a part, in whole blocks; the fewest for packed sequences: ``schedule/tiles.cuh``."""
    blocks = -(-problem.seqlen_k // config.block_n)
    if problem.cu_seqlens_q is not None:
        return int(-(-BOUNDS.min_part_keys // config.block_n) * config.block_n)
    return int(-(-blocks // parts) * config.block_n)


def parts_of(problem: Problem, config: Any, num_sms: int) -> int:
    """Parts of each tile: as many as fill the device once, within ``BOUNDS``."""
    bounds, most = BOUNDS, problem.seqlen_k // BOUNDS.min_part_keys
    if problem.cu_seqlens_q is not None:
        return min(bounds.max_packed_parts, most)
    if few(problem):
        most = max(most, min(bounds.max_short_parts, problem.seqlen_k // bounds.min_short_keys))
    tiles = math.prod(problem.batch) * -(-problem.seqlen_q // config.block_m) * config.split_columns
    blocks = -(-problem.seqlen_k // config.block_n)
    parts = config.blocks_per_sm * num_sms // max(tiles, 1)
    if _is_ragged(problem):
        parts = max(parts, -(-problem.seqlen_k // bounds.max_ragged_part_keys))
    if not config.leaves_parts:
        most = min(most, MOST_CLUSTER_PARTS)
    parts = max(1, min(parts, most, bounds.max_parts))
    return int(-(-blocks // -(-blocks // parts)))


def _is_ragged(problem: Problem) -> bool:
    lengths = problem.kv_lengths is not None or problem.cu_seqlens_q is not None
    return few(problem) and lengths and problem.seqlen_k > BOUNDS.max_ragged_part_keys
