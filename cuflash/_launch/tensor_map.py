"""How is an array described to TMA, Hopper's copy engine? By a tensor map of the driver."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from cuflash._jit import driver
from cuflash._kernels.config import ELEMENT_BYTES
from cuflash._kernels.params import MAP_ALIGNMENT, MAP_BYTES

#: Batch axes that a map holds beside its rows and columns.
BATCH_AXES = 3
#: Bytes of a row of a box: the span of the swizzle.
_BOX_BYTES = 128
ALIGNMENT = 16  # bytes; of addresses and strides
_STRIDE_LIMIT = 1 << 40
_EXTENT_LIMIT = 1 << 32

# Values of the enumerations CU_TENSOR_MAP_... of cuda.h.
_DATA_TYPES = {"float8_e4m3fn": 0, "float16": 6, "bfloat16": 9}  # the first as bytes
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_L2_256B = 3
_FLOAT_OOB_FILL_NONE = 0


class MapLayout(NamedTuple):
    """Everything that a map encodes except the address. Innermost axis first; strides in bytes.

    Boxes have 128 bytes of columns and ``box_rows`` rows of one batch entry. Elements outside the
    array are read as zeros and not written.
    """

    dtype: str
    extents: tuple[int, ...]  # columns, rows, batch axes 2, 1 and 0 of the launch
    strides: tuple[int, ...]  # of all axes except the columns
    box_rows: int


def map_layout(
    dtype: np.dtype[Any],
    rows: tuple[int, int],
    columns: tuple[int, int],
    batch: tuple[tuple[int, int], ...],
    box_rows: int,
) -> MapLayout | None:
    """Layout from pairs (extent, byte stride), ``batch`` slowest first; None if TMA cannot use it.

    Axes along which an array is broadcast (stride 0) get extent 1. Their coordinate has to be 0.
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


class Maps:
    """The maps of a launch's operands: encoded once, and given the addresses of each call. (D68)"""

    def __init__(self, layouts: tuple[MapLayout, ...], pointers: tuple[int, ...] = ()) -> None:
        self.layouts = layouts
        #: Numbers of the operands among the pointers of the kernel.
        self.pointers = pointers or tuple(range(len(layouts)))
        self._encoded = b""

    def of(self, pointers: tuple[int, ...]) -> bytes:
        """All maps, in order, for the pointers of the kernel."""
        return self.at(tuple(pointers[number] for number in self.pointers))

    def at(self, addresses: tuple[int, ...]) -> bytes:
        """All maps, in order, for as many of these addresses as there are maps.

        A map depends on its layout and this address alone: no map can be stale.
        """
        addresses = addresses[: len(self.layouts)]
        if not self._encoded:
            self._encoded = b"".join(map(encode, self.layouts, addresses))
        return with_addresses(self._encoded, addresses)


def encode(layout: MapLayout, address: int) -> bytes:
    """Encode the map of an array."""
    rank, columns = len(layout.extents), _BOX_BYTES // ELEMENT_BYTES[layout.dtype]
    memory, offset = _room(MAP_BYTES)
    error = driver.function("cuTensorMapEncodeTiled")(
        ctypes.addressof(memory) + offset,
        _DATA_TYPES[layout.dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*layout.extents),
        (ctypes.c_uint64 * (rank - 1))(*layout.strides),
        (ctypes.c_uint32 * rank)(columns, layout.box_rows, *(1,) * BATCH_AXES),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_L2_256B,
        _FLOAT_OOB_FILL_NONE,
    )
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {error} for {layout} at {address:#x}")
    return memory.raw[offset : offset + MAP_BYTES]


def with_addresses(maps: bytes, addresses: tuple[int, ...]) -> bytes:
    """The same maps with other ``addresses``, in less time than encoding takes."""
    memory, offset = _room(len(maps))
    first = ctypes.addressof(memory) + offset
    ctypes.memmove(first, maps, len(maps))
    function = driver.function("cuTensorMapReplaceAddress")
    for number, address in enumerate(addresses):
        error = function(first + MAP_BYTES * number, address)
        if error:
            raise RuntimeError(f"cuTensorMapReplaceAddress: error {error} for {address:#x}")
    return memory.raw[offset : offset + len(maps)]


def _room(size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """New memory for one call, as threads may not share it, and the aligned offset of a map."""
    memory = (ctypes.c_char * (size + MAP_ALIGNMENT))()
    return memory, -ctypes.addressof(memory) % MAP_ALIGNMENT
