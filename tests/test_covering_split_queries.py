"""Do all options compose with gradients in one pass that split queries into parts?

Rows of the covering array of `support.covering`, three options at a time, with head sizes and
layouts that a Hopper's one pass serves.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from test_covering import check

from cuflash import Options
from cuflash._kernels import fused_backward, split_queries
from cuflash._problem.formulas import formulas_of
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, changed, describe
from cuflash._select import hardware
from cuflash._select.choose import Wanted, choose
from support import covering, memory
from support.problems import CANONICAL, Call, run

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import plan_cache  # noqa: E402
from support.host_device import on_device  # noqa: E402


def in_one_pass(number: int, row: covering.Row) -> covering.Row:
    """A row as one pass serves it on a Hopper, with several parts.

    The copy engine loads these head sizes and layouts. Beyond padded head size 96 there are no
    registers for a bias. Heads share keys where the queries of one head are not parted.
    """
    wide = row["bias"] == "none" and number % 2 == 1
    own = row["heads"] == "own" and row["packed"] == "no" and not wide
    return row | {
        "d": "112" if wide else ("24", "40", "72")[number % 3],
        "d_v": "24",
        "heads": "own" if own else "grouped",
        "layout": ("dense", "sequence outside heads")[number // 2 % 2],
    }


_OF_HALVES = [row for row in covering.rows() if row["dtype"] in ("float16", "bfloat16")]
ROWS = list(itertools.starmap(in_one_pass, enumerate(_OF_HALVES[::4])))


def call_with_options(number: int) -> Call:
    """The call of a row, with arrays that begin at multiples of 16 bytes."""
    return covering.call_of(ROWS[number], number, times=8).but(lead=memory.ALIGNED)


@pytest.fixture
def numbers_of_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets one pass compute every gradient that it can, in parts, and lists how many.

    As many as entries that share keys, or twice as many where parts may share an entry. Masks and
    segments would take one pass by ``config=`` alone.
    """
    found: list[int] = []

    def parts(problem: Problem, config: Any, _: int) -> int:
        alone = problem.cu_seqlens_q is not None or not split_queries.may_split_rows(config)
        found.append(split_queries.entries_that_share(problem) * (1 if alone else 2))
        return found[-1]

    def sums(_: Problem, config: Any, __: int) -> int:
        return 3 if config.deterministic else 1

    monkeypatch.setattr(fused_backward, "wins", lambda *_: True)
    monkeypatch.setattr(split_queries, "parts_of", parts)
    monkeypatch.setattr(split_queries, "sums_of_dq", sums)
    return found


@pytest.mark.usefixtures("numbers_of_parts")
def test_rows_of_options_have_parts_on_a_hopper() -> None:
    """All of them: every level of a factor is among them, and parts of both kinds are."""
    of_rows: Counter[bool] = Counter()
    for number in range(len(ROWS)):
        call = call_with_options(number)
        steps = choose(
            described(call), hardware.typical("sm_90a"), wanted=Wanted.of("qkv"),
            deterministic=call.deterministic,
        )  # fmt: skip
        kernels = [step.config.kernel for step in steps]
        assert kernels[-3:] == ["backward_sm90", "backward_combine", "backward_convert"], number
        assert steps[-3].splits > 1
        of_rows[steps[-3].config.split_rows] += 1
    assert min(of_rows[True], of_rows[False]) >= 4
    by_hand = {"dtype", "operand dtypes", "d", "d_v", "layout"}
    levels = {(name, level) for name in covering.FACTORS.keys() - by_hand
              for level in covering.FACTORS[name]}  # fmt: skip
    assert levels - {pair for row in ROWS for pair in row.items()} == {("heads", "broadcast")}


def described(call: Call) -> Problem:
    """The problem of a call on a GPU."""
    pairs = call.axes or CANONICAL
    q, k, v = (on_device(np.ascontiguousarray(np.moveaxis(array, (-2, -1), pair)))
               for array, pair in zip(call.qkv, pairs, strict=False))  # fmt: skip
    options = Options(**call.options)
    if call.sequences:
        ends = {
            f"cu_seqlens_{name}": on_device(np.linspace(0, rows, call.sequences + 1, dtype="i4"))
            for name, rows in (("q", call.q.shape[-2]), ("k", call.k.shape[-2]))
        }
        problem = describe_packed(q, k, v, options, ends, axes=call.axes, precision=None)
    else:
        problem = describe(q, k, v, options, axes=call.axes)
    return changed(problem, formulas=formulas_of(options))


@pytest.fixture
def on_hopper() -> Any:
    """A device with wgmma, and no plans from before a test."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")
    plan_cache.forget()
    yield
    plan_cache.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_options_compose_with_parts(
    on_hopper: None, numbers_of_parts: list[int], number: int
) -> None:
    call = call_with_options(number)
    check(call, run(cupy, call))
    assert numbers_of_parts, "other kernels have served it"
    assert min(numbers_of_parts) > 1
