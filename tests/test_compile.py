"""Does every kernel that can be chosen compile cleanly, for every architecture, without a GPU?

Cleanly means no warning, shared memory within the architecture's limit, and no spilled register
except in the rows that `SPILLS` lists with the reason. The short gate has every row of the tables,
without options and with all, by one of NVRTC 12 and 13 for sm_80 and by the other for sm_90. It
also has cases in which every two options meet. For other architectures it has rows without options.
With `--slow` both NVRTCs compile everything. (D117)
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import CompileError, Options
from cuflash._jit.compilation import OPTIONS as FLAGS
from cuflash._jit.compilation import Report, compile_static, source_of
from cuflash._jit.source import flatten, kernels_dir
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._kernels.config import HEAD_DIMS, KernelConfig, fields_text
from cuflash._kernels.params import STRUCTS, pointer_names
from cuflash._kernels.request import needs_simt
from cuflash._kernels.segment_bounds import SegmentBoundsConfig
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, describe
from support import chosen
from support.nvrtc import DISTRIBUTIONS, Library, all_cores, compiler_of, library_of
from support.parts import kernels_of_part

KIB = 1024
#: Shared memory that one thread block may use.
LIMITS = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB,
          "sm_100": 227 * KIB, "sm_120": 99 * KIB}  # fmt: skip
#: Rows of wider elements that the short gate compiles without options. Three architectures have the
#: same tables, and each row is compiled for one of them.
PART_OF_WIDE = {"sm_86": slice(0, None, 3), "sm_89": slice(1, None, 3),
                "sm_120": slice(2, None, 3), "sm_100": slice(1, None, 2)}  # fmt: skip
#: Every option is compiled for FULL. SMALLEST has the least shared memory.
FULL, SMALLEST = ("sm_80", "sm_90"), "sm_86"


@dataclass(frozen=True)
class Spill:
    """Why a row may spill registers."""

    size: int  # bytes of all spill stores and loads, by NVRTC 12.9 or 13.5, the larger
    reason: str


INVARIANTS = (
    "addresses of the next copy and bounds of the masked blocks: stored before the loop over "
    "blocks, each loaded once per block"
)
COUNTER = "the counter of the loop over batch entries: once per entry (13.5: one address per block)"
NUMBERS = (
    "with all options the numbers of the block and the entry, too, from which dropout draws, and "
    "where slopes, ids and statistics of rows lie: stored before the loop, loaded once per block"
)
NO_DEVICE = "sm_90's tile; no device of this kind was there to time its neighbours on"
#: (architecture, entry, arithmetic, larger padded head size). How much longer the neighbouring tile
#: without spills takes was measured on an H100 SXM, 2026-11-21, bf16, full, seqlen 8192.
SPILLS = {
    ("sm_80", "cuflash_backward_dq_sm80", "float64", 256): Spill(
        16, "unequal head sizes: the counter of the loop over batch entries, once per entry"
    ),
    ("sm_80", "cuflash_backward_dkv_sm80", "16 bits", 64): Spill(
        16, f"{COUNTER}; {NUMBERS}; {NO_DEVICE}"
    ),
    ("sm_80", "cuflash_backward_dkv_sm80", "16 bits", 128): Spill(
        108, f"{INVARIANTS}; the counter of the loop over batch entries; {NUMBERS}; {NO_DEVICE}"
    ),
    ("sm_80", "cuflash_forward_sm80", "float32", 256): Spill(
        32,
        "all options: a number from which dropout draws and two offsets, stored before the loop "
        f"over blocks, each loaded once per block; {NO_DEVICE}",
    ),
    ("sm_86", "cuflash_forward_sm80", "float32", 256): Spill(
        16,
        "all options, unequal head sizes: a number from which dropout draws and the upper half of "
        "an offset, stored before the loop over blocks, each loaded once per block (12.9: "
        "nothing); no device of this kind was there to time its neighbours on",
    ),
    ("sm_86", "cuflash_backward_dkv_sm80", "16 bits", 64): Spill(16, f"{COUNTER}; {NO_DEVICE}"),
    ("sm_86", "cuflash_backward_dkv_sm80", "16 bits", 128): Spill(
        104, f"{INVARIANTS}; the counter of the loop over batch entries; {NUMBERS}; {NO_DEVICE}"
    ),
    ("sm_89", "cuflash_backward_dkv_sm80", "16 bits", 64): Spill(16, f"{COUNTER}; {NO_DEVICE}"),
    ("sm_90", "cuflash_backward_dq_sm80", "16 bits", 128): Spill(
        32,
        f"{INVARIANTS}; the counter of the loop over batch entries: once per entry; the neighbour "
        "takes 1.20 times as long",
    ),
    ("sm_90", "cuflash_backward_dq_sm80", "float64", 128): Spill(
        88,
        f"packed: {INVARIANTS}; where operands lie in shared memory: as often; the counter of the "
        "loop over batch entries: once per entry (13.5: 16 bytes); the neighbours are not timed",
    ),
    ("sm_90", "cuflash_backward_dkv_sm80", "16 bits", 128): Spill(
        48, f"{INVARIANTS}; the neighbour takes 1.18 times as long"
    ),
    ("sm_100", "cuflash_forward_sm80", "16 bits", 64): Spill(
        8, f"the block's first key, once per block (13.5: nothing); {NO_DEVICE}"
    ),
    ("sm_100", "cuflash_backward_dq_sm80", "16 bits", 128): Spill(
        8, f"an address, loaded once per block (13.5: nothing); {NO_DEVICE}"
    ),
    ("sm_100", "cuflash_backward_dkv_sm80", "16 bits", 128): Spill(
        56, f"{INVARIANTS} (13.5: 12 bytes); {NO_DEVICE}"
    ),
}

TF32 = "tf32"  # float32 with precision="tf32"
WIDE = (np.float32, TF32, np.float64)
ARITHMETICS = (bfloat16, *WIDE)
SLOPES = ("alibi_slopes", "queries")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": (bfloat16, np.float16, np.float32, TF32, np.float64),
    "head_dims": ((64, 64), (128, 128), (96, 64), (192, 128), (256, 256), (20, 33)),
    "out_dtype": (None, np.float32),
    "window": ((None, None), (None, 0), (7, None), (7, 3)),
    "scale": (None, -0.5),
    "softcap": (None, 20.0),
    "bias": (None, np.float32, np.float16, bfloat16, np.float64),
    "alibi_slopes": (None, np.float32, np.float16, np.float64),
    "mask": (False, True),
    "segment_ids": (None, np.int32, np.int64),
    "sink": (None, np.float32, bfloat16),
    "dropout": (0.0, 0.25),
    "offset": (None, np.int32, np.int64),
    "q_lengths": (None, np.int32, np.int64),
    "kv_lengths": (None, np.int64, np.int32),
    "copy_bytes": (16, 8, 4, 2),
    "cu_seqlens": (None, np.int32, np.int64),
    "grad": ("qkv", "k", "v"),
    "sums": (
        ("scale", "queries"),
        ("bias", "pairs"),
        ("bias", "keys"),
        ("bias", "queries"),
        SLOPES,
    ),
    "dlse": (False, True),
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
ALL = {
    **PLAIN, "window": (7, 3), "softcap": 20.0, "bias": np.float32, "mask": True,
    "alibi_slopes": np.float32, "segment_ids": np.int32, "sink": np.float32, "offset": np.int64,
    "q_lengths": np.int32, "kv_lengths": np.int64, "dropout": 0.25, "dlse": True,
    "sums": ("bias", "pairs"),
}  # fmt: skip
SEED = 2
#: A window, a causal bound and packed sequences choose tiles of their own, too.
BASES = (PLAIN, {**PLAIN, "window": (None, 0)}, {**PLAIN, "cu_seqlens": np.int64}, ALL)


def problem_of(case: dict[str, Any]) -> Problem:
    """Describe a small problem with these options."""
    (d, d_v), (m, n) = case["head_dims"], (4, 6)
    precision = TF32 if case["dtype"] == TF32 else None
    q, k, v = (np.zeros((2, *s), dtype_of(case)) for s in ((m, d), (n, d), (n, d_v)))
    per_entry = {
        name: None if case[name] is None else np.ones(2, case[name])
        for name in ("offset", "q_lengths", "kv_lengths", "alibi_slopes", "sink")
    }
    ids = case["segment_ids"]
    options = Options(
        window=case["window"],
        scale=case["scale"],
        softcap=case["softcap"],
        bias=None if case["bias"] is None else np.zeros((m, n), case["bias"]),
        mask=np.ones((m, n), bool) if case["mask"] else None,
        segment_ids=None if ids is None else (np.ones(m, ids), np.ones(n, ids)),
        dropout=case["dropout"],
        seed=1,
        **per_entry,
    )
    out = None
    if case["out_dtype"] is not None and q.itemsize == 2:  # wider ones have one dtype of out
        out = np.zeros((2, m, d_v), case["out_dtype"])
    if case["cu_seqlens"] is None:
        return describe(q, k, v, options, precision=precision, out=out)
    ends = {name: np.zeros(3, case["cu_seqlens"]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return describe_packed(q, k, v, options, ends, axes=None, precision=precision, out=out)


def dtype_of(case: dict[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a case: float32 for TF32."""
    return np.dtype(np.float32 if case["dtype"] == TF32 else case["dtype"])


def capability_of(arch: str) -> int:
    """Return 90 for sm_90."""
    return int(arch.removeprefix("sm_"))


def configs_of(case: dict[str, Any], arch: str) -> Iterator[KernelConfig]:
    """Yield every portable kernel that forward and backward of this case would launch."""
    problem, copy_bytes = problem_of(case), max(case["copy_bytes"], dtype_of(case).itemsize)
    sums = case["sums"]
    if sums[0] == "bias" and case["bias"] is None:
        sums = SLOPES
    given = (problem, LIMITS[arch], copy_bytes)
    capability = capability_of(arch)
    cores = {"simt": needs_simt(problem, capability), "capability": capability}
    yield DeltaConfig.of(problem, problem.out.dtype, copy_bytes, grad_lse=case["dlse"])
    yield chosen.portable("forward_sm80", *given, **cores)
    yield chosen.portable("backward_dq_sm80", *given, **cores)
    yield from chosen.portable_kv(*given, frozenset(case["grad"]), **cores)
    if sums != SLOPES or case["alibi_slopes"] is not None:
        yield chosen.scores(*given, *sums, **cores)


def rows(arithmetic: Any, turn: int = 0) -> list[dict[str, Any]]:
    """Return each row of the tables of an arithmetic, without options and with all of them.

    With all options there are a bias and slopes, of which one has a gradient in each row: ``turn``
    chooses with which of them the first row begins.
    """
    sums = (ALL["sums"], SLOPES)
    return [
        {**base, "dtype": arithmetic, "head_dims": (head_dim, head_dim)}
        for n, head_dim in enumerate(HEAD_DIMS, arithmetic in WIDE)
        for base in (PLAIN, {**ALL, "sums": sums[(n + turn) % 2]})
    ]


@functools.cache
def pairwise() -> tuple[dict[str, Any], ...]:
    """Return cases in which, beside the rows, every two values of two options meet.

    NVRTC's version and the architecture are options, too. No source depends on either, so that they
    matter to registers alone. A case starts from a pair that has not met. Until every option has a
    value, the value is added that closes the most pairs with the values of the case. SEED breaks
    ties, and was chosen for few cases.
    """
    options = {**OPTIONS, "nvrtc": tuple(DISTRIBUTIONS), "arch": FULL}
    values = [(name, value) for name, choices in options.items() for value in choices]
    option = np.array([list(options).index(name) for name, _ in values])
    apart = (option[:, None] != option).astype(float)  # 1 where a pair has not met
    for arch, generation in itertools.product(FULL, DISTRIBUTIONS):
        for row in rows_in_minutes(arch, generation):
            case = {**row, "nvrtc": generation, "arch": arch}
            met = [n for n, (name, value) in enumerate(values) if value == case[name]]
            apart[np.ix_(met, met)] = 0
    rng = np.random.default_rng(SEED)
    cases = []
    while apart.any():
        start = np.argmax(apart * (1 + rng.random(apart.shape)))
        chosen = [int(n) for n in np.unravel_index(start, apart.shape)]
        while len(chosen) < len(options):
            gain = apart[:, chosen].sum(1) + 1e-3 * apart.sum(1) + 1e-6 * rng.random(len(values))
            chosen.append(int(np.argmax(np.where(np.isin(option, option[chosen]), -1, gain))))
        apart[np.ix_(chosen, chosen)] = 0
        cases.append(dict(values[n] for n in sorted(chosen)))
    return tuple(cases)


def rows_in_minutes(arch: str, generation: int) -> list[dict[str, Any]]:
    """Return the rows of one architecture of FULL that one NVRTC compiles in the short gate.

    These are all rows of 16 bits without options, and every second of the other rows, which the
    other NVRTC compiles for the other architecture of FULL. So each row is compiled by both NVRTCs
    and for both architectures.
    """
    turn = turn_of(arch, generation)
    tables = [row for arithmetic in ARITHMETICS for row in rows(arithmetic, turn)]
    return plain(bfloat16) + [row for n, row in enumerate(tables) if (n // 2 + n) % 2 == turn]


def plain(*arithmetics: Any) -> list[dict[str, Any]]:
    """Return the rows of some arithmetics without options and without a bias gradient."""
    found = itertools.chain(*map(rows, arithmetics))
    return [{**row, "sums": SLOPES} for row in itertools.islice(found, 0, None, 2)]


def sums_of_pairs(arch: str) -> set[KernelConfig]:
    """Return the kernel of the bias gradient alone, whose tile loads the next entry ahead."""
    case = {**PLAIN, "bias": bfloat16, "sums": ("bias", "pairs")}
    return {c for c in compiled_for([case], arch) if c.kernel == "backward_dscore_sm80"}


def turn_of(arch: str, generation: int) -> int:
    """Return 0 or 1, which differs between the two NVRTCs and between sm_80 and sm_90."""
    return (list(LIMITS).index(arch) + generation) % 2


def compiled_for(cases: Iterable[dict[str, Any]], arch: str) -> set[KernelConfig]:
    """Return the kernels that these cases launch on an architecture."""
    return set(itertools.chain(*(configs_of(case, arch) for case in cases)))


@functools.cache
def gate(generation: int, *, whole: bool = False) -> dict[str, set[KernelConfig]]:
    """Return the kernels that one NVRTC compiles for each architecture: the short gate, or all.

    The short gate has for sm_80 and sm_90 :func:`rows_in_minutes` and the pairwise cases, each of
    them once. For the other architectures it has rows without options, all rows of 16 bits and
    PART_OF_WIDE of the others, each for one of the two NVRTCs. Further tiles are compiled once, by
    one of the two. Rows with all options for the least shared memory belong to the whole gate.
    """
    found: dict[str, set[KernelConfig]] = {}
    tables = [row for arithmetic in ARITHMETICS for row in rows(arithmetic)]
    for arch in LIMITS:
        turn = turn_of(arch, generation)
        if whole:
            every = [row for arithmetic in ARITHMETICS for row in rows(arithmetic, 1)]
            cases = [*tables, *every, *pairwise()] if arch in FULL else plain(*ARITHMETICS)
        elif arch in FULL:
            here = {"arch": arch, "nvrtc": generation}
            cases = rows_in_minutes(arch, generation)
            cases += [case for case in pairwise() if case.items() >= here.items()]
        else:
            cases = [*plain(bfloat16)[turn::2], *plain(*WIDE)[PART_OF_WIDE[arch]][turn::2]]
        found[arch] = compiled_for(cases, arch) | sums_of_pairs(arch)
        for dtype in ("int32", "int64"):
            found[arch].add(SegmentBoundsConfig(num_warps=8, segment_ids=dtype))
    if whole:
        others = (compiled_for(tables, arch) for arch in FULL)
        found[SMALLEST] |= compiled_for(tables, SMALLEST).difference(*others)
    further = [(config, arch) for config, arch, once in further_tiles() if whole or once]
    for number, (config, arch) in enumerate(further):
        if whole or number % 2 == generation % 2:
            found[arch].add(config)
    return found


def arithmetic_of(config: KernelConfig) -> str:
    """Return what registers hold: float16 and bfloat16 have the same tables and kernels."""
    if "tile" in config.parts and config.precision == TF32:
        return TF32
    return config.dtype if config.element_bytes > 2 else "16 bits"


def tiles_of(configs: Iterable[KernelConfig]) -> set[tuple[Any, ...]]:
    """Return the tiles that the tables choose, with arithmetic and larger head size as keys."""
    names = ("entry", "wide_float64", "simt", "block_m", "block_n", "num_stages",
             "num_warps", "blocks_per_sm", "split_columns")  # fmt: skip
    return {
        (arithmetic_of(c), max(c.head_dim, c.head_dim_v), *(getattr(c, n, None) for n in names))
        for c in configs
        if "tile" in c.parts
    }


@functools.cache
def further_tiles() -> tuple[tuple[KernelConfig, str, bool], ...]:
    """Return a kernel of each tile that no row has, with all options and with fewer.

    Each comes with an architecture, and whether the tile itself is new or only its options. Bounds,
    packing and unequal head sizes choose such tiles. Of all head sizes that choose a tile, the
    largest is taken.
    """
    head_dims = sorted(itertools.product(HEAD_DIMS, repeat=2), key=sum, reverse=True)
    tables = [row for arithmetic in ARITHMETICS for row in rows(arithmetic)]
    cases = [
        {**base, "dtype": arithmetic, "head_dims": pair}
        for arithmetic, base, pair in itertools.product(ARITHMETICS, BASES, head_dims)
    ]
    seen: set[tuple[Any, ...]] = set()
    found = []
    for number, case in enumerate((*tables, *cases)):
        for arch in (*FULL, SMALLEST):
            for config in sorted(compiled_for([case], arch), key=repr):
                tiles = tiles_of([config])
                keys = {(case["mask"], tile) for tile in tiles}
                if not keys <= seen and number >= len(tables):
                    new = not any((mask, t) in seen for mask in (False, True) for t in tiles)
                    found.append((config, arch, new))
                seen |= keys
    return tuple(found)


def row_of(config: KernelConfig, arch: str) -> tuple[str, str, str, int]:
    """Return the key of a kernel in SPILLS."""
    widths = [config.head_dim_v] if "operands" in config.parts else [0]
    widths += [config.head_dim] if "tile" in config.parts else []
    arithmetic = arithmetic_of(config) if "operands" in config.parts else ""
    return arch, config.entry, arithmetic, max(widths)


@functools.cache
def report_of(config: KernelConfig, arch: str, generation: int) -> Report:
    """Compile a kernel, at most once in all tests."""
    return compile_static(config, arch, compiler_of(generation))._replace(cubin=b"")


def complaints(config: KernelConfig, arch: str, report: Report) -> list[str]:
    """Return a line for each warning, for spilled registers and for too much shared memory."""
    found = list(report.warnings)
    spill = SPILLS.get(row_of(config, arch))
    if report.spill_bytes > (spill.size if spill else 0):
        found.append(f"{report.spill_bytes} bytes spilled, {report.registers} registers")
    if config.smem_bytes > LIMITS[arch]:
        found.append(f"{config.smem_bytes} bytes of shared memory")
    return [f"{arch}: {text}: {config}" for text in found]


def reports(
    configs: Iterable[KernelConfig], arch: str, generation: int
) -> dict[KernelConfig, Report]:
    """Compile on all cores, the kernels that take longest first."""
    ordered = sorted(
        kernels_of_part(configs), key=lambda c: (not getattr(c, "mask", False), repr(c))
    )
    with all_cores() as pool:
        return dict(
            zip(ordered, pool.map(lambda c: report_of(c, arch, generation), ordered), strict=True)
        )


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_everything_compiles_cleanly(arch: str, generation: int, whole: bool) -> None:
    configs = gate(generation, whole=whole)[arch]
    found = [complaints(c, arch, r) for c, r in reports(configs, arch, generation).items()]
    if any(found):
        pytest.fail("\n".join(itertools.chain(*found)), pytrace=False)


@pytest.mark.full
def test_every_tile_that_is_chosen_is_compiled() -> None:
    """Both gates have every tile that a call can choose (the short one not all of SMALLEST's)."""
    gates = [gate(generation, whole=True) for generation in DISTRIBUTIONS]
    compiled = [tiles_of(itertools.chain(*found.values())) for found in gates]
    in_minutes = (found.values() for found in map(gate, DISTRIBUTIONS))
    compiled.append(tiles_of(itertools.chain.from_iterable(itertools.chain(*in_minutes))))
    rng = np.random.default_rng(0)
    for _ in range(3000):
        # Few options are drawn, or hardly a case would use the tables of scores without options.
        case = {
            name: values[rng.integers(len(values) if rng.random() < 0.3 else 1)]
            for name, values in OPTIONS.items()
        }
        case["dtype"] = OPTIONS["dtype"][rng.integers(len(OPTIONS["dtype"]))]
        case["head_dims"] = tuple(int(width) for width in rng.integers(1, 257, 2))
        for arch in (*FULL, SMALLEST):
            tiles = tiles_of(compiled_for([case], arch))
            expected = compiled if arch in FULL else compiled[: len(gates)]
            assert all(tiles <= found for found in expected), (arch, case)


@pytest.mark.long
def test_few_cases_hold_every_pair_of_options() -> None:
    assert len(pairwise()) < 40
    own = list(itertools.product(FULL, DISTRIBUTIONS))
    rows = [{**r, "arch": a, "nvrtc": g} for a, g in own for r in rows_in_minutes(a, g)]
    options = {**OPTIONS, "arch": FULL, "nvrtc": tuple(DISTRIBUTIONS)}
    for (one, first), (other, second) in itertools.combinations(options.items(), 2):
        met = {(repr(case[one]), repr(case[other])) for case in (*rows, *pairwise())}
        assert met >= {(repr(a), repr(b)) for a, b in itertools.product(first, second)}


@pytest.mark.long
def test_every_row_is_compiled_by_both_and_for_both() -> None:
    """Each row is compiled by both NVRTCs and for both architectures of FULL in the short gate."""
    for row in (row for arithmetic in ARITHMETICS for row in rows(arithmetic)):
        own = [
            (arch, generation)
            for arch, generation in itertools.product(FULL, DISTRIBUTIONS)
            if any(r | {"sums": row["sums"]} == row for r in rows_in_minutes(arch, generation))
        ]
        assert {arch for arch, _ in own} == set(FULL), row
        assert {generation for _, generation in own} == set(DISTRIBUTIONS), row
    first, *others = (gate(generation, whole=True) for generation in DISTRIBUTIONS)
    assert all(other == first for other in others), "--slow: all by both"
    for generation in DISTRIBUTIONS:
        assert all(found <= first[arch] for arch, found in gate(generation).items())


@pytest.mark.nvrtc
@pytest.mark.slow
def test_no_exception_is_wider_than_what_is_spilled() -> None:
    """Each size in SPILLS is what one of the two compilers spills, and no more."""
    if any(compiler_of(generation) is None for generation in DISTRIBUTIONS):
        pytest.skip("nvrtc: version 12 or 13 is not installed")
    spilled = dict.fromkeys(SPILLS, 0)
    for arch in {arch for arch, *_ in SPILLS}:
        for generation in DISTRIBUTIONS:
            configs = gate(generation, whole=True)[arch]
            chosen = [config for config in configs if row_of(config, arch) in SPILLS]
            for config, report in reports(chosen, arch, generation).items():
                row = row_of(config, arch)
                spilled[row] = max(spilled[row], report.spill_bytes)
    assert spilled == {row: spill.size for row, spill in SPILLS.items()}


@pytest.mark.nvrtc
def test_generations_live_in_one_process(generation: int) -> None:
    """Loading another NVRTC leaves CuPy with the NVRTC that it has bound."""
    from cupy_backends.cuda.libs import nvrtc

    bound = nvrtc.getVersion()
    path = library_of(DISTRIBUTIONS[generation])
    loaded = Library(path).version() if path else bound
    assert loaded[0] == generation
    assert nvrtc.getVersion() == bound


@pytest.mark.long
@pytest.mark.nvrtc
def test_sources_compile_without_fields(generation: int, pytestconfig: pytest.Config) -> None:
    """Every .cu compiles alone, with the defaults of config.cuh. Each NVRTC compiles half of them.

    The defaults are those of the portable kernels in 16 bits. Static assertions of Hopper's kernels
    ask for their threads, one warpgroup more than they compute with, and some of them for types or
    widths.
    """
    compiler = compiler_of(generation)
    assert compiler is not None
    wide = {"dtype": "float32", "out_dtype": "float32", "num_warps": 12}
    others = {
        "forward_fp8_sm90.cu": {
            "dtype": "float8_e4m3fn",
            "out_dtype": "float16",
            "num_warps": 8,
            "num_q_stages": 1,
        },
        "_partners.cu": {"partners": 2, "dtype": "float64", "out_dtype": "float64", "block_m": 32},
        "dkv_tf32_sm90.cu": wide | {"block_m": 32, "block_n": 128},
        "_tf32_sm90.cu": wide | {"block_m": 128, "block_n": 32},
        "_pair_sm90.cu": {"num_warps": 16, "head_dim": 256, "head_dim_v": 256},
        "backward_sm90.cu": {"num_warps": 16, "block_m": 128, "block_n": 128},
        "_sm90.cu": {"num_warps": 8},
        "backward_combine.cu": {"block_n": 16},
        "_narrow.cu": {"block_m": 128, "block_n": 128, "width": 3, "width_v": 3},
        ".cu": {},
    }

    def compiled(name: str) -> tuple[bytes, str]:
        values = next(values for end, values in others.items() if name.endswith(end))
        texts = (fields_text(values),) if values else ()
        arch = "sm_90a" if name.endswith("_sm90.cu") else "sm_80"
        return compiler(flatten(name, texts), (*FLAGS, f"-arch={arch}"))

    names = sorted(path.name for path in kernels_dir().glob("*.cu"))
    if not pytestconfig.getoption("--slow"):
        names = names[generation % 2 :: 2]
    with all_cores() as pool:
        for name, (cubin, log) in zip(names, pool.map(compiled, names), strict=True):
            assert cubin, name
            assert not log, name


@pytest.mark.nvrtc
def test_offsets_of_the_parameter_structs(generation: int) -> None:
    """The NumPy dtypes of the parameter structs have the compiler's offsets."""
    compiler = compiler_of(generation)
    assert compiler is not None
    checks = []
    for struct, dtype in STRUCTS.items():
        checks.append(f'static_assert(sizeof(cuflash::{struct}) == {dtype.itemsize}, "");')
        for name, offset in _offsets(dtype):
            checks.append(
                f"static_assert(__INTADDR__(&((cuflash::{struct}*)0)->{name}) == {offset}, "
                f'"{struct}.{name}");'
            )
    compiler(flatten("params.cuh") + "\n".join(checks), (*FLAGS, "-arch=sm_80"))


def _offsets(dtype: np.dtype[Any], prefix: str = "", start: int = 0) -> Iterator[tuple[str, int]]:
    assert dtype.fields is not None
    for name, (inner, offset, *_) in dtype.fields.items():
        yield prefix + name, start + offset
        if inner.fields is not None:
            yield from _offsets(inner, f"{prefix}{name}.", start + offset)


def test_pointers_come_first() -> None:
    for dtype in STRUCTS.values():
        names = pointer_names(dtype)
        assert len(set(names)) == len(names) >= 4
        plain = [n for n, o in _offsets(dtype) if n in names or n.removeprefix("score.") in names]
        assert [n.removeprefix("score.") for n in plain] == list(names)


@pytest.mark.nvrtc
def test_a_wrong_source_names_config_log_and_dump(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    import cuflash._jit.compilation as module

    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / "dump"))
    config = next(configs_of(PLAIN, "sm_90"))
    broken = source_of(config) + "\nint f() { return nonsense; }\n"
    monkeypatch.setattr(module, "source_of", lambda *_: broken)
    with pytest.raises(CompileError, match="nonsense") as caught:
        compile_static(config, "sm_90", compiler_of(generation))
    assert caught.value.config == config
    assert "nonsense" in caught.value.log
    with open(caught.value.source) as dumped:
        assert dumped.read() == broken


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
@pytest.mark.parametrize("variable", ["CUFLASH_DUMP", "TMPDIR"])
def test_a_wrong_source_does_not_go_where_a_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A dump replaces a link of its name: anybody can put one into a folder that all may write."""
    import cuflash._jit.compilation as module

    monkeypatch.delenv("CUFLASH_DUMP", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "dump"))
    monkeypatch.setattr(module.tempfile, "tempdir", None)
    (tmp_path / "dump").mkdir()
    config = next(configs_of(PLAIN, "sm_90"))
    path = module._compile_error(config, "nonsense", "a source").source
    assert path is not None
    Path(path).unlink()
    victim = tmp_path / "victim"
    victim.write_text("keys")
    Path(path).symlink_to(victim)
    assert module._compile_error(config, "nonsense", "a source").source == path
    assert victim.read_text() == "keys"
    assert Path(path).read_text() == "a source"
    assert [file.name for file in (tmp_path / "dump").iterdir()] == [Path(path).name]


def test_a_wrong_source_is_told_where_no_file_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import cuflash._jit.compilation as module

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("CUFLASH_DUMP", raising=False)
    monkeypatch.setattr(module.tempfile, "gettempdir", none)
    error = module._compile_error(next(configs_of(PLAIN, "sm_90")), "nonsense", "")
    assert error.source is None
    assert "the source could not be written" in str(error)


def test_every_kernel_has_its_parameters() -> None:
    names = {c.params for c in configs_of(PLAIN, "sm_90")}
    assert names == {"ForwardParams", "DeltaParams", "BackwardParams"}
