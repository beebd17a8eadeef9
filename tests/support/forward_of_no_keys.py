"""``forward_of_no_keys.cu`` writes zeros where there are no keys: the module of a toy kernel."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.tables import Row, smallest, tile_of

ROWS = (Row("", (256, 256), (64, 64, 4)), Row("wide", (256, 256), (64, 64, 2)))


class ForwardOfNoKeysConfig(KernelConfig):
    """Configuration of ``forward_of_no_keys.cu``."""

    kernel = "forward_of_no_keys"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED
    tunables = ("block_m", "block_n", "num_warps")

    @classmethod
    def eligible(cls, request: Request) -> str:
        """Return why the kernel refuses a request, or ""."""
        problem = request.problem
        if problem.dtype != "float32":
            return f"it writes float32, not {problem.dtype}"
        return "there are keys" if problem.seqlen_k else ""

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Return the tile of the request's row."""
        problem = request.problem
        holding = {"wide": problem.head_dim_v > 128}
        tile = dict(zip(cls.tunables, tile_of(ROWS, holding, smallest(ROWS, problem)), strict=True))
        return (cls(**portable.fields(cls, request), **tile, blocks_per_sm=1),)
