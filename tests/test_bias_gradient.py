"""Is the gradient of a bias of pairs right, whichever way it is summed?

The kernels run compiled by a C++ compiler. The kernel itself writes a gradient of 16-bit elements.
Where tiles are few, batch entries are summed in parts, which are added up afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash._problem.problem import describe
from support.problems import make_call

pytest.importorskip("cupy", reason="CuPy is not installed")

from test_kernels_on_the_host import check

from cuflash._kernels.request import Request
from cuflash._select.score_sums import score_sums
from support import chosen
from support.host_device import COMPILER, HostDevice, host_device


@pytest.fixture
def device(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path) as found:
        yield found


def a_bias(*shape: int, dtype: Any = bfloat16) -> Any:
    bias = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    bias[..., 3:5, 20:] = -np.inf
    return bias


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("batch", "bias", "options"),
    [
        ((16, 2), a_bias(1, 2, 70, 81), {}),
        ((2, 2), a_bias(2, 2, 70, 81), {"causal": True}),
        ((3, 2), a_bias(1, 2, 70, 80, dtype=np.float32), {"window": (20, 9)}),
        ((2, 4), a_bias(4, 70, 80, dtype=np.float16), {"enable_gqa": True, "softcap": 2.0}),
        ((4,), a_bias(70, 80, dtype=np.float16), {"kv_lengths": np.array([80, 0, 33, 64])}),
    ],
    ids=["parts", "causal", "window", "groups", "lengths"],
)
def test_within_budget(device: HostDevice, batch: Any, bias: Any, options: Any) -> None:
    dtype = np.float16 if bias.dtype == np.float32 else bias.dtype
    n = bias.shape[-1]
    of_keys = (*batch[:-1], 2) if "enable_gqa" in options else batch
    shapes = (*batch, 70, 24), (*of_keys, n, 24), (*of_keys, n, 24)
    options = {"bias": bias, **options}
    call = make_call("normal", 5, dtype, *shapes, options=options, wrt=("q", "k", "v", "bias"))
    check(call, cuflash.Options(**call.options))
    assert "cuflash_backward_dscore_sm80" in device.launched


def test_sums_of_parts_take_four_copies_at_most() -> None:
    """Parts have at least eight entries and are equal; with many tiles there is only one part."""
    for batch, shape, num_sms, parts in (
        (256, (1, 4, 256, 256), 132, 4),
        (128, (1, 4, 768, 768), 132, 1),
        (30, (1, 4, 256, 256), 132, 3),
        (15, (1, 4, 256, 256), 132, 1),
        (256, (1, 4, 256, 256), 16, 1),
        (32, (1, 12, 512, 512), 132, 1),
    ):
        q = np.zeros((1, shape[1], 1, 1), bfloat16)
        q = np.broadcast_to(q, (batch, *shape[1:3], 32))
        problem = describe(q, q, q, cuflash.Options(bias=np.zeros(shape, bfloat16)))
        own = score_sums(problem, "bias", shape, num_sms)
        assert (own.parts, own.is_gradient) == (parts, parts == 1)
        assert own.shape == ((parts, *shape) if parts > 1 else shape)
        extents = own.axes(problem.batch)
        assert np.prod(extents) == np.prod(problem.batch)
        assert len(own.layout().batch) == len(extents) == len(own.summed_axes())


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("head_dim", [32, 64])
def test_compiles_without_spills(generation: int, head_dim: int) -> None:
    from test_compile_sm90 import compile_all

    configs = set()
    all_options = {
        "softcap": 3.0, "dropout": 0.25, "seed": 1, "causal": True,
        "mask": np.ones((8, 16), np.bool_), "alibi_slopes": np.ones(2, np.float32),
    }  # fmt: skip
    for dtype in (bfloat16, np.float32):
        for options in ({}, all_options):
            q, k = (np.zeros((4, 2, n, head_dim), bfloat16) for n in (8, 16))
            problem = describe(
                q, k, k, cuflash.Options(bias=np.zeros((2, 8, 16), dtype), **options)
            )
            found = chosen.scores(problem, Request(problem).smem_limit, 16, "bias", "pairs")
            assert found.holds_bias
            assert found.num_stages == 2
            configs |= {found, found.replace(sums_dtype=np.dtype(dtype).name)}
    compile_all(configs, generation)


def held(problem: Any) -> list[Any]:
    """Return the kernels of dq, of dk and dv, and of the bias gradient's sums, in float32."""
    given = (Request(problem).smem_limit, 16)
    return [
        chosen.portable("backward_dq_sm80", problem, *given),
        *chosen.portable_kv(problem, *given, "kv"),
        chosen.scores(problem, *given, "bias", "pairs"),
    ]


BOUNDS: dict[str, dict[str, Any]] = {
    "none": {}, "causal": {"causal": True}, "window": {"window": (20, 9)},
    "lengths": {"q_lengths": np.array([[70], [33]]), "kv_lengths": np.array([[50], [0]])},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", BOUNDS)
def test_lanes_hold_a_bias_beside_float32(device: HostDevice, name: str) -> None:
    """A bias held in registers is within the budget in float32, with some pairs hidden by -inf."""
    bias = a_bias(2, 70, 81, dtype=np.float32)
    shapes = (2, 2, 70, 12), (2, 2, 81, 12), (2, 2, 81, 12)
    options = {"bias": bias, **BOUNDS[name]}
    call = make_call("normal", 5, np.float32, *shapes, options=options, wrt=("q", "k", "v", "bias"))
    problem = describe(call.q, call.k, call.v, cuflash.Options(**options))
    assert all(config.holds_bias for config in held(problem))
    check(call, cuflash.Options(**call.options))
    assert "cuflash_backward_dscore_sm80" in device.launched


@pytest.mark.gate
@pytest.mark.nvrtc
def test_a_held_bias_of_float32_compiles_without_spills(generation: int) -> None:
    from test_compile_sm90 import compile_all

    q, k = (np.zeros((2, 2, n, 16), np.float32) for n in (70, 81))
    configs = set()
    for bounds in BOUNDS.values():
        options = cuflash.Options(bias=np.zeros((2, 70, 81), np.float32), **bounds)
        configs |= set(held(describe(q, k, k, options)))
    compile_all(configs, generation)
