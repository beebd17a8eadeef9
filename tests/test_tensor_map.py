"""Does the copy engine see an array in its layout, and are arrays refused that it cannot load?"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash._jit import driver
from cuflash._launch import tensor_map
from cuflash._launch.tensor_map import MapLayout, Maps, map_layout

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


C_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64,
    *(ctypes.POINTER(ctypes.c_uint64),) * 2,
    *(ctypes.POINTER(ctypes.c_uint32),) * 2,
    *(ctypes.c_int,) * 4,
)  # fmt: skip

C_REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)

C_STREAM_ID = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64))


class Driver:
    """A simulated driver library: takes arguments as C does, writes the number of the call.

    It writes an address over the first bytes of a map.
    """

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[dict[str, Any]] = []
        self.cuTensorMapEncodeTiled = C_ENCODE(self._encode)
        self.cuTensorMapReplaceAddress = C_REPLACE(self._replace)
        self.cuStreamGetId = C_STREAM_ID(self._stream_id)

    def _stream_id(self, stream, number):
        number[0] = stream - (1 << 47)
        return self.error

    def _replace(self, found, address):
        assert found % 64 == 0
        ctypes.memmove(found, address.to_bytes(8, "big"), 8)
        return self.error and address == 48

    def _encode(
        self,
        found,
        dtype,
        rank,
        address,
        extents,
        strides,
        box,
        steps,
        interleave,
        swizzle,
        l2,
        fill,
    ):
        assert found % 64 == 0
        self.calls.append(
            {
                "dtype": dtype, "address": address, "extents": extents[:rank],
                "strides": strides[: rank - 1], "box": box[:rank], "steps": steps[:rank],
                "interleave": interleave, "swizzle": swizzle, "l2": l2, "fill": fill,
            }
        )  # fmt: skip
        ctypes.memset(found, len(self.calls), 128)
        return self.error


@pytest.fixture
def load(monkeypatch):
    """Return a function that replaces the driver by a library."""

    def put(library):
        driver.function.cache_clear()
        monkeypatch.setattr(driver.ctypes, "CDLL", library)

    yield put
    driver.function.cache_clear()


def test_what_the_driver_is_given(load):
    own = Driver()
    load(lambda name: own)
    assert driver.encodes_tensor_maps()
    address = (1 << 47) + 256
    assert tensor_map.encode(layout(), address) == b"\x01" * 128
    assert tensor_map.encode(layout(rows=(100, 1 << 36), box_rows=64), 512) == b"\x02" * 128
    alike = {
        "dtype": 6, "steps": [1] * 5, "interleave": 0, "swizzle": 3, "l2": 3, "fill": 0,
        "extents": [64, 100, 1, 1, 6],
    }  # fmt: skip
    assert own.calls == [
        {**alike, "address": address, "strides": [128, 16, 16, 12800], "box": [64, 128, 1, 1, 1]},
        {**alike, "address": 512, "strides": [1 << 36, 16, 16, 12800], "box": [64, 64, 1, 1, 1]},
    ]
    tensor_map.encode(map_layout(np.dtype(bfloat16), **DENSE), 1024)
    assert own.calls[-1]["dtype"] == 9


def test_what_the_driver_refuses(load):
    load(lambda name: Driver(error=1))
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled: error 1 for MapLayout.* 0x30"):
        tensor_map.encode(layout(), 48)


def test_maps_are_encoded_once_and_follow_the_addresses(load):
    own = Driver()
    load(lambda name: own)
    maps = Maps((layout(), layout(box_rows=64)))
    for addresses in ((256, 512), (256, 1024), ((1 << 47) + 16, 32), (256, 512)):
        first, second = (address.to_bytes(8, "big") for address in addresses)
        assert maps.at(addresses) == first + b"\x01" * 120 + second + b"\x02" * 120
    assert [call["address"] for call in own.calls] == [256, 512]


def test_an_address_that_the_driver_refuses(load):
    own = Driver()
    load(lambda name: own)
    maps = Maps((layout(),))
    maps.at((64,))
    own.error = 1
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress: error 1 for 0x30"):
        maps.at((48,))


def test_the_number_of_a_stream(load):
    counters = pytest.importorskip("cuflash._launch.tile_counters", reason="CuPy is not installed")
    driver = Driver()
    load(lambda name: driver)
    assert counters._stream_number((1 << 47) + 5) == 5
    assert counters._stream_number((1 << 48) + 5) == (1 << 47) + 5
    driver.error = 201
    assert counters._stream_number((1 << 47) + 5) is None


def without_library(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize("library", [without_library, lambda name: SimpleNamespace()])
def test_without_a_driver_or_with_an_old_one(load, library):
    load(library)
    assert not driver.encodes_tensor_maps()


def test_enumerations_are_those_of_cuda_h():
    package = importlib.util.find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package else []
    headers = [path for folder in folders for path in Path(folder).glob("*/include/cuda.h")]
    if not headers:
        pytest.skip("no CUDA headers are installed")
    values = {}
    for members in re.findall(r"enum \w+ \{([^}]*)\}", headers[0].read_text(encoding="utf-8")):
        names = re.findall(r"^ {4}CU_TENSOR_MAP_(\w+)", members, flags=re.MULTILINE)
        values |= {name: value for value, name in enumerate(names)}
    for name, value in tensor_map._DATA_TYPES.items():
        stored = "uint8" if name.startswith("float8") else name
        assert value == values[f"DATA_TYPE_{stored.upper()}"]
    for name in ("INTERLEAVE_NONE", "SWIZZLE_128B", "L2_PROMOTION_L2_256B", "FLOAT_OOB_FILL_NONE"):
        assert getattr(tensor_map, f"_{name}") == values[name]
