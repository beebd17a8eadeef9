"""Are float64 kernels within the budget where they are meant to be fast, for every input family?

Rows enough for the rules on samples, at the head sizes whose tiles are the fastest: gradients whose
blocks are shared by partners, the forward of one buffer.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.budget import SAMPLE, Budget
from support.families import FAMILIES
from support.problems import make_call, run

pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

ROWS, KEYS = 330, 300


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_family_of_inputs(head_dim: int, causal: bool, family: str) -> None:
    import cupy

    rows, keys = ((1, 2, n, head_dim) for n in (ROWS, KEYS))
    call = make_call(family, 8, np.float64, rows, keys, keys, options={"causal": causal})
    assert call.q.size >= SAMPLE
    result, budget = run(cupy, call, with_out=True), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))
