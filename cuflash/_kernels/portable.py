"""What do the kernels share that every architecture has? Fields, widths, fitting, passes.

Registers decide about tiles: of accumulators of 4 and 8 bytes, one slice of 16 rows fits a warp,
and of wide results a part of the columns. Rows of tables without a number of docs/decisions.md are
what registers and shared memory hold, free of spills by NVRTC 12.9 and 13.5.

``block_n`` and the order of keys depend on head sizes and options alone, never on batch, heads or
seqlen_q, so that the bits of a row do not depend on its neighbours; but where tiles are few, parts
of the keys follow from the shapes of arrays (``split_keys.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash._errors import not_yet
from cuflash._kernels.config import HEAD_DIMS, RESERVED_SMEM, KernelConfig, Precision
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
#: What can be chosen of a portable kernel.
TUNABLES = ("block_m", "block_n", "num_warps", "blocks_per_sm")


#: Padded head size up to which registers hold a bias beside the gradients of float32. (D161)
WIDEST_HELD = 16
ROWS_OF_TWO_WARPS = 32  # and of queries, one of each head of a group
_SHORT, _SHORT_COLUMNS = 64, 64  # queries and keys, columns that small tiles hold (D15)
ROWS_OF_FOUR_WARPS = 64


class Held(NamedTuple):
    """Columns of results that registers hold; ``general``: beside options of scores."""

    out: int
    out_general: int
    gradient: int
    gradient_general: int
    pair: int  # padded head size up to which they hold dk and dv in one pass


_HELD = {
    "half": Held(256, 256, 256, 256, 128),
    "float32": Held(128, 128, 128, 96, 64),
    "float64": Held(128, 64, 128, 64, 32),
}
_HELD_BY_SIMT = {4: Held(128, 128, 128, 128, 64), 8: Held(64, 64, 64, 64, 32)}


def held(request: Request) -> Held:
    """Columns that registers hold of the results of a problem."""
    dtype = request.problem.dtype
    if request.simt:
        return _HELD_BY_SIMT[max(4, dtype.itemsize)]
    return _HELD["half" if dtype in HALVES else dtype.name]


def padded(head_dim: int) -> int:
    """The tile width that holds ``head_dim`` columns."""
    for width in HEAD_DIMS:
        if head_dim <= width:
            return width
    raise not_yet(
        f"head_dim {head_dim} on a GPU", "a later version", f"up to {HEAD_DIMS[-1]} works"
    )


def precision_of(problem: Problem) -> Precision:
    """TF32 is a permission that only float32 can take."""
    return "tf32" if problem.precision == "tf32" and problem.dtype == np.float32 else "ieee"


def is_short(problem: Problem) -> bool:
    """Whether one small tile holds the queries of an entry, one its keys, and a score is plain.

    (D15) Beside other options registers do not last for so many blocks of threads on an SM.
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


def can_hold_bias(problem: Problem) -> bool:
    """Whether a formula does not ask for the bias, and it is no wider than scores."""
    asked = problem.formulas is not None and problem.formulas.score_mod
    return problem.bias is not None and problem.bias.dtype.itemsize <= 4 and not asked


def holds_bias(request: Request, own: Mapping[str, Any]) -> bool:
    """Whether each lane of a gradient of float32 holds the bias of its pairs: alone and narrow."""
    problem = request.problem
    narrow = max(own["head_dim"], own["head_dim_v"]) <= WIDEST_HELD
    of_float32 = (own["dtype"], own["precision"], own["simt"]) == ("float32", "ieee", False)
    alone = problem.segment_ids_q is None and not register_pressure(problem)
    return narrow and of_float32 and alone and can_hold_bias(problem)


def fields(kernel: type[KernelConfig], request: Request) -> dict[str, Any]:
    """Fields that follow from the problem: of operands, products and the score."""
    problem = request.problem
    of_gradients = request.grad_dtype or problem.dtype
    return {
        "dtype": problem.dtype.name,
        "out_dtype": (problem.out.dtype if kernel.computes == "out" else of_gradients).name,
        "precision": precision_of(problem),
        "wide_float64": problem.dtype == np.float64 and request.capability >= 90,
        "copy_bytes": request.copy_bytes,
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
    """The fields ``own`` with each tile of a table for a request, best first.

    The first serves sm_90, the last the 99 KiB of sm_86, sm_89 and sm_120. CUDA cores have one
    tile: they own 64 rows.
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
        and (in_pages or own.get("split_keys", False)),
        "pages": in_pages,
        "short": request.capability == 90 and is_short(problem),
        "32 rows": problem.seqlen_q <= ROWS_OF_TWO_WARPS,
        "held bias": own.get("holds_bias", False),
        "clusters": own.get("clusters", False),
        "six warps": problem.seqlen_q > ROWS_OF_FOUR_WARPS,
    }
    tiles = tile_of(rows, holding, max(own["head_dim"], own["head_dim_v"]))
    names = kernel.tunables or TUNABLES
    return [own | dict(zip(names, tile, strict=True)) for tile in tiles]


def num_tiles(problem: Problem, block: int, *, of_keys: bool = False) -> int:
    """How many tiles of so many rows, or keys, there are."""
    rows = problem.seqlen_k if of_keys else problem.seqlen_q
    return math.prod(problem.batch) * -(-rows // block)


def most_rows(request: Request, block_m: int) -> int:
    """Rows of the busiest SM."""
    return -(-num_tiles(request.problem, block_m) // request.num_sms) * block_m


def split(columns: int, own: int) -> int:
    """Into how many parts of at most ``own`` the columns of a result are split."""
    return next(n for n in range(1, columns) if columns % (16 * n) == 0 and columns <= n * own)


def gradient_parts(request: Request, columns: int) -> int:
    """Into how many parts a gradient is split, by the columns that registers hold."""
    found = held(request)
    general = needs_score_math(request.problem)
    return split(columns, found.gradient_general if general else found.gradient)


def fits(config: KernelConfig, smem_limit: int) -> bool:
    """Whether the thread blocks that are to share an SM can."""
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
    """Which of dk and dv, "k" and "v", are computed together, if registers hold both.

    They are if k and v are summed over the same batch axes, so that both walk the same queries.
    """
    names = "".join(sorted(wanted))
    if together and names and problem.k.summed == problem.v.summed:
        return [names]
    return list(names)


def shares_keys(problem: Problem, names: Sequence[str]) -> bool:
    """Whether the batch entries summed into one result have the same k, and v where it is read."""
    summed = problem.k.summed if "k" in names else problem.v.summed
    read = [problem.k.summed, problem.v.summed] if "k" in names else [problem.k.summed]
    return all(own[i] for own in read for i, is_summed in enumerate(summed) if is_summed)


def against_passes(problem: Problem, passes: Sequence[str]) -> str:
    """Why kernels that load keys once for a result do not serve these passes."""
    if all(shares_keys(problem, names) for names in passes):
        return ""
    return "batch entries that are summed into one result have other keys or values"


class Forward(NamedTuple):
    """What a forward is told beside what every kernel of scores is."""

    sink: Floats
    num_stages: int = 2  # buffers of k and of v
    split_keys: bool = False  # are the keys of a tile dealt out to several thread blocks?
    overlaps: bool = False  # does the kernel that combines them start meanwhile?
    reads_once: bool = False  # are keys read about once, and may leave the L2 cache first?
    clusters: bool = False  # or are these blocks a cluster, which combines them?
    paged: bool = False  # do keys and values lie in pages, which a table puts in order?


class Results(NamedTuple):
    """What a pass of a kernel for dk and dv computes."""

    grad_k: bool
    grad_v: bool

    def check(self) -> None:
        if not (self.grad_k or self.grad_v):
            raise ValueError(f"{self.grad_k=}, {self.grad_v=}: nothing to compute")


class SharedKeys(NamedTuple):
    """What kernels are told that may load keys for each batch entry."""

    shared_keys: bool  # do all batch entries that are summed into one result share k and v?


#: Parts of a portable kernel for dk and dv.
KV_PARTS: dict[str, Any] = {"keys": SharedKeys, "results": Results}


def kv_fields(problem: Problem, names: str) -> dict[str, bool]:
    """Fields of these parts in a pass for ``names``."""
    return {
        "shared_keys": shares_keys(problem, names),
        "grad_k": "k" in names,
        "grad_v": "v" in names,
    }


class HeldBias(NamedTuple):
    """Kernels of gradients that may read a bias ahead of the pairs that it is added to."""

    holds_bias: bool = False  # does each lane hold the bias of its pairs of a block?


class Partners(NamedTuple):
    """Kernels with warps that share rows."""

    partners: int = 2  # warps that have the same rows


class PartnersConfig(KernelConfig):
    """A kernel of float64 where each of two warps has half the columns of their rows."""

    params = "BackwardParams"
    tunables = TUNABLES
    row_warps = 2
    narrowest = 32  # half the columns are whole panels

    def check(self) -> None:
        if self.num_warps % 2:
            raise ValueError(f"num_warps = {self.num_warps} must be even: two have the same rows")


def against_partners(request: Request, rows: Sequence[Row]) -> str:
    """Why no kernel with warps that share rows serves a request; empty where one does."""
    problem = request.problem
    if request.simt or problem.dtype != np.float64:
        return "only float64 on tensor cores leaves a warp too few registers for its rows"
    if needs_score_math(problem) or problem.cu_seqlens_q is not None:
        return "options of scores and packed sequences take registers that partners do not leave"
    widest = max(padded(d) for d in (problem.head_dim, problem.head_dim_v))
    if widest not in {row.head_dims for row in rows}:
        return f"no tile of partners is {widest} columns wide"
    return ""
