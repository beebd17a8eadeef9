"""Do CuPy's kernels of 8-bit floats have the bits of the CPU path? Run by a C++ compiler."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuflash._api.quantize import _divided
from cuflash._problem.float8 import E4M3, E5M2

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch.float8 import element_body
from support.host_device import COMPILER, SUPPORT

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(params=[E4M3, E5M2], ids=str)
def kind(request: Any) -> np.dtype[Any]:
    return request.param


def on_the_host(
    folder: Path, name: str, kind: np.dtype[Any], dtype: Any
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of elements and factors that computes what CuPy's kernel computes."""
    wide = dtype == np.float64
    real = "double" if wide else "float"
    encodes = name == "quantize"
    body, library = (folder / f"{name}-{kind}-{real}{end}" for end in (".inc", ".so"))
    body.write_text(element_body(name, e4m3=kind == E4M3, wide=wide))
    words = (
        ("x", real, "unsigned char", "float") if encodes else ("bits", "unsigned char", real, real)
    )
    names = ("NAME", "INPUT", "OUTPUT", "FACTOR", "REAL", "BODY")
    macros = zip(names, (*words, real, f'"{body}"'), strict=True)
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-o", library]
    command += [f"-D{macro}={value}" for macro, value in macros]
    subprocess.run([*command, SUPPORT / "host_elements.cpp"], check=True)
    run = ctypes.CDLL(str(library)).run

    def call(inputs: np.ndarray, factors: np.ndarray) -> np.ndarray:
        outputs = np.empty(inputs.shape, np.uint8 if encodes else dtype)
        arrays = (np.ascontiguousarray(inputs), np.ascontiguousarray(factors), outputs)
        run(ctypes.c_long(inputs.size), *(ctypes.c_void_p(a.ctypes.data) for a in arrays))
        return outputs

    return call


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_every_byte_is_decoded(tmp_path: Path, kind: np.dtype[Any], dtype: Any) -> None:
    codes = np.repeat(np.arange(256, dtype=np.uint8), 3)
    factors = np.tile(np.array([1.0, 2.0**-7, 3.3], dtype), 256)
    found = on_the_host(tmp_path, "dequantize", kind, dtype)(codes, factors)
    expected = codes.view(kind).astype(dtype) * factors
    np.testing.assert_array_equal(found, expected)
    assert (np.signbit(found) == np.signbit(expected))[np.isfinite(expected)].all()


def numbers(kind: np.dtype[Any], dtype: Any) -> np.ndarray:
    """Return all 8-bit numbers, the midpoints between two, and the neighbours of all of these."""
    finite = np.arange(128, dtype=np.uint8).view(kind).astype(np.float64)
    finite = finite[np.isfinite(finite)]
    edges = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, 1.1 * finite[-1:]])
    edges = edges.astype(dtype)
    largest = ml_dtypes.finfo(dtype).max
    near = [edges, np.nextafter(edges, largest), np.nextafter(edges, -largest)]
    rng = np.random.default_rng(0)
    random = rng.standard_normal(4000) * np.exp2(rng.integers(-140, 20, 4000))
    special = [0.0, np.inf, np.nan, largest, ml_dtypes.finfo(dtype).smallest_normal]
    both = np.concatenate([*near, random.astype(dtype), np.array(special, dtype)])
    return np.concatenate([both, -both])


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize("exponent", [0, -100, 17])
def test_elements_are_encoded_alike(
    tmp_path: Path, kind: np.dtype[Any], dtype: Any, exponent: int
) -> None:
    factor = np.float32(2.0**exponent)
    x = numbers(kind, dtype)
    with np.errstate(all="ignore"):
        x = x * dtype(factor)
        expected = _divided(x, factor, kind)
    found = on_the_host(tmp_path, "quantize", kind, dtype)(x, np.full(x.shape, factor)).view(kind)
    nan = np.isnan(expected.astype(np.float32))
    assert (np.isnan(found.astype(np.float32)) == nan).all()
    assert ((found.view(np.uint8) == expected.view(np.uint8)) | nan).all()
