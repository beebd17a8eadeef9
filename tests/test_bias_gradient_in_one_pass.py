"""Is a bias gradient right that one pass writes, where each element is of one pair? On Hopper.

Gradients of other biases have a kernel of sums: ``test_bias_gradient.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import Options
from cuflash._kernels import split_queries
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash._select.choose import Wanted, choose
from cuflash.testing._budget import Budget
from support import chosen
from support.memory import to_device
from support.problems import Call, make_call

HEADS = 3
#: (batch, heads of keys, queries, keys, options)
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "ragged": (2, HEADS, 300, 400, {}),
    "odd rows": (2, HEADS, 130, 397, {}),
    "causal": (2, HEADS, 300, 400, {"causal": True}),
    "rows that see nothing": (1, HEADS, 700, 264, {"causal": True}),
    "window": (1, HEADS, 600, 704, {"window": (90, 30), "offset": -20}),
    "lengths": (
        3, HEADS, 300, 400,
        {"q_lengths": np.array([[300], [0], [129]]), "kv_lengths": np.array([[250], [400], [0]])},
    ),
    "groups": (2, 1, 200, 304, {"enable_gqa": True, "causal": True}),
    "slopes and dropout": (
        2, HEADS, 200, 300,
        {"alibi_slopes": np.array([0.3, 0.0, -0.05], np.float32), "dropout": 0.3, "seed": 5},
    ),
    "parts of the queries": (1, HEADS, 1500, 104, {"causal": "top_left"}),
}  # fmt: skip
#: Cases at head size 128 in which registers hold a bias and its gradient is stored from them.
AT_128 = ("ragged", "lengths")


def bias_of(shape: tuple[int, ...], dtype: Any = bfloat16) -> np.ndarray:
    """Return a bias that is -inf for some pairs, for one whole row and for one whole key."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal(shape).astype(dtype)
    bias[rng.random(shape) < 0.1] = bias[..., 13, :] = bias[..., 20] = -np.inf
    return bias


def call_of(name: str, head_dim: int, dtype: Any = bfloat16) -> Call:
    batch, heads_k, rows, keys, options = CASES[name]
    shapes = [(batch, h, n, head_dim) for h, n in ((HEADS, rows), (heads_k, keys), (heads_k, keys))]
    options = {"bias": bias_of((batch, HEADS, rows, keys), dtype), **options}
    return make_call("normal", 3, dtype, *shapes, options=options, wrt=("q", "k", "v", "bias"))


def kernels_of(bias: np.ndarray, **options: Any) -> list[str]:
    """Return the names of the kernels of all gradients, for two batch entries with three heads."""
    q = np.zeros((2, 3, 200, 64), options.pop("dtype", bfloat16))
    problem = describe(q, q, q, Options(bias=bias, **options))
    wanted = Wanted({**dict.fromkeys("qkv", ()), "bias": bias.shape})
    steps = choose(problem, hardware.typical("sm_90"), wanted=wanted)
    return [step.config.kernel for step in steps if step.config.computes != "delta"]


def test_only_a_bias_of_single_pairs_is_written_by_one_pass() -> None:
    one_pass, sums = ["backward_sm90", "backward_convert"], ["backward_dscore_sm80"]

    def of(*shape: int, dtype: Any = bfloat16) -> np.ndarray:
        return np.zeros(shape, dtype)

    assert kernels_of(of(2, 3, 200, 200)) == one_pass
    assert kernels_of(of(2, 3, 200, 200), causal=True, dropout=0.5, seed=1) == one_pass
    for shape in ((1, 3, 200, 200), (2, 1, 200, 200), (2, 3, 1, 200), (2, 3, 200, 1)):
        assert kernels_of(of(*shape)) == one_pass + sums
    assert kernels_of(of(2, 3, 200, 200, dtype=np.float32)) == one_pass + sums
    assert kernels_of(of(2, 3, 200, 200), dtype=np.float16) == one_pass + sums
    assert kernels_of(of(2, 3, 200, 200), softcap=3.0) == one_pass + sums


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_compiles_without_spills(generation: int, head_dim: int) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_compile_sm90 import compile_all

    configs = set()
    lengths = {"q_lengths": np.ones(2, np.int64), "kv_lengths": np.ones(2, np.int32)}
    all_options = {
        "window": (7, 3), "dropout": 0.25, "seed": 1, "mask": np.ones((100, 200), np.bool_),
        "alibi_slopes": np.ones(2, np.float32), **lengths,
    }  # fmt: skip
    for options in ({}, {"causal": True}, {"causal": True, **lengths}, lengths, all_options):
        q, k = (np.zeros((2, n, head_dim), bfloat16) for n in (100, 200))
        problem = describe(q, k, k, Options(bias=np.zeros((2, 100, 200), bfloat16), **options))
        found = chosen.fused(problem, deterministic="mask" not in options)
        if found is None or not found.can_write_bias:
            assert head_dim == 128
            assert "window" in options or "causal" in options
            continue
        found = found.replace(grad_bias=True)
        configs |= {found, BackwardConvertConfig.after(found)}
        if options in ({}, all_options):
            rows = split_queries.may_split_rows(found)
            configs.add(found.replace(split_queries=True, split_rows=rows))
    compile_all(configs, generation)


def uploaded(value: Any) -> Any:
    import cupy

    return to_device(cupy, value) if isinstance(value, np.ndarray) else value


def gradients(call: Call, out: Any, lse: Any, *, odd: bool = False, **keywords: Any) -> Any:
    """Return all gradients, written over NaN; with ``odd`` into every second column of an array."""
    dout, q, k, v = (uploaded(call.array(name)) for name in ("dout", "q", "k", "v"))
    room = {}
    for name in call.wrt:
        array = call.array(name)
        shape = (*array.shape[:-1], 2 * array.shape[-1]) if odd else array.shape
        room[f"d{name}"] = uploaded(np.full(shape, np.nan, array.dtype))[..., :: 2 if odd else 1]
    options = {name: uploaded(value) for name, value in call.options.items()}
    return cuflash.attention_backward(
        dout, q, k, v, out, lse, wrt=call.wrt, grads_out=cuflash.Gradients(**room), **options,
        **keywords,
    )  # fmt: skip


def results(call: Call) -> Any:
    """Return out and lse on the device."""
    q, k, v = (uploaded(call.array(name)) for name in ("q", "k", "v"))
    options = {name: uploaded(value) for name, value in call.options.items()}
    return cuflash.attention(q, k, v, return_lse=True, **options)


def as_numpy(found: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: getattr(found, f"d{name}").get() for name in names}


@pytest.fixture
def launched() -> Any:
    """Yield the kernels of the plans that a test makes."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")
    from support.portable import planned_kernels

    with planned_kernels() as configs:
        yield configs
        found = {config.kernel for config in configs}
        assert "backward_sm90" in found
        assert "backward_dscore_sm80" not in found


@pytest.mark.gpu
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(name, d) for name in CASES for d in (32, 64, 96, 128) if d < 128 or name in AT_128],
)
def test_within_budget(name: str, head_dim: int) -> None:
    """Every order and stride is within the budget; dbias has the same bits in all of them."""
    dtype = np.float16 if head_dim == 96 else bfloat16
    call = call_of(name, head_dim, dtype)
    out, lse = results(call)
    budget, given = Budget(call), (out.get(), lse.get())
    found = []
    for keywords in ({}, {}, {"deterministic": False}, {"odd": True}):
        own = as_numpy(gradients(call, out, lse, **keywords), call.wrt)
        budget.check_backward(own, given=given)
        found.append(own["bias"].tobytes())
    assert len(set(found)) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("launched")
def test_a_value_that_one_row_sees_is_nan() -> None:
    """A NaN value makes dbias NaN only in the row that sees it, where the bias is not -inf."""
    call = call_of("ragged", 64)
    bias, v = call.options["bias"].copy(), call.v.copy()
    bias[..., 50] = -np.inf
    bias[..., 30, 50] = 0
    v[..., 50, :] = np.nan
    clean = call.but(options={**call.options, "bias": bias})
    out, lse = results(clean)
    poisoned = clean.but(v=v)
    own = as_numpy(gradients(poisoned, *results(poisoned)), call.wrt)["bias"]
    visible = bias[..., 30, :] != -np.inf
    assert np.isnan(own[..., 30, :][visible]).all()
    assert not own[..., 30, :][~visible].any()
    found = as_numpy(gradients(clean, out, lse), call.wrt)
    own[..., 30, :] = found["bias"][..., 30, :]
    Budget(clean).check_backward({**found, "bias": own}, given=(out.get(), lse.get()))
