"""Do kernels make of products near 0 the capped score, for any softcap and scale?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuflash import Options
from cuflash._problem.problem import Problem, describe
from cuflash._problem.softcap_polynomial import NEAR_PARAMS

FLOAT32 = np.float32
#: At very small and very large caps, some coefficients of the polynomials are no normal numbers.
CAPS = st.floats(-60, 60).map(math.exp2)
SCALES = st.tuples(st.sampled_from((-1.0, 1.0)), st.floats(-30, 20)).map(
    lambda given: given[0] * math.exp2(given[1])
)


def problem_of(softcap: float, scale: float) -> Problem:
    q = np.zeros((1, 8), np.float16)
    return describe(q, q, q, Options(softcap=softcap, scale=scale))


def parameters(problem: Problem) -> dict[str, Any]:
    return {name: dtype(value(problem)) for name, (dtype, value, _) in NEAR_PARAMS.items()}


def fused(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(float) * b + c).astype(FLOAT32)


@given(CAPS, SCALES)
def test_products_near_0(softcap: float, scale: float) -> None:
    problem = problem_of(softcap, scale)
    of = parameters(problem)
    products = of["near_product"] * np.linspace(-1, 1, 41, dtype=FLOAT32)
    t = fused(products, products, -float(of["near_square"]))
    factor = np.full_like(t, of["capped_3"])
    for power in (2, 1, 0):
        factor = fused(t, factor, float(of[f"capped_{power}"]))
    exact = softcap * np.tanh(products * (scale / softcap)) / math.log(2)
    np.testing.assert_allclose(products * factor, exact, rtol=5e-7, atol=1e-12)


@given(CAPS, SCALES)
def test_no_square_of_a_larger_product_counts_as_near(softcap: float, scale: float) -> None:
    """Squares of products beyond near_product are at least near_square, which is tested first."""
    of = parameters(problem_of(softcap, scale))
    beyond = np.nextafter(of["near_product"], FLOAT32(np.inf))
    assert float(beyond) ** 2 >= float(of["near_square"])


def test_a_scale_of_0() -> None:
    of = parameters(problem_of(2.0, 0.0))
    assert all(math.isfinite(x) for x in of.values())
    assert all(of[f"capped_{power}"] == 0 for power in range(4))
