"""Do all options compose, three at a time?

The calls of `support.covering`, forward and backward, are checked by the error budget on poisoned
memory.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cuflash.testing._budget import Budget
from cuflash.testing._model_flash import final_scores
from support import covering
from support.problems import Call, Results, run, unpacked

ROWS = covering.rows()
#: Calls for each row, with values of different families.
SEEDS = 3

pytestmark = pytest.mark.usefixtures("small_host_tiles")


def test_every_triple_is_covered() -> None:
    covered = {
        frozenset(triple) for row in ROWS for triple in itertools.combinations(row.items(), 3)
    }
    assert covered == covering.triples()
    for row in ROWS:
        assert list(row) == list(covering.FACTORS)


def test_the_array_is_always_the_same() -> None:
    assert covering.rows() == ROWS


def check(call: Call, result: Results) -> Call:
    """Check results against the error budget; return the call as the definition sees it."""
    if call.sequences:
        call, result = unpacked(call, result)
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))
    return call


@pytest.mark.parametrize("number", range(SEEDS * len(ROWS)))
def test_row(number: int) -> None:
    call = covering.call_of(ROWS[number % len(ROWS)], number)
    with_out = bool(number % 2)
    result = run(np, call, poison="canary" if number % 4 < 2 else "nan", with_out=with_out)
    rows_that_choose = (np.isfinite(final_scores(check(call, result))).sum(-1) > 1).mean()
    assert rows_that_choose > 0.2, "hardly a row sees two keys: nothing would be tested"


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_row_on_a_gpu(number: int) -> None:
    """Rows with longer sequences, which have full blocks and blocks beyond lengths, are right."""
    import cupy

    call = covering.call_of(ROWS[number], number, times=8)
    check(call, run(cupy, call, with_out=bool(number % 2)))
