"""How does the copy engine of Hopper see an array? Tensor maps, encoded by the driver."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Batch axes that a map holds beside its rows and columns.
BATCH_AXES = 3
BYTES = 128
#: Columns of a box: 128 bytes, the span of the swizzle.
BOX_COLUMNS = 64
ALIGNMENT = 16
_STRIDE_LIMIT = 1 << 40
_EXTENT_LIMIT = 1 << 32
_CACHED_MAPS = 4096


@dataclass(frozen=True, slots=True)
class MapLayout:
    """Everything that a map encodes but the address. Innermost axis first; strides in bytes.

    Boxes have ``BOX_COLUMNS`` columns of 16 bits and ``box_rows`` rows of one batch entry; what
    lies outside the array is read as zeros and not written.
    """

    dtype: str
    extents: tuple[int, ...]  # columns, rows, batch axes 2, 1 and 0 of the launch
    strides: tuple[int, ...]  # of all but the columns
    box_rows: int


def map_layout(
    dtype: np.dtype[Any],
    rows: tuple[int, int],
    columns: tuple[int, int],
    batch: tuple[tuple[int, int], ...],
    box_rows: int,
) -> MapLayout | None:
    """Layout from pairs (extent, byte stride), ``batch`` slowest first; None where TMA cannot.

    Axes along which an array is broadcast (stride 0) get extent 1; their coordinate has to be 0.
    """
    if len(batch) > BATCH_AXES:
        return None
    axes = [(extent if stride else 1, stride) for extent, stride in batch]
    axes += [(1, 0)] * (BATCH_AXES - len(axes))
    axes = [rows, *reversed(axes)]
    strides = tuple(stride if extent > 1 else ALIGNMENT for extent, stride in axes)
    extents = (columns[0], *(extent for extent, _ in axes))
    if (
        (columns[1] != dtype.itemsize and columns[0] > 1)
        or any(s % ALIGNMENT or not 0 < s < _STRIDE_LIMIT for s in strides)
        or max(extents) >= _EXTENT_LIMIT
    ):
        return None
    return MapLayout(dtype.name, extents, strides, box_rows)


@functools.cache
def available() -> bool:
    """Whether maps can be encoded here: it takes the package cuda-bindings."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


class Maps:
    """The maps of a launch's operands, encoded where their addresses are new."""

    def __init__(self, layouts: tuple[MapLayout, ...]) -> None:
        self.layouts = layouts
        self._known: dict[tuple[int, ...], bytes] = {}

    def at(self, addresses: tuple[int, ...]) -> bytes:
        """All maps, in order.

        Addresses are all of a map that the layouts do not hold: what is found is never stale.
        """
        found = self._known.get(addresses)
        if found is None:
            found = b"".join(map(encode, self.layouts, addresses))
            if len(self._known) >= _CACHED_MAPS:
                self._known.clear()
            self._known[addresses] = found
        return found


def encode(layout: MapLayout, address: int) -> bytes:
    """Encode the map of an array."""
    encoder, arguments, tail = _encoder(layout)
    error, found = encoder(*arguments[:2], address, *arguments[2:], *tail)
    if int(error):
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error!r} for {layout} at {address:#x}")
    return ctypes.string_at(found.getPtr(), BYTES)


@functools.lru_cache(maxsize=_CACHED_MAPS)
def _encoder(layout: MapLayout) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Prepare the driver's arguments before and after the extents, which do not depend on it."""
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    dtype = {
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[layout.dtype]
    rank = len(layout.extents)
    arguments = (
        dtype,
        rank,
        [driver.cuuint64_t(extent) for extent in layout.extents],
        [driver.cuuint64_t(stride) for stride in layout.strides],
        [driver.cuuint32_t(n) for n in (BOX_COLUMNS, layout.box_rows, *(1,) * BATCH_AXES)],
        [driver.cuuint32_t(1)] * rank,
    )
    tail = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return driver.cuTensorMapEncodeTiled, arguments, tail
