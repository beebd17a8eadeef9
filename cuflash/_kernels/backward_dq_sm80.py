"""``backward_dq_sm80.cu``: dq on every architecture."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.tables import Row

#: A tile: block_m, block_n, num_warps, blocks_per_sm.
ROWS = (
    Row("half", 16, ((64, 64, 4, 4),)),
    Row("half", 32, ((128, 64, 4, 2),)),
    Row("half", 64, ((128, 48, 4, 2), (64, 32, 4, 2)), "D30"),
    Row("half", 96, ((128, 32, 4, 2), (64, 32, 4, 2))),
    Row("half", 128, ((128, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)), "D30"),
    Row("half", 192, ((64, 32, 4, 2), (64, 32, 4, 1))),
    Row("half", 256, ((64, 16, 4, 2), (64, 16, 4, 1))),
    Row("half, general", 16, ((64, 64, 4, 3),)),
    Row("half, general", 32, ((128, 32, 4, 2),)),
    Row("half, general", 64, ((64, 64, 4, 2),)),
    Row("half, general", 96, ((64, 32, 4, 2),)),
    Row("half, general", 128, ((64, 32, 4, 2), (64, 32, 4, 1))),
    Row("half, general", 192, ((64, 16, 4, 2), (64, 16, 4, 1))),
    *(Row("half, short", d, ((64, 64, 4, 3),), "D15") for d in (16, 32, 64)),
    Row("float32", 16, ((64, 32, 4, 2),)),
    Row("float32", 32, ((64, 32, 4, 2),), "D36"),
    Row("float32", 64, ((128, 32, 8, 1),), "D36"),
    Row("float32", 96, ((64, 16, 4, 2), (64, 16, 4, 1)), "D36"),
    Row("float32", 128, ((128, 16, 8, 1), (64, 16, 4, 1)), "D36"),
    Row("float32", 192, ((64, 16, 4, 1), (32, 16, 2, 1)), "D36"),
    Row("float32", 256, ((64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1)), "D36"),
    Row("tf32", 64, ((128, 16, 4, 2), (64, 16, 4, 1))),
    Row("tf32", 128, ((64, 16, 4, 2), (64, 16, 4, 1))),
    Row("float32, general", 16, ((128, 16, 4, 2),), "D161"),
    Row("float32, held bias", 16, ((128, 32, 8, 2),), "D161"),
    Row("float32, general", 32, ((64, 16, 4, 2),)),
    Row("float32, general", 64, ((64, 16, 4, 2), (64, 16, 4, 1))),
    Row("float64", 16, ((64, 16, 4, 2),)),
    Row("float64", 32, ((64, 16, 4, 2),)),
    Row("float64", 64, ((64, 16, 4, 2), (64, 16, 4, 1))),
    Row("float64", 96, ((64, 16, 4, 1), (32, 16, 2, 1))),
    Row("float64", 128, ((64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))),
    Row("float64", 192, ((32, 16, 2, 1), (16, 16, 1, 1))),
    Row("float64", 256, ((16, 16, 1, 1),)),
)


class BackwardQConfig(KernelConfig):
    kernel = "backward_dq_sm80"
    params = "BackwardParams"
    computes = "dq"
    parts = SCORED | {"held": portable.BiasInRegisters}
    tunables = portable.TUNABLES

    @property
    def smem_bytes(self) -> int:
        """Tiles of q and dout, two stages of k and v, or one stage of both TF32 parts of them."""
        return sum(
            self.tile_bytes(self.block_m, columns) + 2 * self.tile_bytes(self.block_n, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The first tile of its table row that fits; ``simt`` if none does."""
        own = portable.fields(cls, request)
        own["holds_bias"] = portable.holds_bias(request, own)
        own["split_columns"] = portable.gradient_parts(request, own["head_dim"])
        values = portable.candidates(cls, ROWS, request, own)
        found = portable.fitting(cls, values, request.smem_limit)
        return found or cls.chosen(request._replace(simt=True))
