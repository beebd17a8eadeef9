"""Is 2^x of the float64 kernels within one unit in the last place? Against 50 digits.

The header is compiled for the host and for the device. Additions and fused multiply-additions have
the same bits on both.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash._jit import compilation
from cuflash._jit import source as jit_source

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER, SUPPORT

LEAST_NORMAL = -1022.0
#: x -> 2^x by the table in memory, 2^x by the table in registers, and 2^(x FACTOR - REFERENCE).
Evaluate = Callable[[np.ndarray], np.ndarray]
FACTOR, REFERENCE = 0.18033688011112042, 5 + 1 / 32


class Probed(ctypes.Structure):
    """Mirrors the struct of the probe."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "by_memory", "by_lanes", "of_products")),
        ("factor", ctypes.c_double),
        ("reference", ctypes.c_double),
        ("count", ctypes.c_int),
    ]


def whole_warps(x: np.ndarray) -> np.ndarray:
    return np.resize(x, -(-x.size // 32) * 32)


def source() -> str:
    return jit_source.flatten(str(SUPPORT / "exp2_probe.cu"))


def on_the_host(folder: Path, text: str) -> Evaluate:
    code, library = folder / "probe.cpp", folder / "probe.so"
    macros = "#define HOST_KERNEL probe\n#define HOST_PARAMS Exp2Probe\n"
    code.write_text(
        f'#include "{SUPPORT}/host_kernel.h"\n{macros}{text}#include "{SUPPORT}/host_run.h"\n'
    )
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", code, "-o", library]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run

    def evaluate(x: np.ndarray) -> np.ndarray:
        given = whole_warps(x)
        found = np.full((3, given.size), np.nan)
        addresses = (a.ctypes.data for a in (given, *found))
        run(1, 32, 1, ctypes.byref(Probed(*addresses, FACTOR, REFERENCE, given.size)))
        return found[:, : x.size]

    return evaluate


def on_the_device() -> Evaluate:
    import cupy

    kernel = cupy.RawModule(code=source(), options=compilation.OPTIONS).get_function("probe")

    def evaluate(x: np.ndarray) -> np.ndarray:
        given = cupy.asarray(whole_warps(x))
        found = cupy.full((3, given.size), np.nan)
        addresses = (a.data.ptr for a in (given, *found))
        arguments = Probed(*addresses, FACTOR, REFERENCE, given.size)
        kernel((1,), (256,), (np.array(bytes(arguments), f"V{ctypes.sizeof(Probed)}"),))
        return cupy.asnumpy(found)[:, : x.size]

    return evaluate


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def evaluate(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    if request.param == "device":
        return on_the_device()
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return on_the_host(tmp_path_factory.mktemp("probe"), source())


def units_off(x: np.ndarray, found: np.ndarray, factor: float = 1, reference: float = 0) -> float:
    """Return the largest error in units in the last place of 2^(x factor - reference)."""
    largest = Decimal(0)
    with localcontext() as context:
        context.prec = 50
        ln_2 = Decimal(2).ln()
        for argument, result in zip(x.tolist(), found.tolist(), strict=True):
            exponent = Decimal(argument) * Decimal(factor) - Decimal(reference)
            whole = math.floor(exponent)
            fraction = (exponent - whole) * ln_2
            scaled = Decimal(math.ldexp(result, -whole - 60)) * 2**60
            largest = max(largest, abs(scaled - fraction.exp()) * 2**52)
    return float(largest)


def arguments() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    midpoints = rng.integers(-32 * 1022, 32 * 3, 3000) / 32 + 1 / 64
    small = np.geomspace(1e-300, 2, 3000)
    # At the table's least exact entry, with the largest r.
    corner = 1 / 64 - np.random.default_rng(8).random(20000) / 2048
    corner[::2] *= -1
    return {
        "weights": -rng.exponential(20, 20000),
        "near the largest": -rng.random(10000),
        "whole range": rng.uniform(LEAST_NORMAL, 1023, 10000),
        "by the table's least exact entry": np.arange(-20, 0).repeat(500)
        + (30 + rng.uniform(-0.5, 0.5, 10000)) / 32,
        "worst corner": np.arange(-20, 0).repeat(1000) + 30 / 32 + corner,
        "where r changes sign": np.concatenate(
            [np.nextafter(midpoints, -np.inf), midpoints, np.nextafter(midpoints, np.inf)]
        ),
        "near 0": np.concatenate([small, -small]),
        "least normal": LEAST_NORMAL + rng.random(2000) / 16,
    }


@pytest.mark.parametrize("name", arguments())
def test_one_unit_in_the_last_place(name: str, evaluate: Evaluate) -> None:
    x = arguments()[name]
    by_memory, by_lanes, _ = evaluate(x)
    np.testing.assert_array_equal(by_memory, by_lanes)
    assert units_off(x, by_memory) <= 1


@pytest.mark.parametrize("name", sorted(set(arguments()) - {"least normal"}))
def test_so_are_products_less_a_reference(name: str, evaluate: Evaluate) -> None:
    x = (arguments()[name] + REFERENCE) / FACTOR
    assert units_off(x, evaluate(x)[2], FACTOR, REFERENCE) <= 1


def test_products_that_are_no_exponents(evaluate: Evaluate) -> None:
    zeros = np.array([-np.inf, -np.finfo(float).max, -1e300, -(2.0**47), -(2.0**31), -1e5, -6000])
    np.testing.assert_array_equal(evaluate(zeros)[2], 0)
    assert np.isnan(evaluate(np.array([np.nan, np.inf]))[2]).all()


def test_powers_of_the_table_are_rounded_to_nearest(evaluate: Evaluate) -> None:
    x = np.arange(-32 * 40, 33) / 32
    assert units_off(x, evaluate(x)[0]) <= 0.5


def test_the_ends_of_the_range(evaluate: Evaluate) -> None:
    whole = np.arange(LEAST_NORMAL, 1024)
    np.testing.assert_array_equal(evaluate(whole)[:2], [np.ldexp(1.0, whole.astype(int))] * 2)
    zeros = np.array([-np.inf, -np.finfo(float).max, -1e300, -(2.0**47), -(2.0**31), -1e5, -1074,
                      -1022.5, LEAST_NORMAL - 2.0**-10])  # fmt: skip
    np.testing.assert_array_equal(evaluate(zeros)[:2], np.zeros((2, zeros.size)))
    ones = np.array([0.0, -0.0, 5e-324, -5e-324])
    np.testing.assert_array_equal(evaluate(ones)[:2], np.ones((2, ones.size)))
    invalid = np.array([np.nan, -np.nan, np.inf])
    assert np.isnan(evaluate(invalid)[:2]).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_it_compiles_without_a_stack(arch: str) -> None:
    _, log = compilation._nvrtc(
        source(), (*compilation.OPTIONS, f"-arch={arch}", "--ptxas-options=-v")
    )
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0x3fef9301d0125b51", "0x3fef9301d0125b52"),
        ("0x1.62e42fefa39efp-1", "0x1.62e42fefa39e0p-1"),
        ("0x1.4309557c7947ap-13", "0x1.0000000000000p-13"),
    ],
)
def test_a_wrong_constant_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    text = source()
    assert right in text
    evaluate = on_the_host(tmp_path, text.replace(right, wrong, 1))
    x = arguments()["near the largest"]
    assert units_off(x, evaluate(x)[0]) > 1
