"""Does every kernel of Hopper's tables compile without spills or serialised products?

Needs no GPU. The tensor-core instructions of sm_90a run beside the softmax only if the compiler
finds no reason to wait for them: it says so in a warning C75xx, which fails here.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import gen_wgmma
import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_compile import ALL, LIMITS, PLAIN, pairwise, problem_of

from cuflash import _select, _select_one_pass
from cuflash._compile import compile_static, params_struct
from cuflash._config import BackwardConvertConfig, BackwardSm90Config, ForwardSm90Config
from cuflash._problem import HALVES

LENGTHS = {"q_lengths": np.int32, "kv_lengths": np.int64}
CAUSAL, WINDOW = {"window": (None, 0)}, {"window": (7, 3)}
PACKED = {"cu_seqlens": np.int64, "mask": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": CAUSAL,
    "lengths": LENGTHS,
    "causal and lengths": {**CAUSAL, **LENGTHS},
    "left": {"window": (7, None)},
    "window": WINDOW,
    "window, offset and lengths": {**WINDOW, **LENGTHS, "offset": np.int64},
    "softcap": {"softcap": 20.0},
    "mask": {"mask": True},
    "negative scale": {**CAUSAL, "scale": -0.5},
    "negative scale, window, lengths": {**WINDOW, **LENGTHS, "scale": -0.5},
    "all": ALL,
    "packed": PACKED,
    "packed causal": {**CAUSAL, **PACKED},
    "packed window": {**WINDOW, **PACKED},
    "all, packed": {**ALL, **PACKED},
}
#: What Hopper's kernel takes at any value of the other options.
SERVED = {"bias": None, "out_dtype": None}
#: The same for its gradient, and options beside those above.
SERVED_GRADIENT = {"bias": None, "out_dtype": None, "dropout": 0.0}
GRADIENT_OPTIONS = OPTIONS | {"slopes": {**CAUSAL, "alibi_slopes": np.float32}}


#: Of a device that is too small for the smaller tiles, and of one that is large enough.
SMALL, LARGE = 0, 10**9


def config_of(case: dict[str, Any], multiprocessors: int = SMALL) -> ForwardSm90Config | None:
    return _select.forward_sm90_config(problem_of(case), multiprocessors)


def gradient_configs(case: dict[str, Any], wrt: str = "qkv") -> list[BackwardSm90Config]:
    """The kernels of every gradient in ``wrt``; none where the portable ones serve."""
    problem = problem_of(case)
    of_queries = _select.backward_q_sm90_config(problem)
    of_keys = _select.backward_kv_sm90_configs(problem, frozenset(wrt))
    if of_queries is None or of_keys is None:
        return []
    return [of_queries, *of_keys]


def complaints(
    config: ForwardSm90Config | BackwardSm90Config | BackwardConvertConfig,
) -> list[str]:
    """Compile, and say what is wrong."""
    report = compile_static(config, "sm_90a")
    found = list(report.warnings)
    if report.spill_bytes:
        found.append(f"{report.spill_bytes} bytes spilled, {report.registers} registers")
    if config.smem_bytes > LIMITS["sm_90"]:
        found.append(f"{config.smem_bytes} bytes of shared memory")
    return [f"{text}: {config}" for text in found]


def compile_all(
    configs: (
        set[ForwardSm90Config]
        | set[BackwardSm90Config]
        | set[BackwardSm90Config | BackwardConvertConfig]
    ),
) -> None:
    """Compile on all cores: NVRTC runs without Python's lock."""
    with ThreadPoolExecutor() as pool:
        found = list(itertools.chain(*pool.map(complaints, sorted(configs, key=repr))))
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.nvrtc
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_row_of_the_tables(options: dict[str, Any]) -> None:
    configs = {
        config_of({**PLAIN, **options, **SERVED, "head_dims": d}, multiprocessors)
        for d in _select._FORWARD_SM90
        for multiprocessors in (SMALL, LARGE)
    }
    assert {(c.head_dim, c.head_dim_v) for c in configs} == set(_select._FORWARD_SM90)
    compile_all(configs)


@pytest.mark.nvrtc
@pytest.mark.parametrize("options", GRADIENT_OPTIONS.values(), ids=GRADIENT_OPTIONS)
def test_every_row_of_the_gradient(options: dict[str, Any]) -> None:
    configs = {
        c
        for d in _select._BACKWARD_KV_SM90
        for c in gradient_configs({**PLAIN, **options, **SERVED_GRADIENT, "head_dims": d})
    }
    rows = {(c.head_dim, c.head_dim_v) for c in configs}
    assert rows == set(_select._BACKWARD_KV_SM90) == set(_select._BACKWARD_Q_SM90)
    compile_all(configs)


#: Each with registers of its own; what lies between compiles in less.
ONE_PASS_OPTIONS = (
    "none", "causal", "window, offset and lengths", "negative scale, window, lengths",
)  # fmt: skip


@pytest.mark.nvrtc
def test_all_gradients_in_one_pass() -> None:
    configs: set[BackwardSm90Config | BackwardConvertConfig] = set()
    for head_dims, name in itertools.product(_select_one_pass.TILES, ONE_PASS_OPTIONS):
        case = {**PLAIN, **GRADIENT_OPTIONS[name], **SERVED_GRADIENT, "head_dims": head_dims}
        config = _select_one_pass.config_of(problem_of(case), ordered=name != "causal")
        assert config is not None
        assert (config.head_dim, config.head_dim_v) == head_dims
        configs.add(config)
        if name == "none":
            configs.add(_select_one_pass.convert_config(config))
    compile_all(configs)


@pytest.mark.nvrtc
def test_one_gradient_alone() -> None:
    case = {**PLAIN, **CAUSAL, **SERVED_GRADIENT, "dtype": np.float16}
    compile_all({
        c
        for d in ((64, 64), (96, 96), (128, 128))
        for name in ("k", "v")
        for c in gradient_configs({**case, "head_dims": d}, name)
    })  # fmt: skip


@pytest.mark.nvrtc
def test_other_combinations() -> None:
    """A sample of those in which two options meet: a kernel of this kind compiles for seconds."""
    extremes = ((64, 64), (256, 256))
    cases = [{**case, **SERVED} for case in pairwise() if case["head_dims"] in extremes]
    halves = [{**c, "dtype": c["dtype"] if c["dtype"] in HALVES else np.float16} for c in cases]
    chosen = {config_of(case) for case in halves} - {None}
    assert len(chosen) > 10
    compile_all(chosen)


@pytest.mark.nvrtc
def test_float16() -> None:
    case = {**PLAIN, **CAUSAL, **SERVED, "dtype": np.float16}
    compile_all({config_of({**case, "head_dims": d}) for d in _select._FORWARD_SM90})


@pytest.mark.nvrtc
def test_serialised_products_would_be_noticed() -> None:
    config = config_of({**PLAIN, "head_dims": (128, 128)})
    found = complaints(replace(config, block_m=192, num_warps=16, num_q_stages=1))
    assert any("C75" in text for text in found)
    assert any("spilled" in text for text in found)


def test_what_the_portable_kernel_serves() -> None:
    wide_mask = {**PACKED, "mask": True, "head_dims": (256, 256)}
    for case in (
        {"bias": np.float32}, {"out_dtype": np.float32}, {"head_dims": (64, 33)}, wide_mask,
    ):  # fmt: skip
        assert config_of({**PLAIN, **case}) is None
    assert config_of({**PLAIN, "dtype": bfloat16}) is not None
    assert not gradient_configs({**PLAIN, "bias": np.float32})
    assert not gradient_configs({**PLAIN, "head_dims": (64, 320)})
    assert len(gradient_configs({**PLAIN, "head_dims": (64, 33)})) == 2


def test_wgmma_headers_are_fresh() -> None:
    for name, text in gen_wgmma.generate().items():
        assert (gen_wgmma.FOLDER / name).read_text(encoding="utf-8") == text


def test_parameters_are_its_own() -> None:
    assert params_struct(config_of(PLAIN)) == "ForwardSm90Params"
    assert {params_struct(c) for c in gradient_configs(PLAIN)} == {"BackwardSm90Params"}
    together = _select_one_pass.config_of(problem_of(PLAIN), ordered=True)
    assert together is not None
    assert params_struct(together) == "BackwardSm90Params"
    assert params_struct(_select_one_pass.convert_config(together)) == "BackwardParams"
