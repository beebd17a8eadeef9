"""Does `rotary` turn pairs as the definition says, and back?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16, finfo

import cuflash
from cuflash import reference

DTYPES = [np.float16, bfloat16, np.float32, np.float64]


def rows(seed: int, dtype: Any, d: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, 5, d)).astype(dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from([2, 6, 64]),
    st.sampled_from([(5,), (2, 1, 5), (1,), ()]),
    st.sampled_from([10, 100_000, 2**40]),
    st.booleans(),
    st.booleans(),
)
def test_pairs_turn_as_defined(
    seed: int, dtype: Any, d: int, shape: tuple[int, ...], far: int, interleaved: bool, back: bool
) -> None:
    x = rows(seed, dtype, d)
    positions = np.random.default_rng(seed).integers(-far, far, shape)
    options = {"interleaved": interleaved, "inverse": back}
    found = cuflash.rotary(x, positions, **options)
    expected = reference.rotary(x, positions, **options)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    eps = float(finfo(x.dtype).eps)
    products = max(eps, float(np.finfo(np.float32).eps)) if x.dtype != np.float64 else eps
    size = np.abs(x.astype(np.float64)).max() * 1.5
    # Roundings of the angle in float64, of cos, sin, two products and a sum, and of the result.
    bound = size * (2 * far * np.finfo(float).eps + 3 * products) + eps / 2 * np.abs(expected)
    assert (np.abs(found.astype(np.float64) - expected) <= bound + float(finfo(x.dtype).tiny)).all()


def test_by_hand() -> None:
    """A quarter turn turns (a, b) into (-b, a)."""
    quarter, x = np.array([np.pi / 2]), np.array([[1.0, 2.0, 7.0]])
    for interleaved in (False, True):
        turned = cuflash.rotary(x, 1, frequencies=quarter, interleaved=interleaved)
        np.testing.assert_allclose(turned, [[-2, 1, 7]], atol=1e-15)
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    turned = cuflash.rotary(x, np.array([5]), frequencies=np.array([np.pi / 10, 0.0]))
    np.testing.assert_allclose(turned, [[-3, 2, 1, 4]], atol=1e-14)
    turned = cuflash.rotary(
        x, np.array([5]), frequencies=np.array([np.pi / 10, 0.0]), interleaved=True
    )
    np.testing.assert_allclose(turned, [[-2, 1, 3, 4]], atol=1e-14)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
def test_positions_of_any_integers(dtype: Any) -> None:
    """Positions of any integer dtype work, from the least to the largest number."""
    x, limits = rows(0, np.float64, 6)[0, 0], np.iinfo(dtype)
    positions = np.array([limits.min, limits.max, 0, 1, limits.max - 1], dtype)
    found = cuflash.rotary(x, positions)
    np.testing.assert_allclose(found, reference.rotary(x, positions), rtol=1e-12, atol=1e-12)
    if dtype is np.int64:
        for position in (limits.min, limits.max):
            expected = reference.rotary(x, np.array(position, dtype))
            np.testing.assert_allclose(cuflash.rotary(x, position), expected, atol=1e-12)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_scores_depend_on_distances_alone(seed: int, interleaved: bool) -> None:
    q, k = (rows(seed + i, np.float64, 8) for i in range(2))
    scores = [
        cuflash.rotary(q, 7 + shift, interleaved=interleaved)
        @ cuflash.rotary(k, 3 + shift, interleaved=interleaved).swapaxes(-1, -2)
        for shift in (0, 1000)
    ]
    np.testing.assert_allclose(*scores, rtol=1e-9, atol=1e-10)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([None, 1, 3]))
def test_the_inverse_is_the_gradient(seed: int, interleaved: bool, pairs: int | None) -> None:
    """The inverse is the gradient, as rotary is linear: <dy, rotary(x)> = <inverse(dy), x>."""
    x, dy = (rows(seed + i, np.float64, 8) for i in range(2))
    frequencies = None if pairs is None else np.random.default_rng(seed).standard_normal(pairs)
    options = {"frequencies": frequencies, "interleaved": interleaved}
    positions = np.arange(5) - 2
    y = cuflash.rotary(x, positions, **options)
    dx = cuflash.rotary(dy, positions, inverse=True, **options)
    np.testing.assert_allclose((dy * y).sum(), (dx * x).sum(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(cuflash.rotary(y, positions, inverse=True, **options), x, atol=1e-13)


def test_it_does_not_write_into_what_it_reads() -> None:
    out = np.zeros((2, 4))
    for positions, name in ((out[:, 0].view(np.int64), "positions"), (0, "x")):
        x = out if name == "x" else np.ones((2, 4))
        with pytest.raises(ValueError, match=f"out: got memory shared with {name}"):
            cuflash.rotary(x, positions, out=out)


def test_it_writes_where_it_is_told() -> None:
    x = rows(0, np.float16, 6)
    out = np.empty((2, 3, 5, 12), np.float16)[..., ::2]
    assert cuflash.rotary(x, np.array([3]), out=out) is out
    np.testing.assert_array_equal(out, cuflash.rotary(x, np.array([3])))


@pytest.mark.parametrize(
    ("x", "positions", "options", "error", "message"),
    [
        ((2, 5), 0, {}, ValueError, "x: got shape .2, 5., expected an even number of features"),
        ((2, 0), 0, {}, ValueError, "x: got shape"),
        ((4,), 0, {}, ValueError, "x: got shape"),
        ((2, 4), [0, 1, 2], {}, ValueError, "positions: got shape .3,., expected a shape that"),
        ((2, 4), [[0, 1], [2, 3]], {}, ValueError, "positions: got shape .2, 2., expected a shape"),
        ((2, 4), [0.5], {}, TypeError, "positions: got"),
        ((2, 4), 2**70, {}, ValueError, "positions: got"),
        ((2, 4), 0, {"frequencies": np.ones(3)}, ValueError, "frequencies: got shape .3,."),
        ((2, 4), 0, {"frequencies": np.ones(2, int)}, TypeError, "frequencies: got dtype int64"),
        ((2, 4), 0, {"interleaved": 1}, TypeError, "interleaved: got 1"),
        ((2, 4), 0, {"out": np.ones((2, 3))}, ValueError, "out: got shape"),
        ((2, 4), 0, {"out": np.ones((2, 4), np.float32)}, TypeError, "out: got dtype float32"),
    ],
)
def test_wrong_calls_are_refused_by_name(
    x: Any, positions: Any, options: Any, error: Any, message: str
) -> None:
    positions = np.array(positions) if isinstance(positions, list) else positions
    with pytest.raises(error, match=message):
        cuflash.rotary(np.ones(x), positions, **options)


@pytest.mark.parametrize("name", ["x", "positions", "frequencies"])
def test_out_has_memory_of_its_own(name: str) -> None:
    out = np.ones((2, 4))
    inputs = {"x": np.ones((2, 4)), "positions": np.ones(2, int), "frequencies": np.ones(2)}
    own = inputs[name]
    inputs[name] = out.reshape(-1)[: own.size].view(own.dtype).reshape(own.shape)
    with pytest.raises(ValueError, match=f"out: got memory shared with {name}"):
        cuflash.rotary(inputs["x"], inputs["positions"], frequencies=inputs["frequencies"], out=out)


def test_frequencies_that_are_not_finite_warn_of_nothing() -> None:
    """Non-finite frequencies give NaN, and no floating-point error whatever np.errstate says."""
    with np.errstate(all="raise"):
        out = cuflash.rotary(np.ones((3, 4)), np.arange(3), frequencies=np.array([np.inf, 1.0]))
    assert np.isnan(out[:, 0]).all()
    assert np.isfinite(out[:, 1]).all()
