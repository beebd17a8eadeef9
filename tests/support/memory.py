"""Does a call read and write exactly the memory that it was given?

Inputs are inside buffers filled with a poison (NaN, 0x7F.. for integers, True for masks), at odd
element offsets by default. Outputs are inside buffers filled with another pattern. Afterwards every
byte of an input's buffer, and every byte outside the elements of an output, must be unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any

_CANARY = 0xA5
#: Elements in front of and behind an array: odd, so that no vector load is aligned.
BAND = 7
#: Elements in front of an array that TMA and 16-byte copies can read.
ALIGNED = 64


@dataclass(frozen=True)
class Placement:
    """Where the elements of an array are in memory.

    ``order`` lists the axes from slowest to fastest. ``gaps`` is how many elements of room each
    element along an axis takes (1 is dense), ``flips`` the axes with negative stride, ``zeros`` the
    axes with stride 0 (the array is constant along them), ``lead`` the elements in front. An entry
    of ``gaps``, ``flips`` and ``zeros`` belongs to the axis of the same index.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    flips: tuple[bool, ...]
    zeros: tuple[bool, ...]
    lead: int = BAND

    @classmethod
    def dense(cls, ndim: int, lead: int = BAND) -> Placement:
        """Return C order without gaps."""
        none = (False,) * ndim
        return cls(tuple(range(ndim)), (1,) * ndim, none, none, lead)

    def layout(self, shape: tuple[int, ...]) -> tuple[list[int], int, int]:
        """Return strides, position of element (0, ..., 0) and extent, all in elements."""
        strides, reach, first = [0] * len(shape), 1, 0
        for axis in reversed(self.order):
            if self.zeros[axis]:
                continue
            strides[axis] = reach * self.gaps[axis]
            if shape[axis] > 1:  # the stride of an axis of one element is arbitrary
                reach = strides[axis] * shape[axis]
        for axis, extent in enumerate(shape):
            if self.flips[axis] and extent:
                first += strides[axis] * (extent - 1)
                strides[axis] = -strides[axis]
        return strides, first, reach


@dataclass
class Placed:
    """One array inside its buffer; cuflash gets ``view``."""

    view: Array
    buffer: Array  # all bytes, on the array's device
    before: np.ndarray  # the bytes before the call
    covered: np.ndarray  # True for bytes of the array's own elements


def to_device(xp: ModuleType, array: np.ndarray) -> Array:
    """Copy a NumPy array to ``xp`` byte for byte, in C order, whatever its dtype."""
    return _view(xp, xp.asarray(_bytes(array)), array.shape, array.dtype, 0, None)


def to_numpy(array: Array) -> np.ndarray:
    """Copy an array of any module to NumPy."""
    return array.copy() if isinstance(array, np.ndarray) else np.asarray(array.get())


def place(xp: ModuleType, array: np.ndarray, placement: Placement, poison: str) -> Placed:
    """Put the elements of ``array`` into a poisoned buffer of ``xp``, laid out as asked."""
    placed = _blank(xp, array.shape, array.dtype, placement, poison)
    host = placed.before
    _host_view(host, array.shape, array.dtype, placement)[...] = array
    placed.buffer[...] = xp.asarray(host)
    return placed


def reserve(
    xp: ModuleType, shape: tuple[int, ...], dtype: Any, placement: Placement, poison: str
) -> Placed:
    """Return room for a result, whose elements are poisoned, too."""
    return _blank(xp, shape, np.dtype(dtype), placement, poison)


def assert_unchanged(name: str, placed: Placed) -> None:
    """Raise unless an input and its buffer are bit-identical to what was given."""
    changed = np.flatnonzero(to_numpy(placed.buffer) != placed.before)
    assert not changed.size, f"{name}: the call changed byte {changed[0]} of the input's buffer"


def assert_written_inside(name: str, placed: Placed) -> None:
    """Raise unless every byte outside the elements of an output is unchanged."""
    changed = np.flatnonzero((to_numpy(placed.buffer) != placed.before) & ~placed.covered)
    assert not changed.size, f"{name}: the call wrote byte {changed[0]}, outside the array"


def _blank(
    xp: ModuleType, shape: tuple[int, ...], dtype: np.dtype, placement: Placement, poison: str
) -> Placed:
    strides, first, reach = placement.layout(shape)
    extent = placement.lead + reach + BAND
    host = _filling(dtype, extent, poison)
    covered = np.zeros(host.shape, bool)
    marks = np.lib.stride_tricks.as_strided(
        covered[(placement.lead + first) * dtype.itemsize :],
        (*shape, dtype.itemsize),
        (*(s * dtype.itemsize for s in strides), 1),
    )
    marks[...] = True
    buffer = xp.asarray(host.copy())
    view = _view(
        xp,
        buffer,
        shape,
        dtype,
        (placement.lead + first) * dtype.itemsize,
        tuple(s * dtype.itemsize for s in strides),
    )
    return Placed(view, buffer, host, covered)


def _filling(dtype: np.dtype, extent: int, poison: str) -> np.ndarray:
    if poison == "canary":
        return np.full(extent * dtype.itemsize, 1 if dtype.kind == "b" else _CANARY, np.uint8)
    if dtype.kind == "b":
        return np.ones(extent, np.uint8)
    if dtype.kind in "iu":
        return _bytes(np.full(extent, np.iinfo(dtype).max, dtype))
    return _bytes(np.full(extent, np.nan, dtype))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).copy()


def _host_view(
    buffer: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, placement: Placement
) -> np.ndarray:
    strides, first, _ = placement.layout(shape)
    offset = (placement.lead + first) * dtype.itemsize
    return _view(np, buffer, shape, dtype, offset, tuple(s * dtype.itemsize for s in strides))


def _view(
    xp: ModuleType,
    buffer: Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int,
    strides: tuple[int, ...] | None,
) -> Array:
    if xp is np:
        return np.ndarray(shape, dtype, buffer, offset, strides)
    return xp.ndarray(shape, dtype, buffer.data + offset, strides)
