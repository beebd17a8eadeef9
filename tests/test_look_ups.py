"""Do masks and biases come through shared memory where they can, and are results right then?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._problem.problem import describe
from cuflash._select.hardware import typical
from cuflash.testing._budget import Budget
from support import chosen
from support.hopper import make
from support.problems import run

LENGTHS = {"q_lengths": np.array([[7], [5]]), "kv_lengths": np.array([[64], [33]], np.int32)}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal, lengths, sink": {"causal": True, **LENGTHS, "sink": np.ones(2, np.float32)},
    "offsets": {"causal": True, **LENGTHS, "offset": np.array([[3], [2]])},
}


def config_of(head_dim: int, keys: int = 64, **options: Any) -> Any:
    q, k = (np.zeros((2, 2, n, head_dim), bfloat16) for n in (8, keys))
    return chosen.one("forward_sm90", describe(q, k, k, Options(**options)))


def test_rows_of_16_bytes_come_through_shared_memory() -> None:
    bias, mask = np.zeros((8, 80), bfloat16), np.ones((8, 80), np.bool_)
    for options, bias_stages, mask_stages in (
        ({"bias": bias[:, :64]}, 2, 0),
        ({"bias": bias[:, :64].astype(np.float32)}, 1, 0),
        ({"bias": bias[:, :64].astype(np.float64)}, 0, 0),
        ({"bias": bias[:1, :64]}, 2, 0),
        ({"bias": bias[:, :1]}, 0, 0),
        ({"bias": np.zeros((64, 8), bfloat16).T}, 0, 0),
        ({"bias": bias[:, :64], "window": (5, 5)}, 0, 0),
        ({"mask": mask[:, :64]}, 0, 2),
        ({"mask": mask[:, :64], "window": (5, 5)}, 0, 2),
        ({"mask": mask[:, :64], "softcap": 3.0}, 0, 0),
        ({"mask": mask[:, :64], "scale": -1.0}, 0, 0),
        ({"mask": np.ones((8, 65), np.bool_)[:, :64]}, 0, 0),
    ):
        found = config_of(128, **options)
        assert (found.bias_stages, found.mask_stages) == (bias_stages, mask_stages), options
        assert found.smem_bytes <= 227 << 10
        wide = config_of(192, **options)
        assert wide is None or (wide.bias_stages, wide.mask_stages) == (0, 0)
    assert config_of(64, 65, mask=np.ones((8, 80), np.bool_)[:, :65]).mask_stages == 2
    assert config_of(64, 65, bias=bias[:, :65]).bias_stages == 0  # 65 values are no whole copies


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_compiles_without_spills(generation: int, head_dim: int) -> None:
    from test_compile_sm90 import compile_all

    configs = set()
    for options in OPTIONS.values():
        for dtype in (bfloat16, np.float32):
            configs.add(config_of(head_dim, bias=np.zeros((8, 64), dtype), **options))
        configs.add(config_of(head_dim, mask=np.ones((8, 64), np.bool_), **options))
    configs.add(config_of(head_dim, mask=np.ones((8, 64), np.bool_), window=(7, 3), **LENGTHS))
    assert all(config.bias_stages or config.mask_stages for config in configs)
    compile_all(configs, generation)


def gradient_of(head_dim: int, **options: Any) -> Any:
    q, k = (np.zeros((2, 2, n, head_dim), bfloat16) for n in (100, 208))
    return chosen.fused(describe(q, k, k, Options(**options)), deterministic=True)


def test_one_pass_is_chosen_beside_a_mask() -> None:
    """One pass takes masks, segments and biases; a mask beside a bias takes two kernels."""
    q, k = (np.zeros((2, 2, n, 64), bfloat16) for n in (100, 208))
    mask, bias = np.ones((100, 208), np.bool_), np.zeros((100, 208), bfloat16)
    ids = (np.zeros(100, np.int32), np.zeros(208, np.int32))
    for options, stages in (
        ({"mask": mask}, (0, 4)),
        ({"mask": mask, "segment_ids": ids, "causal": True}, (0, 4)),
        ({"mask": mask, "softcap": 3.0}, (0, 0)),
        ({"mask": mask, "bias": bias}, None),
        ({"mask": np.ones((100, 209), np.bool_)[:, 1:]}, (0, 0)),
        ({"bias": bias}, (3, 0)),
        ({"segment_ids": ids}, (0, 0)),
    ):
        problem = describe(q, k, k, Options(**options))
        one = [c for c in chosen.backward_of(problem, typical("sm_90")) if c.computes == "dqkv"]
        found = [(c.bias_stages, c.mask_stages) for c in one]
        assert found == ([stages] if stages else []), options


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_gradients_beside_a_mask_compile_without_spills(generation: int, head_dim: int) -> None:
    """Gradients beside a mask compile with each option that may come with it, and split queries."""
    from test_compile_sm90 import compile_all

    beside: list[dict[str, Any]] = [
        {}, {"causal": True}, {"window": (7, 3), **LENGTHS}, {"dropout": 0.1, "seed": 1},
        {"alibi_slopes": np.ones(2, np.float32)}, {"scale": -1.0},
    ]  # fmt: skip
    configs = set()
    for options in beside:
        found = gradient_of(head_dim, mask=np.ones((100, 208), np.bool_), **options)
        assert found.mask_stages, options
        configs |= {found, found.replace(split_queries=True)}
    for other in (np.ones((100, 209), np.bool_)[:, 1:], np.ones((208, 100), np.bool_).T):
        assert not gradient_of(head_dim, mask=other).mask_stages
    compile_all(configs, generation)


def on_hopper(shape: Any, seed: int) -> tuple[Any, np.random.Generator, np.ndarray]:
    """Return CuPy, a generator, and a mask that hides some keys from all rows and all from one."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")
    (_, heads), rows, keys = shape
    rng = np.random.default_rng(seed)
    mask = rng.random((1, heads, rows, keys)) < 0.6
    mask[..., 3, :] = mask[..., 30:100] = False
    return cupy, rng, mask


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("shape", [((2, 3), 300, 1136), ((2, 40), 200, 144)], ids=str)
def test_within_budget(head_dim: int, shape: Any) -> None:
    """The forward is right with hidden keys and rows, a band, -1e30 as a mask, and steep slopes."""
    _, rng, mask = on_hopper(shape, 0)
    from test_forward_sm90 import check

    _, rows, keys = shape
    bias = rng.standard_normal(mask.shape)
    distance = np.abs(np.arange(rows)[:, None] - np.arange(keys))
    cases: list[dict[str, Any]] = [
        {"mask": mask}, {"mask": mask, "causal": True}, {"mask": mask, "window": (60, 9)},
        {"mask": np.broadcast_to(distance < 90, mask.shape).copy()},
        {"bias": np.where(mask, bias, -np.inf).astype(bfloat16)},
        {"bias": np.where(mask, bias, -1e30).astype(np.float32), "causal": True},
        {"bias": (bias - 0.7 * distance).astype(np.float32)},
        {"bias": (bias - 0.7 * distance[:, ::-1]).astype(np.float16)},
    ]  # fmt: skip
    for options in cases:
        for ends in ({}, {"q_lengths": rows - 9, "kv_lengths": keys - 75}):
            dtype = np.float16 if getattr(options.get("bias"), "itemsize", 4) == 2 else bfloat16
            check(make((head_dim, head_dim), shape, {**options, **ends}, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("shape", [((2, 3), 300, 1136), ((2, 40), 200, 144)], ids=str)
def test_gradients_within_budget(head_dim: int, shape: Any) -> None:
    """Gradients are right with hidden keys and rows and a triangle, beside slopes and dropout."""
    cupy, rng, mask = on_hopper(shape, 1)
    (_, heads), rows, keys = shape
    bias = np.where(mask, rng.standard_normal(mask.shape), -np.inf)
    ends = {"q_lengths": rows - 9, "kv_lengths": keys - 75}
    cases: list[dict[str, Any]] = [
        {"mask": mask}, {"mask": mask[:, :1], "causal": True}, {"mask": mask, "window": (60, 9)},
        {"mask": np.broadcast_to(np.tri(rows, keys, dtype=np.bool_), mask.shape).copy(), **ends},
        {"mask": mask, "alibi_slopes": np.linspace(0.1, 1, heads, dtype=np.float32)},
        {"mask": mask, "dropout": 0.2, "seed": 5, **ends}, {"mask": mask, "scale": -0.1},
        {"bias": bias.astype(bfloat16), **ends}, {"bias": bias.astype(np.float16), "causal": True},
        {"bias": bias[:, :1].astype(bfloat16), "dropout": 0.2, "seed": 5},
    ]  # fmt: skip
    for options in cases:
        dtype = getattr(options.get("bias"), "dtype", bfloat16)
        call = make((head_dim, head_dim), shape, options, dtype)
        result, budget = run(cupy, call), Budget(call)
        budget.check_forward(result.out, result.lse)
        budget.check_backward(result.gradients, given=(result.out, result.lse))
