"""``forward_combine.cu``: combines the results of the parts of split keys."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from cuflash._kernels.config import KernelConfig, Operands
from cuflash._problem.problem import Problem

_WARPS = 8
_PARTS_OF_A_WARP = 8  # parts that a warp reads about as fast as all warps of a thread block do
BLOCKS_PER_SM = 4  # thread blocks that an SM runs at once, about


class Own(NamedTuple):
    num_warps: int = _WARPS  # warps of a thread block, which divide the parts of each row
    rows: int = 1  # rows of a thread block: 1, or one for each warp
    overlaps: bool = False  # does it start while parts are being computed, and wait for them?

    def check(self) -> None:
        if self.rows not in (1, self.num_warps):
            raise ValueError(f"{self.rows=} must be 1 or {self.num_warps=}")


class CombineConfig(KernelConfig):
    """``forward_combine.cu``: ``out_dtype`` is the dtype of the caller's out."""

    kernel = "forward_combine"
    params = "CombineParams"
    computes = "combine"
    parts = {"operands": Operands, "own": Own}  # noqa: RUF012

    @classmethod
    def after(cls, config: KernelConfig, problem: Problem, parts: int, num_sms: int) -> Self:
        """The kernel that combines the parts of a forward.

        A row has a warp of its own where its parts are few, or rows are many. (D180)
        """
        values = config.values()
        num_rows = math.prod(problem.batch) * problem.seqlen_q
        alone = parts <= _PARTS_OF_A_WARP or num_rows > BLOCKS_PER_SM * num_sms
        own = {name: values[name] for name in (*Operands._fields, "overlaps")} | {
            "out_dtype": problem.out.dtype.name,
            "copy_bytes": max(4, config.element_bytes),
            "rows": _WARPS if alone else 1,
        }
        return cls(**own)

    @property
    def starts_early(self) -> bool:
        """Whether it starts while parts are computed."""
        return bool(self.overlaps)

    @property
    def smem_bytes(self) -> int:
        """A row of sums for each warp, where several warps share a row."""
        warps = self.num_warps // self.rows
        return int(self.real_bytes * warps * self.head_dim_v) if warps > 1 else 0
