"""Are arrays of ranks added, rounded and copied right, in as few instructions as that takes?

A C++ compiler runs the kernel's text, for the places that CuPy would give to its threads. NVRTC
compiles it, too, which needs no device.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from cuflash._arrays import rounded
from cuflash._launch import one_pass
from cuflash._launch.one_pass import NEIGHBOURS, body, contiguous, in_dtype, write_sum
from support.nvrtc import compiler_of

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER
from support.neighbours import assert_same_bits, on_the_host, placed, probe

BF16 = np.dtype(bfloat16)
#: (dtype of parts, dtype of totals)
DTYPES = [
    (np.float32, BF16), (np.float32, np.float16), (np.float32, np.float32),
    (np.float64, np.float64), (np.float64, BF16), (np.float64, np.float16),
]  # fmt: skip
OF_DTYPES = pytest.mark.parametrize(
    ("of_parts", "of_total"), DTYPES, ids=lambda dtype: np.dtype(dtype).name
)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Return numbers of many sizes, with ties of 16 bits and non-finite numbers among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 12, shape))
    ties = 1 + rng.integers(0, 2**12, shape) * 2.0**-12 + rng.integers(-1, 2, shape) * 2.0**-40
    x = np.where(rng.random(shape) < 0.3, ties, x)
    special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], shape)
    return np.where(rng.random(shape) < 0.02, special, x).astype(dtype)


def expected_of(parts: tuple[np.ndarray, ...], dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return rounded(functools.reduce(operator.add, parts), dtype)


@OF_DTYPES
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple),
    terms=st.integers(1, 2),
    places=st.sampled_from(["new", "first", "last"]),
)
def test_each_element_is_rounded_once(of_parts, of_total, shape, terms, places):
    parts = tuple(numbers(shape, of_parts, seed) for seed in range(terms))
    expected = expected_of(parts, of_total)
    in_place = places != "new" and np.dtype(of_parts) == of_total
    total = parts[-(places == "last")] if in_place else np.zeros(shape, of_total)
    with np.errstate(all="ignore"):
        write_sum(total, *parts)
    assert_same_bits(total, expected)


@OF_DTYPES
@pytest.mark.parametrize("terms", [1, 2])
def test_only_what_has_another_dtype_is_copied(of_parts, of_total, terms):
    parts = tuple(numbers((3, 8), of_parts, seed) for seed in range(terms))
    expected = expected_of(parts, of_total)
    with np.errstate(all="ignore"):
        total = in_dtype(of_total, *parts)
    assert_same_bits(total, expected)
    assert (total is parts[0]) == (np.dtype(of_parts) == of_total)


def parameters(types: tuple[Any, ...]) -> dict[str, Any]:
    """Return the types of parts and of the total by parameter name."""
    return dict(zip((*("a", "b")[: len(types) - 1], "total"), types, strict=True))


@pytest.fixture
def counts(tmp_path, monkeypatch) -> list[int]:
    """Run kernels on the host; yield how many neighbours each of their threads took."""
    found: list[int] = []

    def kernel(_: Any, terms: int, count: int) -> Any:
        def run(*arrays: np.ndarray, block_size: int) -> None:
            assert block_size % 32 == 0
            assert len(arrays) == terms + 1
            assert len({a.shape for a in arrays}) == 1
            found.append(count)
            own = parameters(tuple(a.dtype for a in arrays))
            on_the_host(tmp_path, own, body(terms, count))(*arrays)

        return run

    monkeypatch.setattr(one_pass, "_kernel", kernel)
    return found


#: How arrays of ranks are cut, and whether a thread then takes several elements.
CUTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "all": (lambda a: a, True),
    "some rows": (lambda a: a[..., 2:5, :], True),
    "some heads": (lambda a: a[:, 1:], True),
    "rows first": (lambda a: np.moveaxis(a, -2, 0), True),
    "no row": (lambda a: a[..., 2:2, :], True),
    "features that are no multiple": (lambda a: a[..., :12], False),
    "features in the middle": (lambda a: a[..., 1:9], False),
    "every other feature": (lambda a: a[..., ::2], False),
    "features not last": (lambda a: a.swapaxes(-1, -2), False),
}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_threads_write_all_elements_and_no_other(counts, cut, terms):
    of_cut, several = CUTS[cut]
    parts = tuple(placed(numbers((2, 3, 6, 16), np.float32, seed)) for seed in range(terms))
    total = placed(np.full((2, 3, 6, 16), 7, np.float16))
    expected = np.array(total)
    of_cut(expected)[...] = expected_of(tuple(map(of_cut, parts)), np.float16)
    one_pass._by_kernel(of_cut(total), *map(of_cut, parts))
    assert_same_bits(np.asarray(total), expected)
    assert counts == [NEIGHBOURS if several else 1]


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_arrays_on_a_gpu(cut, terms):
    import cupy

    of_cut, _ = CUTS[cut]
    shape = (2, 3, 6, 16)
    for of_total in (BF16, np.float16, np.float32):
        parts = [numbers(shape, np.float32, seed) for seed in range(terms)]
        expected = np.full(shape, 7, of_total)
        of_cut(expected)[...] = expected_of(tuple(map(of_cut, parts)), of_total)
        total = cupy.asarray(np.full(shape, 7, of_total))
        write_sum(of_cut(total), *(of_cut(cupy.asarray(part)) for part in parts))
        assert_same_bits(cupy.asnumpy(total), expected)
    array = of_cut(cupy.asarray(parts[0]))
    assert contiguous(array).flags.c_contiguous
    np.testing.assert_array_equal(cupy.asnumpy(contiguous(array)), of_cut(parts[0]))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("of_total", [np.float16, np.float32])
@pytest.mark.parametrize("which", range(3))
def test_what_a_thread_cannot_read_at_once(counts, which, of_total):
    """Arrays that are not aligned to 16 bytes are added by one element per thread."""
    for behind in range(4, 20, 4):
        parts = [numbers((3, 16), np.float32, seed) for seed in range(2)]
        expected = expected_of(tuple(parts), of_total)
        arrays = [*parts, np.zeros((3, 16), of_total)]
        a, b, total = (placed(x, behind // x.itemsize * (i == which)) for i, x in enumerate(arrays))
        one_pass._by_kernel(total, a, b)
        assert_same_bits(np.asarray(total), expected)
    assert counts == [1, 1, 1, NEIGHBOURS]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("first", [True, False])
def test_a_sum_in_place(counts, first):
    parts = [placed(numbers((3, 6, 16), np.float32, seed)) for seed in range(2)]
    expected = expected_of(tuple(map(np.array, parts)), np.float32)
    total = parts[not first]
    one_pass._by_kernel(total, *parts)
    assert_same_bits(np.asarray(total), expected)
    assert counts == [NEIGHBOURS]


#: The functions of CuPy that copies call.
CUPY = SimpleNamespace(
    ascontiguousarray=lambda array: array,  # already contiguous
    empty=lambda shape, dtype: placed(np.zeros(shape, dtype)),
)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "dtype", [BF16, np.float32, np.float64, bool, np.int8, np.uint16, np.complex64], ids=str
)
def test_copies_keep_bits(counts, monkeypatch, dtype):
    """Copies keep all bits, also those of NaN."""
    dtype = np.dtype(dtype)
    most = 2 if dtype.kind == "b" else 256
    raw = np.random.default_rng(0).integers(0, most, (2, 6, 16 * dtype.itemsize), np.uint8)
    array = placed(raw.view(dtype))
    rows_first = np.moveaxis(array, -2, 0)
    monkeypatch.setattr(one_pass, "array_module", lambda _: CUPY)
    assert contiguous(array) is array
    assert not counts
    copy = contiguous(rows_first)
    assert copy.flags.c_contiguous
    assert copy.dtype == dtype
    assert np.asarray(copy).tobytes() == np.ascontiguousarray(rows_first).tobytes()
    assert counts == [NEIGHBOURS]


OF_SUMS = [(np.float32, BF16), (np.float32, np.float32), (np.float64, np.float64)]
COMPILED = [
    *((types, NEIGHBOURS) for pair in OF_SUMS for types in (pair, (pair[0], *pair))),
    *(((f"u{n}", f"u{n}"), NEIGHBOURS) for n in (1, 2, 4, 8)),
    ((np.float32, np.float32, BF16), 1),
]


def on_a_device(types: tuple[Any, ...], count: int) -> str:
    return probe("neighbours_probe.cu", parameters(types), body(len(types) - 1, count))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_it_compiles_without_a_stack(generation, arch):
    compiler = compiler_of(generation)
    for types, count in COMPILED:
        _, log = compiler(
            on_a_device(types, count), ("--std=c++17", f"-arch={arch}", "--ptxas-options=-v")
        )
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.nvrtc
@pytest.mark.parametrize(("types", "count"), COMPILED)
def test_an_instruction_moves_all_that_it_can(types, count):
    """Beside addresses, a thread reads and writes 16 bytes with each instruction."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(on_a_device(types, count), "probe.cu", (), ())
    nvrtc.compileProgram(program, ("--std=c++17", "-arch=compute_80"))
    ptx = nvrtc.getPTX(program).decode()
    *parts, total = (-(-count * np.dtype(dtype).itemsize // 16) for dtype in types)
    assert len(re.findall(r"\bst\.", ptx)) == total
    assert len(re.findall(r"\bld\.(?!param)", ptx)) == sum(parts) + len(types)
