"""How do a KV cache and rotary embedding run on a GPU? Kernels read and write the arrays.

Nothing is allocated: a captured graph can be replayed.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._arrays import Array
from cuflash._jit.compilation import compile_kernel
from cuflash._kernels.cache_grow import CacheGrowConfig
from cuflash._kernels.cache_take import CacheTakeConfig
from cuflash._kernels.cache_write import TOKENS, CacheWriteConfig
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.params import MAX_BATCH_AXES, STRUCTS, pointer_names
from cuflash._kernels.rotary import RotaryConfig, Rotation
from cuflash._launch.grid import plan_grid
from cuflash._launch.kernel_launcher import KernelLauncher, current_stream
from cuflash._launch.plan import refuse_misaligned
from cuflash._problem.layout import Layout
from cuflash._select import hardware

_NOT_MOVED = ((),)  # one launch without offsets
_MOST_PAGES = 1 << 18  # most pages of a cache on any device


def most_pages() -> int:
    """Most pages of a cache on the current device, whose shared memory has two bits for each."""
    limit, pages = hardware.of_device(runtime.getDevice()).limits.block_smem, _MOST_PAGES
    while CacheGrowConfig.of(pages).smem_bytes > limit:
        pages //= 2
    return pages


def grow(
    page_table: Array,
    lengths: Array,
    dropped: Array,
    counts: Array | None,
    starts: Array,
    sources: Array,
    taken: Array,
    **numbers: int,
) -> None:
    """Give pages to the sequences of a cache, and advance their lengths."""
    arrays = (page_table, lengths, dropped, counts, starts, sources, taken)
    sequences, columns = page_table.shape
    numbers |= {"num_sequences": sequences, "num_columns": columns, "num_pages": len(taken)}
    _run(CacheGrowConfig.of(len(taken)), 1, arrays, numbers)


def write(
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    frequencies: Array | None,
    page_table: Array,
    starts: Array,
    lengths: Array,
    sources: Array,
    *,
    rotation: Rotation,
    num_pairs: int,
    scales: tuple[Any, Any] = (1.0, 1.0),
) -> None:
    """Write new keys and values into the pages of their sequences, after :func:`grow`.

    Pages of 8 bits take elements divided by ``scales``, of k and v: a number, or an array (heads,).
    """
    layouts = {
        name: Layout(a.dtype.itemsize, a.strides[:2], *a.strides[2:])
        for name, a in (("k", k), ("v", v))
    }
    refuse_misaligned(layouts, {"k": k.data.ptr, "v": v.data.ptr})
    sequences, heads, tokens, head_dim = k.shape
    numbers = {
        "num_heads": heads, "num_columns": page_table.shape[1], "page_size": k_pages.shape[2],
        "num_tokens": tokens, "head_dim": head_dim, "head_dim_v": v.shape[3],
        "num_pairs": num_pairs,
    }  # fmt: skip
    numbers |= {f"{name}_layout": _filled(layout, layout.batch) for name, layout in layouts.items()}
    arrays: list[Any] = [k, v, k_pages, v_pages, frequencies, page_table, starts, lengths, sources]
    for name, scale in zip("kv", scales, strict=True):
        of_heads = hasattr(scale, "shape")
        arrays.append(scale if of_heads else None)
        numbers |= {} if of_heads else {f"{name}_scale": scale}
    blocks = sequences * heads * -(-tokens // TOKENS)
    config = CacheWriteConfig(
        dtype=k.dtype.name, rotation=rotation,
        pages_dtype="none" if k.dtype == k_pages.dtype else k_pages.dtype.name,
    )  # fmt: skip
    _run(config, blocks, tuple(arrays), numbers)


def take(
    page_table: Array,
    lengths: Array,
    old_table: Array,
    old_lengths: Array,
    parents: Array,
    kept: Array | None,
) -> None:
    """Give each sequence the pages of its parent sequence; the old arrays are scratch memory."""
    for old, new in ((old_table, page_table), (old_lengths, lengths)):
        cupy.copyto(old, new)
    config = CacheTakeConfig()
    sequences, columns = page_table.shape
    arrays = (page_table, lengths, old_table, old_lengths, parents, kept)
    numbers = {"num_sequences": sequences, "num_columns": columns}
    _run(config, -(-page_table.size // config.num_threads), arrays, numbers)


def turn(
    x: Array,
    out: Array,
    positions: Array | int,
    frequencies: Array | None,
    num_pairs: int,
    rotation: Rotation,
    *,
    inverse: bool,
) -> None:
    """Write the rows of ``x`` to ``out``, rotated by their positions, (..) + (rows,)."""
    *batch, rows, width = x.shape
    steps = {"x": x.strides, "out": out.strides, "positions": (0,) * x.ndim}
    sizes = {"x": x.dtype.itemsize, "out": x.dtype.itemsize, "positions": 1}
    number = 0
    if isinstance(positions, int):
        number, places = positions, None
    else:
        places = cupy.broadcast_to(positions, x.shape[:-1])
        steps["positions"], sizes["positions"] = (*places.strides, 0), places.dtype.itemsize
    layouts = {n: Layout(sizes[n], tuple(own[:-2]), own[-2], own[-1]) for n, own in steps.items()}
    moving = {"x": x, "out": out} | ({} if places is None else {"positions": places})
    refuse_misaligned(layouts, {name: array.data.ptr for name, array in moving.items()})
    of_positions = "none" if places is None else places.dtype.name
    config = RotaryConfig(dtype=x.dtype.name, rotation=rotation, positions=of_positions)
    tiles = -(-rows // config.num_warps)
    # Frequencies are the same for all entries: no offset moves them.
    columns = [*(layout.batch for layout in layouts.values()), (0,) * len(batch)]
    grid = plan_grid(tuple(batch), columns, (False,) * len(batch), tiles)
    numbers: dict[str, Any] = {
        "batch": (
            len(grid.axes),
            [e for e, _ in grid.axes] + [1] * (MAX_BATCH_AXES - len(grid.axes)),
        ),
        "grid": (tiles, grid.num_owners, grid.num_owners, 1),
        "position": number, "num_rows": rows, "head_dim": width, "num_pairs": num_pairs,
        "sign": -1 if inverse else 1,
    }  # fmt: skip
    for column, (name, layout) in enumerate(layouts.items()):
        numbers[f"{name}_layout"] = _filled(layout, [s[column] for _, s in grid.axes])
    arrays = (x, out, places, frequencies)
    _run(config, tiles * math.prod(e for e, _ in grid.axes), arrays, numbers, grid.offsets())


def _filled(layout: Layout, batch: Any) -> tuple[Any, int, int]:
    """A layout as parameter structs hold it, in elements."""
    size = layout.itemsize
    steps = [step // size for step in batch]
    axes = steps + [0] * (MAX_BATCH_AXES - len(steps))
    return ((axes,), layout.row // size, layout.column // size)


def _run(
    config: KernelConfig,
    blocks: int,
    arrays: tuple[Array | None, ...],
    numbers: dict[str, Any],
    offsets: tuple[tuple[int, ...], ...] = _NOT_MOVED,
) -> None:
    """Launch on the current stream; ``arrays`` are the pointers that the struct begins with."""
    filled = np.zeros(1, STRUCTS[config.params])[0]
    for name, number in numbers.items():
        filled[name] = number
    params = filled.tobytes()[8 * len(arrays) :]
    pointers = tuple(0 if a is None else a.data.ptr for a in arrays)
    stream, _ = current_stream()
    _launcher(config, runtime.getDevice(), blocks, params, offsets).run(pointers, stream)


def forget() -> None:
    """Drop all prepared launches."""
    _launcher.cache_clear()


@functools.lru_cache(maxsize=1024)
def _launcher(
    config: KernelConfig,
    device: int,
    blocks: int,
    params: bytes,
    offsets: tuple[tuple[int, ...], ...],
) -> KernelLauncher:
    kernel = compile_kernel(config, device)
    names = pointer_names(STRUCTS[config.params])
    return KernelLauncher(kernel, blocks, names, params, offsets)
