"""Does the copy engine see an array as it lies, and is refused what it cannot walk?"""

from __future__ import annotations

import numpy as np
import pytest

from cuflash import _tensor_map
from cuflash._tensor_map import MapLayout, Maps, map_layout

HALF = np.dtype(np.float16)
DENSE = {"rows": (100, 128), "columns": (64, 2), "batch": ((6, 12800),), "box_rows": 128}


def layout(**changes):
    return map_layout(HALF, **{**DENSE, **changes})


def test_a_dense_array():
    assert layout() == MapLayout("float16", (64, 100, 1, 1, 6), (128, 16, 16, 12800), 128)


def test_batch_axes_come_innermost_first():
    found = layout(batch=((2, 4096), (3, 2048), (5, 1024)))
    assert found.extents == (64, 100, 5, 3, 2)
    assert found.strides == (128, 1024, 2048, 4096)


def test_a_broadcast_axis_has_extent_one():
    assert layout(batch=((6, 12800), (4, 0))).extents == (64, 100, 1, 1, 6)


def test_the_stride_of_a_single_row_does_not_matter():
    assert layout(rows=(1, 6)).strides == (16, 16, 16, 12800)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (100, 72)},
        {"rows": (100, 0)},
        {"rows": (100, -128)},
        {"rows": (100, 1 << 40)},
        {"rows": (1 << 32, 128)},
        {"columns": (64, 4)},
        {"columns": (64, -2)},
        {"batch": ((6, 12808),)},
        {"batch": ((6, -12800),)},
        {"batch": ((2, 8192), (2, 4096), (2, 2048), (2, 1024))},
    ],
    ids=str,
)
def test_what_the_engine_cannot_walk(changes):
    assert layout(**changes) is None


def test_maps_are_encoded_once_for_each_set_of_addresses(monkeypatch):
    encoded = []

    def encode(layout, address):
        encoded.append((layout, address))
        return f"<{layout.box_rows} {address}>".encode()

    monkeypatch.setattr(_tensor_map, "encode", encode)
    maps = Maps((layout(), layout(box_rows=64)))
    for _ in range(2):
        assert maps.at((256, 512)) == b"<128 256><64 512>"
        assert maps.at((256, 1024)) == b"<128 256><64 1024>"
    assert len(encoded) == 4


def test_the_number_of_kept_maps_is_bounded(monkeypatch):
    monkeypatch.setattr(_tensor_map, "encode", lambda _, address: str(address).encode())
    monkeypatch.setattr(_tensor_map, "_CACHED_MAPS", 3)
    maps = Maps((layout(),))
    for address in range(16, 16 * 10, 16):
        assert maps.at((address,)) == str(address).encode()
        assert len(maps._known) <= 3
