"""How do Hopper's kernels run? Tensor maps, and tiles that persistent blocks of threads draw."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._jit import driver
from cuflash._jit.compilation import Kernel
from cuflash._kernels import params as kernel_params
from cuflash._kernels.config import KernelConfig
from cuflash._launch import dq_sums, plan, tensor_map
from cuflash._launch.grid import Grid, even_sections, plan_grid
from cuflash._launch.kernel_launcher import Addresses, Starter
from cuflash._launch.plan import Launch, num_tiles
from cuflash._launch.tensor_map import Maps
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem
from cuflash._select import hardware

_NAMES = kernel_params.pointer_names(kernel_params.FORWARD_SM90)
_POINTERS = struct.Struct(f"<{len(_NAMES)}Q")
_MAPPED = len(kernel_params.MAPPED)  # the first of the pointers
_COUNTER = struct.Struct("<Q56x")  # its address, and room up to the alignment of the maps
_COUNTER_BYTES = 4
_NUM_COUNTERS = 1 << 20  # 4 MiB: a counter that a graph owns cannot be returned
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for each thread
_GRADIENT_NAMES = kernel_params.pointer_names(kernel_params.BACKWARD_SM90)
_INDEX_LIMIT = 2**31 - 2**20  # a block of threads draws one index past the last tile
_STORED_ROWS = 64  # of out: those of a warpgroup


class TileCounters:
    """From what the launches on the current device draw their tiles.

    A counter is 0 between launches: the last draw of a launch wraps it. Launches on one stream
    follow each other and share a counter, as they share memory of CuPy's pool. A stream is known by
    its handle and the driver's number of it: the driver gives the handle of a stream that was
    destroyed to the next one, with work of the first still in flight. A launch that a graph
    captures may be replayed on any stream, and owns one for ever.
    """

    def __init__(self) -> None:
        self._memory = cupy.cuda.Memory(_NUM_COUNTERS * _COUNTER_BYTES)  # of no pool
        stream = cupy.cuda.Stream(non_blocking=True)
        runtime.memsetAsync(self._memory.ptr, 0, self._memory.size, stream.ptr)
        stream.synchronize()
        first = self._memory.ptr
        self._free = iter(range(first, first + self._memory.size, _COUNTER_BYTES))
        self._of_stream: dict[tuple[int, int], tuple[int, int]] = {}  # number, counter

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


def _stream_number(stream: int) -> int | None:
    """The driver's number of a stream, which no other stream ever has; None for no stream."""
    number = ctypes.c_ulonglong()
    error = driver.function("cuStreamGetId")(stream, ctypes.byref(number))
    return None if error else number.value


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"all {_NUM_COUNTERS} tile counters of a device are taken, by launches that graphs have "
        "captured and by streams: further ones have their tiles dealt out in advance, and causal "
        "calls among them take 15 to 25 % longer",
        RuntimeWarning,
        stacklevel=2,
    )


_counters: dict[int, TileCounters] = {}  # by device


class Sm90Launch(NamedTuple):
    """One launch of persistent blocks of threads, with everything but its pointers."""

    params: bytes  # between the pointers and the maps
    maps: Maps
    device: int
    draws: bool  # there are more tiles than blocks of threads
    starter: Starter

    def run(self, pointers: Addresses, stream: int, captured: bool) -> None:
        """Launch on ``stream`` with these addresses."""
        if self.draws:
            pointers = (*pointers, self._counter(stream, captured))
        self.starter.start(pointers, self._pack, stream)

    def _counter(self, stream: int, captured: bool) -> int:
        """Address of a counter; 0 where none can be had, and tiles are dealt out in advance."""
        counters = _counters.get(self.device)
        if counters is None:
            if captured:  # no memory can be allocated (D70)
                return 0
            counters = _counters.setdefault(self.device, TileCounters())
        return counters.for_launch(stream, captured)

    def _pack(self, addresses: Addresses) -> bytes:
        pointers, counter = addresses[: len(_NAMES)], addresses[len(_NAMES) :] or (0,)
        maps = self.maps.at(pointers[:_MAPPED])
        return _POINTERS.pack(*pointers) + self.params + maps + _COUNTER.pack(*counter)


class MappedLaunch(NamedTuple):
    """One launch with a block of threads for each tile, with everything but its pointers."""

    params: bytes  # between the pointers and the maps
    maps: Maps
    starter: Starter

    def run(self, pointers: Addresses, stream: int) -> None:
        """Launch on ``stream`` with these addresses."""
        self.starter.start(pointers, self._pack, stream)

    def _pack(self, pointers: Addresses) -> bytes:
        maps = self.maps.at(pointers[: len(kernel_params.BACKWARD_MAPPED)])
        return struct.pack(f"<{len(pointers)}Q", *pointers) + self.params + maps


def keys_to_load(problem: Problem) -> int:
    """Rows of k and v that exist for every batch entry: past them TMA brings zeros."""
    length = problem.kv_length_value
    if length is None or problem.cu_seqlens_k is not None:
        return problem.seqlen_k
    return max(length, 1)


def _forward_maps(
    problem: Problem, layouts: Mapping[str, Layout], config: Any, addresses: Addresses
) -> Maps | None:
    """Maps of q, k, v and out; None where the copy engine cannot address one of them."""
    absent = Layout(1, (0,) * len(problem.batch))
    strides = [layouts.get(name, absent).batch for name in _NAMES]
    num_blocks = num_tiles(problem, problem.seqlen_q, config.block_m)
    grid = plan_grid(problem.batch, strides, (False,) * len(problem.batch), num_blocks)
    if grid.peeled or grid.num_owners * num_blocks > _INDEX_LIMIT:
        return None
    shapes = {
        "q": (problem.seqlen_q, problem.head_dim, config.block_m),
        "k": (keys_to_load(problem), problem.head_dim, config.block_n),
        "v": (keys_to_load(problem), problem.head_dim_v, config.block_n),
        "out": (problem.seqlen_q, problem.head_dim_v, _STORED_ROWS),
    }
    return _encoded(problem, layouts, grid, shapes, addresses)


def _gradient_maps(
    problem: Problem, layouts: Mapping[str, Layout], config: Any, addresses: Addresses
) -> Maps | None:
    """Maps of dout, q, k and v; None where the copy engine cannot address one of them."""
    if config.computes == "dqkv":
        layouts = {**layouts, "sums": dq_sums.layout(problem)}
    summed = plan.summed_axes(problem, config)
    absent = Layout(1, (0,) * len(problem.batch))
    strides = [layouts.get(name, absent).batch for name in _GRADIENT_NAMES]
    num_blocks = -(-max(problem.seqlen_q, problem.seqlen_k) // config.own_rows)
    grid = plan_grid(problem.batch, strides, summed, num_blocks)
    if grid.peeled:
        return None
    of_queries = problem.seqlen_q, config.block_m
    of_keys = problem.seqlen_k, config.block_n
    shapes = {
        "dout": (of_queries[0], problem.head_dim_v, of_queries[1]),
        "q": (of_queries[0], problem.head_dim, of_queries[1]),
        "k": (of_keys[0], problem.head_dim, of_keys[1]),
        "v": (of_keys[0], problem.head_dim_v, of_keys[1]),
    }
    return _encoded(problem, layouts, grid, shapes, addresses)


class MapsOf:
    """Encodes the maps of a call's operands for one kernel and another, to see whether it can."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses  # of what the maps describe, in their order
        self._found: dict[KernelConfig, Maps] = {}

    def __call__(
        self, problem: Problem, layouts: Mapping[str, Layout], config: KernelConfig
    ) -> bool:
        """Whether the copy engine can address all operands."""
        encode = _forward_maps if config.computes == "out" else _gradient_maps
        maps = encode(problem, layouts, config, self._addresses)
        if maps is not None:
            self._found[config] = maps
        return maps is not None

    def of(self, config: KernelConfig) -> Maps:
        """The maps that were found for a kernel."""
        return self._found[config]


def mapped(launch: Launch, maps: Maps, grid: int | None = None) -> MappedLaunch:
    """The launch of a gradient's kernel with its maps, of ``grid`` blocks where that differs."""
    end = kernel_params.maps_at(kernel_params.BACKWARD) - launch.pointers.size
    starter = launch.starter if grid is None else Starter(launch.kernel, grid)
    return MappedLaunch(launch.params[:end], maps, starter)


def _encoded(
    problem: Problem,
    layouts: Mapping[str, Layout],
    grid: Grid,
    shapes: dict[str, tuple[int, int, int]],
    addresses: tuple[int, ...],
) -> Maps | None:
    """Maps of the first pointers of a launch; ``shapes``: rows, columns, rows of a box."""
    if any(address % tensor_map.ALIGNMENT for address in addresses):
        return None
    found = []
    for operand, (name, (rows, columns, box_rows)) in enumerate(shapes.items()):
        layout = layouts[name]
        batch = tuple((extent, steps[operand]) for extent, steps in grid.axes)
        encoded = tensor_map.map_layout(
            problem.dtype, (rows, layout.row), (columns, layout.column), batch, box_rows
        )
        if encoded is None:
            return None
        found.append(encoded)
    maps = Maps(tuple(found))
    try:
        maps.at(addresses)
    except RuntimeError:  # the driver knows limits that it does not document
        return None
    return maps


def _owners_side_by_side(problem: Problem, config: Any, num_blocks: int, processors: int) -> int:
    """How many owners may start their heaviest tiles together: see docs/forward-sm90.md."""
    if problem.cu_seqlens_q is not None:  # each of them leaves 16 tiles that share keys (D13)
        return processors // 16
    if not config.window_right:
        return 1
    # As many as 8 MiB hold, but 16 if 64 MiB hold them, and as many as give each processor a tile,
    # or 16.
    keys = problem.seqlen_k
    if problem.window_keys is not None:
        keys = min(keys, problem.window_keys)
    streamed_bytes = 2 * keys * (problem.head_dim + problem.head_dim_v)
    fitting = max((8 << 20) // streamed_bytes, min(16, (64 << 20) // streamed_bytes))
    return max(fitting, min(16, -(-processors // num_blocks)))


def persistent(
    kernel: Kernel,
    params: bytes,
    maps: Maps,
    problem: Problem,
    config: Any,
    device: int,
) -> Sm90Launch:
    """Prepare the launch from the parameters of one block of threads for each tile."""
    processors = hardware.of_device(device).multiprocessors
    filled = np.frombuffer(bytearray(params), kernel_params.FORWARD_SM90)[0]
    filled["score"]["seqlen_k"] = keys_to_load(problem)
    owners, num_blocks = int(filled["grid"]["num_owners"]), int(filled["grid"]["num_blocks"])
    limit = _owners_side_by_side(problem, config, num_blocks, processors)
    filled["grid"]["owners_per_section"] = even_sections(owners, limit)
    return Sm90Launch(
        params=filled.tobytes()[_POINTERS.size : kernel_params.maps_at(kernel_params.FORWARD)],
        maps=maps,
        device=device,
        draws=owners * num_blocks > processors,
        starter=Starter(kernel, min(owners * num_blocks, processors)),
    )
