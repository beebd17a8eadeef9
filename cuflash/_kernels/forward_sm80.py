"""``forward_sm80.cu``: the forward that every architecture has."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from cuflash._kernels import portable
from cuflash._kernels.config import SCORED, KernelConfig, Tile
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import Floats, dtype_of, needs_score_math
from cuflash._kernels.tables import Row

#: block_m, block_n, num_warps, blocks_per_sm, num_stages. Of float32 one stage of k and v: two
#: would leave no room for the low parts of 3xTF32. The one stage of float64 with options was
#: measured at 8192 keys alone.
ROWS = (
    Row("half", 16, ((128, 64, 4, 3, 2),)),
    Row("half", 32, ((128, 128, 4, 2, 2),)),
    Row("half", 64, ((128, 96, 4, 2, 2), (128, 32, 4, 2, 2)), "D30"),
    Row("half", 96, ((128, 64, 4, 2, 2), (64, 32, 4, 2, 2))),
    Row("half", 128, ((128, 48, 4, 2, 2), (64, 32, 4, 2, 2)), "D30"),
    Row("half", 192, ((64, 48, 4, 2, 2), (64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("half", 256, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("half, general", 16, ((128, 64, 4, 2, 2),)),
    Row("half, general", 32, ((128, 64, 4, 2, 2),)),
    Row("half, general", 64, ((64, 96, 4, 2, 2),)),
    Row("half, general", 96, ((64, 64, 4, 2, 2), (64, 32, 4, 2, 2))),
    Row("half, general", 128, ((64, 64, 4, 2, 2), (64, 32, 4, 2, 2))),
    Row("half, general", 192, ((64, 48, 4, 2, 2), (64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("half, general", 256, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("float32", 32, ((128, 32, 4, 2, 1),), "D124"),
    Row("float32", 64, ((128, 64, 8, 1, 1),), "D36"),
    Row("float32", 96, ((64, 48, 4, 2, 1), (64, 32, 4, 2, 1), (64, 48, 4, 1, 1)), "D36"),
    Row("float32", 128, ((128, 32, 8, 1, 1), (64, 16, 4, 1, 1)), "D36"),
    Row("float32", 192, ((128, 32, 8, 1, 1), (128, 16, 8, 1, 1), (48, 16, 3, 1, 1)), "D36"),
    Row("float32", 256, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1), (32, 16, 2, 1, 1)), "D36"),
    Row("float32, general", 32, ((64, 64, 4, 2, 1),)),
    Row("float32, general", 64, ((128, 32, 8, 1, 1),)),
    Row("float32, general", 96, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1))),
    Row("float32, general", 128, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1))),
    Row("float32, general", 192, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1))),
    Row("float32, general", 256, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1), (32, 16, 2, 1, 1))),
    Row("tf32", 32, ((64, 64, 4, 2, 2),)),
    Row("tf32", 64, ((128, 64, 4, 2, 2), (64, 64, 4, 1, 2)), "D35"),
    Row("tf32", 96, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("tf32", 128, ((256, 32, 8, 1, 2), (128, 32, 8, 1, 2), (64, 16, 4, 1, 2)), "D35"),
    Row("tf32", 192, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("tf32", 256, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2), (32, 16, 2, 1, 2))),
    Row("tf32, general", 32, ((64, 32, 4, 2, 2),)),
    Row("tf32, general", 64, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("tf32, general", 96, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("tf32, general", 128, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("float64", 32, ((64, 32, 4, 2, 2),)),
    Row("float64", 64, ((128, 64, 8, 1, 2), (128, 32, 8, 1, 2), (64, 32, 4, 1, 2)), "D60"),
    Row("float64", 96, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row(
        "float64",
        128,
        ((128, 16, 8, 1, 1), (128, 16, 8, 1, 2), (64, 16, 4, 1, 2), (32, 16, 2, 1, 2)),
        "D102",
    ),
    Row("float64", 192, ((64, 16, 4, 1, 2), (32, 16, 2, 1, 2), (16, 16, 1, 1, 2))),
    Row("float64", 256, ((64, 16, 4, 1, 2), (32, 16, 2, 1, 2), (16, 16, 1, 1, 2))),
    Row("float64, general", 64, ((128, 32, 8, 1, 2), (64, 32, 4, 1, 2))),
    Row(
        "float64, general", 128, ((128, 32, 8, 1, 1), (64, 16, 4, 1, 2), (32, 16, 2, 1, 2)), "D102"
    ),
)


class Own(NamedTuple):
    """What this kernel alone is told."""

    sink: Floats
    num_stages: int = 2  # buffers of k and of v


class ForwardConfig(KernelConfig):
    """``forward_sm80.cu``."""

    kernel = "forward_sm80"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": Own}
    tunables = (*portable.TUNABLES, "num_stages")

    def check(self) -> None:
        """Raise a ValueError for other numbers of buffers."""
        if self.num_stages not in (1, 2):
            raise ValueError(f"{self.num_stages=} must be 1 or 2")

    @property
    def result_columns(self) -> int:
        """Columns of out."""
        return int(self.head_dim_v)

    @property
    def smem_bytes(self) -> int:
        """The q tile, one or two stages of k and v."""
        own_columns = self.head_dim_v // self.column_parts
        streamed = self.tile_bytes(self.block_n, self.head_dim)
        streamed += self.tile_bytes(self.block_n, own_columns)
        stages = self.num_stages * self.operand_parts
        return self.tile_bytes(self.block_m, self.head_dim) + int(stages * streamed)

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The first tile of its row that fits; on CUDA cores where none does."""
        problem, cores = request.problem, request.cuda_cores
        fields: dict[str, Any] = portable.fields(request, problem.out.dtype, cuda_cores=cores)
        fields["sink"] = dtype_of(problem.sink)
        general = needs_score_math(problem) or not fields["scale_in_exponent"]
        held = portable.held(problem, cuda_cores=cores)
        columns = held.out_general if general else held.out
        tiles = ((64, portable.streamed_on_cuda_cores(problem), 4, 1, 2),)
        if not cores:
            tiles = portable.tiles(ROWS, request, fields, general=general)  # type: ignore[assignment]
        parts = portable.split(fields["head_dim_v"], columns)
        configs = [
            cls(**fields, **Tile(*tile)._replace(column_parts=parts)._asdict(), num_stages=stages)
            for *tile, stages in tiles
        ]
        if configs[-1].smem_bytes > request.smem_limit:
            narrower = portable.split(fields["head_dim_v"], columns // 2)
            configs.append(configs[-1].replace(column_parts=narrower))
        found = portable.fitting(configs, request.smem_limit)
        return (found,) if found else cls.chosen(request._replace(cuda_cores=True))
