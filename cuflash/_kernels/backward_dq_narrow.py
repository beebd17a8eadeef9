"""``backward_dq_narrow.cu``: dq of very small head sizes, on CUDA cores."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import narrow
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request


class BackwardQNarrowConfig(narrow.NarrowBackwardConfig):
    """``backward_dq_narrow.cu``: a thread owns rows of dq."""

    kernel = "backward_dq_narrow"
    computes = "dq"
    parts = SCORED | {"widths": narrow.Widths}
    row_numbers = 5

    @property
    def numbers(self) -> int:
        """For a query: q, dout, lse and delta; sums of dq over one block and over all blocks."""
        return int(3 * self.width + self.width_v + 2)

    @property
    def smem_bytes(self) -> int:
        """A block of keys with value and bias of each."""
        return self.room(self.block_n, self.width + self.width_v + self.key_bias)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its tile. How many queries a thread block owns changes no bit of a row."""
        return (cls.tiled(request),)
