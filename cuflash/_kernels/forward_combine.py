"""``forward_combine.cu``: combines the results of the parts of split keys."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels.config import KernelConfig, Operands


class Own(NamedTuple):
    num_warps: int = 8  # warps of a thread block, which share the parts of a row
    overlaps: bool = False  # does it start while parts are being computed, and wait for them?


class CombineConfig(KernelConfig):
    """``forward_combine.cu``: ``out_dtype`` is the dtype of the caller's out."""

    kernel = "forward_combine"
    params = "CombineParams"
    computes = "combine"
    parts = {"operands": Operands, "own": Own}  # noqa: RUF012

    @classmethod
    def after(cls, config: KernelConfig, out_dtype: str) -> Self:
        """The kernel that combines the parts of a forward."""
        values = config.values()
        own = {name: values[name] for name in (*Operands._fields, "overlaps")}
        return cls(**own | {"out_dtype": out_dtype, "copy_bytes": max(4, config.element_bytes)})

    @property
    def smem_bytes(self) -> int:
        """A row of sums for each warp."""
        return int(self.real_bytes * self.num_warps * self.head_dim_v)
