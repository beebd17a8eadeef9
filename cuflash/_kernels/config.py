"""What changes the machine code of a kernel? A configuration, composed of named parts.

Every field of a part becomes a member of ``Config`` in ``kernels_cu/config.cuh``, which lists all
with their defaults. Shapes, strides, lengths, scale and window bounds are run-time parameters and
not here: a new shape never recompiles. One module beside this one holds each kernel, named as its
``.cu``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self

from cuflash._kernels.request import Request
from cuflash._kernels.score_config import ScoreConfig

#: Of q, k and v, or of results.
Dtype = Literal["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
#: Of products of float32.
Precision = Literal["ieee", "tf32"]

#: What a padded tile width may be.
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
#: The same with what only kernels of Hopper have tiles for.
ALL_HEAD_DIMS = (*HEAD_DIMS[:3], 80, *HEAD_DIMS[3:])
#: Shared memory that the system keeps for itself in every thread block.
RESERVED_SMEM = 1024
ELEMENT_BYTES = {
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
#: Enumerations of config.cuh, by the field that has one; any other text is a ``Dtype``.
_ENUMS = {
    "precision": "Precision", "offset": "Offset", "sums_to": "SumsTo", "grad_of": "GradOf",
    "rotation": "Rotation",
}  # fmt: skip
#: PTX's names of dtypes, for texts of instructions.
_PTX_DTYPES = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64",
}  # fmt: skip


class Operands(NamedTuple):
    """How a kernel reads q, k, v, out or their gradients."""

    dtype: Dtype
    out_dtype: Dtype
    copy_bytes: int  # widest copy that strides and alignment of every operand allow
    head_dim_v: int

    def check(self) -> None:
        if self.copy_bytes not in (2, 4, 8, 16):
            raise ValueError(f"{self.copy_bytes=} must be 2, 4, 8 or 16")
        if self.copy_bytes < ELEMENT_BYTES[self.dtype]:
            raise ValueError(f"{self.copy_bytes=} is less than an element of {self.dtype}")
        if self.head_dim_v not in ALL_HEAD_DIMS:
            raise ValueError(f"{self.head_dim_v=} must be one of {ALL_HEAD_DIMS}")


class Products(NamedTuple):
    """How a kernel multiplies q with k, and weights with v."""

    head_dim: int
    precision: Precision
    wide_float64: bool  # are there products of float64 of 16 rows, as from sm_90 on?
    simt: bool = False  # do CUDA cores multiply, operands where they lie?

    def check(self) -> None:
        if self.head_dim not in ALL_HEAD_DIMS:
            raise ValueError(f"{self.head_dim=} must be one of {ALL_HEAD_DIMS}")


class Tile(NamedTuple):
    """Rows and columns of scores that a thread block computes at a time."""

    block_m: int
    block_n: int
    num_warps: int
    blocks_per_sm: int
    split_columns: int = 1  # thread blocks that share a tile, each with its own columns

    def check(self) -> None:
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n)):
            if value <= 0 or value % 16:
                raise ValueError(f"{name} = {value} must be a positive multiple of 16")
        for name, value in (("blocks_per_sm", self.blocks_per_sm),
                            ("split_columns", self.split_columns)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name} = {value} must be positive")


#: Parts of every kernel that computes scores.
SCORED: dict[str, Any] = {
    "operands": Operands,
    "products": Products,
    "score": ScoreConfig,
    "tile": Tile,
}


class KernelConfig:
    """One kernel with values for all fields; a subclass is a kernel, and says what it is.

    Fields are given by name and read from the configuration itself, whichever part has them. No
    code is generated for a class, as dataclasses do. (D71)
    """

    kernel: ClassVar[str]  # name of its source without the suffix
    params: ClassVar[str]  # CUDA name of its parameter struct
    #: "out", "dq", "dkv" or "dqkv"; or a step on the way: "bounds", "delta", "convert", "sums"; or
    #: what functions beside attention do: "growth", "rows", "table", "turns".
    computes: ClassVar[str]
    parts: ClassVar[Mapping[str, Any]]  # the classes of its parts, by name
    tunables: ClassVar[tuple[str, ...]] = ()  # fields that a sweep chooses, in order of its keys
    for_sm90: ClassVar[bool] = False  # does it run on Hopper alone?
    float8: ClassVar[bool] = False  # does it take elements of 8 bits, and no others?
    tensor_maps: ClassVar[bool] = False  # does Hopper's copy engine load operands by them?
    owned: ClassVar[str] = "block_m"  # the side that a thread block computes results for
    splits_keys: ClassVar[bool] = False  # can it deal the keys of a tile out to several blocks?
    of_few_rows: ClassVar[bool] = False  # does it serve split keys of few queries?
    joins_results: ClassVar[bool] = False  # can its results join those over other keys?
    reads_pages: ClassVar[bool] = False  # can keys and values lie in pages?
    cluster_blocks: ClassVar[int] = 1  # thread blocks that share a tile
    row_warps: ClassVar[int] = 1  # warps that own the same rows; 0: rows are not divided by warps
    row_numbers: ClassVar[int] = 0  # a thread keeps so many of a row at least; 0: warps own rows
    other_warps: ClassVar[int] = 0  # own no rows, where the tile decides how many warps there are
    #: Rows of the other side that a thread block may have: a lane has 32 bits for its columns of a
    #: row, ``ColumnBits`` of score/score.cuh.
    streams: ClassVar[Sequence[int]] = range(16, 129, 16)
    narrowest: ClassVar[int] = HEAD_DIMS[0]  # padded head size
    most_of_simt: ClassVar[int] = 512  # rows of simt/global_tile.cuh

    _names: ClassVar[tuple[str, ...]]  # of all fields
    _defaults: ClassVar[dict[str, Any]]
    _values: dict[str, Any]

    def __init_subclass__(cls) -> None:
        named = getattr(cls, "parts", {})  # what kernels share may have none
        parts = named.values()
        cls._names = tuple(name for part in parts for name in part._fields)
        cls._defaults = {n: value for part in parts for n, value in part._field_defaults.items()}
        if both := named.keys() & set(cls._names):
            raise TypeError(f"{cls.__name__}: {both} are parts and fields")

    def __init__(self, **values: Any) -> None:
        names, given = self._names, self._defaults | values
        wrong = [name for name in names if name not in given]
        wrong += [name for name in values if name not in names]
        if wrong:
            raise TypeError(f"{self.__class__.__name__}: missing, or no field: {', '.join(wrong)}")
        flat = {name: given[name] for name in names}
        parts = {
            name: part._make([flat[field] for field in part._fields])
            for name, part in self.parts.items()
        }
        vars(self).update(parts, _values=flat, _key=(self.kernel, *flat.values()))
        if not 1 <= self.num_warps <= 32:
            raise ValueError(f"{self.num_warps=} must be from 1 to 32")
        for part in parts.values():
            if check := getattr(part, "check", None):  # some have no rules of their own
                check()
        if "tile" in parts:
            self._check_rows()
        self.check()

    def check(self) -> None:
        """Raise a ValueError for values that fit no kernel of this kind."""

    @classmethod
    def eligible(cls, request: Request) -> str:  # noqa: ARG003
        """Why the kernel does not serve a request; empty where it does, by default any."""
        return ""

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """Its passes for a request that it serves, each with its tile; none where no tile fits."""
        raise NotImplementedError

    @classmethod
    def draft(cls, values: dict[str, Any]) -> Self:
        """The configuration without its parts and checks, to ask for its shared memory."""
        found = cls.__new__(cls)
        vars(found).update(_values=cls._defaults | values)
        return found

    @classmethod
    def warps_for(cls, rows: int) -> int:
        """Warps of a tile whose thread blocks own so many rows each, 16 to a warp."""
        return cls.cluster_blocks * rows // 16 + cls.other_warps

    @property
    def source(self) -> str:
        """Its file in ``kernels_cu``."""
        return f"{self.kernel}.cu"

    @property
    def entry(self) -> str:
        """Name of its function on the device."""
        return f"cuflash_{self.kernel}"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k and v."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def real_bytes(self) -> int:
        """Bytes of a score, a statistic or a sum: as wide as an element, or float32."""
        return max(4, ELEMENT_BYTES[self._values.get("dtype", "float32")])

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * int(self.num_warps)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return 0

    @property
    def own_rows(self) -> int:
        """Rows of a tile's results."""
        return self.cluster_blocks * int(getattr(self, self.owned))

    @property
    def leaves_parts(self) -> bool:
        """Are its results those of parts of the keys, which another kernel combines?"""
        return bool(self._values.get("split_keys") and not self._values.get("clusters"))

    @property
    def result_columns(self) -> int:
        """Columns of the result, which thread blocks may share; dk and dv are split alike."""
        of_v = self.computes == "out" or (self.computes == "dkv" and not self.grad_k)
        return int(self.head_dim_v if of_v else self.head_dim)

    @property
    def operand_parts(self) -> int:
        """TF32 numbers that add up to an element where tensor cores multiply it: 3xTF32."""
        splits = (self.dtype, self.precision, self.simt) == ("float32", "ieee", False)
        return 2 if splits else 1

    def tile_bytes(self, rows: int, columns: int) -> int:
        """Shared memory of one operand; CUDA cores read it where it lies."""
        return 128 if self.simt else self.element_bytes * rows * columns

    def texts(self) -> tuple[tuple[str, str], ...]:
        """Files of ``kernels_cu`` with another text in this kernel: fields, and formulas."""
        named = self._values | {"smem_bytes": self.smem_bytes}
        formulas = named.pop("formulas", ())
        return (fields_text(named), *formulas)

    def values(self) -> dict[str, Any]:
        """All fields by name."""
        return dict(self._values)

    def replace(self, **changes: Any) -> Self:
        """The same kernel with other values of some fields."""
        return self.__class__(**(self._values | changes))

    def _check_rows(self) -> None:
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if name != self.owned and value not in self.streams:
                raise ValueError(f"{name} = {value} must be one of {(*self.streams,)}")
            if name == self.owned and self.simt and value > self.most_of_simt:
                raise ValueError(f"{name} = {value} must be at most {self.most_of_simt}")
        if self.result_columns % (16 * self.split_columns):
            raise ValueError(f"{self.result_columns} columns, {self.split_columns=}: not by 16")
        rows = self.row_warps * int(getattr(self, self.owned))
        if rows % (16 * self.num_warps):
            raise ValueError(f"{rows} rows must be split evenly over {self.num_warps=} by 16")

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_values"][name]
        except KeyError:
            raise AttributeError(f"{self.__class__.__name__} has no {name}") from None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return bool(self._key == getattr(other, "_key", None))

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{self.__class__.__name__}({named})"

    def __getstate__(self) -> dict[str, Any]:
        return self.values()

    def __setstate__(self, values: dict[str, Any]) -> None:
        new = {_RENAMED.get(name, name): value for name, value in values.items()}
        self.__init__(**new)  # type: ignore[misc]


#: Fields by the names that older pickles have.
_RENAMED = {"cuda_cores": "simt", "column_parts": "split_columns", "ordered": "deterministic"}


def fields_text(values: Mapping[str, str | int | bool]) -> tuple[str, str]:
    """``kernels_cu/config.fields`` for these values: its name and its text."""
    members = "".join(_member(name, value) for name, value in values.items())
    ptx_dtype = _PTX_DTYPES[str(values.get("dtype", "bfloat16"))]
    return "config.fields", f'{members}#define CUFLASH_PTX_DTYPE "{ptx_dtype}"\n'


def _member(name: str, value: str | int | bool) -> str:
    if isinstance(value, str):
        kind = _ENUMS.get(name, "Dtype")
        return f"static constexpr {kind} {name} = {kind}::{value};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"static constexpr {kind} {name} = {str(value).lower()};\n"


def __getattr__(name: str) -> Any:
    """A kernel by its class: pickles of older versions look for all of them here."""
    if name.endswith("Config"):
        from cuflash._kernels.registry import KERNELS

        for kernel in KERNELS.values():
            if kernel.__name__ == name:
                return kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
