"""``forward_sm80.cu``: the forward on every architecture."""

from __future__ import annotations

from typing import Self

from cuflash._kernels import portable, split_keys
from cuflash._kernels.config import SCORED, KernelConfig
from cuflash._kernels.request import Request
from cuflash._kernels.score_config import dtype_of, needs_score_math
from cuflash._kernels.tables import Row

_PLACES_BYTES = 16  # offsets of the k row and the v row of a key in pages
_ADDRESS_BYTES = 8  # an address of the page table, or an mbarrier
_FIRST_WITH_FLOAT8 = 89  # compute capability
_COLUMNS_OF_8_BITS = 32  # that one read of keys covers
_ALIGNMENT = 128  # alignment in bytes of structs in shared memory
#: A tile: block_m, block_n, num_warps, blocks_per_sm, num_stages. float32 has one stage of k and v:
#: two would leave no room for the low parts of 3xTF32. The one stage of float64 with options was
#: measured only at 8192 keys.
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
    # Thread blocks that share an SM hide each other's loads.
    *(Row("half, short", d, ((64, 64, 4, n, 1),), "D15") for d, n in ((16, 5), (32, 4), (64, 5))),
    Row("half, short, 32 rows", 32, ((32, 64, 2, 6, 1),), "D15"),
    Row("half, short, 32 rows", 64, ((32, 64, 2, 5, 2),), "D15"),
    Row("half, clusters", 64, ((64, 64, 4, 2, 2),), "D196"),
    Row("half, clusters, six warps", 64, ((96, 128, 6, 2, 2), (96, 64, 6, 2, 2)), "D196"),
    Row("half, few rows", 64, ((32, 96, 2, 4, 2), (32, 64, 2, 2, 2)), "D181"),
    Row("half, few rows, few tiles in order", 64, ((32, 128, 2, 2, 2), (32, 64, 2, 2, 2)), "D181"),
    Row("half, few rows, pages", 64, ((32, 64, 2, 4, 2), (32, 64, 2, 2, 2)), "D156"),
    Row("half, few rows, clusters", 64, ((32, 64, 2, 4, 2), (32, 64, 2, 2, 2)), "D196"),
    Row("half, few rows", 128, ((32, 32, 2, 4, 2), (32, 32, 2, 2, 2)), "D181"),
    Row("half, few rows, few tiles in order", 128, ((32, 64, 2, 2, 2), (32, 32, 2, 2, 2)), "D181"),
    Row("half, few rows, clusters", 128, ((32, 64, 2, 2, 2), (32, 32, 2, 2, 2)), "D196"),
    Row("half, few rows", 256, ((32, 16, 2, 4, 2), (32, 16, 2, 2, 2)), "D181"),
    Row("half, few rows, few tiles in order", 256, ((32, 32, 2, 2, 2), (32, 16, 2, 2, 2)), "D181"),
    # One warp converts the keys that it reads.
    Row("half, 8-bit keys, 16 rows", 64, ((16, 128, 1, 4, 2), (16, 64, 1, 4, 2)), "D197"),
    Row("half, 8-bit keys, 16 rows", 128, ((16, 64, 1, 4, 2), (16, 32, 1, 4, 2)), "D197"),
    Row("half, 8-bit keys, 16 rows", 256, ((16, 32, 1, 4, 2), (16, 16, 1, 4, 2)), "D197"),
    Row("float32", 16, ((128, 32, 4, 2, 1),), "D161"),
    Row("float32", 32, ((128, 32, 4, 2, 1),), "D124"),
    Row("float32", 64, ((128, 64, 8, 1, 1),), "D36"),
    Row("float32", 96, ((64, 48, 4, 2, 1), (64, 32, 4, 2, 1), (64, 32, 4, 1, 1)), "D36"),
    Row("float32", 128, ((128, 32, 8, 1, 1), (64, 16, 4, 1, 1)), "D36"),
    Row("float32", 192, ((128, 32, 8, 1, 1), (128, 16, 8, 1, 1), (48, 16, 3, 1, 1)), "D36"),
    Row("float32", 256, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1), (32, 16, 2, 1, 1)), "D36"),
    Row("float32, general", 32, ((64, 64, 4, 2, 1),)),
    Row("float32, general", 64, ((128, 32, 8, 1, 1),)),
    *(Row("float32, general", d, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1))) for d in (96, 128, 192)),
    Row("float32, general", 256, ((64, 16, 4, 2, 1), (64, 16, 4, 1, 1), (32, 16, 2, 1, 1))),
    Row("tf32", 16, ((64, 64, 4, 2, 2),)),
    Row("tf32", 32, ((64, 64, 4, 2, 2),)),
    Row("tf32", 64, ((128, 64, 4, 2, 2), (64, 64, 4, 1, 2)), "D35"),
    Row("tf32", 96, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("tf32", 128, ((256, 32, 8, 1, 2), (128, 32, 8, 1, 2), (64, 16, 4, 1, 2)), "D35"),
    Row("tf32", 192, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("tf32", 256, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2), (32, 16, 2, 1, 2))),
    Row("tf32, general", 16, ((64, 32, 4, 2, 2),)),
    Row("tf32, general", 32, ((64, 32, 4, 2, 2),)),
    Row("tf32, general", 64, ((64, 32, 4, 2, 2), (64, 32, 4, 1, 2))),
    Row("tf32, general", 96, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("tf32, general", 128, ((64, 16, 4, 2, 2), (64, 16, 4, 1, 2))),
    Row("float64", 16, ((64, 32, 4, 2, 2),)),
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


class ForwardConfig(KernelConfig):
    kernel = "forward_sm80"
    params = "ForwardParams"
    computes = "out"
    parts = SCORED | {"own": portable.Forward, "held": portable.BiasInRegisters}
    tunables = (*portable.TUNABLES, "num_stages")
    splits_keys = of_few_rows = reads_pages = converts_keys = True

    def check(self) -> None:
        if self.num_stages not in (1, 2):
            raise ValueError(f"{self.num_stages=} must be 1 or 2")

    @property
    def smem_bytes(self) -> int:
        """The q tile, one or two stages of k and v; offsets of paged rows; a cluster's rows."""
        own_columns = self.head_dim_v // self.split_columns
        streamed = self.tile_bytes(self.block_n, self.head_dim)
        streamed += self.tile_bytes(self.block_n, own_columns)
        if self.kv_dtype != "none":
            streamed //= self.element_bytes
        stages = self.num_stages * self.operand_parts
        tiles = self.tile_bytes(self.block_m, self.head_dim) + int(stages * streamed)
        places = (3 if self.simt else 2) * _PLACES_BYTES * self.block_n + _ADDRESS_BYTES
        received = self.block_m + split_keys.MOST_CLUSTER_PARTS - 1
        received *= self.real_bytes * (self.head_dim_v + 1)
        received += -received % _ADDRESS_BYTES + _ADDRESS_BYTES
        beside = (places * self.paged, received * self.clusters)
        return tiles + sum(int(-(-size // _ALIGNMENT) * _ALIGNMENT) for size in beside)

    @classmethod
    def eligible(cls, request: Request) -> str:
        problem = request.problem
        if not problem.has_8_bit_keys:
            return ""
        sizes = [portable.padded(d) for d in (problem.head_dim, problem.head_dim_v)]
        if request.simt or request.capability < _FIRST_WITH_FLOAT8:
            return "the device has no instruction that converts 8-bit floats"
        if portable.mean_rows(problem) > portable.ROWS_OF_TWO_WARPS:
            return "for many rows keys of 16 bits are faster"
        if max(sizes) not in split_keys.WIDTHS_OF_FEW_ROWS or min(sizes) < _COLUMNS_OF_8_BITS:
            return "keys of 8 bits are read 32 columns at once, by tiles for 64, 128 or 256"
        return ""

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """The first tile of its table row that fits; ``simt`` if none does."""
        own = portable.fields(cls, request) | {"sink": dtype_of(request.problem.sink)}
        own["paged"] = request.problem.pages is not None
        if request.problem.has_8_bit_keys:
            own["kv_dtype"] = request.problem.k.dtype.name
        own["holds_bias"] = portable.holds_wide_bias(request)
        general = needs_score_math(request.problem) or not own["scale_in_exponent"]
        general = general or request.problem.num_queries is not None
        if split_keys.wanted(request) or split_keys.has_tiles_of_few_rows(request):
            own |= split_keys.fields(cls, request)
        if own["paged"] or "split_keys" in own:
            general = general or split_keys.few(request.problem)  # narrower tiles (D181)
        held = portable.held(request)
        columns = held.out_general if general else held.out
        own["split_columns"] = portable.split(own["head_dim_v"], columns)
        values = portable.candidates(cls, ROWS, request, own, general=general)
        smallest = cls.draft(values[-1])
        if split_keys.in_pairs(request) and not portable.fits(smallest, request.smem_limit):
            return cls.chosen(request._replace(clusters=False))
        if smallest.smem_bytes > request.smem_limit:
            if own.get("clusters"):  # a thread block of a cluster has all columns of its rows
                return cls.chosen(request._replace(clusters=False))
            narrower = portable.split(own["head_dim_v"], columns // 2)
            values.append(values[-1] | {"split_columns": narrower})
        found = portable.fitting(cls, values, request.smem_limit)
        return found or cls.chosen(request._replace(simt=True))
