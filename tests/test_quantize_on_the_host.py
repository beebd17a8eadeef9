"""Does the kernel that quantises give the bits of the CPU path? Run by a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._api.quantize import _rotated, _signs
from cuflash._problem.float8 import E4M3, E5M2
from support.float8 import BF16, bits, dequantized

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._kernels.quantize import WIDTHS, block_rows
from cuflash._launch import float8
from support.host_device import COMPILER, HostDevice, host_device, on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def device(tmp_path_factory: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path_factory.mktemp("kernels"), capability=90) as found:
        yield found


def numbers(dtype: Any, d: int, rows: int = 100) -> np.ndarray:
    """Return numbers of many sizes, with non-finite numbers and a matrix of zeros."""
    rng = np.random.default_rng(d)
    x = rng.standard_normal((2, 3, rows, d)) * np.exp2(rng.integers(-9, 6, (2, 3, rows, d)))
    x[0, 0, 0, :4] = [np.nan, np.inf, 0.0, -0.0]
    x[1, 1] = 0
    return x.astype(dtype)


def check(x: np.ndarray, rows: int, kind: Any) -> None:
    expected = cuflash.quantize(x, per=rows or "matrix", dtype=kind)
    made = float8.rounded_in_two_passes(on_device(x), rows, None, kind)
    assert made is not None
    array, scale = made
    assert bits(scale) == bits(expected.scale)
    nan = np.isnan(expected.array.astype(np.float32))
    assert (np.isnan(array.astype(np.float32)) == nan).all()
    assert ((array.view(np.uint8) == expected.array.view(np.uint8)) | nan).all()


@pytest.mark.long
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=str)
@pytest.mark.parametrize("d", WIDTHS)
def test_bits_are_those_of_the_cpu(device: HostDevice, kind: Any, dtype: Any, d: int) -> None:
    for rows in (0, 1, 16, 64, 128, 1 << 40):
        check(numbers(dtype, d), rows, kind)
    assert device.launched.count("cuflash_quantize") >= 10


@pytest.mark.long
@pytest.mark.parametrize("d", WIDTHS)
def test_a_thread_block_has_more_of_many_rows(device: HostDevice, d: int) -> None:
    del device
    assert 64 <= block_rows(d, 600) == block_rows(d, 1 << 40) < 600
    for rows in (0, 512):
        check(numbers(BF16, d, 600), rows, E4M3)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("d", WIDTHS)
def test_rotations_are_those_of_the_cpu(device: HostDevice, dtype: Any, d: int) -> None:
    """Rotations equal the CPU's up to their order of sums, which rounds few elements otherwise."""
    x = np.random.default_rng(1).standard_normal((2, 70, d)).astype(dtype)
    expected = cuflash.quantize(x, rotation=7, per=32)
    made = float8.rounded_in_two_passes(on_device(x), 32, _signs(7, d), E4M3)
    assert made is not None
    assert bits(made[1]) == bits(expected.scale)
    off = made[0].view(np.uint8) != expected.array.view(np.uint8)
    assert off.mean() < 0.001
    turned = _rotated(x, _signs(7, d), np)
    assert (
        abs(dequantized(np.asarray(made[0]), made[1]) - turned) <= 2.0**-4 * abs(turned) + 0.01
    ).all()


def test_heads_may_lie_beside_features(device: HostDevice) -> None:
    del device
    x = numbers(BF16, 64)
    expected = float8.rounded_in_two_passes(on_device(x), 16, None, E4M3)
    beside = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    found = float8.rounded_in_two_passes(on_device(beside), 16, None, E4M3)
    assert found is not None
    assert expected is not None
    assert [bits(a) for a in found] == [bits(a) for a in expected]


def test_what_it_does_not_serve(device: HostDevice) -> None:
    del device
    for x in (np.ones((3, 80)), np.ones((3, 80), np.float32), np.ones((0, 64), np.float32)):
        assert float8.rounded_in_two_passes(on_device(x), 0, None, E4M3) is None
