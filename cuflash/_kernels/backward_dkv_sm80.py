"""``backward_dkv_sm80.cu``: dk and dv on every architecture."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.tables import Row

#: A tile: block_m, block_n, num_warps, blocks_per_sm.
ROWS = (
    Row("half", 16, ((32, 128, 4, 3),)),
    Row("half", 32, ((32, 128, 4, 2),)),
    Row("half", 64, ((32, 128, 4, 2),), "D30"),
    Row("half", 96, ((64, 64, 4, 2), (32, 64, 4, 2))),
    Row("half", 128, ((64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)), "D30"),
    Row("half", 192, ((32, 64, 4, 2), (32, 64, 4, 1))),
    Row("half", 256, ((16, 64, 4, 2), (16, 64, 4, 1))),
    *(Row("half, general", d, ((64, 64, 4, 2),)) for d in (16, 32, 64)),
    Row("half, general", 96, ((32, 64, 4, 2),)),
    Row("half, general", 128, ((32, 64, 4, 2), (32, 64, 4, 1))),
    *(Row("half, short", d, ((32, 64, 4, 3),), "D15") for d in (16, 32, 64)),
    Row("float32", 16, ((32, 64, 4, 2),)),
    Row("float32", 32, ((32, 64, 4, 2),), "D36"),
    Row("float32, v alone", 32, ((64, 64, 4, 2),), "D126"),
    Row("float32", 64, ((16, 64, 4, 2), (16, 64, 4, 1)), "D36"),
    Row("float32", 96, ((16, 64, 4, 2), (16, 64, 4, 1)), "D36"),
    Row("float32", 128, ((16, 128, 8, 1), (16, 64, 4, 1), (16, 32, 2, 1)), "D36"),
    Row("float32", 192, ((16, 64, 4, 1), (16, 32, 2, 1)), "D36"),
    Row("float32", 256, ((16, 64, 4, 1), (16, 32, 2, 1), (16, 16, 1, 1)), "D36"),
    # With all options registers do not hold 32 queries.
    Row("float32, general", 16, ((16, 64, 4, 2),), "D161"),
    Row("float32, held bias", 16, ((32, 128, 4, 2),), "D161"),
    Row("float32, general", 32, ((16, 64, 4, 2),)),
    Row("tf32", 16, ((16, 64, 4, 2),)),
    Row("tf32", 32, ((16, 64, 4, 2),)),
    Row("tf32", 128, ((16, 64, 4, 2), (16, 64, 4, 1), (16, 32, 2, 1))),
    Row("float64", 16, ((16, 64, 4, 2),)),
    Row("float64", 32, ((16, 64, 4, 2),)),
    Row("float64", 64, ((16, 64, 4, 2), (16, 64, 4, 1), (16, 32, 2, 1))),
    Row("float64", 96, ((16, 64, 4, 1), (16, 32, 2, 1), (16, 16, 1, 1))),
    Row("float64", 128, ((16, 32, 2, 1), (16, 16, 1, 1))),
    Row("float64, general", 128, ((16, 64, 4, 1), (16, 32, 2, 1), (16, 16, 1, 1))),
    Row("float64", 192, ((16, 32, 2, 1), (16, 16, 1, 1))),
    Row("float64", 256, ((16, 16, 1, 1),)),
)


class BackwardKVConfig(KernelConfig):
    """``backward_dkv_sm80.cu``: dk, dv or both in one pass over the queries."""

    kernel = "backward_dkv_sm80"
    params = "BackwardParams"
    computes = "dkv"
    parts = SCORED | portable.KV_PARTS | {"held": portable.BiasInRegisters}
    tunables = portable.TUNABLES
    owned = "block_n"  # queries are streamed
    streams = range(16, 65, 16)  # up to 64: KeptBits of score/dropout.cuh

    def check(self) -> None:
        if self.block_m > self.num_threads:
            raise ValueError(
                f"{self.block_m=} must be at most {self.num_threads=}: one thread loads lse and "
                "delta of a row"
            )

    @property
    def smem_bytes(self) -> int:
        """Tiles of k and v; two stages of q, dout and the pairs (lse, delta).

        With 3xTF32 a pass for dk or dv alone has one stage with both TF32 parts instead. (D37)
        """
        streamed = 2 * self.operand_parts if self.grad_k and self.grad_v else 2
        tiles = sum(
            self.tile_bytes(self.block_n, columns)
            + streamed * self.tile_bytes(self.block_m, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )
        return tiles + 4 * self.real_bytes * int(self.block_m)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The first tile of its table row that fits, for each pass; ``simt`` if a pass has none."""
        problem, fields = request.problem, portable.fields(cls, request)
        together = max(fields["head_dim"], fields["head_dim_v"]) <= portable.held(request).pair
        found: tuple[Self, ...] = ()
        for names in portable.kv_passes(problem, request.keys, together=together):
            columns = fields["head_dim" if "k" in names else "head_dim_v"]
            own = fields | portable.kv_fields(problem, names)
            own["holds_bias"] = portable.holds_bias(request, own)
            own["split_columns"] = portable.gradient_parts(request, columns)
            # Results that are wider than elements take registers, as options do.
            wider = True if own["out_dtype"] != own["dtype"] else None
            values = portable.candidates(cls, ROWS, request, own, general=wider)
            fitting = portable.fitting(cls, values, request.smem_limit)
            if not fitting:
                return cls.chosen(request._replace(simt=True))
            found += fitting
        return found
