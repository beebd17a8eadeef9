"""``forward_combine.cu``: results of parts of the keys become one."""

from __future__ import annotations

from typing import NamedTuple, Self

from cuflash._kernels.config import KernelConfig, Operands


class Own(NamedTuple):
    num_warps: int = 8  # that share the parts of a row
    overlaps: bool = False  # is it launched while the parts are computed, and waits for them?


class CombineConfig(KernelConfig):
    """``forward_combine.cu``; ``out_dtype`` is what the caller's out has."""

    kernel = "forward_combine"
    params = "CombineParams"
    computes = "combine"
    parts = {"operands": Operands, "own": Own}  # noqa: RUF012

    @classmethod
    def after(cls, config: KernelConfig, out_dtype: str) -> Self:
        """The kernel for the parts that a forward leaves."""
        values = config.values()
        own = {name: values[name] for name in (*Operands._fields, "overlaps")}
        return cls(**own | {"out_dtype": out_dtype, "copy_bytes": max(4, config.element_bytes)})

    @property
    def smem_bytes(self) -> int:
        """A row of sums for each warp."""
        return int(self.real_bytes * self.num_warps * self.head_dim_v)
