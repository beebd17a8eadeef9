"""What do kernels of narrow heads share? True widths, who is served, room for queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import present
from cuflash._problem.problem import HALVES, Problem

#: Head sizes up to which products of CUDA cores are cheaper than the exponential.
WIDEST = 8


class Widths(NamedTuple):
    """True head sizes, for which a kernel is compiled."""

    width: int
    width_v: int
    key_bias: bool  # is a bias kept with its key, since all queries share it?

    def check(self) -> None:
        if not 1 <= self.width <= WIDEST or not 0 <= self.width_v <= WIDEST:
            raise ValueError(f"{self.width=} must be from 1 to 8, {self.width_v=} from 0 to 8")


class NarrowConfig(KernelConfig):
    """A kernel with threads that own rows."""

    tunables = portable.TUNABLES
    streams = range(16, 513, 16)  # of a sum: as many as sums, of 262,144
    most_of_simt = 2**15  # a thread has its rows in registers

    def check(self) -> None:
        own = getattr(self, self.owned)
        if own % self.num_threads or self.split_columns != 1:
            raise ValueError(f"{own} rows by {self.num_threads=}, {self.split_columns=} by 1")

    @property
    def numbers(self) -> int:
        """What a thread keeps of each of its rows."""
        raise NotImplementedError

    def room(self, rows: int, numbers: int) -> int:
        """Bytes of rows in shared memory, by four numbers."""
        return self.real_bytes * rows * 4 * -(-numbers // 4)


class NarrowBackwardConfig(NarrowConfig):
    """One that computes gradients."""

    params = "BackwardParams"
    streams = range(64, 257, 64)  # as bounds of segments

    @classmethod
    def eligible(cls, request: Request) -> str:
        return against(request)

    @classmethod
    def tiled(cls, request: Request, **own: Any) -> Self:
        """With two rows to a thread where registers hold them and each SM has its share. (D160)"""
        known = fields(cls, request) | own
        draft = cls.draft(known)
        tiles = portable.num_tiles(request.problem, 256, of_keys=cls.owned == "block_n")
        few = tiles < 2 * request.num_sms or draft.numbers * draft.real_bytes > 256
        rows = 1 if few else 2
        sides = {"block_m": 128, "block_n": 128} | {cls.owned: 128 * rows}
        tile = sides | {"num_warps": 4, "blocks_per_sm": 2}
        return cls(**known, **tile)


def fields(kernel: type[KernelConfig], request: Request) -> dict[str, Any]:
    """Fields that follow from the problem."""
    problem = request.problem
    # No tensor cores in any case; before sm_80 no instruction that rounds two to 16 bits, either.
    rounds_singly = request.simt and problem.dtype in HALVES
    return portable.fields(kernel, request._replace(simt=rounds_singly)) | {
        "width": problem.head_dim,
        "width_v": problem.head_dim_v,
        "key_bias": shares_bias(problem),
    }


def against(request: Request) -> str:
    """Why none serves a request. (D64)"""
    problem = request.problem
    wins = problem.dtype in (np.float32, np.float64) or shares_bias(problem)
    return wgmma.first_reason(
        (not wins, "tensor cores are fast enough for 16 bits without a bias of keys alone"),
        (wgmma.widest(problem) > WIDEST, f"head sizes above {WIDEST} are for tensor cores"),
        (bool(problem.formulas), "nobody knows how many registers a formula takes"),
    )


def shares_bias(problem: Problem) -> bool:
    """Whether a bias that all queries share is all that is added to scores, and hides keys."""
    if problem.bias is None or problem.bias.strides[-2] != 0:
        return False
    return present(problem, "cap", "add", "see") == {"bias"}
