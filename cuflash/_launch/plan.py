"""What do the launches of a call need beside pointers? Kernels, grids, parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cuflash._errors import wrong_value
from cuflash._jit.compilation import compile_kernel
from cuflash._kernels import params as kernel_params
from cuflash._kernels import split_keys
from cuflash._kernels.config import ELEMENT_BYTES
from cuflash._kernels.segment_bounds import IDS, bounds_of, operands_of
from cuflash._launch import score_params, tensor_map
from cuflash._launch.grid import Grid, num_tiles, plan_grid
from cuflash._launch.kernel_launcher import KernelLauncher
from cuflash._launch.sections import owners_per_section
from cuflash._launch.tensor_map import Maps
from cuflash._launch.workspace import dq_sums_layout, parts_layouts
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem
from cuflash._select.choose import LaunchStep
from cuflash._select.hardware import Hardware
from cuflash._select.pack_gqa import with_shared_rows

Layouts = Mapping[str, Layout]  # of the operands of a call, by name
Addresses = Mapping[str, int]
#: Operands that kernels read in the dtype to which q, k and v are promoted.
_OF_THE_DTYPE = frozenset(("q", "k", "v", "dout"))
_GRADIENTS = frozenset(("dq", "dk", "dv"))  # written in ``out_dtype``
_OF_QUERIES = frozenset(("q", "out", "dout", "dq"))  # operands with a row for each query
#: Operands of the kernel that finds the bounds of segments, in the order of its pointers.
_OF_SEGMENTS = ("segment_ids_q", "segment_ids_k", "segment_bounds_q", "segment_bounds_k")
_INDEX_LIMIT = 2**31 - 2**20  # a thread block draws one index past the last tile
_STORED_ROWS = {"out": 64, "dq": 16}  # rows that a warpgroup or a warp stores at a time


class _Work(NamedTuple):
    """The work of a launch, which its thread blocks divide."""

    operands: dict[str, Layout]  # of every pointer, in order; absent operands have strides of 0
    tiles: int  # tiles of one owner
    streamed_bytes: int  # bytes that the tiles of one owner stream
    grid: Grid


def _work_of(step: LaunchStep, problem: Problem, layouts: Layouts) -> _Work:
    config: Any = step.config
    row = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    summed, streamed = (False,) * len(problem.batch), 0  # summed: axes that a thread block walks
    match config.computes:
        case "combine":
            tiles = -(-problem.seqlen_q // config.rows)
        case "delta":
            tiles = -(-problem.seqlen_q // config.block_m)
        case "convert":
            tiles = num_tiles(problem, problem.seqlen_q, config.block_m)
        case "sums" if step.sums is not None:
            tiles = step.sums.tiles(problem, config.block_m, config.block_n)
            summed = step.sums.summed_axes()
        case "dkv" | "dqkv" | "parts":
            tiles = num_tiles(problem, problem.seqlen_k, config.own_rows)
            summed = (problem.k if getattr(config, "grad_k", True) else problem.v).summed
            streamed = problem.seqlen_q * row
        case _:
            tiles = num_tiles(problem, problem.seqlen_q, config.own_rows)
            summed = problem.q.summed if config.computes == "dq" else summed
            streamed = problem.seqlen_k * row
    if config.leaves_parts or config.computes == "combine":
        parts = parts_layouts(problem, step.splits)
        layouts = {**layouts, **parts}
        if config.computes == "out":
            layouts |= {"out": parts["out_parts"], "lse": parts["lse_parts"]}
    if step.sums is not None:
        own = layouts.get(sums_of(step.gradient), step.sums.layout())
        layouts = {**layouts, "sums": own}
    elif config.computes in ("dqkv", "convert"):
        layouts = {**layouts, "sums": dq_sums_layout(problem, config)}
        if config.grad_bias:
            layouts["dbias"] = layouts[sums_of("bias")]
    absent = Layout(1, (0,) * len(problem.batch))
    names = kernel_params.pointer_names(kernel_params.STRUCTS[config.params])
    operands = {name: layouts.get(name, absent) for name in names}
    batch, strides = problem.batch, [layout.batch for layout in operands.values()]
    if step.sums is not None and step.sums.parts > 1:
        strides = [
            of if name == "sums" else step.sums.strides(of, batch)
            for name, of in zip(operands, strides, strict=True)
        ]
        batch = step.sums.axes(batch)
    grid = plan_grid(
        batch,
        strides,
        summed,
        tiles * getattr(config, "split_columns", 1),
        kernel_params.MAX_BATCH_AXES - (problem.cu_seqlens_q is not None),
    )
    return _Work(operands, tiles, streamed, grid)


def plan_steps(
    steps: tuple[LaunchStep, ...],
    problem: Problem,
    layouts: dict[str, Layout],
    hardware: Hardware,
    device: int,
    addresses: Addresses,
    num_turns: int = 0,
) -> list[KernelLauncher]:
    """The launches of a call, in order."""
    launchers = []
    if any(step.config.computes == "out" for step in steps):
        problem, layouts = with_shared_rows(problem, layouts)
    for step in steps:
        if step.config.computes == "bounds":
            launchers += plan_bounds(step.config, problem, device)
        else:
            launchers.append(
                plan_launch(step, problem, layouts, hardware, device, addresses, num_turns)
            )
    return launchers


def plan_launch(
    step: LaunchStep,
    problem: Problem,
    layouts: Layouts,
    hardware: Hardware,
    device: int,
    addresses: Addresses | None = None,
    num_turns: int = 0,
) -> KernelLauncher:
    """Prepare the launch of one kernel of a call.

    Tensor maps need the ``addresses``. The kernel of delta clears ``num_turns`` turns.
    """
    config: Any = step.config
    struct = kernel_params.with_reals(kernel_params.STRUCTS[config.params], config.real_bytes)
    operands, tiles, streamed, grid = _work_of(step, problem, layouts)
    kv = frozenset("kv") if problem.has_8_bit_keys else frozenset()
    dtypes = (
        (problem.dtype.name, _OF_THE_DTYPE - kv),
        (problem.k.dtype.name, kv),
        (config.out_dtype, _GRADIENTS),
    )
    for dtype, names in dtypes:
        for name in names & layouts.keys() & operands.keys():
            if layouts[name].itemsize != ELEMENT_BYTES[dtype]:
                raise AssertionError(f"{name}: {layouts[name].itemsize} bytes, not {dtype}")
    filled = np.zeros(1, struct)[0]
    owners, entries = grid.num_owners, grid.entries_per_owner
    cluster = step.splits if getattr(config, "clusters", False) else 1  # thread blocks of a tile
    if config.computes == "out":
        owners *= step.splits // cluster
    elif "dq_sums" in (struct.names or ()):
        filled["dq_sums"], filled["num_parts"] = step.dq_sums, step.splits
        if config.computes == "dqkv":
            row_parts = max(1, step.splits // entries)
            blocks_of_queries = -(-problem.seqlen_q // config.block_m)
            owners, entries = owners * step.splits, entries * row_parts // step.splits
            filled["row_parts"], filled["part_blocks"] = (
                row_parts,
                -(-blocks_of_queries // row_parts),
            )
    section = owners_per_section(config, problem, tiles, owners, streamed, hardware)
    filled["grid"] = (tiles, owners, section, entries)
    _fill_strides(filled, grid, operands, packed=problem.cu_seqlens_q is not None)
    filled["head_dim_v"] = problem.head_dim_v
    if "num_splits" in (struct.names or ()):
        filled["num_splits"] = step.splits
    if config.computes == "combine":
        filled["num_rows"] = problem.seqlen_q
    if getattr(config, "split_keys", False):
        filled["part_keys"] = split_keys.part_keys(problem, config, step.splits)
    blocks = tiles * owners * getattr(config, "split_columns", 1) * cluster
    if "score" in (struct.names or ()):
        filled["head_dim"] = problem.head_dim
        score_params.fill(filled["score"], problem)
    elif config.computes == "delta":
        filled["seqlen_q"] = problem.seqlen_q
        filled["recomputes_far_rows"] = score_params.recomputes_far_rows(problem)
        filled["num_turns"] = num_turns
    if problem.pages is not None and config.computes == "out":
        filled["page_size"], filled["num_pages"] = problem.pages.size, problem.pages.num_pages
        for name in ("k", "v"):
            filled[f"{name}_page"] = layouts[name].page // layouts[name].itemsize
    maps, drawn_on, end = None, None, struct.itemsize
    draws = config.computes == "out" and not getattr(config, "split_keys", False)
    if config.tensor_maps:
        maps = maps_of(problem, layouts, config, addresses or {})
        forward = config.computes == "out"
        end = kernel_params.maps_at(kernel_params.FORWARD if forward else kernel_params.BACKWARD)
        if config.computes == "out":
            filled["score"]["seqlen_k"] = keys_to_load(problem)
            drawn_on = device if draws and blocks > hardware.multiprocessors else None
        if draws or (config.computes == "dqkv" and config.cluster_blocks == 1):
            blocks = min(blocks, hardware.multiprocessors)  # persistent: they draw tiles
        elif config.computes == "dqkv":
            blocks *= config.cluster_blocks  # a cluster computes one tile
    return KernelLauncher(
        kernel=compile_kernel(config, device),
        grid=blocks,
        names=tuple(_operand_of(step, name) for name in operands),
        params=filled.tobytes()[8 * len(operands) : end],
        offsets=grid.offsets(),
        maps=maps,
        drawn_on=drawn_on,
        overlaps=config.starts_early,
        cluster=cluster,
    )


def _operand_of(step: LaunchStep, pointer: str) -> str:
    """Name of the operand for a pointer of a kernel."""
    if pointer == "sums" and step.sums is not None:
        return sums_of(step.gradient)
    if pointer == "dbias" and getattr(step.config, "grad_bias", False):
        return sums_of("bias")
    adds_parts = step.config.computes == "parts"
    if (adds_parts and pointer == "sums") or (
        getattr(step.config, "split_queries", False) and pointer == "dk"
    ):
        return "dkv_parts"
    if step.config.leaves_parts and pointer in ("out", "lse"):
        return f"{pointer}_parts"
    return pointer


def plan_bounds(config: Any, problem: Problem, device: int) -> list[KernelLauncher]:
    """Prepare the launch that finds the bounds of segments; empty where there are no ids."""
    bounds, (q, k) = bounds_of(problem), operands_of(problem)
    num_q, num_k = q.shape[-1], k.shape[-1]
    blocks = sum(-(-n // (IDS * config.num_warps)) for n in (num_q, num_k))
    ndim = len(bounds.batch)
    layouts = (
        Layout(q.dtype.itemsize, q.strides[:ndim]),
        Layout(k.dtype.itemsize, k.strides[:ndim]),
        Layout(bounds.itemsize, bounds.strides(bounds.pairs_q)),
        Layout(bounds.itemsize, bounds.strides(bounds.pairs_k)),
    )
    grid = plan_grid(bounds.batch, [layout.batch for layout in layouts], (False,) * ndim, blocks)
    if not blocks * grid.num_owners:
        return []
    filled = np.zeros(1, kernel_params.SEGMENT_BOUNDS)[0]
    operands = dict(zip(kernel_params.SEGMENT_BOUNDS_POINTERS, layouts, strict=True))
    _fill_strides(filled, grid, operands, packed=False)  # sequences are a batch axis here
    filled["num_ids_q"], filled["num_ids_k"] = num_q, num_k
    return [
        KernelLauncher(
            kernel=compile_kernel(config, device),
            grid=blocks * grid.num_owners,
            names=_OF_SEGMENTS,
            params=filled.tobytes()[8 * len(_OF_SEGMENTS) :],
            offsets=grid.offsets(),
        )
    ]


def sums_of(gradient: str) -> str:
    """Name of the operand that holds the sums for the gradient of bias, slopes or scale."""
    return f"sums of {gradient}"


def _fill_strides(filled: Any, grid: Grid, layouts: Layouts, *, packed: bool) -> None:
    """Write the batch axes of a launch, and the strides of each operand along them."""
    filled["batch"]["num_axes"] = len(grid.axes)
    filled["batch"]["extent"] = [e for e, _ in grid.axes] + [1] * (6 - len(grid.axes))
    for column, (name, layout) in enumerate(layouts.items()):
        part = filled["score"] if name in kernel_params.SCORE_POINTERS else filled
        if f"{name}_strides" in part.dtype.names:
            strides = part[f"{name}_strides"]
        elif f"{name}_layout" not in part.dtype.names:  # the same for all entries
            continue
        else:
            strides = part[f"{name}_layout"]["batch"]
            part[f"{name}_layout"]["row"] = layout.row // layout.itemsize
            part[f"{name}_layout"]["column"] = layout.column // layout.itemsize
        for axis, (_, steps) in enumerate(grid.axes):
            strides["axis"][axis] = steps[column] // layout.itemsize
        if packed:
            strides["axis"][-1] = layout.sequence // layout.itemsize


def maps_of(problem: Problem, layouts: Layouts, config: Any, addresses: Addresses) -> Maps | None:
    """The tensor maps of a kernel; None where TMA cannot address an operand."""
    found = map_layouts_of(problem, layouts, config)
    if found is None:
        return None
    places = tuple(addresses[name] for name in mapped_by(config))
    loaded = places[:-1] if getattr(config, "split_keys", False) else places
    if any(place % tensor_map.ALIGNMENT for place in loaded):
        return None
    pointers = kernel_params.pointer_names(kernel_params.STRUCTS[config.params])
    maps = Maps(found, tuple(map(pointers.index, mapped_by(config))))
    try:
        maps.at(places)
    except RuntimeError:  # the driver knows limits that it does not document
        return None
    return maps


def mapped_by(config: Any) -> tuple[str, ...]:
    """Operands with a tensor map, in the order of the kernel's parameters."""
    if config.computes == "out":
        return kernel_params.MAPPED
    if config.params != "BackwardOnePassParams":
        return kernel_params.BACKWARD_MAPPED
    unused = kernel_params.BACKWARD_MAPPED[0]
    return (*kernel_params.BACKWARD_MAPPED, "dq" if config.finishes_dq else unused)


def map_layouts_of(
    problem: Problem, layouts: Layouts, config: Any
) -> tuple[tensor_map.MapLayout, ...] | None:
    """Layouts of the tensor maps of a kernel; None where TMA cannot use one at any address."""
    forward = config.computes == "out"
    operands, tiles, _, grid = _work_of(LaunchStep(config), problem, layouts)
    if grid.peeled or (forward and grid.num_owners * tiles > _INDEX_LIMIT):
        return None
    names = tuple(operands)
    found: list[tensor_map.MapLayout] = []
    of_parts = getattr(config, "split_keys", False)
    for name in mapped_by(config):
        columns = problem.head_dim if name in ("q", "k", "dq") else problem.head_dim_v
        rows, box = problem.seqlen_q, config.block_m
        if name not in _OF_QUERIES:
            rows, box = keys_to_load(problem) if forward else problem.seqlen_k, config.block_n
        batch = tuple((extent, steps[names.index(name)]) for extent, steps in grid.axes)
        if name == "out" and of_parts:  # not stored by TMA
            found.append(found[0])
            continue
        own = layouts[name]
        if problem.pages is not None and name not in _OF_QUERIES:
            # As kernels_cu/sm90/load_pages.cuh reads them.
            rows, box = problem.pages.size, min(problem.pages.size, config.block_n)
            batch = ((problem.pages.num_pages, own.page), *(axis for axis in batch if axis[1]))
        # An out of float32, which is stored without its map, counts as columns of 16 bits.
        wider = own.itemsize // problem.dtype.itemsize
        layout = tensor_map.map_layout(
            problem.dtype, (rows, own.row), (columns * wider, own.column // wider), batch,
            _STORED_ROWS.get(name, box),
        )  # fmt: skip
        if layout is None:
            return None
        found.append(layout)
    return tuple(found)


def keys_to_load(problem: Problem) -> int:
    """Rows of k and v in every batch entry: beyond them TMA fills in zeros."""
    length = problem.kv_length_value
    if length is None or problem.cu_seqlens_k is not None:
        return problem.seqlen_k
    return max(length, 1)


def row_layout(problem: Problem, itemsize: int, strides: tuple[int, ...] | None) -> Layout:
    """Layout of an array batch + (m,), C-contiguous if ``strides`` is None."""
    if strides is None:
        steps = itertools.accumulate((problem.seqlen_q, *problem.batch[:0:-1]), int.__mul__)
        return Layout(itemsize, tuple(s * itemsize for s in steps)[::-1], itemsize)
    *batch, row = strides
    if problem.group_size is not None:  # GQA splits the head axis
        head = batch.pop()
        batch += [head * problem.group_size, head]
    return Layout(itemsize, tuple(batch), row)


def refuse_misaligned(layouts: Layouts, addresses: Addresses) -> None:
    """Raise for an array with elements that are not aligned to their size."""
    for name, layout in layouts.items():
        size = layout.itemsize
        own = (*layout.batch, layout.row, layout.column, layout.page)
        places = (addresses.get(name, 0), *own)
        if any(place % size for place in places):
            raise wrong_value(
                name, f"misaligned elements of {size} bytes",
                "an address and strides that are multiples of the element size",
                "copy the array's bytes into a new one",
            )  # fmt: skip
