"""Do float64 rows keep their weights whatever the size of their scores, whichever rows are near?

The float64 forward compares scores by half of their bits, and its references lag behind maxima.
Rows too large for that, infinities and NaN take another branch, together with all rows of their
warp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from support.problems import make_call, run

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER, host_device

ROWS, KEYS, WIDTH = 64, 150, 16
#: Scores of a row are multiples of one factor. A warp has rows of each factor.
FACTORS = (
    1.0, 30.0, -30.0, 1e5, -1e5, 3e6, -3e6, 1e9, 1e13, 1e15, -1e15, 1e20, -1e31, 1e100, -1e300, 0.0,
    1e-300,
)  # fmt: skip
ORDERS, BOUNDS = ("rising", "falling", "below zero", "mixed"), ("full", "window")
Attend = Callable[[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]], Any]


def keys_of(order: str) -> np.ndarray:
    """Return the first columns of the keys, between -2.5 and 3 (4 less where "below zero")."""
    keys = np.sort(np.random.default_rng(3).uniform(-2.5, 3, KEYS))
    shuffled = np.random.default_rng(4).permutation(keys)
    return {
        "rising": keys,
        "falling": keys[::-1],
        "below zero": shuffled - 4,
        "mixed": shuffled,
    }[order]


def inputs(order: str, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k = np.zeros((factors.size, WIDTH)), np.zeros((KEYS, WIDTH))
    q[:, 0], k[:, 0] = factors, keys_of(order)
    return q, k, np.random.default_rng(5).standard_normal((KEYS, WIDTH))


def on_the_host(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> Any:
    from test_kernels_on_the_host import results

    call = make_call("normal", 0, np.float64, q.shape, k.shape, v.shape, options=options, wrt=())
    out, lse, _ = results(call.but(q=q, k=k, v=v), cuflash.Options(**options))
    return out, lse


def on_a_gpu(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> Any:
    import cupy

    call = make_call("normal", 0, np.float64, q.shape, k.shape, v.shape, options=options, wrt=())
    result = run(cupy, call.but(q=q, k=k, v=v), backward=False)
    return result.out, result.lse


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Attend]:
    if request.param == "gpu":
        yield on_a_gpu
        return
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    with host_device(tmp_path):
        yield on_the_host


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse of scores that are products of two numbers; 0 and -inf for hidden rows."""
    scores = np.where(seen, np.outer(q[:, 0], k[:, 0]), -np.inf).astype(np.longdouble)
    largest = scores.max(-1, keepdims=True, initial=-1.7e308)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, largest + np.log(total), -np.inf)
    return weights @ v / np.where(total > 0, total, 1), lse[:, 0]


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_scores_of_every_size(attend: Attend, order: str, bounds: str) -> None:
    q, k, v = inputs(order, np.resize(FACTORS, ROWS))
    options: dict[str, Any] = {"scale": 1.0}
    seen = np.ones((ROWS, KEYS), bool)
    if bounds == "window":  # the first rows see nothing, the next a few keys
        options |= {"window": (40, 0), "offset": -20}
        distance = np.arange(KEYS) - np.arange(ROWS)[:, None] + 20
        seen = (distance <= 0) & (distance >= -40)
    out, lse = attend(q, k, v, options)
    right, right_lse = expected(q, k, v, seen)
    np.testing.assert_allclose(out, right.astype(float), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, right_lse.astype(float), rtol=1e-15, atol=1e-14)


@pytest.mark.long
def test_infinities_and_nan_stay_in_their_rows(attend: Attend) -> None:
    factors = np.resize(FACTORS, ROWS)
    q, k, v = inputs("mixed", factors)
    calm = attend(q, k, v, {"scale": 1.0})
    odd = {5: np.nan, 11: -np.nan, 21: np.inf, 40: 1e307, 41: -1e307}
    q[list(odd), 0] = list(odd.values())
    out, lse = attend(q, k, v, {"scale": 1.0})
    others = np.setdiff1d(np.arange(ROWS), list(odd))
    assert out[others].tobytes() == calm[0][others].tobytes()
    assert lse[others].tobytes() == calm[1][others].tobytes()
    assert np.isnan(out[[5, 11]]).all()
    assert np.isnan(lse[[5, 11]]).all()
    assert not np.isfinite(lse[21])


@pytest.mark.long
def test_bits_do_not_depend_on_neighbours(attend: Attend) -> None:
    q, k, v = inputs("rising", np.resize(FACTORS, ROWS))
    q[:, 1], k[:, 1] = 1, 3e5  # large, but still distinguished by half of the bits
    together = attend(q, k, v, {"scale": 1.0})
    for first in range(0, ROWS, 9):
        alone = np.zeros_like(q)
        alone[first] = q[first]
        out, lse = attend(alone, k, v, {"scale": 1.0})
        assert out[first].tobytes() == together[0][first].tobytes()
        assert lse[first] == together[1][first]
