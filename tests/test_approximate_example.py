"""Do the approximations in examples/approximate.py have the properties that their papers prove?"""

from __future__ import annotations

import math

import approximate
import approximate_trained
import numpy as np
import pytest
import rxnmapper_weights
from albert import Albert
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import reference


def arrays(seed: int, m: int, n: int, d: int, e: int = 3) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape) for shape in ((m, d), (n, d), (n, e)))


def estimates(draw, count: int, draws: int, d: int = 8) -> tuple[np.ndarray, float, float]:
    """Return estimates (draws,) of one weight by ``count`` directions, the weight and |q + k|^2."""
    rng = np.random.default_rng(1)
    q, k = 0.6 * rng.standard_normal((2, 1, d))
    directions = np.concatenate([draw(rng, count, d) for _ in range(draws)])
    exponents = sum(approximate.favor_exponents(x, directions)[0] for x in (q, k))
    means = np.exp(exponents).reshape(draws, count).mean(axis=-1)
    both = float(((q + k) ** 2).sum()) / math.sqrt(d)
    return means, math.exp(float((q @ k.T)[0, 0]) / math.sqrt(d)), both


@pytest.mark.parametrize(
    "draw", [approximate.gaussian_directions, approximate.orthogonal_directions]
)
def test_performers_weights_are_right_in_the_mean(draw):
    found, exact, _ = estimates(draw, 8, 20_000)
    assert abs(found.mean() - exact) < 4 * found.std() / math.sqrt(len(found))


def test_performers_variance_is_the_papers_and_declines_with_features():
    """The variance is weight^2 (exp(|q + k|^2) - 1) / directions (Choromanski et al., lemma 2)."""
    for count in (1, 8, 64):
        found, exact, both = estimates(approximate.gaussian_directions, count, 100_000 // count)
        assert found.var() == pytest.approx(exact**2 * math.expm1(both) / count, rel=0.15)


def test_orthogonal_directions_lower_the_variance():
    """The variance falls at least by the bound of Choromanski et al., theorem 2, for count = d."""
    count, d = 8, 8
    alone, exact, both = estimates(approximate.gaussian_directions, count, 20_000)
    together, _, _ = estimates(approximate.orthogonal_directions, count, 20_000)
    squares = both - 2 * math.log(exact)  # |q|^2 + |k|^2
    gap = 2 * (count - 1) / (count * (d + 2)) * (exact - math.exp(-squares / 2)) ** 2
    assert alone.var() - together.var() > gap


def test_performer_comes_near_exact_attention():
    q, k, v = arrays(0, 20, 30, 16)
    errors = []
    for count in (64, 4096):
        directions = approximate.orthogonal_directions(np.random.default_rng(0), count, 16)
        errors.append(abs(approximate.performer(q, k, v, directions) - cuflash.attention(q, k, v)))
    assert errors[1].max() < errors[0].max() / 3
    assert errors[1].max() < 0.2


def test_linear_attention_is_its_quadratic_form():
    q, k, v = arrays(0, 5, 7, 4)
    weights = approximate.elu_plus_one(q) @ approximate.elu_plus_one(k).T
    wanted = weights / weights.sum(axis=-1, keepdims=True) @ v
    np.testing.assert_allclose(approximate.linear_attention(q, k, v), wanted, rtol=1e-12)
    values = approximate.elu_plus_one(np.array([-1.0, 0.0, 2.0, 1e4, -1e4]))
    np.testing.assert_allclose(values, [math.exp(-1), 1, 3, 10_001, 0], atol=1e-12)


def test_linformer_is_exact_with_as_many_keys_and_for_equal_keys():
    q, k, v = arrays(0, 5, 12, 4)
    exact = cuflash.attention(q, k, v)
    np.testing.assert_allclose(approximate.linformer(q, k, v, np.eye(12), np.eye(12)), exact)
    k = np.repeat(k[:4], 3, axis=0)
    means = np.kron(np.eye(4), np.full((1, 3), 1 / 3))  # means of 3 equal keys, and of values
    exact = cuflash.attention(q, k, v)
    np.testing.assert_allclose(approximate.linformer(q, k, v, means, means), exact)


def test_a_fitted_linformer_is_nearer_than_means_of_neighbours():
    rng = np.random.default_rng(0)
    k = rng.standard_normal((6, 8))[rng.integers(6, size=128)] + 0.3 * rng.standard_normal((128, 8))
    q, v = rng.standard_normal((128, 8)), k[:, :3]
    exact = cuflash.attention(q, k, v)
    e, f = approximate.fit_linformer(q, k, v, 16)
    assert e.shape == f.shape == (16, 128)
    means = np.kron(np.eye(16), np.full((1, 8), 1 / 8))
    pooled, fitted = (
        np.linalg.norm(approximate.linformer(q, k, v, *pair) - exact)
        for pair in ((means, means), (e, f))
    )
    assert fitted < pooled / 5


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), reach=st.integers(0, 12), num_global=st.integers(0, 6))
def test_longformers_pattern_is_attention_with_its_mask(n, reach, num_global):
    num_global = min(num_global, n)
    q, k, v = arrays(n, n, n, 4)
    rows, columns = np.ogrid[:n, :n]
    mask = (abs(rows - columns) <= reach) | (rows < num_global) | (columns < num_global)
    found = approximate.longformer(q, k, v, reach, num_global)
    np.testing.assert_allclose(found, reference.attention(q, k, v, mask=mask), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
def test_methods_take_arrays_of_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = (x.astype(np.float32) for x in arrays(0, 40, 40, 16))
    directions = approximate.orthogonal_directions(np.random.default_rng(0), 64, 16)
    means = np.kron(np.eye(8), np.full((1, 5), 1 / 5)).astype(np.float32)
    for method, *more in (
        (approximate.linear_attention,),
        (approximate.performer, directions.astype(np.float32)),
        (approximate.linformer, means, means),
        (approximate.longformer, 5, 2),
    ):
        given = [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v, *more)]
        found = method(*given).get()
        np.testing.assert_allclose(found, method(q, k, v, *more), rtol=1e-4, atol=1e-5)


def test_the_watched_model_is_the_model():
    """With exact attention per head, the watched model differs from the model by roundings only."""
    try:
        wheel = rxnmapper_weights.obtain_wheel()
    except rxnmapper_weights.WheelUnavailableError as problem:
        pytest.skip(f"the wheel of rxnmapper is not to be had: {problem}")
    checkpoint = rxnmapper_weights.read_checkpoint(wheel)
    ids = approximate_trained.token_ids(checkpoint.vocabulary)[:, :40]
    found, wanted = (
        kind(
            checkpoint.config, checkpoint.tensors, dtype=np.float64, attention_dtype=np.float64
        ).encode(ids, np.array([40]), 0)[0]
        for kind in (approximate_trained.Watched, Albert)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-10)
    assert approximate_trained.error(wanted[0], wanted[0]) == 0
