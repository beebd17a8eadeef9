"""What do kernels of narrow heads share? True widths, eligibility, shared memory of rows."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from cuflash._kernels import portable, wgmma
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import present
from cuflash._problem.problem import HALVES, Problem

#: Largest head size with products on CUDA cores that are cheaper than the exponential.
WIDEST = 8


class Widths(NamedTuple):
    """True head sizes, for which a kernel is compiled."""

    width: int  # of q and k
    width_v: int  # of v and out; 0: no values
    key_bias: bool  # do all queries share the bias, which is then kept with its key?

    def check(self) -> None:
        if not 1 <= self.width <= WIDEST or not 0 <= self.width_v <= WIDEST:
            raise ValueError(f"{self.width=} must be from 1 to 8, {self.width_v=} from 0 to 8")


class NarrowConfig(KernelConfig):
    """A kernel with threads that own rows."""

    tunables = portable.TUNABLES
    streams = range(16, 513, 16)  # keys of one sum: 262,144 keys are 512 sums of 512
    max_simt_rows = 2**15  # owned rows are in registers, not in a GlobalTile

    def check(self) -> None:
        own = getattr(self, self.owned)
        if own % self.num_threads or self.split_columns != 1:
            raise ValueError(
                f"{own} rows must be a multiple of {self.num_threads=}, and {self.split_columns=} 1"
            )

    @property
    def numbers(self) -> int:
        """Numbers that a thread keeps in registers for each row that it owns."""
        raise NotImplementedError

    def room(self, rows: int, numbers: int) -> int:
        """Bytes of rows in shared memory; ``numbers`` of a row are rounded up to four."""
        return self.real_bytes * rows * 4 * -(-numbers // 4)


class NarrowBackwardConfig(NarrowConfig):
    """A narrow kernel that computes gradients."""

    params = "BackwardParams"
    streams = range(64, 257, 64)  # multiples of the 64 ids that share bounds

    @classmethod
    def eligible(cls, request: Request) -> str:
        return why_not(request)

    @classmethod
    def tiled(cls, request: Request, **own: Any) -> Self:
        """Its tile, with two rows to a thread if they fit registers and feed every SM. (D160)"""
        known = fields(cls, request) | own
        draft = cls.draft(known)
        tiles = portable.num_tiles(request.problem, 256, of_keys=cls.owned == "block_n")
        few = tiles < 2 * request.num_sms or draft.numbers * draft.real_bytes > 256
        rows = 1 if few else 2
        sides = {"block_m": 128, "block_n": 128} | {cls.owned: 128 * rows}
        tile = sides | {"num_warps": 4, "blocks_per_sm": 2}
        return cls(**known, **tile)


def fields(kernel: type[KernelConfig], request: Request) -> dict[str, Any]:
    """Fields that the problem determines."""
    problem = request.problem
    # Tensor cores are never used. Before sm_80 no instruction rounds two numbers to 16 bits.
    rounds_singly = request.simt and problem.dtype in HALVES
    return portable.fields(kernel, request._replace(simt=rounds_singly)) | {
        "width": problem.head_dim,
        "width_v": problem.head_dim_v,
        "key_bias": shares_bias(problem),
    }


def why_not(request: Request) -> str:
    """Why no narrow kernel serves a request; empty where one does. (D64)"""
    problem = request.problem
    wins = problem.dtype in (np.float32, np.float64) or shares_bias(problem)
    return wgmma.first_reason(
        (
            not wins,
            "tensor cores are fast enough for 16 bits unless only a bias for each key is added",
        ),
        (wgmma.widest(problem) > WIDEST, f"head sizes above {WIDEST} are for tensor cores"),
        (bool(problem.formulas), "a formula's registers are unknown"),
    )


def shares_bias(problem: Problem) -> bool:
    """Whether a bias that all queries share is the only option that changes scores or hides."""
    if problem.bias is None or problem.bias.strides[-2] != 0:
        return False
    return present(problem, "cap", "add", "see") == {"bias"}
