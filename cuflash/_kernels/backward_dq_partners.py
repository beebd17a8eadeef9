"""``backward_dq_partners.cu``: dq of float64, with two warps for the same rows."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.tables import Row

#: A tile: block_m, block_n, num_warps, blocks_per_sm.
ROWS = (
    Row("float64", 64, ((64, 64, 8, 1),), "D58"),
    Row("float64, general", 64, ((64, 32, 8, 1),), "D58"),
    Row("float64", 96, ((64, 32, 8, 1),), "D58"),
    Row("float64", 128, ((64, 32, 8, 1),), "D58"),
)


class BackwardQPartnersConfig(portable.PartnersConfig):
    """``backward_dq_partners.cu``: two warps own the same rows, each with half of the columns."""

    kernel = "backward_dq_partners"
    computes = "dq"
    parts = SCORED | {"own": portable.Partners, "held": portable.BiasInRegisters}
    streams = range(32, 257, 32)  # each warp computes half of the scores

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, a block of k and v, and ds."""
        rows = self.block_m + self.block_n
        kept = self.element_bytes * rows * (self.head_dim + self.head_dim_v)
        return int(kept + self.real_bytes * self.block_m * self.block_n)

    @classmethod
    def eligible(cls, request: Request) -> str:
        return portable.why_not_partners(request, ROWS)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its table row; nothing if it does not fit."""
        values = portable.partner_fields(cls, ROWS, request)
        return (cls(**values),) if portable.fits(cls.draft(values), request.smem_limit) else ()
