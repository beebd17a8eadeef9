"""``forward_sm90.cu``: the forward of 16-bit elements on Hopper."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from cuflash._kernels import look_ups, portable, split_keys, wgmma
from cuflash._kernels.config import ELEMENT_BYTES, SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import (
    Floats,
    dtype_of,
    needs_score_math,
    present,
    register_pressure,
    scale_in_exponent,
)
from cuflash._kernels.tables import Row

#: Measured on an H100 SXM: docs/forward-sm90.md, and later benchmarks/sweeps.
#: A tile: block_m, block_n, num_stages, num_q_stages, overlap_quarters.
ROWS = (
    Row("", (64, 64), (192, 128, 4, 2, 0), "D100"),
    Row("", (80, 80), (128, 128, 2, 2, 4)),
    Row("", (96, 96), (128, 128, 2, 2, 4), "D17"),
    Row("", (128, 128), (128, 128, 2, 2, 4), "D96"),
    Row("", (192, 128), (128, 128, 2, 1, 2)),
    Row("", (192, 192), (128, 112, 2, 1, 2)),
    Row("", (256, 256), (128, 80, 2, 1, 2)),
    # Lengths from arrays are bounds in registers: the widest tile leaves none for them.
    Row("lengths", (256, 256), (128, 64, 2, 1, 2)),
    # A narrow window has few blocks: narrow blocks waste less at its ends, and three warpgroups
    # hide more of a tile's epilogue and the next tile's prologue.
    Row("narrow window", (128, 128), (192, 64, 4, 2, 1), "D16"),
    # Where tiles of 192 rows give some SMs much more work than others, smaller tiles end sooner. A
    # score that is multiplied by its scale before the exponential also takes registers.
    Row("few rows", (64, 64), (128, 128, 4, 2, 1), "D15"),
    Row("narrow window, few tiles", (128, 128), (128, 64, 5, 2, 1), "D16"),
    Row("short sequences", (128, 128), (192, 64, 4, 2, 1), "D16"),
    # Score math: look-ups branch, but nothing may branch while products are in flight. All of these
    # options also take registers.
    Row("score math", (64, 64), (128, 128, 4, 2, 0)),
    Row("score math", (80, 80), (128, 128, 2, 2, 0)),
    Row("score math", (96, 96), (128, 128, 2, 2, 0)),
    Row("score math", (128, 128), (128, 128, 2, 2, 0)),
    Row("score math", (192, 128), (128, 128, 2, 1, 0)),
    Row("score math", (192, 192), (128, 96, 2, 1, 0)),
    Row("score math", (256, 256), (128, 64, 2, 1, 0)),
    # A softcap or slopes alone leave registers for more; with many rows, for tiles of 192 rows.
    Row("softcap alone", (96, 96), (128, 128, 2, 2, 4), "D131"),
    Row("softcap alone", (128, 128), (128, 128, 2, 2, 4), "D102"),
    Row("softcap alone", (192, 192), (128, 96, 2, 1, 2), "D131"),
    Row("softcap alone, many rows", (64, 64), (192, 128, 4, 2, 0), "D102"),
    Row("slopes alone", (96, 96), (128, 128, 2, 2, 4), "D133"),
    Row("slopes alone", (128, 128), (128, 128, 2, 2, 4), "D133"),
    Row("slopes alone, many rows", (64, 64), (192, 128, 4, 2, 0), "D133"),
    # Lengths, bounds and drawn bits leave no registers for 96 keys (NVRTC 13.5).
    Row("dropout", (192, 192), (128, 64, 2, 1, 0)),
    # The starts of packed sequences take registers.
    Row("score math, packed", (256, 256), (128, 48, 2, 1, 0)),
    Row("score math, left bound", (192, 128), (128, 112, 2, 1, 0)),
    Row("score math, left bound", (192, 192), (128, 64, 2, 1, 0)),
    Row("score math, left bound", (256, 256), (128, 48, 2, 1, 0)),
    # Each value of a bias waits in a register for its product. These are the widest blocks without
    # spills by NVRTC 12.9 and 13.5.
    Row("bias", (64, 64), (128, 96, 4, 2, 0)),
    Row("bias", (80, 80), (128, 96, 2, 2, 0)),
    Row("bias", (96, 96), (128, 96, 2, 2, 0)),
    Row("bias", (128, 128), (128, 96, 2, 2, 0), "D9"),
    Row("bias", (192, 128), (128, 96, 2, 1, 0)),
    Row("bias", (192, 192), (128, 64, 2, 1, 0)),
    Row("bias", (256, 256), (128, 48, 2, 1, 0)),
    # A bias, or a mask alone, that is copied to shared memory: registers are left, and a full block
    # keeps its reference. Above 64 columns, buffers of a bias take the room of a second tile of q.
    Row("bias tiles", (64, 64), (128, 128, 4, 2, 1)),
    Row("bias tiles", (80, 80), (128, 128, 2, 1, 4)),
    Row("bias tiles", (96, 96), (128, 128, 2, 1, 4)),
    Row("bias tiles", (128, 128), (128, 128, 2, 1, 4), "D9"),
    Row("mask tiles", (64, 64), (128, 128, 4, 2, 1)),
    Row("mask tiles", (80, 80), (128, 128, 2, 2, 4)),
    Row("mask tiles", (96, 96), (128, 128, 2, 2, 4)),
    Row("mask tiles", (128, 128), (128, 128, 2, 2, 4), "D8"),
    # Where the tiles above spill, which few of these cases do, and some with one compiler only.
    Row("high register pressure", (128, 128), (128, 64, 2, 2, 0)),
    Row("softcap, packed, offsets", (256, 256), (128, 32, 2, 1, 0)),
    Row("bias of float16, parts", (128, 128), (128, 80, 2, 2, 0)),
    # Segments (ids are looked up for each key), or a left bound with packing or a bias.
    Row("few registers, packed", (128, 128), (128, 64, 2, 2, 0)),
    Row("few registers", (192, 128), (128, 64, 2, 1, 0)),
    Row("few registers", (192, 192), (128, 48, 2, 1, 0)),
)
WIDEST_LOOK_UP = 128  # largest head size with shared memory for a mask or a bias
_MASK_STAGES = 2  # buffers of a mask
_BIAS_BYTES = 4  # bytes of one value of a bias in all buffers
_MOST_PRESSURE = 4  # most register_pressure beside blocks of 128 keys at head size 128
_NARROW = 4096  # most keys that a query sees in a narrow window
_MAX_ROWS_RATIO_OF_192 = 1.15  # most rows of the busiest SM, over its rows with tiles of 128 (D15)


class Own(NamedTuple):
    sink: Floats
    num_stages: int  # buffers of k and of v
    num_q_stages: int  # buffers of q; with 2, results are staged in one while the other is read
    #: Quarters of a block's exponentials that run before p v of the previous block must be done.
    overlap_quarters: int
    split_keys: bool = False  # do several thread blocks share the keys of a tile (split-KV)?
    overlaps: bool = False  # does forward_combine.cu start before this kernel ends?
    joins: bool = False  # does it merge its result with a given one over other keys?
    paged: bool = False  # are keys and values in pages, which a page table orders?
    #: Buffers in shared memory for blocks of a bias or of a mask; 0: read from global memory.
    bias_stages: int = 0
    mask_stages: int = 0


class ForwardSm90Config(wgmma.WarpgroupsConfig):
    """``forward_sm90.cu``: warpgroups own 64 queries each, one more loads and stores."""

    kernel = "forward_sm90"
    params = "ForwardSm90Params"
    computes = "out"
    parts = SCORED | {"own": Own}
    tunables = ("block_m", "block_n", "num_stages", "num_q_stages", "overlap_quarters")
    splits_keys = True
    can_merge_partial = True
    reads_pages = True

    def check(self) -> None:
        super().check()
        if self.num_q_stages not in (1, 2):
            raise ValueError(f"{self.num_q_stages=} must be 1 or 2")
        if self.overlap_quarters not in range(5):
            raise ValueError(f"{self.overlap_quarters=} must be from 0 to 4")
        if (self.bias_stages or self.mask_stages) and (
            self.block_m != 128
            or self.block_n % (128 if self.mask_stages else 64)
            or max(self.head_dim, self.head_dim_v) > 128
        ):
            raise ValueError(
                f"{self.bias_stages=} and {self.mask_stages=} need block_m 128, head sizes up to "
                "128, and block_n a multiple of 64, with a mask of 128"
            )
        if self.num_q_stages == 2 and self.head_dim_v > self.head_dim:
            raise ValueError(
                f"{self.head_dim_v=} must be at most {self.head_dim=}: q's tile stages out"
            )

    @property
    def smem_bytes(self) -> int:
        """Rings of q, k and v in panels of 64 columns; slopes, mask, bias; a KiB of barriers."""
        q_rows, k_rows = self.num_q_stages * self.block_m, self.num_stages * self.block_n
        rings = wgmma.panel_bytes(self, q_rows, self.head_dim)
        rings += wgmma.panel_bytes(self, k_rows, self.head_dim, self.head_dim_v)
        if self.alibi_slopes != "none" and self.head_dim <= WIDEST_LOOK_UP:
            rings += wgmma.panel_bytes(self, 16, self.block_n)  # indices of a block's keys
            rings += 1024 * self.block_m // 64  # slopes, for each warpgroup
        pairs = int(self.block_m * self.block_n)
        rings += pairs * int(self.mask_stages)
        if self.bias_stages:
            rings += pairs * int(self.bias_stages) * ELEMENT_BYTES[self.bias]
        return rings + 1024

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        pressure, wide = register_pressure(problem), wgmma.widest(problem) > 192
        packed, biased = problem.cu_seqlens_q is not None, problem.bias is not None
        looked_up = problem.mask is not None or problem.segment_ids_q is not None
        sliding = problem.window_left is not None
        partial = problem.merges_partial or problem.out.dtype != problem.dtype
        capped_segments = problem.softcap is not None and problem.segment_ids_q is not None
        sloped = problem.alibi_slopes is not None
        most = 1 if sloped or capped_segments or wgmma.widest(problem) > 128 else 2
        pages = problem.pages
        return wgmma.why_not_halves(request) or wgmma.first_reason(
            (problem.formulas is not None, "a formula's registers are unknown"),
            (biased and packed, "a bias of packed sequences spills registers in some cases"),
            (
                biased and pressure > 0,
                "a bias spills registers with other options that need registers",
            ),
            (
                biased and wide and sliding,
                "a bias with a left window bound spills registers in every tile",
            ),
            (problem.head_dim_v % 8 != 0, "rows of out are no multiples of 16 bytes"),
            (
                pages is not None and pages.size % 8 != 0,
                "page_size is no multiple of 8, the rows of a swizzle atom",
            ),
            (
                pages is not None and biased,
                "a bias with pages spills registers at head size 96",
            ),
            (
                pages is not None
                and (looked_up or problem.dropout > 0)
                and wgmma.widest(problem) > 128,
                "a mask, segment ids or dropout with pages spill registers",
            ),
            (
                pages is not None and split_keys.few(problem),
                "few queries over pages leave the kernel's tiles half empty",
            ),
            (
                partial and problem.dropout > 0 and 128 < wgmma.widest(problem) <= 192,
                "float32 results with dropout spill registers in this tile",
            ),
            (
                partial and pressure > most,
                "float32 results with several options that need registers spill in some cases",
            ),
            (
                wide and packed and looked_up,
                "a mask or segment ids of packed sequences spill registers in every tile",
            ),
            (wide and pressure > 1, "any two options that need registers spill in some cases"),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        problem, stages = request.problem, look_up_stages(request)
        fields = wgmma.fields(cls, request, ROWS, _holding(request, stages)) | stages
        # Thread blocks draw tiles of packed sequences, but a split tile is not drawn.
        if split_keys.wanted(request) and problem.cu_seqlens_q is None:
            fields |= split_keys.fields(cls, request)
        if problem.pages is not None:
            size, block_n = problem.pages.size, fields["block_n"]
            if size % block_n and block_n % size:
                return ()  # a TMA box would extend over two blocks or two pages
            fields["paged"] = True
        return (cls(**fields, sink=dtype_of(problem.sink), joins=problem.merges_partial),)


def look_up_stages(request: Request) -> dict[str, int]:
    """``bias_stages`` or ``mask_stages`` where one is copied to shared memory; else empty."""
    problem = request.problem
    if (
        wgmma.widest(problem) > WIDEST_LOOK_UP
        or problem.cu_seqlens_q is not None
        or problem.pages is not None
        or problem.merges_partial
        or problem.out.dtype != problem.dtype
        or split_keys.wanted(request)
    ):
        return {}
    if problem.bias is not None:
        # Bounds on both sides and lengths beside a bias spill.
        if problem.window_left is not None or not look_ups.bias_comes(request):
            return {}
        return {"bias_stages": _BIAS_BYTES // problem.bias.dtype.itemsize}
    alone = present(problem, "cap", "add", "see", "weight") == {"mask"}
    if not alone or problem.formulas is not None or not scale_in_exponent(problem):
        return {}
    return {"mask_stages": _MASK_STAGES} if look_ups.come_by_rows(problem.mask, request) else {}


def _holding(request: Request, stages: dict[str, int]) -> dict[str, bool]:
    """Which words of the table hold for a request with these buffers."""
    problem, folded = request.problem, scale_in_exponent(request.problem)
    packed, biased = problem.cu_seqlens_q is not None, problem.bias is not None
    lengths = problem.q_lengths is not None or problem.kv_lengths is not None
    sliding, sink = problem.window_left is not None, problem.sink is not None
    few_rows = _has_few_rows(request)
    few_tiles = not folded or portable.num_tiles(problem, 128) <= request.num_sms
    narrow = problem.window_keys is not None and problem.window_keys <= _NARROW
    # Three warpgroups have no registers for a sink and bounds from arrays.
    narrow = narrow and not (sink and (lengths or problem.offset is not None))
    alone = "" if sink else wgmma.only_option(problem)
    return {
        "lengths": lengths or packed,
        "offsets": problem.offset is not None,
        "parts": split_keys.wanted(request) and not packed,
        "narrow window": narrow,
        "few rows": not folded or few_rows,
        "many rows": not few_rows,
        "few tiles": few_tiles,
        "short sequences": packed and not sink and not few_tiles,
        "score math": needs_score_math(problem),
        "high register pressure": register_pressure(problem) > _MOST_PRESSURE,
        f"{alone} alone": bool(alone),
        "softcap": problem.softcap is not None,
        "dropout": problem.dropout > 0,
        "packed": packed,
        "left bound": sliding,
        "bias": biased,
        "bias of float16": biased and problem.bias.dtype == np.float16,
        "bias tiles": "bias_stages" in stages,
        "mask tiles": "mask_stages" in stages,
        "few registers": problem.segment_ids_q is not None
        or (needs_score_math(problem) and sliding and (packed or biased)),
    }


def _has_few_rows(request: Request) -> bool:
    """Whether tiles of 192 rows take longer than tiles of 128 rows.

    The busiest SM decides. Under a causal bound the last tile has the most keys: with at most one
    tile to an SM, its SM is the busiest.
    """
    problem, num_sms = request.problem, request.num_sms
    if num_sms == 0:
        return False
    alone = problem.window_right is not None and portable.num_tiles(problem, 192) <= num_sms
    of_192, of_128 = (portable.most_rows(request, block_m) for block_m in (192, 128))
    return alone or of_192 > _MAX_ROWS_RATIO_OF_192 * of_128
