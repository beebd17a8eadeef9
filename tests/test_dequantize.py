"""Are operands of 8 bits dequantised on a GPU as on a CPU, in as few instructions as that takes?

A C++ compiler runs the kernel's text, for the places that CuPy would give to its threads. NVRTC
compiles it, too, which needs no device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuflash._api import float8 as api_float8
from cuflash._problem.float8 import E4M3, E5M2, FLOAT8, RESULTS
from support.float8 import BF16, of_8_bits, on_gpu, on_host, powers_of_two
from support.nvrtc import compiler_of

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import float8
from cuflash._launch.one_pass import NEIGHBOURS
from support.host_device import COMPILER
from support.neighbours import assert_same_bits, on_the_host, placed, probe

OF_KINDS = pytest.mark.parametrize("kind", FLOAT8, ids=str)


class Layout(NamedTuple):
    """The layout of the matrices in an array (2, 40, 3, 32)."""

    cut: Callable[[Any], Any]
    axes: tuple[int, int]
    several: bool  # does a thread take several elements?


LAYOUTS = {
    "rows beside features": Layout(lambda a: a.swapaxes(1, 2), (-2, -1), True),
    "heads beside features": Layout(lambda a: a, (-3, -1), True),
    "some rows": Layout(lambda a: a[:, 3:20], (-3, -1), True),
    "the middle of features": Layout(lambda a: a[..., 8:24], (-3, -1), True),
    "no row": Layout(lambda a: a[:, 7:7], (-3, -1), True),
    "features that begin between two words": Layout(lambda a: a[..., 4:20], (-3, -1), False),
    "features that are no multiple": Layout(lambda a: a[..., :20], (-3, -1), False),
    "features first": Layout(lambda a: a.transpose(0, 3, 2, 1), (-1, 1), False),
}
OF_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)
SCALES = {
    "none": None,
    "a number": 0.3,
    "of the call": np.array([[0.3]]),
    "of heads": powers_of_two((3, 1, 1), 1),
    "of entries": powers_of_two((2, 1, 1, 1), 2) * np.float32(1.1),
    "of blocks of rows": powers_of_two((2, 3, 5, 1), 3),
}


def codes(kind: Any) -> np.ndarray:
    """Return an array (batch, rows, heads, features) that has all numbers of 8 bits."""
    x = of_8_bits((2, 40, 3, 32), 0, kind)
    x[1, :8].reshape(-1)[:256] = np.arange(256, dtype=np.uint8).view(kind)
    return x


def scale_of(name: str, layout: Layout) -> Any:
    """Return a scale that fits the matrices of a layout, with blocks of 8 rows."""
    scale, (a, _) = SCALES[name], layout.axes
    blocks = -(-layout.cut(np.empty((2, 40, 3, 32))).shape[a] // 8)
    return scale[:, :, :blocks] if name == "of blocks of rows" else scale


@pytest.fixture
def counts(tmp_path, monkeypatch) -> list[int]:
    """Run kernels on the host; yield how many neighbours each of their threads took."""
    found: list[int] = []

    def dequantizer(count: int, *, e4m3: bool, wide: bool) -> Any:
        body = float8.body_of_neighbours(count, e4m3=e4m3, wide=wide)
        real = np.float64 if wide else np.float32

        def run(factor: Any, codes: Any, out: Any, *, block_size: int) -> None:
            assert block_size % 32 == 0
            assert np.shape(factor)[-1:] in ((), (1,))  # neighbours share one factor
            found.append(count)
            parameters = {"factor": real, "codes": np.uint8, "out": out.dtype}
            on_the_host(tmp_path, parameters, body)(factor, codes, out)

        return run

    cupy = SimpleNamespace(empty=lambda shape, dtype: placed(np.zeros(shape, dtype)))
    monkeypatch.setattr(float8, "_dequantizer", dequantizer)
    monkeypatch.setattr(float8, "refuse_capture", lambda *_: None)
    monkeypatch.setattr(api_float8, "is_cupy", lambda _: True)
    monkeypatch.setattr(api_float8, "array_module", lambda _: cupy)
    return found


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("scale", SCALES)
@OF_LAYOUTS
def test_bits_are_those_of_a_cpu(counts, monkeypatch, layout, scale):
    own = LAYOUTS[layout]
    factor = scale_of(scale, own)
    for kind, dtype in ((E4M3, np.float16), (E5M2, np.float32), (E4M3, np.float64)):
        array = codes(kind)
        found = api_float8.times("k", own.cut(placed(array)), factor, own.axes, np.dtype(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(api_float8, "is_cupy", lambda _: False)
            expected = api_float8.times("k", own.cut(array), factor, own.axes, np.dtype(dtype))
        assert_same_bits(np.asarray(found), expected)
    assert counts == 3 * [NEIGHBOURS if own.several else 1]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@OF_LAYOUTS
@OF_KINDS
def test_bits_on_a_gpu(kind, layout, scale):
    import cupy

    own = LAYOUTS[layout]
    factor = scale_of(scale, own)
    array = codes(kind)
    for dtype in (*RESULTS, np.dtype(np.float64)):
        there = own.cut(on_gpu(cupy, array)), on_gpu(cupy, factor)
        found = api_float8.times("k", *there, own.axes, dtype)
        expected = api_float8.times("k", own.cut(array), factor, own.axes, dtype)
        assert_same_bits(on_host(found), expected)


def on_a_device(count: int, kind: Any, dtype: Any) -> str:
    wide = dtype == np.float64
    parameters = {
        "factor": np.float64 if wide else np.float32, "codes": np.uint8, "out": dtype,
    }  # fmt: skip
    body = float8.body_of_neighbours(count, e4m3=kind == E4M3, wide=wide)
    return probe("neighbours_probe.cu", parameters, body)


OF_RESULTS = pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64], ids=str)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@OF_KINDS
def test_it_compiles_without_a_stack(generation, arch, kind):
    compiler = compiler_of(generation)
    for dtype in (BF16, np.float32, np.float64):
        for count in (1, NEIGHBOURS):
            options = ("--std=c++17", f"-arch={arch}", "--ptxas-options=-v")
            _, log = compiler(on_a_device(count, kind, dtype), options)
            assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.nvrtc
@OF_KINDS
@OF_RESULTS
def test_an_instruction_moves_all_that_it_can(kind, dtype):
    """Beside addresses and the factor, a thread reads its codes at once and writes 16 bytes."""
    from cupy_backends.cuda.libs import nvrtc

    source = on_a_device(NEIGHBOURS, kind, dtype)
    program = nvrtc.createProgram(source, "probe.cu", (), ())
    nvrtc.compileProgram(program, ("--std=c++17", "-arch=compute_80"))
    ptx = nvrtc.getPTX(program).decode()
    stored = NEIGHBOURS * np.dtype(dtype).itemsize
    assert len(re.findall(r"\bst\.", ptx)) == -(-stored // 16)
    assert len(re.findall(r"\bld\.(?!param)", ptx)) == 3 + 2
