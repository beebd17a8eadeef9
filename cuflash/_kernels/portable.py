"""What do the portable kernels share? Fields, padded widths, tiles that fit, passes.

Registers limit tiles: in float32 and float64 a warp mostly has one slice of 16 rows, and of a wide
result some of the columns. A table row without an entry of docs/decisions.md is a tile that fits
registers and shared memory, without spills by NVRTC 12.9 and 13.5.

``block_n`` and the order of keys depend on head sizes and options, not on batch and heads: the bits
of a row do not depend on its neighbours. Where tiles or rows are few, tiles and parts of the keys
follow from the shapes of the arrays (``split_keys.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash._errors import not_yet
from cuflash._kernels.config import HEAD_DIMS, RESERVED_SMEM, Float8, KernelConfig, Precision
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import (
    Floats,
    needs_score_math,
    register_pressure,
    score_config,
)
from cuflash._kernels.tables import Row, tile_of
from cuflash._problem.problem import HALVES, Problem

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)
#: Fields of a portable kernel that its table sets.
TUNABLES = ("block_m", "block_n", "num_warps", "blocks_per_sm")


#: Largest padded head size with registers for a bias beside float32 gradients. (D161)
WIDEST_HELD = 16
ROWS_OF_ONE_WARP = 16  # rows of a tensor core's product
ROWS_OF_TWO_WARPS = 32  # rows of a tile of two warps; with PackGQA heads of a group are rows, too
LEAST_SHARE_IN_USE = 0.7  # of the places for thread blocks: enough bytes are in flight (D181)
_MANY_KEYS = 8192  # keys from which fewer thread blocks matter
_SHORT, _SHORT_COLUMNS = 64, 64  # most queries or keys, and most columns, of a small tile (D15)
ROWS_OF_FOUR_WARPS = 64  # rows of a tile of four warps


class Held(NamedTuple):
    """Columns of a result that registers hold; ``general``: beside score options."""

    out: int
    out_general: int
    gradient: int  # one of dq, dk and dv
    gradient_general: int
    pair: int  # largest padded head size with registers for dk and dv in one pass


_HELD = {
    "half": Held(256, 256, 256, 256, 128),
    "float32": Held(128, 128, 128, 96, 64),
    "float64": Held(128, 64, 128, 64, 32),
}
_HELD_BY_SIMT = {4: Held(128, 128, 128, 128, 64), 8: Held(64, 64, 64, 64, 32)}


def held(request: Request) -> Held:
    """Columns of a problem's results that registers hold."""
    dtype = request.problem.dtype
    if request.simt:
        return _HELD_BY_SIMT[max(4, dtype.itemsize)]
    return _HELD["half" if dtype in HALVES else dtype.name]


def padded(head_dim: int) -> int:
    """The smallest padded head size that holds ``head_dim`` columns."""
    for width in HEAD_DIMS:
        if head_dim <= width:
            return width
    raise not_yet(
        f"head_dim {head_dim} on a GPU", "a later version", f"up to {HEAD_DIMS[-1]} works"
    )


def precision_of(problem: Problem) -> Precision:
    """Precision of products: "tf32" where the caller allows it and elements are float32."""
    return "tf32" if problem.precision == "tf32" and problem.dtype == np.float32 else "ieee"


def is_short(problem: Problem) -> bool:
    """Whether small tiles hold all queries and all keys of an entry, and scores are plain. (D15)

    With more options than a causal bound, as many thread blocks on an SM would lack registers.
    """
    options = (
        problem.cu_seqlens_q, problem.window_left, problem.q_lengths, problem.kv_lengths,
        problem.sink, problem.pages, problem.offset,
    )  # fmt: skip
    return (
        max(problem.seqlen_q, problem.seqlen_k) <= _SHORT
        and max(problem.head_dim, problem.head_dim_v) <= _SHORT_COLUMNS
        and problem.dtype in HALVES
        and not needs_score_math(problem)
        and all(option is None for option in options)
    )


def can_hold_bias(problem: Problem, most_bytes: int = 4) -> bool:
    """Whether there is a bias with elements of at most ``most_bytes``, and no ``score_mod``."""
    asked = problem.formulas is not None and problem.formulas.score_mod
    return problem.bias is not None and problem.bias.dtype.itemsize <= most_bytes and not asked


def holds_wide_bias(request: Request) -> bool:
    """Whether the forward of float32 or float64 reads the bias of a row at once.

    Results wider than 128 columns leave no registers for it.
    """
    problem = request.problem
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    wide = problem.dtype.itemsize >= 4 and precision_of(problem) == "ieee"
    return wide and narrow and not request.simt and can_hold_bias(problem, most_bytes=8)


def holds_bias(request: Request, own: Mapping[str, Any]) -> bool:
    """Whether a float32 gradient kernel keeps the bias of each lane's pairs in registers.

    Only for narrow heads, and without other options that take registers.
    """
    problem = request.problem
    narrow = max(own["head_dim"], own["head_dim_v"]) <= WIDEST_HELD
    of_float32 = (own["dtype"], own["precision"], own["simt"]) == ("float32", "ieee", False)
    alone = problem.segment_ids_q is None and not register_pressure(problem)
    return narrow and of_float32 and alone and can_hold_bias(problem)


def fields(kernel: type[KernelConfig], request: Request) -> dict[str, Any]:
    """Fields that the problem determines, of ``Operands``, ``Products`` and ``ScoreConfig``."""
    problem = request.problem
    of_gradients = request.grad_dtype or problem.dtype
    return {
        "dtype": problem.dtype.name,
        "out_dtype": (problem.out.dtype if kernel.computes == "out" else of_gradients).name,
        "precision": precision_of(problem),
        "wide_float64": problem.dtype == np.float64 and request.capability >= 90,
        "copy_bytes": max(request.copy_bytes, 2),  # below 4 elements are copied one by one
        "head_dim": max(padded(problem.head_dim), kernel.narrowest),
        "head_dim_v": max(padded(problem.head_dim_v), kernel.narrowest),
        "simt": request.simt,
        **score_config(problem)._asdict(),
    }


def candidates(
    kernel: type[KernelConfig],
    rows: Sequence[Row],
    request: Request,
    own: dict[str, Any],
    *,
    general: bool | None = None,
) -> list[dict[str, Any]]:
    """The fields ``own`` with each tile of the table row for a request, best first.

    The first tile is for sm_90. The last fits the 99 KiB of sm_86, sm_89 and sm_120. With ``simt``
    there is one tile, which owns 64 rows.
    """
    problem = request.problem
    if request.simt:
        streamed = 32 if problem.dtype.itemsize <= 4 else 16
        sides = {"block_m": streamed, "block_n": streamed} | {kernel.owned: 64}
        return [own | sides | {"num_warps": 4, "blocks_per_sm": 1}]
    in_pages = problem.pages is not None
    holding = {
        "half" if problem.dtype in HALVES else problem.dtype.name: True,
        "tf32": own["precision"] == "tf32",
        "general": needs_score_math(problem) if general is None else general,
        "v alone": own.get("grad_v", False) and not own["grad_k"],
        "few rows": problem.seqlen_q <= ROWS_OF_TWO_WARPS
        and problem.cu_seqlens_q is None
        and (in_pages or own.get("split_keys", False) or problem.has_8_bit_keys),
        "pages": in_pages,
        "8-bit keys": problem.has_8_bit_keys,
        "16 rows": mean_rows(problem) <= ROWS_OF_ONE_WARP,
        "short": request.capability == 90 and is_short(problem),
        "32 rows": problem.seqlen_q <= ROWS_OF_TWO_WARPS,
        "held bias": own.get("holds_bias", False),
        "few tiles in order": not in_pages and _two_read_faster(problem, request.num_sms),
        "clusters": own.get("clusters", False) and 2 * math.prod(problem.batch) <= request.num_sms,
        "six warps": problem.seqlen_q > ROWS_OF_FOUR_WARPS,
    }
    tiles = tile_of(rows, holding, max(own["head_dim"], own["head_dim_v"]))
    names = kernel.tunables or TUNABLES
    return [own | dict(zip(names, tile, strict=True)) for tile in tiles]


def _two_read_faster(problem: Problem, num_sms: int) -> bool:
    """Whether two thread blocks on an SM read the keys of few rows faster than four do. (D181)

    Where they leave many places empty and keys are many, too few bytes are in flight.
    """
    tiles, places = math.prod(problem.batch), 2 * num_sms
    used = places // max(tiles, 1) * tiles
    return tiles <= places and (
        used >= LEAST_SHARE_IN_USE * places or problem.seqlen_k < _MANY_KEYS
    )


def mean_rows(problem: Problem) -> int:
    """Query rows of an entry, or of an average sequence, rounded up."""
    packed = problem.cu_seqlens_q
    return -(-problem.seqlen_q // (1 if packed is None else max(packed.shape[0] - 1, 1)))


def num_tiles(problem: Problem, block: int, *, of_keys: bool = False) -> int:
    """Tiles of ``block`` queries, or keys, in all batch entries."""
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    return math.prod(problem.batch) * -(-rows // block)


def most_rows(request: Request, block_m: int) -> int:
    """Query rows of the busiest SM, if tiles have ``block_m`` rows."""
    return -(-num_tiles(request.problem, block_m) // request.num_sms) * block_m


def split(columns: int, own: int) -> int:
    """The fewest equal parts of ``columns`` with at most ``own`` each, in multiples of 16."""
    return next(n for n in range(1, columns) if columns % (16 * n) == 0 and columns <= n * own)


def gradient_parts(request: Request, columns: int) -> int:
    """Parts into which the columns of a gradient are split, so that registers hold one."""
    found = held(request)
    general = needs_score_math(request.problem)
    return split(columns, found.gradient_general if general else found.gradient)


def fits(config: KernelConfig, smem_limit: int) -> bool:
    """Whether an SM has shared memory for ``blocks_per_sm`` thread blocks."""
    needed = config.blocks_per_sm * (config.smem_bytes + RESERVED_SMEM)
    return bool(needed <= smem_limit + RESERVED_SMEM)


def fitting(
    kernel: type[AnyConfig], values: Sequence[dict[str, Any]], smem_limit: int
) -> tuple[AnyConfig, ...]:
    """The first configuration whose blocks fit an SM together; the last if one block does."""
    for draft in map(kernel.draft, values):
        if fits(draft, smem_limit):
            return (kernel(**draft.values()),)
    return (kernel(**values[-1]),) if draft.smem_bytes <= smem_limit else ()


def kv_passes(problem: Problem, wanted: frozenset[str], *, together: bool) -> list[str]:
    """The passes for dk and dv: "kv" for both in one pass, or "k" and "v".

    Both take one pass if registers hold both (``together``), and k and v are summed over the same
    batch axes, so that both results walk the same queries.
    """
    names = "".join(sorted(wanted))
    if together and names and problem.k.summed == problem.v.summed:
        return [names]
    return list(names)


def shares_keys(problem: Problem, names: Sequence[str]) -> bool:
    """Whether batch entries summed into one result have the same k, and the same v if it is read.

    A pass for dv alone does not read v.
    """
    summed = problem.k.summed if "k" in names else problem.v.summed
    read = [problem.k.summed, problem.v.summed] if "k" in names else [problem.k.summed]
    return all(own[i] for own in read for i, is_summed in enumerate(summed) if is_summed)


def why_not_passes(problem: Problem, passes: Sequence[str]) -> str:
    """Why kernels that load keys once for each result do not support these passes; or empty."""
    if all(shares_keys(problem, names) for names in passes):
        return ""
    return "batch entries that are summed into one result have different keys or values"


class Forward(NamedTuple):
    """Fields of a forward, beside ``SCORED``."""

    sink: Floats
    num_stages: int = 2  # buffers of k and of v in shared memory
    split_keys: bool = False  # do several thread blocks share the keys of a tile (split-KV)?
    overlaps: bool = False  # does forward_combine.cu start before this kernel ends?
    clusters: bool = False  # do these thread blocks, as a cluster, combine their own results?
    paged: bool = False  # are keys and values in pages, which a page table orders?
    kv_dtype: Float8 = "none"  # dtype of k and v in memory; "none": dtype


class Results(NamedTuple):
    """Which gradients a pass of a kernel for dk and dv computes."""

    grad_k: bool  # dk
    grad_v: bool  # dv

    def check(self) -> None:
        if not (self.grad_k or self.grad_v):
            raise ValueError(f"{self.grad_k=}, {self.grad_v=}: at least one must be True")


class SharedKeys(NamedTuple):
    """For kernels that can load keys anew for each batch entry of a result."""

    shared_keys: bool  # do all batch entries that are summed into one result share k and v?


#: Parts of a portable kernel for dk and dv.
KV_PARTS: dict[str, Any] = {"keys": SharedKeys, "results": Results}


def kv_fields(problem: Problem, names: str) -> dict[str, bool]:
    """Fields of ``KV_PARTS`` for a pass: ``names`` is "k", "v" or "kv"."""
    return {
        "shared_keys": shares_keys(problem, names),
        "grad_k": "k" in names,
        "grad_v": "v" in names,
    }


class BiasInRegisters(NamedTuple):
    """For kernels that can read a bias before the scores that it is added to."""

    holds_bias: bool = False  # does each lane keep the bias of its pairs of a block in registers?


class Partners(NamedTuple):
    """For kernels with warps that share rows."""

    partners: int = 2  # warps that own the same rows, each with its own columns


class PartnersConfig(KernelConfig):
    """A float64 kernel in which two warps own the same rows, each with half of the columns."""

    params = "BackwardParams"
    tunables = TUNABLES
    row_warps = 2
    narrowest = 32  # half of the columns is whole panels

    def check(self) -> None:
        if self.num_warps % 2:
            raise ValueError(f"num_warps = {self.num_warps} must be even: two warps share rows")


def partner_fields(
    kernel: type[KernelConfig], rows: Sequence[Row], request: Request
) -> dict[str, Any]:
    """Fields of a kernel with partners, with the tile of its table row."""
    problem = request.problem
    own = fields(kernel, request) | {"holds_bias": problem.bias is not None}
    general = needs_score_math(problem) or problem.cu_seqlens_q is not None
    (found,) = candidates(kernel, rows, request, own, general=general)
    return found


def why_not_partners(request: Request, rows: Sequence[Row]) -> str:
    """Why no kernel with partners (warps that share rows) serves a request; or empty."""
    problem = request.problem
    if request.simt or problem.dtype != np.float64:
        return "partner warps, which share rows, are for float64 on tensor cores"
    if problem.formulas is not None:
        return "a formula's registers are unknown"
    if register_pressure(problem) + (problem.bias is not None) > 1:
        return "registers of partner warps hold one option that changes scores"
    widest = max(padded(d) for d in (problem.head_dim, problem.head_dim_v))
    if widest not in {row.head_dims for row in rows}:
        return f"no tile of partner warps is {widest} columns wide"
    return ""
