"""Do the boxes of the copy engine load the keys in the order of the page table? On the host."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._jit.source import flatten
from cuflash._kernels import params as kernel_params
from cuflash._problem.layout import Layout
from cuflash._problem.options import signature
from cuflash._problem.problem import describe, in_pages
from cuflash._select import hardware
from cuflash._select.access import in_c_order
from cuflash._select.choose import LaunchStep, choose

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import plan, tensor_map
from support.host_device import _PTX, COMPILER, SUPPORT

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SEQUENCES, HEADS, HEADS_KV, ROWS, COLUMNS = 3, 4, 2, 200, 512
HOST_TEXTS = tuple((f"ptx/{n}.cuh", f'#include "{SUPPORT}/host_ptx.h"\n') for n in _PTX)


class PagedCall:
    """Queries over keys in pages in any order, as Hopper's kernel is launched for them."""

    def __init__(self, size: int, head_dim: int, *, heads_last: bool) -> None:
        rng, columns = np.random.default_rng(size), COLUMNS // size
        pages = SEQUENCES * columns + 2
        self.table = rng.permutation(pages)[: SEQUENCES * columns].astype(np.int32)
        self.table = self.table.reshape(SEQUENCES, 1, columns)
        self.pages = rng.standard_normal((pages, HEADS_KV, size, head_dim)).astype(np.float16)
        if heads_last:
            self.pages = self.pages.swapaxes(1, 2).copy().swapaxes(1, 2)
        q = np.zeros((SEQUENCES, HEADS, ROWS, head_dim), np.float16)
        shape = (SEQUENCES, HEADS_KV, COLUMNS, head_dim)
        k = np.lib.stride_tricks.as_strided(self.pages, shape, (0, *self.pages.strides[1:]))
        lengths = np.full((SEQUENCES, 1), COLUMNS, np.int32)
        options = cuflash.Options(kv_lengths=lengths, enable_gqa=True)
        of_pages = map(signature, (self.pages, self.pages, self.table))
        self.problem = in_pages(describe(q, k, k, options), *of_pages)

    def in_order(self, sequence: int, head: int) -> np.ndarray:
        return np.concatenate(self.pages[self.table[sequence, 0], head])


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize(("size", "head_dim"), [(8, 64), (16, 128), (64, 64), (128, 128),
                                                (256, 64), (16, 256)])  # fmt: skip
def test_boxes_are_the_keys_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, head_dim: int, heads_last: bool
) -> None:
    call = PagedCall(size, head_dim, heads_last=heads_last)
    device = hardware.typical("sm_90")
    (step,) = choose(call.problem, device)
    config: Any = step.config
    assert (config.kernel, config.paged) == ("forward_sm90", True)
    monkeypatch.setattr(tensor_map.Maps, "at", lambda *_: b"")
    layouts = dict(in_c_order(call.problem).layouts)
    addresses = dict.fromkeys(("q", "k", "v", "out"), 0)
    maps = plan.maps_of(call.problem, layouts, config, addresses)
    assert maps is not None
    of_k = maps.layouts[1]
    assert of_k.box_rows == min(size, config.block_n)

    struct = kernel_params.STRUCTS["ForwardParams"]
    filled, (operands, *_, grid) = (
        np.zeros(1, struct),
        plan._work_of(LaunchStep(config), call.problem, layouts),
    )
    plan._fill_strides(filled[0], grid, operands, packed=False)
    filled["page_table"] = call.table.ctypes.data
    filled["page_size"], filled["num_pages"] = size, len(call.pages)
    filled["score"]["seqlen_k"] = COLUMNS
    boxes = compiled(config, tmp_path)

    found = np.zeros((512, 6), np.int32)
    rows, columns = config.block_n, config.head_dim
    for flat in range(grid.num_owners):
        entry = np.unravel_index(flat, [extent for extent, _ in grid.axes])
        k_offset = sum(i * steps[1] for i, (_, steps) in zip(entry, grid.axes, strict=True))
        head = k_offset // Layout.of(call.problem.k).batch[1]
        sequence = next(
            int(i) for i, (_, steps) in zip(entry, grid.axes, strict=True)
            if steps[list(operands).index("page_table")]
        )  # fmt: skip
        expected = call.in_order(sequence, head)
        for first_key in range(0, COLUMNS, rows):
            count = boxes(
                ctypes.c_void_p(filled.ctypes.data), flat, first_key,
                ctypes.c_void_p(found.ctypes.data),
            )  # fmt: skip
            tile = np.full((columns // 64, rows, 64), np.nan, np.float16)
            for to, column, row, *batch in found[:count].tolist():
                bring(tile, to, call.pages, of_k, (column, row, *reversed(batch)))
            keys = tile.swapaxes(0, 1).reshape(rows, -1)[: COLUMNS - first_key]
            np.testing.assert_array_equal(keys, expected[first_key:][:rows])


def compiled(config: Any, folder: Path) -> Any:
    """Return the probe for a configuration, compiled by a C++ compiler."""
    text = flatten(SUPPORT / "page_boxes.cu", (*HOST_TEXTS, *config.texts()))
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text(f'#include "{SUPPORT}/host_kernel.h"\n{text}')
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library)).boxes


def bring(
    tile: np.ndarray, to: int, pages: np.ndarray, layout: Any, coordinates: tuple[int, ...]
) -> None:
    """Copy a box of a tensor map as the copy engine does: with zeros outside the array."""
    steps = (pages.itemsize, *layout.strides)
    panel, row = divmod(to // 128, tile.shape[1])
    assert row % 8 == 0, "an atom of the swizzle has eight rows"
    whole = np.lib.stride_tricks.as_strided(pages, layout.extents, steps)
    column, first, *batch = coordinates
    box = whole[(slice(column, column + 64), slice(first, first + layout.box_rows), *batch)].T
    tile[panel, row : row + layout.box_rows] = 0
    tile[panel, row : row + box.shape[0], : box.shape[1]] = box
