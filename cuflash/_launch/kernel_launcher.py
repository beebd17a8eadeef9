"""How is a kernel launched? With an argument that is packed once for each set of addresses."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable

import cupy
from cupy_backends.cuda.api import driver

from cuflash._jit.compilation import Kernel
from cuflash._jit.driver import function
from cuflash._launch import tile_counters
from cuflash._launch.tensor_map import Maps

#: (number of the launcher, pointers, counter) -> (address of the packed argument, the argument)
_known: dict[tuple[int, tuple[int, ...], int], tuple[int, ctypes.c_char_p]] = {}
_LIMIT = 8192  # most packed arguments of all launchers, with their keys up to 4.3 KiB each
_numbers = itertools.count()
_COUNTER = struct.Struct("<Q56x")  # address of a tile counter, padded to the alignment of maps


CLUSTER = 4  # id of the CUlaunchAttribute for clusters
_CLUSTER = struct.Struct("<i4x3I52x")  # a CUlaunchAttribute: id, and 64 bytes with three extents
_EARLY = struct.pack("<i4xi60x", 6, 1)  # attribute 6: the kernel may start early
_LAUNCH = struct.Struct("<7I4xQQI4x")  # CUlaunchConfig: grid, block, bytes, stream, attributes


def current_stream() -> tuple[int, bool]:
    """The stream of a call, and whether it captures.

    To be called before any function of the driver: this gives a new thread its context, without
    which tensor maps cannot be encoded and nothing is launched. (D67)
    """
    stream = cupy.cuda.get_current_stream()
    return stream.ptr, stream.is_capturing()


def extended_launch(
    kernel: Kernel, grid: int, attribute: bytes
) -> Callable[[int, int, int], None] | None:
    """``launchKernel`` of a kernel with an attribute; None where there is no cuLaunchKernelEx."""
    launch = function("cuLaunchKernelEx")
    if launch is None:
        return None
    sizes = (grid, 1, 1, kernel.num_threads, 1, 1, kernel.smem_bytes)
    attributes = ctypes.create_string_buffer(attribute)

    def run(stream: int, argument: int, _: int) -> None:
        packed = _LAUNCH.pack(*sizes, stream, ctypes.addressof(attributes), 1)
        if status := launch(packed, kernel.pointer, argument, None):
            raise driver.CUDADriverError(status)

    return run


class KernelLauncher:
    """One kernel with its grid and parameters: everything but the addresses of its operands.

    The argument is the parameter struct: pointers in the order of ``names``, the bytes of
    ``params``, and for Hopper's kernels the tensor maps and the address of a tile counter.
    ``offsets`` has a row for each launch, added to the pointers: one grid may not hold all batch
    entries. ``overlaps``: the kernel may start while the stream's last kernel still runs.
    ``cluster`` is the number of thread blocks in a cluster.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        names: tuple[str, ...],
        params: bytes,
        offsets: tuple[tuple[int, ...], ...] = ((),),
        maps: Maps | None = None,
        drawn_on: int | None = None,
        *,
        overlaps: bool = False,
        cluster: int = 1,
    ) -> None:
        self.kernel = kernel  # keeps its module loaded
        self.grid = grid
        self.names = names
        self.params = params
        self.maps = maps
        self._offsets = offsets
        self._drawn_on = drawn_on  # device of the counter that tiles are drawn from, or None
        self._number = next(_numbers)
        self._launch: Callable[..., object] = functools.partial(
            driver.launchKernel, kernel.pointer, grid, 1, 1, kernel.num_threads, 1, 1,
            kernel.smem_bytes,
        )  # fmt: skip
        attribute = _CLUSTER.pack(CLUSTER, cluster, 1, 1) if cluster > 1 else _EARLY
        if overlaps or cluster > 1:  # a driver of devices with clusters knows the call
            self._launch = extended_launch(kernel, grid, attribute) or self._launch

    def run(self, pointers: tuple[int, ...], stream: int, captured: bool = False) -> None:
        """Launch on ``stream`` with the ``pointers`` of the first ``names``; 0 if absent."""
        counter = 0
        if self._drawn_on is not None:
            counter = tile_counters.address(self._drawn_on, stream, captured)
        for offsets in self._offsets:
            moved = tuple(map(int.__add__, pointers, offsets)) if offsets else pointers
            key = self._number, moved, counter
            found = _known.get(key)
            if found is None:
                argument = ctypes.c_char_p(self._packed(moved, counter))  # the driver reads a char*
                found = ctypes.addressof(argument), argument
                if len(_known) >= _LIMIT:
                    _known.clear()
                _known[key] = found
            self._launch(stream, found[0], 0)

    def _packed(self, pointers: tuple[int, ...], counter: int) -> bytes:
        addresses = struct.pack(f"<{len(pointers)}Q", *pointers)
        packed = addresses.ljust(8 * len(self.names), b"\0") + self.params
        if self.maps is None:
            return packed
        return packed + self.maps.of(pointers) + _COUNTER.pack(counter)
