"""``backward_dkv_partners.cu``: dk and dv of float64, with two warps for the same keys."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED
from cuflash._kernels.request import Request
from cuflash._kernels.tables import Row

#: A tile: block_m, block_n, num_warps, blocks_per_sm.
ROWS = (
    Row("float64", 64, ((64, 64, 8, 1),), "D58"),
    Row("float64, general", 64, ((32, 64, 8, 1),), "D58"),
    Row("float64", 96, ((32, 64, 8, 1),), "D58"),
    Row("float64", 128, ((32, 64, 8, 1),), "D58"),
)


class BackwardKVPartnersConfig(portable.PartnersConfig):
    """``backward_dkv_partners.cu``: two warps own the same keys, each with half of the columns."""

    kernel = "backward_dkv_partners"
    computes = "dkv"
    parts = (
        SCORED | portable.KV_PARTS | {"own": portable.Partners, "held": portable.BiasInRegisters}
    )
    owned = "block_n"  # queries are streamed
    streams = range(32, 129, 32)  # each warp computes half of the scores

    def check(self) -> None:
        super().check()
        if self.block_m > self.num_threads:
            raise ValueError(
                f"{self.block_m=} must be at most {self.num_threads=}: one thread loads lse and "
                "delta of a row"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v, a block of q and dout, p and ds, two buffers of pairs (lse, delta)."""
        rows = self.block_m + self.block_n
        kept = self.element_bytes * rows * (self.head_dim + self.head_dim_v)
        return int(kept + self.real_bytes * self.block_m * (2 * self.block_n + 4))

    @classmethod
    def eligible(cls, request: Request) -> str:
        return portable.why_not_partners(request, ROWS)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The tile of its table row for each pass; nothing if it does not fit."""
        problem = request.problem
        values = portable.partner_fields(cls, ROWS, request)
        if not portable.fits(cls.draft(values), request.smem_limit):
            return ()
        passes = portable.kv_passes(problem, request.keys, together=True)
        return tuple(cls(**values, **portable.kv_fields(problem, names)) for names in passes)
