"""``forward_narrow.cu``: the forward of very small head sizes, on CUDA cores.

Tiles of points in space, three columns of float32 with no values, are the fastest of
benchmarks/sweeps; tiles of more columns, and of float64, are what registers hold.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from cuflash._kernels import portable, split_keys, wgmma
from cuflash._kernels.config import SCORED, KernelConfig, Tile
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of, needs_score_math, present
from cuflash._problem.problem import Problem

#: Head sizes up to which products of CUDA cores are cheaper than the exponential.
WIDEST = 8
#: By how much a tile of 256 rows is faster, H100 SXM, 2026-11-24: D62.
_GAIN = 1.05


class Own(NamedTuple):
    sink: Floats
    width: int  # true head sizes
    width_v: int
    key_bias: bool  # is a bias kept with its key, since all queries share it?
    num_stages: int = 2
    split_keys: bool = False  # are the keys of a tile dealt out to several thread blocks?
    combined_early: bool = False  # does the kernel that combines them start before they end?


class ForwardNarrowConfig(KernelConfig):
    """``forward_narrow.cu``: a thread owns rows."""

    kernel = "forward_narrow"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": Own}
    tunables = portable.TUNABLES
    streams = range(16, 513, 16)  # keys of a sum: as many as sums, of 262,144 keys
    splits_keys = True
    most_of_simt = 2**15  # a thread has its rows in registers

    def check(self) -> None:
        if self.block_m % self.num_threads or self.split_columns != 1:
            raise ValueError(f"{self.block_m=} by {self.num_threads=}, {self.split_columns=} by 1")
        if not 1 <= self.width <= 8 or not 0 <= self.width_v <= 8:
            raise ValueError(f"{self.width=} must be from 1 to 8, {self.width_v=} from 0 to 8")

    @property
    def smem_bytes(self) -> int:
        """A block of keys, values and biases, by four numbers."""
        numbers = self.width + self.width_v + self.key_bias
        return self.real_bytes * int(self.block_n * 4 * -(-numbers // 4))

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Why it does not serve a request. (D64)"""
        problem = request.problem
        wins = problem.dtype in (np.float32, np.float64) or _shares_bias(problem)
        return wgmma.first_reason(
            (not wins, "tensor cores are fast enough for 16 bits without a bias of keys alone"),
            (wgmma.widest(problem) > WIDEST, f"head sizes above {WIDEST} are for tensor cores"),
            (bool(problem.formulas), "nobody knows how many registers a formula takes"),
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its tile; the number of rows changes no bit of a row."""
        problem = request.problem
        own = portable.fields(cls, request._replace(simt=False)) | _tile(request)._asdict()
        if split_keys.wanted(request):
            own |= split_keys.fields(request)
        config = cls(
            **own,
            sink=dtype_of(problem.sink),
            width=problem.head_dim,
            width_v=problem.head_dim_v,
            key_bias=_shares_bias(problem),
        )
        return (config,)


def _tile(request: Request) -> Tile:
    """As many rows as registers allow and each SM has its share of."""
    problem = request.problem
    rows, blocks_per_sm = _rows(problem)
    if blocks := _blocks_of_eight_warps(problem):
        if portable.most_rows(request, 256) <= _GAIN * portable.most_rows(request, 128):
            return Tile(256, 128, 8, blocks)
        rows = 1
    elif portable.num_tiles(problem, 128 * rows) < 2 * request.num_sms:
        rows = 1
    return Tile(128 * rows, 128, 4, blocks_per_sm)


def _blocks_of_eight_warps(problem: Problem) -> int:
    """How many share an SM, each thread with one row; 0 where rows keep too much.

    More rows to a thread are faster then.
    """
    if problem.dtype == np.float64 or problem.head_dim + 2 * problem.head_dim_v > 4:
        return 0
    if not _shares_bias(problem):
        return 0 if needs_score_math(problem) else 3
    bounds = (problem.window_left, problem.q_lengths, problem.kv_lengths, problem.cu_seqlens_q)
    few = problem.head_dim_v == 0 and all(bound is None for bound in bounds)
    return 4 if few else 0


def _rows(problem: Problem) -> tuple[int, int]:
    """Rows of a thread and blocks of four warps on an SM, as registers allow. (D63)"""
    shares_bias = _shares_bias(problem)
    numbers = problem.head_dim + 2 * problem.head_dim_v + shares_bias  # that a row keeps
    if problem.dtype == np.float64:
        return (2 if numbers <= 16 else 1), 2
    if needs_score_math(problem) and not shares_bias:
        return 2, 2
    return 4, 4 if numbers <= 4 else 3 if numbers <= 16 else 2


def _shares_bias(problem: Problem) -> bool:
    """Whether a bias that all queries share is all that is added to scores, and hides keys."""
    if problem.bias is None or problem.bias.strides[-2] != 0:
        return False
    return present(problem, "cap", "add", "see") == {"bias"}
