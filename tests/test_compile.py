"""Does every kernel that can be chosen compile cleanly, for every architecture, without a GPU?

By NVRTC 12 and 13: no warning, shared memory within the architecture's limit, and no spilled
register but for the rows that `SPILLS` lists with the reason. A quick share of them each time; all
of them, and whether an exception is too wide, with --slow, which takes tens of minutes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import CompileError, Options
from cuflash._compile import OPTIONS as FLAGS
from cuflash._compile import Report, compile_static, params_struct, source_of
from cuflash._config import (
    HEAD_DIMS,
    KernelConfig,
    OperandConfig,
    SegmentBoundsConfig,
    TileConfig,
)
from cuflash._packing import describe_packed
from cuflash._params import STRUCTS, pointer_names
from cuflash._problem import Problem, describe
from cuflash._select import (
    backward_kv_configs,
    backward_q_config,
    backward_score_config,
    delta_config,
    for_architecture,
    forward_config,
)
from cuflash._source import flatten, kernels_dir
from setup_env import NVRTC_FOLDER
from support.nvrtc import DISTRIBUTIONS, Library, compiler_of, library_of

KIB = 1024
#: Shared memory that one block of threads may have.
LIMITS = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB,
          "sm_100": 227 * KIB, "sm_120": 99 * KIB}  # fmt: skip


@dataclass(frozen=True)
class Spill:
    """Why a row may keep registers in memory."""

    size: int  # bytes of all stores and loads in the code of NVRTC 12.9 or 13.5, whichever has more
    reason: str


INVARIANTS = (
    "addresses of the next copy and bounds of the masked blocks: stored before the loop over "
    "blocks, each loaded once per block"
)
COUNTER = "the counter of the loop over batch entries: once per entry (13.5: one address per block)"
NO_DEVICE = "sm_90's tile; no device of this kind was there to time its neighbours on"
#: (architecture, entry, larger padded head size). How much longer the neighbouring tile without
#: spills takes was measured on an H100 SXM, 2026-11-21, bf16, full, seqlen 8192.
SPILLS = {
    ("sm_80", "cuflash_backward_dkv_sm80", 64): Spill(
        24, f"{COUNTER}; with all options the next block; {NO_DEVICE}"
    ),
    ("sm_80", "cuflash_backward_dkv_sm80", 128): Spill(
        72, f"{INVARIANTS}, and the next block, with all options; {NO_DEVICE}"
    ),
    ("sm_80", "cuflash_forward_sm80", 256): Spill(
        16, f"{INVARIANTS}, in float32 with eleven options at once (12.9: nothing); {NO_DEVICE}"
    ),
    ("sm_86", "cuflash_backward_dkv_sm80", 64): Spill(16, f"{COUNTER}; {NO_DEVICE}"),
    ("sm_89", "cuflash_backward_dkv_sm80", 64): Spill(16, f"{COUNTER}; {NO_DEVICE}"),
    ("sm_90", "cuflash_backward_dq_sm80", 128): Spill(
        32,
        f"{INVARIANTS}; the counter of the loop over batch entries: once per entry; the neighbour "
        "takes 1.20 times as long",
    ),
    ("sm_90", "cuflash_backward_dkv_sm80", 64): Spill(
        72, f"{INVARIANTS}; the neighbour takes 1.19 times as long"
    ),
    ("sm_90", "cuflash_backward_dkv_sm80", 128): Spill(
        48, f"{INVARIANTS}; the neighbour takes 1.18 times as long"
    ),
    ("sm_100", "cuflash_forward_sm80", 64): Spill(
        8, f"the block's first key, once per block (13.5: nothing); {NO_DEVICE}"
    ),
    ("sm_100", "cuflash_backward_dq_sm80", 128): Spill(
        8, f"an address, loaded once per block (13.5: nothing); {NO_DEVICE}"
    ),
    ("sm_100", "cuflash_backward_dkv_sm80", 128): Spill(
        24, f"{INVARIANTS} (13.5: nothing); {NO_DEVICE}"
    ),
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": (bfloat16, np.float16, np.float32, np.float64),
    "head_dims": ((64, 64), (128, 128), (32, 32), (96, 64), (192, 128), (256, 256), (20, 33)),
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
    "sums": (("bias", "pairs"), ("bias", "keys"), ("bias", "queries"), ("scale", "queries")),
    "dlse": (False, True),
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
ALL = {
    **PLAIN, "window": (7, 3), "softcap": 20.0, "bias": np.float32, "mask": True,
    "alibi_slopes": np.float32, "segment_ids": np.int32, "sink": np.float32, "offset": np.int64,
    "q_lengths": np.int32, "kv_lengths": np.int64, "dropout": 0.25, "dlse": True,
}  # fmt: skip


def problem_of(case: dict[str, Any]) -> Problem:
    """Describe a small problem with these options."""
    (d, d_v), (m, n) = case["head_dims"], (4, 6)
    q, k, v = (np.zeros((2, *s), case["dtype"]) for s in ((m, d), (n, d), (n, d_v)))
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
    if case["out_dtype"] is not None and q.itemsize == 2:  # wider ones have but one
        out = np.zeros((2, m, d_v), case["out_dtype"])
    if case["cu_seqlens"] is None:
        return describe(q, k, v, options, out=out)
    ends = {name: np.zeros(3, case["cu_seqlens"]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return describe_packed(q, k, v, options, ends, axes=None, precision=None, out=out)


def configs_of(case: dict[str, Any], smem_limit: int) -> list[KernelConfig]:
    """Return every kernel that forward and backward of this case would launch."""
    problem, copy_bytes = problem_of(case), _copy_bytes(case)
    return [
        forward_config(problem, smem_limit, copy_bytes),
        delta_config(problem, problem.out.dtype, copy_bytes, grad_lse=case["dlse"]),
        backward_q_config(problem, smem_limit, copy_bytes),
        *backward_kv_configs(problem, smem_limit, copy_bytes, frozenset(case["grad"])),
        *score_configs(case, problem, smem_limit),
    ]


def _copy_bytes(case: dict[str, Any]) -> int:
    """Never less than an element."""
    return max(case["copy_bytes"], np.dtype(case["dtype"]).itemsize)


def score_configs(case: dict[str, Any], problem: Problem, smem_limit: int) -> list[KernelConfig]:
    """Return those of the gradients of options."""
    of_slopes = [("alibi_slopes", "queries")] if case["alibi_slopes"] is not None else []
    return [
        backward_score_config(problem, smem_limit, _copy_bytes(case), *sums)
        for sums in (case["sums"], *of_slopes)
    ]


def rows() -> Iterator[dict[str, Any]]:
    """Yield each row of the tables, without options and with all of them."""
    for head_dim, base in itertools.product(HEAD_DIMS, (PLAIN, ALL)):
        yield {**base, "head_dims": (head_dim, head_dim)}


def wide_rows(arch: str) -> Iterator[dict[str, Any]]:
    """Yield rows of float32 and float64, where registers and shared memory are scarcest."""
    base = {"sm_90": ALL, "sm_86": PLAIN}.get(arch)
    if base is not None:
        for dtype, head_dim in itertools.product((np.float32, np.float64), (64, 256)):
            yield {**base, "dtype": dtype, "head_dims": (head_dim, head_dim)}


def pairwise() -> list[dict[str, Any]]:
    """Return cases in which every two values of two options meet."""
    rng = np.random.default_rng(0)
    names = list(OPTIONS)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(OPTIONS[a]))
        for j in range(len(OPTIONS[b]))
    }

    def pairs(case: dict[str, int]) -> set[Any]:
        return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)}

    cases = []
    while open_pairs:
        drawn = [{n: int(rng.integers(len(OPTIONS[n]))) for n in names} for _ in range(60)]
        (a, i), (b, j) = min(open_pairs, key=repr)
        best = max(
            ({**case, a: i, b: j} for case in drawn), key=lambda c: len(pairs(c) & open_pairs)
        )
        open_pairs -= pairs(best)
        cases.append({n: OPTIONS[n][i] for n, i in best.items()})
    return cases


def gate(arch: str, share_of: int | None = None) -> set[KernelConfig]:
    """Return what has to compile for an architecture; for one NVRTC its share, quick to compile.

    The shares: each row once by either, without options by one and with all of them by the other;
    every eighth of the pairwise cases for each pair of architecture and NVRTC; two head sizes for
    architectures whose tiles are not their own.
    """
    bounds: set[KernelConfig] = {
        SegmentBoundsConfig(num_warps=8, segment_ids=dtype) for dtype in ("int32", "int64")
    }
    if arch in ("sm_80", "sm_90"):
        cases, pairs = list(rows()), pairwise()
        if share_of is not None:
            odd = share_of == max(DISTRIBUTIONS)
            cases = [case for i, case in enumerate(cases) if (i // 2 + i) % 2 == odd]
            pairs = pairs[2 * odd + (arch == "sm_90") :: 8]
        cases += pairs
    else:
        widths = HEAD_DIMS if share_of is None else (64, 256)
        cases = [{**PLAIN, "head_dims": (head_dim, head_dim)} for head_dim in widths]
    cases += wide_rows(arch)
    found = set()
    for case in cases:
        # Wide heads of float64 do not fit everywhere: what does not is refused by name.
        with contextlib.suppress(NotImplementedError):
            found |= set(configs_of(case, LIMITS[arch]))
    return bounds | {for_architecture(c, int(arch.removeprefix("sm_"))) for c in found}


def row_of(config: KernelConfig, arch: str) -> tuple[str, str, int]:
    """Return the key of SPILLS."""
    widths = [config.head_dim_v] if isinstance(config, OperandConfig) else [0]
    widths += [config.head_dim] if isinstance(config, TileConfig) else []
    return arch, config.entry, max(widths)


@functools.cache
def report_of(config: KernelConfig, arch: str, generation: int) -> Report:
    """Compile, at most once for all tests."""
    return compile_static(config, arch, compiler_of(generation))._replace(cubin=b"")


def complaints(config: KernelConfig, arch: str, report: Report) -> list[str]:
    """Say what is wrong."""
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
    """Compile on all cores: NVRTC runs without Python's lock."""
    ordered = sorted(configs, key=repr)
    with ThreadPoolExecutor() as pool:
        return dict(
            zip(ordered, pool.map(lambda c: report_of(c, arch, generation), ordered), strict=True)
        )


@pytest.fixture(params=DISTRIBUTIONS, ids="nvrtc{}".format)
def generation(request: pytest.FixtureRequest) -> int:
    """Return each major version of NVRTC that is there."""
    if compiler_of(request.param) is None:
        wheel = f"'{DISTRIBUTIONS[request.param]}<{request.param + 1}'"
        install = f"pip install --target {NVRTC_FOLDER.name} {wheel}"
        pytest.skip(f"nvrtc: version {request.param} is not installed ({install})")
    return int(request.param)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_everything_compiles_cleanly(arch: str, generation: int, whole: bool) -> None:
    configs = gate(arch, None if whole else generation)
    found = [complaints(c, arch, r) for c, r in reports(configs, arch, generation).items()]
    if any(found):
        pytest.fail("\n".join(itertools.chain(*found)), pytrace=False)


def test_few_cases_hold_every_pair_of_options() -> None:
    assert len(pairwise()) < 60


@pytest.mark.nvrtc
@pytest.mark.slow
def test_no_exception_is_wider_than_what_is_spilled() -> None:
    """The sizes in SPILLS are those of one of the two compilers."""
    if any(compiler_of(generation) is None for generation in DISTRIBUTIONS):
        pytest.skip("nvrtc: version 12 or 13 is not installed")
    spilled = dict.fromkeys(SPILLS, 0)
    for arch in {arch for arch, *_ in SPILLS}:
        chosen = [config for config in gate(arch) if row_of(config, arch) in SPILLS]
        for generation in DISTRIBUTIONS:
            for config, report in reports(chosen, arch, generation).items():
                row = row_of(config, arch)
                spilled[row] = max(spilled[row], report.spill_bytes)
    assert spilled == {row: spill.size for row, spill in SPILLS.items()}


@pytest.mark.nvrtc
def test_generations_live_in_one_process(generation: int) -> None:
    """Loading another NVRTC leaves CuPy with the one that it has bound."""
    from cupy_backends.cuda.libs import nvrtc

    bound = nvrtc.getVersion()
    path = library_of(DISTRIBUTIONS[generation])
    loaded = Library(path).version() if path else bound
    assert loaded[0] == generation
    assert nvrtc.getVersion() == bound


@pytest.mark.nvrtc
def test_sources_compile_without_python_defines(generation: int) -> None:
    """Every .cu opens alone: config.cuh has defaults for everything.

    Those of the threads are the portable kernels'; Hopper's have one warpgroup more than they
    compute with, which a static assertion asks for.
    """
    compiler = compiler_of(generation)
    assert compiler is not None
    portable, hopper = ("", "sm_80"), ("#define CUFLASH_NUM_WARPS 8\n", "sm_90a")
    names = {path.name for path in kernels_dir().glob("*.cu")}
    for name in sorted(names):
        defines, arch = hopper if name.endswith("_sm90.cu") else portable
        cubin, log = compiler(defines + flatten(name), (*FLAGS, f"-arch={arch}"))
        assert cubin
        assert not log


@pytest.mark.nvrtc
def test_offsets_of_the_parameter_structs(generation: int) -> None:
    """NumPy's mirror and the compiler agree on where every field lies."""
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
    import cuflash._compile as module

    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / "dump"))
    config = configs_of(PLAIN, LIMITS["sm_90"])[0]
    broken = source_of(config) + "\nint f() { return nonsense; }\n"
    monkeypatch.setattr(module, "source_of", lambda _: broken)
    with pytest.raises(CompileError, match="nonsense") as caught:
        compile_static(config, "sm_90", compiler_of(generation))
    assert caught.value.config == config
    assert "nonsense" in caught.value.log
    with open(caught.value.source) as dumped:
        assert dumped.read() == broken


def test_every_kernel_has_its_parameters() -> None:
    names = {params_struct(c) for c in configs_of(PLAIN, LIMITS["sm_90"])}
    assert names == {"ForwardParams", "DeltaParams", "BackwardParams"}
