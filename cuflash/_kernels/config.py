"""What changes the machine code of a kernel? A configuration, composed of named parts.

Every field of a part becomes a member of ``Config`` in ``kernels_cu/config.cuh``, which lists all
fields with their defaults. Shapes, strides, lengths, scale and window bounds are run-time
parameters and no fields: a new shape compiles nothing unless another tile or padded head size
serves it. Each kernel has a module beside this one with the name of its ``.cu`` file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Self

from cuflash._kernels.request import Request
from cuflash._kernels.score_config import ScoreConfig

#: Element type of an operand or a result.
Dtype = Literal["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]
Float8 = Literal["none", "float8_e4m3fn", "float8_e5m2"]
#: Precision of float32 products: full, or that of a single TF32 product.
Precision = Literal["ieee", "tf32"]

#: Padded head sizes: columns of a tile of q, k or v.
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
#: Padded head sizes, with the one that only Hopper's kernels have tiles for.
ALL_HEAD_DIMS = (*HEAD_DIMS[:3], 80, *HEAD_DIMS[3:])
#: Bytes of shared memory that CUDA reserves in every thread block.
RESERVED_SMEM = 1024
ELEMENT_BYTES = {
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
#: Enumerations of config.cuh by field. The text of any other field names a ``Dtype``.
_ENUMS = {
    "precision": "Precision", "offset": "Offset", "sums_to": "SumsTo", "grad_of": "GradOf",
    "rotation": "Rotation",
}  # fmt: skip
#: PTX names of dtypes, as they appear in instructions.
_PTX_DTYPES = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64",
}  # fmt: skip


class Operands(NamedTuple):
    """How a kernel reads and writes q, k, v, out and gradients."""

    dtype: Dtype  # of q, k, v and dout
    out_dtype: Dtype  # of out, or of the gradients that the kernel writes
    copy_bytes: int  # bytes of the widest copy that all strides and alignments allow: 2 to 16
    head_dim_v: int  # padded head size of v and out

    def check(self) -> None:
        if self.copy_bytes not in (2, 4, 8, 16):
            raise ValueError(f"{self.copy_bytes=} must be 2, 4, 8 or 16")
        if self.copy_bytes < ELEMENT_BYTES[self.dtype]:
            raise ValueError(f"{self.copy_bytes=} is smaller than an element of {self.dtype}")
        if self.head_dim_v not in ALL_HEAD_DIMS:
            raise ValueError(f"{self.head_dim_v=} must be one of {ALL_HEAD_DIMS}")


class Products(NamedTuple):
    """How a kernel multiplies q with k, and weights with v."""

    head_dim: int  # padded head size of q and k
    precision: Precision
    wide_float64: bool  # are elements float64, and products 16 rows high (sm_90 and later)?
    simt: bool = False  # do CUDA cores multiply, with operands read from global memory?

    def check(self) -> None:
        if self.head_dim not in ALL_HEAD_DIMS:
            raise ValueError(f"{self.head_dim=} must be one of {ALL_HEAD_DIMS}")


class Tile(NamedTuple):
    """The tile of scores that a thread block computes at a time, and its share of an SM."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    num_warps: int  # warps of a thread block
    blocks_per_sm: int  # thread blocks that are to share an SM: the compiler limits registers
    split_columns: int = 1  # thread blocks that share a tile, each with its own result columns

    def check(self) -> None:
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n)):
            if value <= 0 or value % 16:
                raise ValueError(f"{name} = {value} must be a positive multiple of 16")
        for name, value in (("blocks_per_sm", self.blocks_per_sm),
                            ("split_columns", self.split_columns)):  # fmt: skip
            if value < 1:
                raise ValueError(f"{name} = {value} must be positive")


#: Parts of the configuration of every kernel that computes scores.
SCORED: dict[str, Any] = {
    "operands": Operands,
    "products": Products,
    "score": ScoreConfig,
    "tile": Tile,
}


class KernelConfig:
    """The configuration of a kernel. Each kernel is a subclass; an instance has all field values.

    Fields are passed by name and read as attributes, whichever part has them. No code is
    generated for a class, unlike a dataclass. (D71)
    """

    kernel: ClassVar[str]  # name of the .cu file without its suffix
    params: ClassVar[str]  # CUDA name of the parameter struct
    #: A result of attention: "out", "dq", "dkv" (dk and dv), "dqkv" (all three). A step before or
    #: after it: "bounds", "delta", "sums", "convert", "combine" (of out), "parts" (of dk and dv).
    #: Beside attention: "growth", "rows" and "table" of a KV cache, "turns", "quantize".
    computes: ClassVar[str]
    parts: ClassVar[Mapping[str, Any]]  # NamedTuple classes that declare the fields, by name
    tunables: ClassVar[tuple[str, ...]] = ()  # fields that a table row sets and a sweep varies
    for_sm90: ClassVar[bool] = False  # does it run only on Hopper?
    float8: ClassVar[bool] = False  # does it take 8-bit operands, and no others?
    converts_keys: ClassVar[bool] = False  # can it read k and v of 8 bits beside q of 16 bits?
    tensor_maps: ClassVar[bool] = False  # does TMA load its operands, described by tensor maps?
    owned: ClassVar[str] = "block_m"  # tile side of the results; the other side is streamed
    splits_keys: ClassVar[bool] = False  # can several thread blocks share a tile's keys (split-KV)?
    of_few_rows: ClassVar[bool] = False  # does it support split keys where queries are few?
    can_merge_partial: ClassVar[bool] = False  # can it merge its result with one over other keys?
    reads_pages: ClassVar[bool] = False  # can it read keys and values in pages?
    cluster_blocks: ClassVar[int] = 1  # thread blocks of a cluster that shares a tile
    row_warps: ClassVar[int] = 1  # warps that own the same rows; 0: warps own no rows
    row_numbers: ClassVar[int] = 0  # fewest numbers that a thread keeps of a row; 0: warps own rows
    other_warps: ClassVar[int] = 0  # warps that own no rows, where the tile decides num_warps
    #: Allowed rows of the streamed side of a tile: a lane has 32 bits for its columns of a row,
    #: ``ColumnBits`` of score/ranges.cuh.
    streams: ClassVar[Sequence[int]] = range(16, 129, 16)
    narrowest: ClassVar[int] = HEAD_DIMS[0]  # least padded head size
    max_simt_rows: ClassVar[int] = 512  # most owned rows with ``simt``: simt/global_tile.cuh

    _names: ClassVar[tuple[str, ...]]  # names of all fields
    _defaults: ClassVar[dict[str, Any]]  # by field, where there is a default
    _values: dict[str, Any]  # by field

    def __init_subclass__(cls) -> None:
        named = getattr(cls, "parts", {})  # a base class of several kernels may have none
        parts = named.values()
        cls._names = tuple(name for part in parts for name in part._fields)
        cls._defaults = {n: value for part in parts for n, value in part._field_defaults.items()}
        if both := named.keys() & set(cls._names):
            raise TypeError(f"{cls.__name__}: {both} name both a part and a field")

    def __init__(self, **values: Any) -> None:
        names, given = self._names, self._defaults | values
        wrong = [name for name in names if name not in given]
        wrong += [name for name in values if name not in names]
        if wrong:
            raise TypeError(
                f"{self.__class__.__name__}: missing or unknown fields: {', '.join(wrong)}"
            )
        flat = {name: given[name] for name in names}
        parts = {
            name: part._make([flat[field] for field in part._fields])
            for name, part in self.parts.items()
        }
        vars(self).update(parts, _values=flat, _key=(self.kernel, *flat.values()))
        if not 1 <= self.num_warps <= 32:
            raise ValueError(f"{self.num_warps=} must be from 1 to 32")
        for part in parts.values():
            if check := getattr(part, "check", None):
                check()
        if "tile" in parts:
            self._check_rows()
        self.check()

    def check(self) -> None:
        """Raise a ValueError for values that this kernel does not support."""

    @classmethod
    def eligible(cls, request: Request) -> str:  # noqa: ARG003
        """Why the kernel cannot serve a request; empty where it can."""
        return ""

    @classmethod
    def chosen(cls, request: Request) -> tuple[Self, ...]:
        """One configuration for each pass of a request that it serves; none if no tile fits."""
        raise NotImplementedError

    @classmethod
    def draft(cls, values: dict[str, Any]) -> Self:
        """A configuration without parts and checks, from which to read ``smem_bytes``."""
        found = cls.__new__(cls)
        vars(found).update(_values=cls._defaults | values)
        return found

    @classmethod
    def warps_for(cls, rows: int) -> int:
        """Warps of a thread block, if it owns ``rows`` rows: one for 16 rows of its cluster."""
        return cls.cluster_blocks * rows // 16 + cls.other_warps

    @property
    def source(self) -> str:
        """Name of the ``.cu`` file in ``kernels_cu``."""
        return f"{self.kernel}.cu"

    @property
    def entry(self) -> str:
        """Name of the function that the host launches."""
        return f"cuflash_{self.kernel}"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k and v."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def real_bytes(self) -> int:
        """Bytes of a score, a statistic or a sum: float32, or float64 for float64 elements."""
        return max(4, ELEMENT_BYTES[self._values.get("dtype", "float32")])

    @property
    def num_threads(self) -> int:
        """Threads of a thread block."""
        return 32 * int(self.num_warps)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return 0

    @property
    def starts_early(self) -> bool:
        """Whether it may start while the previous kernel runs, for which it then waits."""
        return False

    @property
    def own_rows(self) -> int:
        """Rows of a tile's result, those of all thread blocks of a cluster together."""
        return self.cluster_blocks * int(getattr(self, self.owned))

    @property
    def leaves_parts(self) -> bool:
        """Does it write a result for each part of the keys, which another kernel combines?"""
        return bool(self._values.get("split_keys") and not self._values.get("clusters"))

    @property
    def result_columns(self) -> int:
        """Columns of the result, which ``split_columns`` divides; dk and dv are split alike."""
        of_v = self.computes == "out" or (self.computes == "dkv" and not self.grad_k)
        return int(self.head_dim_v if of_v else self.head_dim)

    @property
    def operand_parts(self) -> int:
        """TF32 numbers that represent an element: 2 where tensor cores multiply by 3xTF32."""
        splits = (self.dtype, self.precision, self.simt) == ("float32", "ieee", False)
        return 2 if splits else 1

    def tile_bytes(self, rows: int, columns: int) -> int:
        """Bytes of shared memory of one operand tile; with ``simt`` only its description."""
        return 128 if self.simt else self.element_bytes * rows * columns

    def texts(self) -> tuple[tuple[str, str], ...]:
        """(name, text) of the files of ``kernels_cu`` that this configuration replaces."""
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
            if name == self.owned and self.simt and value > self.max_simt_rows:
                raise ValueError(f"{name} = {value} must be at most {self.max_simt_rows}")
        if self.result_columns % (16 * self.split_columns):
            columns = f"{self.result_columns} columns"
            raise ValueError(
                f"{self.split_columns=}: {columns} must be a multiple of 16 times that"
            )
        rows = self.row_warps * int(getattr(self, self.owned))
        if rows % (16 * self.num_warps):
            raise ValueError(f"{self.num_warps=}: {rows} rows must be a multiple of 16 times that")

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


#: Names of fields in older pickles, and their names now.
_RENAMED = {"cuda_cores": "simt", "column_parts": "split_columns", "ordered": "deterministic"}


def fields_text(values: Mapping[str, str | int | bool]) -> tuple[str, str]:
    """Name and text of ``kernels_cu/config.fields`` for these values."""
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
    """A kernel's class by its name: pickles of older versions look for all of them here."""
    if name.endswith("Config"):
        from cuflash._kernels.registry import KERNELS

        for kernel in KERNELS.values():
            if kernel.__name__ == name:
                return kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
