"""How do threads run that process several neighbouring elements? On the host, instead of CuPy."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cuflash._launch.one_pass import TYPES
from support.host_device import COMPILER, FLAGS, SUPPORT, DeviceArray, on_device

_CTYPES = {
    "float16": "_Float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long",
}  # fmt: skip
_ALIGNMENT = 512  # of a device's allocations


def probe(name: str, parameters: dict[str, Any], body: str) -> str:
    """Return the source of a probe whose threads run ``body``.

    ``parameters`` are dtypes by name, the result last. S is the type of the first, T of the last.
    """
    types = {name: _CTYPES[np.dtype(dtype).name] for name, dtype in parameters.items()}
    *_, last = types
    full = {name: f"{'' if name == last else 'const '}{own}" for name, own in types.items()}
    first, *_ = types.values()
    values = {
        "PLACES": ", ".join(f"{own}* const* at_{name}" for name, own in full.items()),
        "BODY;": f"using S = {first};\nusing T = {types[last]};\n"
        + "".join(f"{own}& {name} = *at_{name}[i];\n" for name, own in full.items())
        + body,
    }
    source = (SUPPORT / name).read_text()
    for word, value in values.items():
        source = source.replace(word, value)
    return source.replace("TYPES;", TYPES)


def on_the_host(folder: Path, parameters: dict[str, Any], body: str) -> Callable[..., None]:
    """Return a function that runs ``body`` for each element of arrays; numbers are for all."""
    text = probe("neighbours_probe.cpp", parameters, body)
    name = f"{len(list(folder.iterdir()))}"
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    subprocess.run([COMPILER, *FLAGS, "-shared", source, "-o", library], check=True)
    threads = ctypes.CDLL(str(library)).run

    def run(*values: Any) -> None:
        shape = np.broadcast_shapes(*(np.shape(value) for value in values))
        assert shape == values[-1].shape
        arrays = [*map(np.asarray, values, parameters.values())]
        places = [_addresses(np.broadcast_to(array, shape)) for array in arrays]
        threads(ctypes.c_long(places[0].size), *(ctypes.c_void_p(p.ctypes.data) for p in places))

    return run


def _addresses(array: np.ndarray) -> np.ndarray:
    """Return the addresses of all elements."""
    places = np.full(array.shape, array.ctypes.data, np.int64)
    for axis, stride in enumerate(array.strides):
        extent = [-1 if i == axis else 1 for i in range(array.ndim)]
        places += stride * np.arange(array.shape[axis]).reshape(extent)
    return np.ascontiguousarray(places)


def placed(array: np.ndarray, offset: int = 0) -> DeviceArray:
    """Copy an array to the alignment of device memory, or ``offset`` elements behind it."""
    room = np.zeros(array.nbytes + _ALIGNMENT + offset * array.itemsize, np.uint8)
    first = -room.ctypes.data % _ALIGNMENT + offset * array.itemsize
    made = room[first:][: array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return on_device(made)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that arrays have the same bits, except those of NaN."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    unsigned = np.dtype(f"u{expected.dtype.itemsize}")
    own, other = (np.ascontiguousarray(a).view(unsigned) for a in (found, expected))
    assert ((own == other) | (np.isnan(found) & np.isnan(expected))).all()
