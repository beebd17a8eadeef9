"""Where do persistent thread blocks draw their tiles from? From a counter of their stream."""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings

import cupy
from cupy_backends.cuda.api import runtime

from cuflash._jit import driver

_COUNTER_BYTES = 4
_NUM_COUNTERS = 1 << 20  # 4 MiB: a counter that a graph owns cannot be returned
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for each thread


class TileCounters:
    """The counters of the current device.

    A counter is 0 between launches: the last draw of a launch wraps it. Launches on one stream
    follow each other and share a counter, as they share memory of CuPy's pool. A stream is
    identified by its handle and its number in the driver: the driver may give the handle of a
    destroyed stream to a new one while work of the old one is in flight. A launch that a graph
    captures may be replayed on any stream, and owns a counter for ever.
    """

    def __init__(self) -> None:
        self._memory = cupy.cuda.Memory(_NUM_COUNTERS * _COUNTER_BYTES)  # not from a pool
        stream = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(self._memory.ptr, 0, self._memory.size, stream.ptr)
        stream.synchronize()
        first = self._memory.ptr
        self._free = iter(range(first, first + self._memory.size, _COUNTER_BYTES))
        #: (handle, thread or 0) -> (number, address of the counter)
        self._of_stream: dict[tuple[int, int], tuple[int, int]] = {}

    def for_launch(self, stream: int, captured: bool) -> int:
        """Address of a counter, or 0 where none is left."""
        if captured:
            return self._next()
        key = (stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
        number = _stream_number(stream)
        if number is None:
            return 0
        found = self._of_stream.get(key)
        if found is None or found[0] != number:
            found = self._of_stream[key] = (number, self._next())
        return found[1]

    def _next(self) -> int:
        counter = next(self._free, 0)
        if not counter:
            _warn_once()
        return counter


_of_device: dict[int, TileCounters] = {}


def address(device: int, stream: int, captured: bool) -> int:
    """Address of a counter; 0 where there is none, and tiles are dealt out in advance."""
    counters = _of_device.get(device)
    if counters is None:
        if captured:  # no memory can be allocated (D70)
            return 0
        counters = _of_device.setdefault(device, TileCounters())
    return counters.for_launch(stream, captured)


def _stream_number(stream: int) -> int | None:
    """The driver's number of a stream, which is never reused; None for an invalid handle."""
    number = ctypes.c_ulonglong()
    error = driver.function("cuStreamGetId")(stream, ctypes.byref(number))
    return None if error else number.value


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"all {_NUM_COUNTERS} tile counters of a device are in use by captured launches and by "
        "streams: further launches assign tiles in advance, and causal calls among them take 15 to "
        "25 % longer",
        RuntimeWarning,
        stacklevel=2,
    )
