"""Are masks, block ranges, tiles and fragments right by themselves, without running attention?

Where there is a C++ compiler, the range checks also run on the host, from the same text.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash._jit import compilation
from cuflash._jit import source as jit_source
from cuflash._kernels import params as kernel_params
from cuflash._kernels.config import fields_text
from cuflash._launch.sections import even_sections

SUPPORT = Path(__file__).parent / "support"
COMPILER = shutil.which("g++") or shutil.which("clang++")
FEATURES = [
    {"window_left": left, "window_right": right, "offset": offset, "q_lengths": lengths,
     "kv_lengths": lengths, "block_m": block_m, "block_n": block_n}
    for (left, right), offset, lengths, (block_m, block_n) in [
        ((False, False), "value", "none", (16, 32)),
        ((False, True), "value", "none", (32, 16)),
        ((True, False), "value", "none", (16, 16)),
        ((True, True), "value", "none", (16, 48)),
        ((True, True), "lengths", "int64", (32, 32)),
        ((True, True), "int64", "int64", (48, 16)),
        ((False, True), "int64", "none", (16, 16)),
    ]
]  # fmt: skip


NUM_PROBLEMS = 15_000
#: Integers that are no lengths, some of which would be lengths if cut to 32 bits.
FAR = (-(1 << 62), 1 << 62, -(1 << 32) + 7, (1 << 32) + 7, -(1 << 31) - 1)


def flattened(name: str, fields: dict[str, Any]) -> str:
    """Return a probe for these fields, with its includes flattened."""
    return jit_source.flatten(str(SUPPORT / name), (fields_text(fields),))


def random_problems(rng: np.random.Generator, address: Callable[[np.ndarray], int]) -> Any:
    """Return the parameters of many small problems, and the arrays that they point into."""
    n = NUM_PROBLEMS
    extents = rng.integers(1, 100, (n, 2))
    far = rng.choice(FAR, (3, n))
    near = [*rng.integers(-3, 110, (2, n)), rng.integers(-120, 120, n)]
    *lengths, offsets = np.where(rng.random((3, n)) < 0.05, far, near)
    lengths = np.stack(lengths, -1)
    windows = np.where(rng.random((n, 2)) < 0.1, 1 << 60, rng.integers(0, 60, (n, 2)))
    # The probe reads entry 1, which lies one stride behind the pointer.
    arrays = [np.pad(a, 8) for a in (*lengths.T, offsets)]
    problems = np.zeros(n, kernel_params.SCORE)
    strides = {"q_lengths": 2, "kv_lengths": 3, "offset": 5}
    for (name, stride), array in zip(strides.items(), arrays, strict=True):
        problems[name] = address(array) + 8 * (np.arange(n) + 8 - stride)
        problems[f"{name}_strides"]["axis"][:, 0] = stride
    problems["seqlen_q"], problems["seqlen_k"] = extents.T
    problems["q_length"], problems["kv_length"] = np.clip(lengths, 0, extents).T
    problems["window_left"], problems["window_right"] = windows.T
    small = np.clip(offsets, -(1 << 60), 1 << 60)
    problems["offset_value"] = small
    limit = 1 << 30
    problems["diagonal_begin"] = np.clip(small - windows[:, 0], -limit, limit)
    problems["diagonal_end"] = np.clip(small + windows[:, 1] + 1, -limit, limit)
    return problems, arrays


def offenders(problems: np.ndarray, wrong: np.ndarray) -> str:
    """Return the number of wrong problems, and the fields of the first."""
    names = ("seqlen_q", "seqlen_k", "q_length", "kv_length", "offset_value", "window_left",
             "window_right")  # fmt: skip
    first = problems[np.flatnonzero(wrong)[0]]
    return (
        f"{np.count_nonzero(wrong)} wrong, first { ({name: int(first[name]) for name in names}) }"
    )


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(map(str, f.values())))
def test_visibility_and_block_ranges_on_the_host(features: Any, tmp_path: Path) -> None:
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    text = f'#include "{SUPPORT / "host_cuda.h"}"\n' + flattened("score_probe.cu", features)
    source.write_text(text)
    command = [COMPILER, "-O2", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    problems, _arrays = random_problems(np.random.default_rng(1), lambda a: a.ctypes.data)
    wrong = np.zeros(NUM_PROBLEMS, np.int32)
    probe = ctypes.CDLL(str(library)).probe
    probe(problems.ctypes.data_as(ctypes.c_void_p), NUM_PROBLEMS,
          wrong.ctypes.data_as(ctypes.c_void_p))  # fmt: skip
    assert not wrong.any(), offenders(problems, wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "-".join(map(str, f.values())))
def test_visibility_and_block_ranges_on_the_device(features: Any) -> None:
    import cupy

    code = flattened("score_probe.cu", features)
    kernel = cupy.RawModule(code=code, options=compilation.OPTIONS).get_function("probe")
    on_device: list[Any] = []

    def address(array: np.ndarray) -> int:
        on_device.append(cupy.asarray(array))
        return int(on_device[-1].data.ptr)

    problems, _ = random_problems(np.random.default_rng(2), address)
    given = cupy.asarray(problems.view(np.uint8))
    wrong = cupy.full(NUM_PROBLEMS, -1, np.int32)
    kernel((-(-NUM_PROBLEMS // 128),), (128,), (given, np.int32(NUM_PROBLEMS), wrong))
    found = cupy.asnumpy(wrong)
    assert not found.any(), offenders(problems, found)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("params.window_right + 1", "params.window_right"),
        ("full.begin = max(full.begin, n_end - diagonal_end)",
         "full.begin = max(full.begin, n_end - diagonal_end - 1)"),
        ("keys.end = min(keys.end, queries.end - 1 + diagonal_end)",
         "keys.end = min(keys.end, queries.end + diagonal_end)"),
        ("n_end <= seqlen.k ? seqlen.q : 0", "seqlen.q"),
        ("held < 32 ?", "held < 31 ?"),
        ("min(columns % 8, 2)", "columns % 8 / 2"),
    ],
)  # fmt: skip
def test_the_probe_finds_seeded_bugs(right: str, wrong: str, tmp_path: Path) -> None:
    features = FEATURES[5]
    text = flattened("score_probe.cu", features)
    assert right in text
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(f'#include "{SUPPORT / "host_cuda.h"}"\n' + text.replace(right, wrong, 1))
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    problems, _arrays = random_problems(np.random.default_rng(1), lambda a: a.ctypes.data)
    found = np.zeros(NUM_PROBLEMS, np.int32)
    ctypes.CDLL(str(library)).probe(
        problems.ctypes.data_as(ctypes.c_void_p), NUM_PROBLEMS,
        found.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    assert found.any()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_tile_has_one_turn_and_the_heaviest_of_a_section_start_first(tmp_path: Path) -> None:
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    text = flattened("schedule_probe.cu", {})
    source.write_text(f'#include "{SUPPORT / "host_cuda.h"}"\n' + text)
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(library)).probe
    for blocks, owners, limit in itertools.product((1, 3, 7), (1, 2, 10, 17), (0, 1, 3, 4, 99)):
        section = even_sections(owners, limit)
        assert 1 <= section <= max(limit, 1)
        grid = np.array((blocks, owners, section, 1), kernel_params.GRID)
        found = np.full((2, blocks * owners), -1, np.int32)
        probe(*(ctypes.c_void_p(a.ctypes.data) for a in (grid, *found)))
        assert len({*zip(*found.tolist(), strict=True)}) == blocks * owners
        assert (found >= 0).all()
        assert (found < [[blocks], [owners]]).all()
        first_owners = np.minimum(found[1] // section, owners // section - 1)
        assert (np.diff(first_owners) >= 0).all(), "one section after another"
        within = np.diff(found[0])[np.diff(first_owners) == 0]
        assert (within >= 0).all(), "rank by rank within a section"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_every_tile_of_packed_sequences_has_one_rank(tmp_path: Path) -> None:
    """Each tile has one rank; illegal ends, which lie outside or decrease, give places inside.

    Ends that decrease within the arrays are found, however many threads look for them.
    """
    block, rng = 16, np.random.default_rng(0)
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    text = flattened("schedule_probe.cu", {"cu_seqlens": "int32", "block_m": block})
    source.write_text(f'#include "{SUPPORT / "host_cuda.h"}"\n' + text)
    command = [COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", source, "-o", library]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(library))
    probe.first_ranks.restype = ctypes.c_bool
    for trial in range(500):
        lead, lengths = rng.integers(0, 70), rng.integers(0, 50, rng.integers(1, 7))
        lengths[rng.random(lengths.size) < 0.2] = 0
        ends = np.cumsum((lead, *lengths)).astype(np.int32)
        total = int(ends[-1] + rng.integers(0, 40))
        is_legal = trial % 5 > 0
        if not is_legal:
            ends = rng.integers(-50, total + 50, ends.size).astype(np.int32)
        ranks = total // block + lengths.size
        found = np.full((2, ranks), -1, np.int32)
        first = np.full(lengths.size, -1, np.int32)
        address, to, *others = (ctypes.c_void_p(a.ctypes.data) for a in (ends, first, *found))
        probe.places(address, lengths.size, total, ranks, *others)
        assert (found >= 0).all()
        assert (found[0] < lengths.size).all()
        decrease = probe.first_ranks(address, lengths.size, total, trial % 3 + 1, to)
        rows = np.diff(np.clip(ends, 0, total))
        assert decrease == (rows < 0).any()
        assert (first >= 0).all()
        assert (first + -(-np.maximum(rows, 0) // block) <= ranks).all()
        if is_legal:
            owned = sorted((s, b) for s, b in found.T.tolist() if b * block < lengths[s])
            assert owned == [(s, b) for s, n in enumerate(lengths) for b in range(-(-n // block))]


FRAGMENT_CASES = list(
    itertools.product(
        (bfloat16, np.float16),
        [(16, 16, 32, 32), (32, 48, 64, 96), (32, 64, 96, 32), (16, 32, 256, 192),
         (16, 32, 16, 16)],
        (2, 4, 16),
    )
)  # fmt: skip


def fragment_code(dtype: Any, tile: tuple[int, int, int, int], copy_bytes: int) -> str:
    """Return the flattened probe for one tile."""
    names = ("block_m", "block_n", "head_dim", "head_dim_v")
    fields = {
        "dtype": np.dtype(dtype).name, **dict(zip(names, tile, strict=True)), "num_warps": 1,
        "copy_bytes": copy_bytes,
    }  # fmt: skip
    return flattened("fragment_probe.cu", fields)


@pytest.mark.nvrtc
def test_the_fragment_probe_compiles() -> None:
    """The probe compiles, which needs no device."""
    _, log = compilation._nvrtc(
        fragment_code(*FRAGMENT_CASES[0]), (*compilation.OPTIONS, "-arch=sm_80")
    )
    assert "warning" not in log


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tile", "copy_bytes"), FRAGMENT_CASES)
def test_tiles_and_fragments_multiply_exactly(
    dtype: Any, tile: tuple[int, int, int, int], copy_bytes: int
) -> None:
    """Products of small integers are exact, and rows past the valid ones, NaN in memory, add 0."""
    import cupy

    m, n, d, d_v = tile
    columns, columns_v = d - 8 // (16 // copy_bytes), d_v - 8
    code = fragment_code(dtype, tile, copy_bytes)
    kernel = cupy.RawModule(code=code, options=compilation.OPTIONS).get_function("probe")
    smem_bytes = 2 * (m * d + n * (d + d_v))
    kernel.max_dynamic_shared_size_bytes = smem_bytes
    rng = np.random.default_rng(3)
    first, last = 3, n - 2
    columns -= columns % (copy_bytes // 2)
    a = rng.integers(-1, 2, (m, columns)).astype(dtype)
    b = rng.integers(-1, 2, (n, columns)).astype(dtype)
    v = rng.integers(-2, 3, (n, columns_v)).astype(dtype)
    expected_b, expected_v = (x.astype(np.float64) for x in (b, v))
    for given, expected in ((b, expected_b), (v, expected_v)):
        given[:first] = given[last:] = np.nan
        expected[:first] = expected[last:] = 0
    on_device = [cupy.asarray(x.view(np.uint16)) for x in (a, b, v)]
    s, o = cupy.full((m, n), np.nan, np.float32), cupy.full((m, d_v), np.nan, np.float32)
    integers = ("c", "cv", "first", "last")
    params = np.zeros((), [(x, np.uint64) for x in "abvso"] + [(x, np.int32) for x in integers])
    for name, array in zip("abvso", (*on_device, s, o), strict=True):
        params[name] = array.data.ptr
    params["c"], params["cv"], params["first"], params["last"] = columns, columns_v, first, last
    kernel((1,), (32,), (params,), shared_mem=smem_bytes)
    expected_s = a.astype(np.float64) @ expected_b.T
    assert (np.abs(expected_s) <= 128).all()
    np.testing.assert_array_equal(cupy.asnumpy(s), expected_s)
    expected_o = np.zeros((m, d_v))
    expected_o[:, :columns_v] = expected_s @ expected_v
    np.testing.assert_array_equal(cupy.asnumpy(o), expected_o)
