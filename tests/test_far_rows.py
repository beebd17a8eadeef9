"""Do rows get the definition's weights, forward and gradient, however far from 0 their scores lie?

Far from 0, one unit in the last place of a score spans many exponents. A product that is rounded
once more, or summed in another order, then gives weights that overflow or vanish. Scores here
differ by more than their roundings, so that one key has the whole weight and an error shows in
every digit. Rows near 0 lie among the far rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, finfo

import cuflash
from cuflash import reference
from support.problems import DTYPES, FIELDS, Call, make_call, run

pytest.importorskip("cupy", reason="CuPy is not installed")

import test_host

from support.host_device import COMPILER, host_device

ROWS, KEYS = 40, 80
#: dtype of the inputs -> sizes of the scores of far rows.
SIZES = {
    "float64": (1e12, 1e14, 1e20, 1e31, 1e100, 1e300),
    "float32": (1e4, 1e6, 1e10, 1e30),
    "bfloat16": (1e4, 1e6, 1e10, 1e30),
}
#: From these lse on, rows are computed again.
FAR = {"float64": 2.0**46, "float32": 2.0**20}
OPTIONS = ("plain", "causal", "mask and sink", "key bias", "large scale", "narrow")
CASES = [
    *(("float64", name) for name in OPTIONS),
    *(("float32", name) for name in OPTIONS if name != "causal"),
    *(("bfloat16", name) for name in ("plain", "large scale")),
]
Compute = Callable[[Call], tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]


def on_the_host(call: Call) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    from test_kernels_on_the_host import results

    return results(call, cuflash.Options(**call.options))


def on_a_gpu(call: Call) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    import cupy

    result = run(cupy, call)
    return result.out, result.lse, result.gradients


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def compute(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Compute]:
    if request.param == "gpu":
        yield on_a_gpu
        return
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    with host_device(tmp_path):
        yield on_the_host


def options_of(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "mask and sink": {"mask": rng.random((ROWS, KEYS)) < 0.8, "sink": np.array(0.5)},
        "key bias": {"bias": rng.standard_normal((1, KEYS))},
        "large scale": {},
        "narrow": {"causal": True},
    }
    return cases[name]


def call_of(name: str, dtype: str, size: float, late: bool) -> Call:
    """Of each three rows make the first near 0, the second far above 0 and the third far below.

    With ``late``, the rows far below 0 see keys far below 0 first, and then a key at 0.
    """
    width, width_v = (3, 4) if name == "narrow" else (24, 40)
    shapes = (ROWS, width), (KEYS, width), (KEYS, width_v)
    call = make_call("normal", 2, np.dtype(np.float64), *shapes, options=options_of(name))
    kind = np.arange(ROWS) % 3
    q, k = call.q.copy(), call.k.copy()
    k[:, 0] = np.abs(k[:, 0]) + 3
    q[kind == 1, 0] = 4
    q[kind == 2] *= 0.1
    q[kind == 2, 0] = -4
    if late:
        k[KEYS - 25] = 0
    scale = size if name == "large scale" else 0.25
    q = np.where((kind == 0)[:, None], q / (4 * scale), q * (size / scale / 4))
    to = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v, dout = (a.astype(to) for a in (q, k, call.v, call.dout))
    wrt: tuple[str, ...] = ("q", "k", "v", *({"bias", "sink"} & set(call.options) or {"scale"}))
    if "bias" in call.options and dtype != "float64":
        wrt = ()  # a bias may act as a mask: docs/accuracy.md
    return Call(q, k, v, dout, options={**call.options, "scale": scale}, wrt=wrt)


def check(call: Call, found: tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]) -> None:
    """Compare with the definition, within what sums and roundings of single weights may lose."""
    real = np.dtype(call.lse_dtype)
    exact = np.longdouble if real == np.float64 else np.float64
    options, scale = dict(call.options), abs(call.options["scale"])
    given = [a.astype(exact) for a in (call.dout, call.q, call.k, call.v)]
    dout, q, k, v = given
    right, right_lse = reference.attention(q, k, v, return_lse=True, dtype=exact, **options)
    gradients = reference.attention_backward(*given, dtype=exact, wrt=call.wrt, **options)
    p = reference.weights(q, k, rows=slice(None), dtype=exact, **options)

    eps = float(np.finfo(real).eps)
    unit = max(eps, float(finfo(call.dtype).eps))
    size = scale * (np.abs(q) @ np.abs(k).T) + np.abs(options.get("bias", 0.0))
    assert (eps * size * p * (1 - p) < 1e-2).all(), "keys are not far enough apart"
    p_error = p * (1 - p) * 64 * eps * (1 + size) + 32 * eps * p + np.finfo(real).tiny
    # A gradient's weights are as exact as lse and a recomputed score. Far from 0 both round alike.
    finite_lse = np.where(np.isneginf(right_lse), 0, np.abs(right_lse))
    near = finite_lse < FAR[real.name]
    x = np.abs(dout) @ np.abs(v).T
    again = p_error + 64 * eps * (finite_lse + (p * size).sum(-1))[:, None] * p * near[:, None]
    ds_error = (again + 4 * unit * p) * (x + (p * x).sum(-1, keepdims=True))
    bounds = {
        "out": (p_error + 2 * unit * p) @ np.abs(v),
        "lse": 8 * eps * (1 + np.abs(right_lse) + (p * size).sum(-1)),
        "v": (again + 2 * unit * p).T @ np.abs(dout),
        "q": scale * (ds_error @ np.abs(k)),
        "k": scale * (ds_error.T @ np.abs(q)),
        "bias": ds_error.sum(0, keepdims=True),
        "scale": (ds_error * size / scale).sum(),
    }
    if "sink" in options:
        p_sink = 1 - p.sum(-1)
        sink_error = p_sink * (1 - p_sink) * (1 + finite_lse) + p_sink + p_error.sum(-1)
        bounds["sink"] = (64 * unit * sink_error * (p * x).sum(-1)).sum()
    out, lse, own = found
    truths = {"out": right, "lse": right_lse}
    truths |= {name: getattr(gradients, FIELDS[name]) for name in own}
    for name, result in {"out": out, "lse": lse, **own}.items():
        truth = truths[name]
        # Written so that a NaN is wrong.
        wrong = ~(np.abs(result.astype(exact) - truth) <= bounds[name] + np.abs(truth) * unit)
        if name == "lse":
            wrong &= ~(np.isneginf(truth) & np.isneginf(result))
        at = np.argwhere(wrong)[:3].tolist()
        assert not at, f"{name}{at} of {wrong.sum()}: {result[wrong][:3]}, not {truth[wrong][:3]}"


def check_sizes(dtype: str, name: str, compute: Compute) -> None:
    for size, late in zip(SIZES[dtype], itertools.cycle((False, True)), strict=False):
        try:
            check(call := call_of(name, dtype, size, late), compute(call))
        except AssertionError as error:
            raise AssertionError(f"scores of {size:g}, late {late}: {error}") from error


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_weights(compute: Compute, dtype: str, name: str) -> None:
    check_sizes(dtype, name, compute)


@pytest.mark.full
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_without_tensor_cores(dtype: str, tmp_path: Any) -> None:
    with host_device(tmp_path, 75):
        check_sizes(dtype, "plain", on_the_host)


@pytest.mark.full
def test_rows_near_0_keep_their_bits(compute: Compute) -> None:
    call = call_of("plain", "float64", 1e100, late=True).but(wrt=("q",))
    near = np.arange(ROWS) % 3 == 0
    alone = call.but(q=np.where(near[:, None], call.q, 0))
    together, apart = compute(call), compute(alone)
    for a, b in zip((*together[:2], together[2]["q"]), (*apart[:2], apart[2]["q"]), strict=True):
        assert a[near].tobytes() == b[near].tobytes()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equal_keys_share_a_far_row(compute: Compute, dtype: str) -> None:
    call = call_of("plain", dtype, 1e30, late=False).but(wrt=())
    k = call.k.copy()
    k[KEYS // 2 :] = k[: KEYS // 2]
    out, _, _ = compute(call.but(k=k))
    p = reference.weights(call.q, k, rows=slice(None), **call.options)
    far = np.arange(ROWS) % 3 > 0
    assert (np.isin(p[far], (0, 0.5))).all()
    unit = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(out[far], (p @ call.v)[far], rtol=4 * unit, atol=4 * unit)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [("float32", (24, 24)), ("float32", (3, 5)), ("float64", (24, 40)), ("bfloat16", (64, 64))],
    ids=str,
)
def test_sums_of_values_stay_within_the_range(
    compute: Compute, dtype: str, widths: tuple[int, int]
) -> None:
    """A mean stays finite though its sum overflows: its row is computed again, pair by pair."""
    options = {"sink": np.array(-1.0)} if dtype == "float32" else {}
    call = test_host.large_values(DTYPES[dtype], 100, *widths, **options)
    # Kernels flush subnormal float32 numbers.
    test_host.check_large_values(call, compute(call)[0], float(np.finfo(np.float32).tiny))


@pytest.mark.full
@pytest.mark.parametrize("option", ["bias", "sink"])
def test_far_options(compute: Compute, option: str) -> None:
    """A bias or sink far from 0 gives one key, or no key, the whole weight of every row."""
    far = np.zeros((1, KEYS)) if option == "bias" else np.array(1e100)
    if option == "bias":
        far[0, 7] = 1e100
    call = make_call("normal", 3, np.dtype(np.float64), (ROWS, 24), (KEYS, 24), (KEYS, 40))
    call = call.but(options={option: far}, wrt=("q", "k", "v", option))
    out, lse, gradients = compute(call)
    right = np.broadcast_to(call.v[7] if option == "bias" else 0, out.shape)
    np.testing.assert_array_equal(out, right)
    np.testing.assert_array_equal(lse, 1e100)
    expected = np.zeros_like(call.v)
    if option == "bias":
        expected[7] = call.dout.sum(0)
    np.testing.assert_allclose(gradients.pop("v"), expected, rtol=1e-13, atol=1e-13)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, np.zeros_like(gradient), atol=1e-12, err_msg=name)
