"""Which formulas do approximations of attention compute?

Linear attention, Performer, Linformer and Longformer's pattern, for NumPy or CuPy arrays. In all of
them q is (m, d), k is (n, d), v is (n, e), and logits are q.k / sqrt(d). The first three compute
something else than attention, with O(n) products. Longformer's pattern is exact attention to fewer
keys, which `cuflash` computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from transformer import Adam

import cuflash

Array = Any


def linear_attention(
    q: Array, k: Array, v: Array, feature: Callable[[Array], Array] | None = None
) -> Array:
    """Weights feature(q).feature(k) replace exp(q.k / sqrt(d)): two products, no n x n matrix.

    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, equation 5; their feature is
    elu(x) + 1.
    """
    feature = elu_plus_one if feature is None else feature
    return normalised(feature(q), feature(k), v)


def elu_plus_one(x: Array) -> Array:
    """Return x + 1 where x > 0, else exp(x), which is always positive."""
    return x.clip(0, None) + np.exp(x.clip(None, 0))


def normalised(query: Array, key: Array, v: Array) -> Array:
    """Means of v with weights query.key, for features query (m, r) and key (n, r)."""
    return (query @ (key.T @ v)) / (query @ key.sum(axis=0))[:, None]


def performer(q: Array, k: Array, v: Array, directions: Array) -> Array:
    """FAVOR+ of Choromanski et al. 2021, https://arxiv.org/abs/2009.14794: random features (r, d).

    The expected value of a weight is the exact exp(q.k / sqrt(d)); more directions r bring one draw
    closer to it.
    """
    # A factor of one query, or of all keys, cancels in the mean. These factors keep exp in range.
    query, key = (favor_exponents(x, directions) for x in (q, k))
    query = np.exp(query - query.max(axis=-1, keepdims=True))
    return normalised(query, np.exp(key - key.max()), v)


def favor_exponents(x: Array, directions: Array) -> Array:
    """w.y - |y|^2 / 2 with y = x d^(-1/4), for every direction w; its exp is a feature of x."""
    x = x * x.dtype.type(x.shape[-1] ** -0.25)
    return x @ directions.T - (x * x).sum(axis=-1, keepdims=True) / 2


def gaussian_directions(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
    """Draw (count, d) independent directions with normal components."""
    return rng.standard_normal((count, d))


def orthogonal_directions(rng: np.random.Generator, count: int, d: int) -> np.ndarray:
    """Draw directions in orthogonal groups of d, which lowers the variance of the weights."""
    matrices = [np.linalg.qr(rng.standard_normal((d, d))) for _ in range(math.ceil(count / d))]
    # With the signs of the diagonal of r all rotations are equally likely.
    rotations = np.concatenate([q * np.sign(np.diag(r)) for q, r in matrices])[:count]
    return rotations * np.linalg.norm(rng.standard_normal((count, d)), axis=-1, keepdims=True)


def linformer(q: Array, k: Array, v: Array, e: Array, f: Array) -> Array:
    """Exact attention to r mixtures of keys, e k, and of values, f v; e and f are (r, n).

    Wang et al. 2020, https://arxiv.org/abs/2006.04768, equation 7.
    """
    return cuflash.attention(q, e @ k, f @ v)


def fit_linformer(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, r: int, *, steps: int = 100, rate: float = 0.3
) -> tuple[np.ndarray, np.ndarray]:
    """Learn e and f (r, n) for one input by gradient descent, beginning with r chosen positions.

    The loss is the squared difference to exact attention. The products e k and f v are learned; e
    and f are the smallest matrices with these products. They exist if n is larger than d.
    """
    exact = cuflash.attention(q, k, v)
    chosen = np.arange(r) * len(k) // r
    k_unit, v_unit = k.std(), v.std()
    learned = {"k": k[chosen] / k_unit, "v": exact[chosen] / v_unit}
    adam = Adam(np, learned, rate)
    for step in range(steps):
        out, pullback = cuflash.attention_vjp(q, learned["k"] * k_unit, learned["v"] * v_unit)
        grads = pullback(out - exact)
        adam.rate = rate * (1 - step / steps)
        adam.step(learned, {"k": grads.dk * k_unit, "v": grads.dv * v_unit})
    e = (learned["k"] * k_unit) @ np.linalg.pinv(k)
    return e, (learned["v"] * v_unit) @ np.linalg.pinv(v)


def longformer(q: Array, k: Array, v: Array, reach: int, num_global: int) -> Array:
    """Each position sees ``reach`` neighbours on both sides and the first ``num_global`` positions.

    The global positions see all positions and are seen by all. This is the pattern of Beltagy et
    al. 2020, https://arxiv.org/abs/2004.05150, computed exactly in O(n (reach + num_global)).
    """
    few, rest = slice(num_global), slice(num_global, None)
    parts = [
        cuflash.attention(q, k[few], v[few], return_lse=True),
        # Key 0 of ``rest`` is position num_global, so the diagonal is shifted by the offset.
        cuflash.attention(
            q, k[rest], v[rest], window=(reach, reach), offset=-num_global, return_lse=True
        ),
    ]
    out = cuflash.merge([part.out for part in parts], [part.lse for part in parts]).out
    out[few] = cuflash.attention(q[few], k, v)
    return out
