"""Do all options compose in Hopper's gradients: of two kernels, and in one pass?

One pass has several parts, or above head size 128 pairs of thread blocks.

The rows are those of `support.covering`, with head sizes and layouts that these kernels support. In
`test_covering.py` the portable kernels compute every row.
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
from cuflash._select.choose import LaunchStep, Wanted, choose
from support import covering, memory
from support.problems import CANONICAL, Call, run

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import on_device  # noqa: E402
from support.portable import planned_kernels  # noqa: E402

TWO_KERNELS = {"backward_dkv_sm90", "backward_dq_sm90"}


def on_hopper(number: int, row: covering.Row) -> covering.Row:
    """Return a row such that on Hopper one pass with several parts, and two kernels, support it.

    The copy engine loads these head sizes and layouts. Beyond padded head size 96 there are no
    registers for a bias. Heads share keys where the queries of one head are not split.
    """
    wide = row["bias"] == "none" and number % 2 == 1
    own = row["heads"] == "own" and row["packed"] == "no" and not wide
    return row | {
        "d": "112" if wide else ("24", "40", "72")[number % 3],
        "d_v": "24",
        "heads": "own" if own else "grouped",
        "layout": ("dense", "sequence outside heads")[number // 2 % 2],
    }


def of_a_pair(number: int, row: covering.Row) -> covering.Row:
    """Return a row above head size 128 with the options that registers of a pair leave room for."""
    kept = _TOGETHER[number % len(_TOGETHER)]
    alone = {"lengths": "none", "offset": "default", "position": "everything", "packed": "no"}
    return (
        on_hopper(number, row)
        | {name: "none" for names in _TOGETHER for name in names if name not in kept}
        | {"d": ("160", "256")[number % 2], "d_v": ("64", "136")[number // 2 % 2]}
        | (alone if kept == ("segments",) else {})
    )


#: Options that a pair of thread blocks supports together, beside bounds.
_TOGETHER = (
    *itertools.combinations(("mask", "softcap", "alibi", "dropout"), 2), ("bias",), ("segments",),
)  # fmt: skip
_OF_HALVES = [row for row in covering.rows() if row["dtype"] in ("float16", "bfloat16")]
ROWS = list(itertools.starmap(on_hopper, enumerate(_OF_HALVES[::4])))
ROWS_OF_PAIRS = list(itertools.starmap(of_a_pair, enumerate(_OF_HALVES[::3])))


def call_with_options(number: int, rows: list[covering.Row] = ROWS) -> Call:
    """Return the call of a row, with arrays aligned to 16 bytes."""
    return covering.call_of(rows[number], number, times=8).but(lead=memory.ALIGNED)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one pass compute every gradient that it can, in several parts.

    There are as many parts as entries that share keys, or twice as many where parts may share an
    entry.
    """

    def parts(problem: Problem, config: Any, _: int) -> int:
        alone = problem.cu_seqlens_q is not None or not split_queries.may_split_rows(config)
        return split_queries.entries_that_share(problem) * (1 if alone else 2)

    def sums(_: Problem, config: Any, __: int) -> int:
        return 3 if config.deterministic else 1

    monkeypatch.setattr(fused_backward, "wins", lambda *_: True)
    monkeypatch.setattr(split_queries, "parts_of", parts)
    monkeypatch.setattr(split_queries, "sums_of_dq", sums)


@pytest.fixture
def by_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pass compute all gradients."""
    monkeypatch.setattr(fused_backward, "wins", lambda *_: False)


@pytest.mark.usefixtures("in_parts")
def test_every_row_has_parts_on_a_hopper() -> None:
    """Each row has several parts in one pass; both kinds of parts and all levels occur."""
    of_rows: Counter[bool] = Counter()
    for number in range(len(ROWS)):
        *_, fused, combine, convert = steps_of(number)
        names = [step.config.kernel for step in (fused, combine, convert)]
        assert names == ["backward_sm90", "backward_combine", "backward_convert"], number
        assert fused.splits > 1
        of_rows[fused.config.split_rows] += 1
    assert min(of_rows[True], of_rows[False]) >= 4
    by_hand = {"dtype", "operand dtypes", "d", "d_v", "layout"}
    levels = {(name, level) for name in covering.FACTORS.keys() - by_hand
              for level in covering.FACTORS[name]}  # fmt: skip
    assert levels - {pair for row in ROWS for pair in row.items()} == {("heads", "broadcast")}


@pytest.mark.usefixtures("by_two_kernels")
def test_every_row_has_two_kernels_of_a_hopper() -> None:
    for number in range(len(ROWS)):
        assert {step.config.kernel for step in steps_of(number)} >= TWO_KERNELS, number


def test_every_row_of_pairs_has_one_pass_on_a_hopper() -> None:
    """Each row above head size 128 has one pass; rows have all options that a pair supports."""
    levels = {pair for row in ROWS_OF_PAIRS for pair in row.items()}
    for name in itertools.chain(*_TOGETHER):
        assert len({level for own, level in levels if own == name}) > 1, name
    for number in range(len(ROWS_OF_PAIRS)):
        steps = steps_of(number, ROWS_OF_PAIRS)
        assert "backward_pair_sm90" in {step.config.kernel for step in steps}, number


def steps_of(number: int, rows: list[covering.Row] = ROWS) -> tuple[LaunchStep, ...]:
    """Return the launches of a row's gradients on Hopper."""
    call = call_with_options(number, rows)
    return choose(
        described(call), hardware.typical("sm_90"), wanted=Wanted.of("qkv"),
        deterministic=call.deterministic,
    )  # fmt: skip


def described(call: Call) -> Problem:
    """Return the problem of a call on a GPU."""
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


def kernels_within_the_budget(number: int, rows: list[covering.Row] = ROWS) -> set[str]:
    """Return the kernels that a row runs on a GPU; its results are checked against the budget."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")
    call = call_with_options(number, rows)
    with planned_kernels() as configs:
        result = run(cupy, call)
    check(call, result)
    return {config.kernel for config in configs}


@pytest.mark.gpu
@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_options_compose_with_parts(number: int) -> None:
    assert {"backward_sm90", "backward_combine"} <= kernels_within_the_budget(number)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_two_kernels")
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_options_compose_in_two_kernels(number: int) -> None:
    assert kernels_within_the_budget(number) >= TWO_KERNELS


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS_OF_PAIRS)))
def test_options_compose_in_a_pair_of_thread_blocks(number: int) -> None:
    assert "backward_pair_sm90" in kernels_within_the_budget(number, ROWS_OF_PAIRS)
