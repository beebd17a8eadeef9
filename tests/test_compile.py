"""Does every kernel that can be chosen compile cleanly, for every architecture, without a GPU?

No warning, shared memory within the architecture's limit, and no spilled register but for the
configurations that `SPILLS` lists with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import CompileError, Options
from cuflash._compile import compile_static, params_struct, source_of
from cuflash._config import HEAD_DIMS, KernelConfig, TileConfig
from cuflash._params import STRUCTS, pointer_names
from cuflash._problem import Problem, describe
from cuflash._select import (
    backward_kv_configs,
    backward_q_config,
    delta_config,
    forward_config,
)

pytestmark = pytest.mark.nvrtc

KIB = 1024
#: Shared memory that one block of threads may have.
LIMITS = {"sm_80": 163 * KIB, "sm_86": 99 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB,
          "sm_100": 227 * KIB, "sm_120": 99 * KIB}  # fmt: skip
#: Bytes stored and loaded, by kernel and larger padded head size. In all of them the compiler
#: keeps a few loop-invariant addresses out of registers: stored once before the loop, loaded once
#: per block. The neighbouring tile without spills takes longer (H100 SXM, 2026-11-21, bf16, full,
#: seqlen 8192): dk and dv 1.18 times at 128 and 1.19 at 64, dq 1.20 at 128.
SPILLS = {
    ("cuflash_forward_sm80", 64): 16,
    ("cuflash_forward_sm80", 128): 96,
    ("cuflash_forward_sm80", 192): 48,
    ("cuflash_forward_sm80", 256): 192,
    ("cuflash_backward_dq_sm80", 64): 48,
    ("cuflash_backward_dq_sm80", 128): 64,
    ("cuflash_backward_dq_sm80", 256): 128,
    ("cuflash_backward_dkv_sm80", 64): 64,
    ("cuflash_backward_dkv_sm80", 128): 96,
    ("cuflash_backward_dkv_sm80", 256): 64,
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dtype": (bfloat16, np.float16),
    "head_dims": ((64, 64), (128, 128), (32, 32), (96, 64), (192, 128), (256, 256), (20, 33)),
    "out_dtype": (None, np.float32),
    "window": ((None, None), (None, 0), (7, None), (7, 3)),
    "scale": (None, -0.5),
    "softcap": (None, 20.0),
    "bias": (None, np.float32, np.float16, bfloat16, np.float64),
    "mask": (False, True),
    "offset": (None, np.int32, np.int64),
    "q_lengths": (None, np.int32, np.int64),
    "kv_lengths": (None, np.int64, np.int32),
    "copy_bytes": (16, 8, 4, 2),
    "grad": ("qkv", "k", "v"),
    "dlse": (False, True),
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
ALL = {
    **PLAIN, "window": (7, 3), "softcap": 20.0, "bias": np.float32, "mask": True,
    "offset": np.int64, "q_lengths": np.int32, "kv_lengths": np.int64, "dlse": True,
}  # fmt: skip


def problem_of(case: dict[str, Any]) -> Problem:
    """Describe a small problem with these options."""
    (d, d_v), (m, n) = case["head_dims"], (4, 6)
    q, k, v = (np.zeros((2, *s), case["dtype"]) for s in ((m, d), (n, d), (n, d_v)))
    integers = {
        name: None if case[name] is None else np.ones(2, case[name])
        for name in ("offset", "q_lengths", "kv_lengths")
    }
    options = Options(
        window=case["window"],
        scale=case["scale"],
        softcap=case["softcap"],
        bias=None if case["bias"] is None else np.zeros((m, n), case["bias"]),
        mask=np.ones((m, n), bool) if case["mask"] else None,
        **integers,
    )
    out = None if case["out_dtype"] is None else np.zeros((2, m, d_v), case["out_dtype"])
    return describe(q, k, v, options, out=out)


def configs_of(case: dict[str, Any], smem_limit: int) -> list[KernelConfig]:
    """Return every kernel that forward and backward of this case would launch."""
    problem, copy_bytes = problem_of(case), case["copy_bytes"]
    return [
        forward_config(problem, smem_limit, copy_bytes),
        delta_config(problem, problem.out.dtype, copy_bytes, grad_lse=case["dlse"]),
        backward_q_config(problem, smem_limit, copy_bytes),
        *backward_kv_configs(problem, smem_limit, copy_bytes, frozenset(case["grad"])),
    ]


def rows() -> Iterator[dict[str, Any]]:
    """Yield each row of the tables, without options and with all of them."""
    for head_dim, base in itertools.product(HEAD_DIMS, (PLAIN, ALL)):
        yield {**base, "head_dims": (head_dim, head_dim)}


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


def spills_allowed(config: KernelConfig) -> int:
    if not isinstance(config, TileConfig):
        return 0
    return SPILLS.get((config.entry, max(config.head_dim, config.head_dim_v)), 0)


def complaints(config: KernelConfig, arch: str) -> list[str]:
    """Compile, and say what is wrong."""
    report = compile_static(config, arch)
    found = list(report.warnings)
    if report.spill_bytes > spills_allowed(config):
        found.append(f"{report.spill_bytes} bytes spilled, {report.registers} registers")
    if config.smem_bytes > LIMITS[arch]:
        found.append(f"{config.smem_bytes} bytes of shared memory")
    return [f"{arch}: {text}: {config}" for text in found]


def compile_all(work: set[tuple[KernelConfig, str]]) -> None:
    """Compile on all cores: NVRTC runs without Python's lock."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda item: complaints(*item), sorted(work, key=repr)))
    if any(found):
        pytest.fail("\n".join(itertools.chain(*found)), pytrace=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_row_of_the_tables(arch: str) -> None:
    compile_all({(c, arch) for case in rows() for c in configs_of(case, LIMITS[arch])})


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_pair_of_options(arch: str) -> None:
    cases = pairwise()
    assert len(cases) < 60
    compile_all({(c, arch) for case in cases for c in configs_of(case, LIMITS[arch])})


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_100", "sm_120"])
def test_other_architectures(arch: str) -> None:
    compile_all(
        {
            (c, arch)
            for head_dim in HEAD_DIMS
            for c in configs_of({**PLAIN, "head_dims": (head_dim, head_dim)}, LIMITS[arch])
        }
    )


def test_sources_compile_without_python_defines() -> None:
    """Every .cu opens alone: config.cuh has defaults for everything."""
    from cuflash._compile import OPTIONS as FLAGS
    from cuflash._compile import _nvrtc
    from cuflash._source import flatten

    for config in {type(c): c for c in configs_of(PLAIN, LIMITS["sm_90"])}.values():
        cubin, log = _nvrtc(flatten(config.source), (*FLAGS, "-arch=sm_80"))
        assert cubin
        assert "error" not in log


def test_offsets_of_the_parameter_structs() -> None:
    """NumPy's mirror and the compiler agree on where every field lies."""
    from cuflash._compile import OPTIONS as FLAGS
    from cuflash._compile import _nvrtc
    from cuflash._source import flatten

    checks = []
    for struct, dtype in STRUCTS.items():
        checks.append(f'static_assert(sizeof(cuflash::{struct}) == {dtype.itemsize}, "");')
        for name, offset in _offsets(dtype):
            checks.append(
                f"static_assert(__INTADDR__(&((cuflash::{struct}*)0)->{name}) == {offset}, "
                f'"{struct}.{name}");'
            )
    _nvrtc(flatten("params.cuh") + "\n".join(checks), (*FLAGS, "-arch=sm_80"))


def _offsets(dtype: np.dtype[Any], prefix: str = "", start: int = 0) -> Iterator[tuple[str, int]]:
    assert dtype.fields is not None
    for name, (inner, offset, *_) in dtype.fields.items():
        yield prefix + name, start + offset
        if inner.fields is not None:
            yield from _offsets(inner, f"{prefix}{name}.", start + offset)


def test_pointers_come_first() -> None:
    for dtype in STRUCTS.values():
        names = pointer_names(dtype)
        assert len(set(names)) == len(names) >= 5
        plain = [n for n, o in _offsets(dtype) if n in names or n.removeprefix("score.") in names]
        assert [n.removeprefix("score.") for n in plain] == list(names)


def test_a_wrong_source_names_config_log_and_dump(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuflash._compile as module

    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / "dump"))
    config = configs_of(PLAIN, LIMITS["sm_90"])[0]
    broken = source_of(config) + "\nint f() { return nonsense; }\n"
    monkeypatch.setattr(module, "source_of", lambda _: broken)
    with pytest.raises(CompileError, match="nonsense") as caught:
        compile_static(config, "sm_90")
    assert caught.value.config == config
    assert "nonsense" in caught.value.log
    with open(caught.value.source) as dumped:
        assert dumped.read() == broken


def test_every_kernel_has_its_parameters() -> None:
    names = {params_struct(c) for c in configs_of(PLAIN, LIMITS["sm_90"])}
    assert names == {"ForwardParams", "DeltaParams", "BackwardParams"}
