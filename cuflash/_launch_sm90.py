"""How does Hopper's forward run? Tensor maps, and tiles that persistent blocks of threads draw."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import driver, runtime

from cuflash import _params, _tensor_map
from cuflash._compile import Kernel
from cuflash._config import ForwardSm90Config
from cuflash._grid import Layout, even_sections, plan_grid
from cuflash._problem import Problem
from cuflash._tensor_map import Maps

_NAMES = _params.pointer_names(_params.FORWARD_SM90)
_POINTERS = struct.Struct(f"<{len(_NAMES)}Q")
_MAPPED = len(_params.MAPPED)  # the first of the pointers
_COUNTER = struct.Struct("<Q56x")  # its address, and room up to the alignment of the maps
_COUNTER_BYTES = 4
_INDEX_LIMIT = 2**31 - 2**20  # a block of threads draws one index past the last tile
_STORED_ROWS = 64  # of out: those of a warpgroup


class Sm90Launch(NamedTuple):
    """One launch of persistent blocks of threads, with everything but its pointers."""

    kernel: Kernel
    grid: int
    params: bytes  # between the pointers and the maps
    maps: Maps
    draws: bool  # there are more tiles than blocks of threads

    def run(self, pointers: Sequence[int], stream: int) -> None:
        """Launch on ``stream`` with these addresses.

        Tiles are drawn from a counter in memory of this launch alone, so that launches on two
        streams never share one. While a graph is captured no memory can be had that would live as
        long as the graph: tiles are dealt out in advance then. Results are the same.
        """
        counter = None
        if self.draws and not runtime.streamIsCapturing(stream):
            counter = cupy.empty(_COUNTER_BYTES, np.uint8)
            runtime.memsetAsync(counter.data.ptr, 0, _COUNTER_BYTES, stream)
        # A char* is all of the argument list that the driver reads: one address.
        arguments = ctypes.c_char_p(
            _POINTERS.pack(*pointers)
            + self.params
            + self.maps.at(tuple(pointers[:_MAPPED]))
            + _COUNTER.pack(0 if counter is None else counter.data.ptr)
        )
        driver.launchKernel(
            self.kernel.pointer, self.grid, 1, 1, self.kernel.num_threads, 1, 1,
            self.kernel.smem_bytes, stream, ctypes.addressof(arguments), 0,
        )  # fmt: skip
        del counter  # no sooner: another thread could be given its memory on this stream


def available(device: int) -> bool:
    """Whether this device has what the kernel needs, and its maps can be encoded here."""
    capability = cupy.cuda.Device(device).compute_capability
    return _tensor_map.available() and bool(capability == "90")


def keys_to_load(problem: Problem) -> int:
    """Rows of k and v that exist for every batch entry: past them TMA brings zeros."""
    length = problem.kv_length_value
    return problem.seqlen_k if length is None else max(length, 1)


def tensor_maps(
    problem: Problem,
    layouts: dict[str, Layout],
    config: ForwardSm90Config,
    pointers: tuple[int, ...],
) -> Maps | None:
    """Maps of q, k, v and out; None where the copy engine cannot address one of them."""
    addresses = pointers[:_MAPPED]
    if any(address % _tensor_map.ALIGNMENT for address in addresses):
        return None
    absent = Layout(1, (0,) * len(problem.batch))
    strides = [layouts.get(name, absent).batch for name in _NAMES]
    num_blocks = -(-problem.seqlen_q // config.block_m)
    grid = plan_grid(problem.batch, strides, (False,) * len(problem.batch), num_blocks)
    if grid.peeled or grid.num_owners * num_blocks > _INDEX_LIMIT:
        return None
    shapes = {  # rows, columns, rows of a box
        "q": (problem.seqlen_q, problem.head_dim, config.block_m),
        "k": (keys_to_load(problem), problem.head_dim, config.block_n),
        "v": (keys_to_load(problem), problem.head_dim_v, config.block_n),
        "out": (problem.seqlen_q, problem.head_dim_v, _STORED_ROWS),
    }
    found = []
    for operand, (name, (rows, columns, box_rows)) in enumerate(shapes.items()):
        layout = layouts[name]
        batch = tuple((extent, strides[operand]) for extent, strides in grid.axes)
        encoded = _tensor_map.map_layout(
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


def persistent(
    kernel: Kernel,
    params: bytes,
    maps: Maps,
    problem: Problem,
    config: ForwardSm90Config,
    device: int,
) -> Sm90Launch:
    """Prepare the launch from the parameters of one block of threads for each tile."""
    processors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
    filled = np.frombuffer(bytearray(params), _params.FORWARD_SM90)[0]
    filled["score"]["seqlen_k"] = keys_to_load(problem)
    owners, num_blocks = int(filled["grid"]["num_owners"]), int(filled["grid"]["num_blocks"])
    if config.window_right:
        # As many owners start their heaviest tiles together as 8 MiB hold, but as many as give
        # each processor a tile, or 16: docs/forward-sm90.md.
        streamed_bytes = 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
        limit = max((8 << 20) // streamed_bytes, min(16, -(-processors // num_blocks)))
        filled["grid"]["owners_per_section"] = even_sections(owners, limit)
    return Sm90Launch(
        kernel=kernel,
        grid=min(owners * num_blocks, processors),
        params=filled.tobytes()[_POINTERS.size : _params.MAPS_AT],
        maps=maps,
        draws=owners * num_blocks > processors,
    )
