"""``backward_delta.cu``: delta = rowsum(dout * out) - dlse, which the gradient kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from cuflash._kernels.config import KernelConfig, Operands
from cuflash._kernels.portable import padded
from cuflash._problem.problem import Problem


class Own(NamedTuple):
    num_warps: int  # warps of a thread block
    block_m: int  # queries of a thread block
    grad_lse: bool  # is there a cotangent of lse?
    overlaps: bool = False  # may a one-pass kernel start before this one ends?


class DeltaConfig(KernelConfig):
    """``backward_delta.cu``: it reads out in ``out_dtype``."""

    kernel = "backward_delta"
    params = "DeltaParams"
    computes = "delta"
    parts = {"operands": Operands, "own": Own}  # noqa: RUF012

    @classmethod
    def of(
        cls,
        problem: Problem,
        out_dtype: np.dtype[Any],
        copy_bytes: int,
        *,
        grad_lse: bool,
        overlaps: bool = False,
    ) -> Self:
        """The kernel for a problem with an out of ``out_dtype``."""
        return cls(
            dtype=problem.dtype.name,
            out_dtype=out_dtype.name,
            copy_bytes=16 if copy_bytes == 16 else problem.dtype.itemsize,
            head_dim_v=padded(problem.head_dim_v),
            num_warps=4,
            block_m=64,
            grad_lse=grad_lse,
            overlaps=overlaps,
        )
