"""By which polynomial do kernels apply softcap to a product near 0?

With ``x = scale * product / softcap``, ``log2(exp(softcap * tanh x))`` is the product times a
polynomial in ``product^2 - near_square``. Kernels need not compute x for it, and the sign of
``product^2 - near_square`` says whether the product is near 0. (D131)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

#: A bound, and coefficients of powers of x^2 - bound^2: up to the bound, tanh x is x times this
#: polynomial, to 1e-7 of tanh x. Caps that are high compared with the scale take a later row, whose
#: coefficients for products are not too small for float32.
_TANH = (
    (0.4, (0.9498723100146247, -0.29449889145601144, 0.10987943409207108, -0.04757280643231788)),
    (2.0**-5, (0.9996745903878482, -0.33320317644755276)),
    (2.0**-11, (1.0,)),
)
_COUNT = len(_TANH[0][1])
_SMALLEST = 2.0**-126  # smallest normal float32 number
_LARGEST = 2.0**63  # its square is a float32 number


def cap(problem: Any) -> float:
    """The softcap, bounded so that its inverse is a normal number; higher caps change no score."""
    return min(float(problem.softcap), 2.0**900 if problem.lse_dtype == np.float64 else 2.0**60)


def near_product(problem: Any) -> float:
    """The largest product that counts as near 0."""
    x = abs(problem.scale / cap(problem))  # x of a product of 1
    near, _ = _near_polynomial(problem)
    return float(np.float32(min(near / x, _LARGEST) if x > 0 else _LARGEST))


def near_square(problem: Any) -> float:
    """The square of near_product; 0, so that no product is near 0, if it is no normal number."""
    square = near_product(problem) ** 2
    return square if square >= _SMALLEST else 0.0


def _near_polynomial(problem: Any) -> tuple[float, list[float]]:
    x = problem.scale / cap(problem)
    for near, of_x in _TANH:
        of_product, factor = [], cap(problem) * math.log2(math.e) * x
        for coefficient in of_x:
            of_product.append(coefficient * factor)
            factor *= x * x
        chosen = near, of_product + [0.0] * (_COUNT - len(of_product))
        if all(_SMALLEST <= abs(c) < _LARGEST**2 for c in of_product):
            break
    return chosen


def _coefficient(power: int, problem: Any) -> float:
    return _near_polynomial(problem)[1][power]


#: Parameters of kernels: dtype, value, comment.
NEAR_PARAMS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "near_product": (np.float32, near_product, "largest product that is capped by a polynomial"),
    "near_square": (np.float32, near_square, ""),
    **{
        f"capped_{i}": (
            np.float32, functools.partial(_coefficient, i),
            f"coefficient of (product^2 - near_square)^{i} in log2(exp(capped score)) / product",
        )
        for i in range(_COUNT)
    },
}  # fmt: skip
