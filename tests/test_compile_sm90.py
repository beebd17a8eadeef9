"""Does every kernel of Hopper's tables compile without spills or serialised products?

Needs no GPU. The tensor-core instructions of sm_90a run beside the softmax only if the compiler
finds no reason to wait for them. If it finds one, it prints a warning C75xx, which fails here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_compile import ALL, LIMITS, PLAIN, dtype_of, pairwise, problem_of

from cuflash import MaskMod, Options, ScoreMod
from cuflash._jit.compilation import compile_static
from cuflash._kernels import forward_sm90, fused_backward, split_queries
from cuflash._kernels.backward_combine import BackwardCombineConfig
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._kernels.config import KernelConfig
from cuflash._problem.formulas import formulas_of
from cuflash._problem.options import signature
from cuflash._problem.problem import HALVES, describe, in_pages
from support import chosen
from support.nvrtc import all_cores, compiler_of
from support.parts import kernels_of_part

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
    "dropout": {"dropout": 0.25},
    "dropout, causal and lengths": {**CAUSAL, **LENGTHS, "dropout": 0.25},
    "negative scale": {**CAUSAL, "scale": -0.5},
    "negative scale, window, lengths": {**WINDOW, **LENGTHS, "scale": -0.5},
    "bias": {"bias": np.float32},
    "bias, window, offset and lengths": {
        **WINDOW,
        **LENGTHS,
        "offset": np.int64,
        "bias": bfloat16,
    },
    "all": {**ALL, "bias": None},
    "packed": PACKED,
    "packed causal": {**CAUSAL, **PACKED},
    "packed window": {**WINDOW, **PACKED},
    "all, packed": {**ALL, **PACKED, "bias": None},
}
#: Options that the widest row of the forward does not take.
NOT_THE_WIDEST = ("all", "all, packed", "bias, window, offset and lengths")
#: What Hopper's kernels need, whatever the other options are.
SERVED = {"out_dtype": None}
#: Options of the gradient, beside those of the forward.
GRADIENT_OPTIONS = OPTIONS | {
    "slopes": {**CAUSAL, "alibi_slopes": np.float32},
    "all without dropout": {**ALL, "bias": None, "dropout": 0.0},
    "all": ALL,
    "all without bias": {**ALL, "bias": None},
    "all with bias, packed": {**ALL, **PACKED},
    "bias, packed": {"bias": np.float32, **PACKED, **WINDOW},
    "dropout, softcap and slopes": {"dropout": 0.25, "softcap": 20.0, "alibi_slopes": np.float32},
}


#: Every NVRTC compiles every row with the options in EVERY_ROW.
HEAD_SIZES = dict.fromkeys(row.head_dims for row in forward_sm90.ROWS)
EVERY_ROW = ("none", "all")

#: SMs of a device that is too small for the smaller tiles, and of one that is large enough.
SMALL, LARGE = 0, 10**9


def config_of(case: dict[str, Any], multiprocessors: int = SMALL) -> Any:
    return chosen.one("forward_sm90", problem_of(case), num_sms=multiprocessors)


def gradient_configs(case: dict[str, Any], wrt: str = "qkv") -> list[KernelConfig]:
    """Return the kernels of every gradient in ``wrt``; [] where only portable kernels can run."""
    problem = problem_of(case)
    of_queries = chosen.one("backward_dq_sm90", problem)
    of_keys = chosen.passes("backward_dkv_sm90", problem, frozenset(wrt))
    if of_queries is None or of_keys is None:
        return []
    return [of_queries, *of_keys]


def by_turns(names: Iterable[str], generation: int, *, whole: bool) -> list[str]:
    """Return what an NVRTC compiles: EVERY_ROW, and every second of the other options, or all."""
    return [
        name
        for turn, name in enumerate(names)
        if whole or name in EVERY_ROW or generation % 2 != turn % 2
    ]


def rows_of(
    table: Iterable[tuple[int, int]], names: Iterable[str], name: str, *, whole: bool
) -> list[tuple[int, int]]:
    """Return the head sizes of a table that options of this name are compiled with.

    EVERY_ROW and --slow have all of them. Other options have one, since a kernel of this kind
    compiles for seconds.
    """
    rows = list(table)
    if whole or name in EVERY_ROW:
        return rows
    return [rows[list(names).index(name) % len(rows)]]


def complaints(config: KernelConfig, generation: int) -> list[str]:
    """Compile a kernel, and return a line for each warning, spill and excess of shared memory."""
    report = compile_static(config, "sm_90a", compiler_of(generation))
    found = list(report.warnings)
    if report.spill_bytes:
        found.append(f"{report.spill_bytes} bytes spilled, {report.registers} registers")
    if config.smem_bytes > LIMITS["sm_90"]:
        found.append(f"{config.smem_bytes} bytes of shared memory")
    return [f"{text}: {config}" for text in found]


def compile_all(configs: Iterable[KernelConfig], generation: int) -> None:
    """Compile on all cores, the kernels that take longest first."""
    with all_cores() as pool:
        ordered = sorted(kernels_of_part(configs), key=lambda c: (-c.smem_bytes, repr(c)))
        found = itertools.chain(*pool.map(lambda c: complaints(c, generation), ordered))
    if text := "\n".join(found):
        pytest.fail(text, pytrace=False)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_every_row_of_the_tables(generation: int, pytestconfig: pytest.Config) -> None:
    """Every row compiles; in one test, since kernels of one option seldom keep two cores busy."""
    whole = pytestconfig.getoption("--slow")
    configs: set[KernelConfig] = set()
    for name in by_turns(OPTIONS, generation, whole=whole):
        rows = rows_of(HEAD_SIZES, OPTIONS, name, whole=whole)
        case = {**PLAIN, **OPTIONS[name], **SERVED}
        chosen = {config_of({**case, "head_dims": d}, n) for d in rows for n in (SMALL, LARGE)}
        refused = {(256, 256)} & set(rows) if name in NOT_THE_WIDEST else set()
        assert (None in chosen) == bool(refused), name
        served = {config for config in chosen if config is not None}
        assert {(c.head_dim, c.head_dim_v) for c in served} == set(rows) - refused, name
        configs |= served
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_a_softcap_or_slopes_alone(generation: int, pytestconfig: pytest.Config) -> None:
    """Full blocks compile that keep the reference of a row, with only a softcap or only slopes."""
    sizes = (64, 96, 128) if pytestconfig.getoption("--slow") else (128,)
    configs = {
        config_of({**PLAIN, **SERVED, **bound, **option, "head_dims": (d, d)}, LARGE)
        for d in sizes
        for option in ({"softcap": 20.0}, {"alibi_slopes": np.float32})
        for bound in ({}, CAUSAL)
    }
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_results_in_float32_and_such_as_join_others(generation: int) -> None:
    """Results in float32 and results that join others compile, every second one by each NVRTC."""
    found = []
    for head_dims in HEAD_SIZES:
        served: list[dict[str, Any]] = [{}, CAUSAL, WINDOW]
        if head_dims[0] != 192:
            served.append(OPTIONS["dropout"])
        if max(head_dims) <= 128:
            served += [{"dropout": 0.25, "softcap": 20.0}, {"segment_ids": np.int32, "mask": True}]
        for options in served:
            case = {**PLAIN, **options, **SERVED, "head_dims": head_dims}
            config = config_of(case, LARGE)
            found += [config.replace(joins=True), config.replace(out_dtype="float32")]
            found.append(config.replace(out_dtype="float32", joins=True))
    compile_all(found[generation % 2 :: 2], generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_parts_of_keys_and_packed_results_in_float32(generation: int) -> None:
    """Split keys and packed results in float32 compile, every second one by each NVRTC."""
    parts = {"out_dtype": "float32", "split_keys": True, "overlaps": True}
    found = []
    for head_dims in HEAD_SIZES:
        case = {**PLAIN, **SERVED, "head_dims": head_dims}
        for name in ("causal and lengths", "window", "dropout, causal and lengths"):
            found.append(config_of({**case, **OPTIONS[name]}, LARGE).replace(**parts))
        packed = config_of({**case, **OPTIONS["packed causal"]}, LARGE)
        found.append(packed.replace(out_dtype="float32"))
    compile_all(found[generation % 2 :: 2], generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_pages_and_rows_of_several_heads(generation: int, pytestconfig: pytest.Config) -> None:
    """Pages and rows of several heads compile, every second one by each NVRTC."""
    whole, found = pytestconfig.getoption("--slow"), set()
    table = signature(np.zeros((2, 2), np.int32))
    options = {name: own for name, own in OPTIONS.items() if "packed" not in name}
    for name, given in options.items():
        for head_dims in rows_of(HEAD_SIZES, options, name, whole=whole):
            case = {**PLAIN, "kv_lengths": np.int64, **given, **SERVED, "head_dims": head_dims}
            many = replace(problem_of(case), seqlen_q=400)
            pages = [signature(np.zeros((2, 2, 16, d), dtype_of(case))) for d in head_dims]
            found.add(chosen.one("forward_sm90", in_pages(many, *pages, table), num_sms=LARGE))
    for head_dims in HEAD_SIZES:
        for bound in (CAUSAL, {**WINDOW, "offset": np.int64}):
            case = {**PLAIN, "kv_lengths": np.int64, **bound, **SERVED, "head_dims": head_dims}
            shared = replace(problem_of(case), num_queries=2)
            found.add(chosen.one("forward_sm90", shared, num_sms=LARGE))
    configs = sorted(found - {None}, key=repr)
    assert {(c.paged, c.heads_in_rows) for c in configs} == {(True, False), (False, True)}
    compile_all(configs[generation % 2 :: 2], generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_a_narrow_window_with_a_sink_and_bounds_from_arrays(generation: int) -> None:
    """A narrow window with a sink and bounds compiles, every second one by each NVRTC."""
    case = {**PLAIN, **WINDOW, "sink": np.float32, "head_dims": (128, 128)}
    bounds = [{name: np.int64} for name in ("q_lengths", "kv_lengths", "offset")]
    bounds += [LENGTHS, {"offset": np.int64, **LENGTHS}]
    chosen = [config_of({**case, **given}) for given in (*bounds, {})]
    rows = [config.block_m for config in chosen if config is not None]
    assert rows == [128] * len(bounds) + [192]
    compile_all({c for c in chosen[generation % 2 :: 2] if c is not None}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_a_window_too_wide_for_narrow_blocks(generation: int, pytestconfig: pytest.Config) -> None:
    """A wide window compiles, with a sink by one NVRTC and without by the other (--slow: both)."""
    a = np.broadcast_to(np.zeros((), bfloat16), (1, 8192, 128))
    configs = []
    for sink in (None, np.ones(1, np.float32)):
        problem = describe(a, a, a, Options(window=(5000, 20), sink=sink))
        config = chosen.one("forward_sm90", problem)
        assert config is not None
        assert (config.block_m, config.block_n) == (128, 128)
        configs.append(config)
    if not pytestconfig.getoption("--slow"):
        configs = configs[generation % 2 :][:1]
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_every_row_of_the_gradient(generation: int, pytestconfig: pytest.Config) -> None:
    whole = pytestconfig.getoption("--slow")
    configs: set[KernelConfig] = set()
    for name in by_turns(GRADIENT_OPTIONS, generation, whole=whole):
        rows = rows_of(HEAD_SIZES, GRADIENT_OPTIONS, name, whole=whole)
        case = {**PLAIN, **GRADIENT_OPTIONS[name], **SERVED}
        chosen = {c for d in rows for c in gradient_configs({**case, "head_dims": d})}
        padded = {(96, 96) if d == (80, 80) else d for d in rows}  # only the forward has 80 columns
        assert {(c.head_dim, c.head_dim_v) for c in chosen} == padded, name
        configs |= chosen
    compile_all(configs, generation)


def one_pass(head_dims: tuple[int, int], name: str, *, deterministic: bool = True) -> Any:
    """Return the kernel of all gradients of a row with these options, or None."""
    case = {**PLAIN, **GRADIENT_OPTIONS[name], **SERVED, "head_dims": head_dims}
    found = chosen.fused(problem_of(case), deterministic=deterministic)
    assert found is None or (found.head_dim, found.head_dim_v) == head_dims
    return found


def finishing(config: Any, name: str) -> Any:
    """Return the kernel whose last tiles store dq, where it may be chosen for short sequences."""
    problem = problem_of({**PLAIN, **GRADIENT_OPTIONS[name], **SERVED})
    may = config is not None and split_queries.finishes_dq(problem, config, num_sms=0)
    return config.replace(finishes_dq=True) if may else None


@pytest.mark.gate
@pytest.mark.nvrtc
def test_all_gradients_in_one_pass(generation: int, pytestconfig: pytest.Config) -> None:
    """One pass compiles for all options; at every row also unordered, and with split queries."""
    whole = pytestconfig.getoption("--slow")
    rows = [row.head_dims for row in fused_backward.ROWS]
    configs: set[Any] = set()
    for name in by_turns(GRADIENT_OPTIONS, generation, whole=whole):
        for head_dims in rows_of(rows, GRADIENT_OPTIONS, name, whole=whole):
            found = one_pass(head_dims, name)
            assert found is not None or head_dims[0] > 96, (name, head_dims)
            configs |= {found, finishing(found, name)}
    configs.discard(None)
    for head_dims in rows:
        plain = one_pass(head_dims, "none")
        last = finishing(plain, "none") or plain
        split = plain.replace(split_queries=True, split_rows=True)
        configs.add(last.replace(split_queries=True, split_rows=head_dims[0] <= 96))
        configs |= {split, BackwardCombineConfig.after(split), BackwardConvertConfig.after(plain)}
        configs.add(one_pass(head_dims, "causal", deterministic=False))
    assert {(c.head_dim, c.head_dim_v) for c in configs} == set(rows)
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths"])
def test_lengths_of_one_side_in_one_pass(generation: int, name: str) -> None:
    """One pass compiles with lengths of one side, of each integer dtype, ordered and unordered."""
    configs = set()
    for integer, dtype, ordered in ((np.int32, bfloat16, True), (np.int64, np.float16, False)):
        case = {**PLAIN, name: integer, "dtype": dtype, **SERVED, "head_dims": (128, 128)}
        found = chosen.fused(problem_of(case), deterministic=ordered)
        assert found is not None
        assert (found.q_lengths, found.kv_lengths).count("none") == 1
        configs.add(found)
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_a_bias_through_shared_memory(generation: int, dtype: Any) -> None:
    """A 16-bit bias aligned to 16 bytes comes through shared memory, except at head size 96."""
    configs = set()
    for head_dim in (32, 64, 96, 128):
        q, k = (np.zeros((2, n, head_dim), dtype) for n in (100, 200))
        for causal in (False, True):
            options = Options(bias=np.zeros((100, 200), dtype), causal=causal)
            found = chosen.fused(describe(q, k, k, options), deterministic=True)
            assert (found.bias_stages > 0) == (head_dim != 96)
            configs.add(found.replace(split_queries=causal))
        for other in (np.zeros((100, 201), dtype)[:, 1:], np.zeros((100, 200), np.float32)):
            found = chosen.fused(describe(q, k, k, Options(bias=other)), deterministic=True)
            assert (found is None) == (head_dim == 128)
    compile_all({c for c in configs if c.bias_stages}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_one_gradient_alone(generation: int) -> None:
    """The kernel of dk or dv alone compiles; that of dq does not depend on wrt."""
    case = {**PLAIN, **CAUSAL, **SERVED, "dtype": np.float16}
    name = "kv"[generation % 2]
    compile_all(
        {
            c
            for d in ((64, 64), (96, 96), (128, 128))
            for c in gradient_configs({**case, "head_dims": d}, name)[1:]
        },
        generation,
    )


@pytest.mark.gate
@pytest.mark.nvrtc
def test_other_combinations(generation: int, pytestconfig: pytest.Config) -> None:
    """Pairwise cases of the portable kernels for sm_90 compile for the forward, too.

    A kernel of this kind compiles for seconds: all of them only with --slow.
    """
    widths = ((64, 64), (128, 128), (192, 128), (256, 256))
    chosen = set()
    for case in pairwise():
        here = case["nvrtc"] == generation and case["arch"] == "sm_90"
        if case["head_dims"] in widths and (here or pytestconfig.getoption("--slow")):
            dtype = case["dtype"] if dtype_of(case) in HALVES else np.float16
            chosen.add(config_of({**case, **SERVED, "bias": None, "dtype": dtype}))
    assert len(chosen - {None}) > 1
    compile_all(chosen - {None}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_float16(generation: int) -> None:
    case = {**PLAIN, **CAUSAL, **SERVED, "dtype": np.float16}
    widths = list(HEAD_SIZES)[generation % 2 :: 3]
    compile_all({config_of({**case, "head_dims": d}) for d in widths}, generation)
    cases = [{**case, "head_dims": d} for d in widths]
    one_pass = {chosen.fused(problem_of(c), deterministic=True) for c in cases}
    assert None not in one_pass
    compile_all({*one_pass, *itertools.chain(*map(gradient_configs, cases))}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_formulas_in_the_gradient(generation: int) -> None:
    """Short formulas compile in the gradient without spills; longer ones may need registers."""
    formulas = formulas_of(
        Options(
            score_mod=ScoreMod("score - 0.1f * (q - k)", grad="1.0f", host=min, host_grad=min),
            mask_mod=MaskMod("(q + k) % 3 != 0", host=min),
        )
    )
    configs: set[KernelConfig] = set()
    for head_dims in list(HEAD_SIZES)[generation % 2 :: 3]:
        problem = problem_of({**PLAIN, **WINDOW, **LENGTHS, **SERVED, "head_dims": head_dims})
        problem = replace(problem, formulas=formulas)
        of_queries = chosen.one("backward_dq_sm90", problem)
        of_keys = chosen.passes("backward_dkv_sm90", problem, frozenset("kv"))
        assert of_queries is not None
        assert of_keys is not None
        configs |= {of_queries, *of_keys}
    assert all(config.score_mod and config.mask_mod for config in configs)
    compile_all(configs, generation)


@pytest.mark.long
@pytest.mark.nvrtc
def test_serialised_products_would_be_noticed(generation: int) -> None:
    config = config_of({**PLAIN, "head_dims": (128, 128)})
    found = complaints(config.replace(block_m=192, num_warps=16, num_q_stages=1), generation)
    assert any("C75" in text for text in found)
    assert any("spilled" in text for text in found)


def test_what_the_portable_kernel_serves() -> None:
    wide = {**PACKED, "head_dims": (256, 256)}
    for case in (
        {"bias": np.float32, "mask": True}, {"head_dims": (64, 33)},
        {**wide, "mask": True}, {**wide, "segment_ids": np.int32},
        {**PACKED, "bias": np.float32}, {**WINDOW, "bias": np.float32, "head_dims": (256, 256)},
        {**ALL, **SERVED, "bias": None, "head_dims": (200, 64)},
    ):  # fmt: skip
        assert config_of({**PLAIN, **case}) is None
    assert config_of({**PLAIN, "dtype": bfloat16}) is not None
    assert not gradient_configs({**PLAIN, "head_dims": (64, 320)})
    assert len(gradient_configs({**PLAIN, "head_dims": (64, 33)})) == 2


def test_parameters_are_its_own() -> None:
    assert config_of(PLAIN).params == "ForwardSm90Params"
    assert {c.params for c in gradient_configs(PLAIN)} == {"BackwardSm90Params"}
    together = chosen.fused(problem_of(PLAIN), deterministic=True)
    assert together is not None
    assert together.params == "BackwardOnePassParams"
    assert BackwardConvertConfig.after(together).params == "BackwardParams"
