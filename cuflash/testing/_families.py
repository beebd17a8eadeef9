"""On which kinds of numbers must attention be right? The families of inputs for the error budget.

Random normal inputs alone hide most bugs of attention: they never come near the limits of exp, have
no ties, and their softmax is neither one-hot nor uniform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np

from cuflash._arrays import Array

Shape = tuple[int, ...]
Generator = np.random.Generator
Inputs = tuple[Array, Array, Array]

#: Logits of the shifted families. 16-bit kernels have failed where the logsumexp is below -88:
#: there exp(0 - lse) of a padded key overflows float32.
SHIFTS = {"lse_minus_120": -120.0, "lse_minus_60000": -6e4, "lse_plus_200": 200.0}


def uniform(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """Values in [0, 1): a nearly uniform softmax."""
    return rng.random(q), rng.random(k), rng.random(v)


def normal(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """Standard normal values."""
    return rng.standard_normal(q), rng.standard_normal(k), rng.standard_normal(v)


def normal_times_3(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """Peaked rows: logits of standard deviation 9."""
    return 3 * rng.standard_normal(q), 3 * rng.standard_normal(k), 3 * rng.standard_normal(v)


def one_hot(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """Logits of standard deviation 900: one key takes everything."""
    return 30 * rng.standard_normal(q), 30 * rng.standard_normal(k), rng.standard_normal(v)


def constant_rows(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """All keys equal: every row of scores is constant, a tie of all keys."""
    keys = np.broadcast_to(rng.standard_normal((*k[:-2], 1, k[-1])), k)
    return rng.standard_normal(q), keys.copy(), rng.standard_normal(v)


def sparse_integers(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """Integers in {-2..2}, four fifths of them 0: products are exact, many scores tie."""

    def draw(shape: Shape) -> Array:
        return rng.integers(-2, 3, shape) * (rng.random(shape) < 0.2).astype(float)

    return draw(q), draw(k), draw(v)


def outliers(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
    """N(0, 1), and N(0, 100) on a thousandth of the elements (FlashAttention-3, section 4.3)."""

    def draw(shape: Shape) -> Array:
        rare = rng.random(shape) < 1e-3
        return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * rare

    return draw(q), draw(k), draw(v)


def _shifted(logit: float) -> Callable[[Generator, Shape, Shape, Shape], Inputs]:
    def draw(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
        level = sqrt(abs(logit) / sqrt(q[-1]))  # q.k / sqrt(d) = d * level**2 / sqrt(d)
        noise = 1 / (1 + level)  # keeps the spread of a row's logits of order 1
        queries = level + noise * rng.standard_normal(q)
        keys = np.sign(logit) * level + noise * rng.standard_normal(k)
        return queries, keys, rng.standard_normal(v)

    draw.__doc__ = f"All logits near {logit:g} (at the default scale)."
    return draw


#: Families of uniform numbers with one sign, also in dout: (least, width). Sums do not cancel, so
#: that errors of truncating tensor cores add up, and dp - delta is a small difference.
ONE_SIGN: dict[str, tuple[float, float]] = {
    "one_sign": (0.0, 1.0),
    "one_sign_near_1": (1.0, 0.1),
    "one_sign_near_100": (100.0, 1.0),
    "one_sign_small": (0.0, 1e-3),
}


def _one_sign(least: float, width: float) -> Callable[[Generator, Shape, Shape, Shape], Inputs]:
    def draw(rng: Generator, q: Shape, k: Shape, v: Shape) -> Inputs:
        first, second, third = (least + width * rng.random(shape) for shape in (q, k, v))
        return first, second, third

    draw.__doc__ = f"Values in [{least:g}, {least + width:g})."
    return draw


def make_dout(name: str, rng: Generator, dtype: Any, shape: Shape) -> Array:
    """The dout of a family: standard normal, or of one sign as q, k and v."""
    if name not in ONE_SIGN:
        return rng.standard_normal(shape).astype(dtype)
    least, width = ONE_SIGN[name]
    return (least + width * rng.random(shape)).astype(dtype)


FAMILIES: dict[str, Callable[[Generator, Shape, Shape, Shape], Inputs]] = {
    "uniform": uniform,
    "normal": normal,
    "normal_times_3": normal_times_3,
    "one_hot": one_hot,
    "constant_rows": constant_rows,
    "sparse_integers": sparse_integers,
    "outliers": outliers,
    **{name: _shifted(logit) for name, logit in SHIFTS.items()},
    **{name: _one_sign(*bounds) for name, bounds in ONE_SIGN.items()},
}


#: Families for every dtype. Families of one sign are for float32, where errors of sums dominate: in
#: 16 bits the elements' roundings are larger, and gradients near 100 leave float16's range.
OF_EVERY_DTYPE = tuple(name for name in FAMILIES if name not in ONE_SIGN)


def make(name: str, rng: Generator, dtypes: Sequence[Any], q: Shape, k: Shape, v: Shape) -> Inputs:
    """q, k, v of one family, rounded to the three ``dtypes``."""
    q_, k_, v_ = map(np.ndarray.astype, FAMILIES[name](rng, q, k, v), dtypes)
    return q_, k_, v_
