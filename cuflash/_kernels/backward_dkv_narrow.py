"""``backward_dkv_narrow.cu``: dk and dv of very small head sizes, on CUDA cores."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import narrow, portable
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request


class BackwardKVNarrowConfig(narrow.NarrowBackwardConfig):
    """``backward_dkv_narrow.cu``: a thread owns keys, and their rows of dk and dv."""

    kernel = "backward_dkv_narrow"
    computes = "dkv"
    parts = SCORED | {"widths": narrow.Widths, "results": portable.Results}
    owned = "block_n"  # queries are streamed
    row_numbers = 3

    @property
    def numbers(self) -> int:
        """For a key: k, v and bias; sums of dk and dv over one block and over all blocks."""
        of_k, of_v = 1 + 2 * self.grad_k, 1 + 2 * self.grad_v
        return int(of_k * self.width + of_v * self.width_v + self.key_bias)

    @property
    def smem_bytes(self) -> int:
        """A block of queries with dout, lse and delta of each."""
        return self.room(self.block_m, self.width + self.width_v + 2)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its tile for each pass. How many keys a thread block owns changes no bit of a row."""
        return tuple(
            cls.tiled(request, grad_k="k" in names, grad_v="v" in names)
            for names in portable.kv_passes(request.problem, request.keys, together=True)
        )
