"""Is the forward of narrow heads, on CUDA cores, within the budget, with every option?

The kernels run compiled by a C++ compiler, and on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash._jit.compilation import compile_static
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash.testing._budget import Budget
from support import chosen
from support.chosen import forward_of
from support.nvrtc import compiler_of
from support.parts import kernels_of_part
from support.problems import Call, make_call, run

H100 = hardware.typical("sm_90")
ROWS, KEYS, HEADS = 150, 300, 2


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a case."""
    rng = np.random.default_rng(3)
    key_bias = rng.standard_normal((HEADS, 1, KEYS)).astype(np.float32)
    key_bias[..., 5] = key_bias[..., 290:] = -np.inf
    ids = tuple(np.sort(rng.integers(0, 4, (HEADS, n)), -1) for n in (ROWS, KEYS))
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (130, 20), "offset": np.array([-25, 60])},
        "lengths": {"q_lengths": np.array([ROWS, 40]), "kv_lengths": np.array([0, 177])},
        "key bias": {"bias": key_bias, "sink": np.array([0.3, -1.0], np.float32)},
        "key bias, causal": {"bias": key_bias, "causal": True, "scale": -0.3},
        "hidden": {"bias": np.full((1, KEYS), -np.inf, np.float16)},
        "many": {
            "softcap": 2.0, "mask": rng.random((ROWS, KEYS)) < 0.6, "segment_ids": ids,
            "bias": rng.standard_normal((ROWS, KEYS)), "alibi_slopes": np.array([0.1, 0.2]),
            "dropout": 0.3, "seed": 2**40 + 3,
        },
    }[name]  # fmt: skip


NAMES = (
    "plain", "causal", "window", "lengths", "key bias", "key bias, causal", "hidden", "many",
)  # fmt: skip


SIZES = [
    ("float32", (3, 0)), ("float32", (8, 5)), ("float64", (3, 4)), ("float16", (3, 3)),
    ("bfloat16", (8, 1)),
]  # fmt: skip


def call_of(name: str, dtype: Any, head_dim: int, head_dim_v: int) -> Call:
    shapes = (HEADS, ROWS, head_dim), (HEADS, KEYS, head_dim), (HEADS, KEYS, head_dim_v)
    return make_call("normal", 1, dtype, *shapes, options=options_of(name))


def test_it_is_chosen_for_narrow_heads_alone() -> None:
    def source(dtype: Any, head_dim: int, head_dim_v: int, **options: Any) -> str:
        call = make_call("normal", 1, dtype, (9, head_dim), (7, head_dim), (7, head_dim_v))
        problem = describe(call.q, call.k, call.v, cuflash.Options(**options))
        return forward_of(problem, H100).source

    assert source(np.float32, 3, 0) == source(np.float64, 8, 8) == "forward_narrow.cu"
    assert source(np.float16, 3, 3) == source(np.float32, 9, 3) == "forward_sm80.cu"
    assert source(np.float32, 3, 9, causal=True) == "forward_sm80.cu"
    key_bias = np.zeros((1, 7), np.float32)
    assert source(np.float16, 3, 3, bias=key_bias) == "forward_narrow.cu"
    assert source(np.float16, 3, 3, bias=np.zeros((9, 7))) == "forward_sm80.cu"


def test_a_bias_is_kept_with_its_key_where_nothing_else_is_added() -> None:
    def kept(**options: Any) -> bool:
        x = np.zeros((5, 3), np.float32)
        problem = describe(x, x, x, cuflash.Options(**options))
        config = chosen.one("forward_narrow", problem, copy_bytes=16, num_sms=132)
        assert config is not None
        return config.key_bias

    row, matrix = np.zeros((1, 5)), np.zeros((5, 5))
    assert kept(bias=row.astype(np.float16))
    assert kept(bias=row, causal=True)
    assert not kept()
    assert not kept(bias=matrix)
    assert not kept(bias=row, softcap=1.0)


def test_eight_warps_where_no_multiprocessor_gets_much_more_to_do() -> None:
    def tile(rows: int, **options: Any) -> tuple[int, int, int]:
        x = np.broadcast_to(np.float32(0), (rows, 3))
        bias = {"bias": np.zeros((1, rows), np.float32)} if options.pop("biased", False) else {}
        problem = describe(x, x, x[:, :0], cuflash.Options(**options, **bias))
        config = chosen.one("forward_narrow", problem, copy_bytes=4, num_sms=132)
        assert config is not None
        assert config.block_n == 128  # the bits of a row depend on it
        return config.block_m, config.num_warps, config.blocks_per_sm

    assert tile(2**18) == tile(2**16) == tile(256 * 132) == (256, 8, 3)
    assert tile(2**18, biased=True) == (256, 8, 4)
    assert tile(40_000) == (128, 4, 4)  # two times 256 rows, or three times 128
    assert tile(2**18, biased=True, window=(100, 0)) == (512, 4, 4)
    assert tile(2**18, softcap=2.0) == (256, 4, 2)


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_compiles_without_spills(dtype: Any, arch: str, generation: int) -> None:
    size = np.dtype(dtype).itemsize
    cases = [("key bias", 3, 0), ("key bias, causal", 4, 0), ("key bias, causal", 2, 1)]
    cases += [("key bias, causal", 3, 3), ("key bias, causal", 8, 8)]
    if dtype != np.float16:
        cases += [("window", 2, 7), ("many", 8, 8), ("plain", 3, 0), ("window", 2, 1)]
    configs = []
    for name, *head_dims in cases:
        call = call_of(name, dtype, *head_dims)
        problem = describe(call.q, call.k, call.v, cuflash.Options(**call.options))
        for multiprocessors in (1, 10**6):
            given = {"copy_bytes": size, "num_sms": multiprocessors}
            configs.append(chosen.one("forward_narrow", problem, **given))
    assert None not in configs
    for config in kernels_of_part(configs):
        report = compile_static(config, arch, compiler_of(generation))
        assert (report.spill_bytes, report.warnings) == (0, ()), config


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "key bias"),
        (np.float64, "many"),
        (np.float16, "key bias, causal"),
        (bfloat16, "key bias"),
    ],
    ids=["float32", "float64", "float16", "bfloat16"],
)
def test_by_a_compiler(dtype: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_kernels_on_the_host import results

    from support.host_device import COMPILER, host_device

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    call = call_of(name, dtype, 3, 4).but(wrt=())
    with host_device(tmp_path) as device:
        out, lse, _ = results(call, cuflash.Options(**call.options))
    assert device.launched[-1] == "cuflash_forward_narrow"
    Budget(call).check_forward(out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "head_dims"), SIZES, ids=str)
def test_on_a_gpu(dtype: str, head_dims: tuple[int, int], name: str) -> None:
    import cupy

    call = call_of(name, dtype, *head_dims)
    result = run(cupy, call, backward=False, with_out=True)
    Budget(call).check_forward(result.out, result.lse)


@pytest.mark.gpu
def test_a_sum_of_many_terms_loses_none() -> None:
    """262,144 exponentials sum with an error below 1e-5; added one by one they would lose 5e-5."""
    import cupy

    rng = np.random.default_rng(0)
    shapes = (64, 3), (262_144, 3), (1, 262_144)
    q, k, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    options = {"bias": bias, "scale": 1.8}
    truth = reference.logsumexp(q, k, **options)
    lse = cuflash.logsumexp(cupy.asarray(q), cupy.asarray(k), scale=1.8, bias=cupy.asarray(bias))
    assert np.abs(lse.get() - truth).max() < 1e-5


@pytest.mark.gpu
def test_rows_of_a_thread_change_no_bit() -> None:
    import cupy

    call = call_of("key bias, causal", np.float32, 3, 4)
    q, k, v = (cupy.asarray(call.array(name)) for name in "qkv")
    options = {n: cupy.asarray(x) if n == "bias" else x for n, x in call.options.items()}
    problem = describe(q, k, v, cuflash.Options(**options))
    few, many = (
        chosen.one("forward_narrow", problem, copy_bytes=16, num_sms=n) for n in (10**6, 0)
    )
    assert few is not None
    assert many is not None
    assert (few.block_m, many.block_m) == (128, 512)
    first, other = (cuflash.attention(q, k, v, config=c, **options) for c in (few, many))
    assert (first == other).all()
    portable = chosen.portable("forward_sm80", problem, H100.limits.block_smem, 16)
    cupy.testing.assert_allclose(
        cuflash.attention(q, k, v, config=portable, **options), first, rtol=1e-5, atol=1e-6
    )
