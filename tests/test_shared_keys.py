"""Do rows of entries that share keys stay the same when they become rows of one matrix?"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cuflash import Options
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem, describe

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import run
from cuflash._select.pack_gqa import with_shared_rows

KEYS = 40
SHARED = {"enable_gqa": True}
BATCH_LENGTHS = np.array([[7], [40], [0]])


def problem_of(rows: int, options: dict[str, Any], heads: int = 6, heads_kv: int = 2) -> Problem:
    q = np.zeros((3, heads, rows, 16), np.float16)
    k, v = (np.zeros((3, heads_kv, KEYS, d), np.float16) for d in (16, 24))
    return describe(q, k, v, Options(**options))


def layouts_of(problem: Problem) -> dict[str, Layout]:
    lse = np.zeros(problem.lse_shape, np.float32)
    return run.layouts_of(problem, {"out": problem.out}, lse=lse)


def places(problem: Problem, layouts: dict[str, Layout]) -> list[dict[str, int]]:
    """Return the offsets of each row in every operand, entry by entry."""
    found = []
    for *entry, row in itertools.product(*map(range, (*problem.batch, problem.seqlen_q))):
        of_entry = {
            name: sum(i * step for i, step in zip(entry, layout.batch, strict=True))
            for name, layout in layouts.items()
        }
        rows = {name: row * layouts[name].row for name in ("q", "out", "lse")}
        found.append({n: place + rows.get(n, 0) for n, place in of_entry.items()})
    return found


MERGED: list[tuple[int, dict[str, Any], tuple[int, ...], int]] = [
    (1, SHARED, (3, 2), 3),
    (5, SHARED, (3, 2), 15),
    (5, {**SHARED, "softcap": 2.0, "kv_lengths": BATCH_LENGTHS}, (3, 2), 15),
    (1, {**SHARED, "causal": True}, (3, 2), 3),
    (1, {**SHARED, "causal": True, "kv_lengths": BATCH_LENGTHS}, (3, 2), 3),
    (1, {**SHARED, "window": (None, 4), "offset": 9}, (3, 2), 3),
]


@pytest.mark.parametrize(("rows", "options", "batch", "merged_rows"), MERGED, ids=str)
def test_every_row_reads_and_writes_what_it_did(
    rows: int, options: dict[str, Any], batch: tuple[int, ...], merged_rows: int
) -> None:
    problem = problem_of(rows, options)
    layouts = layouts_of(problem)
    merged, moved = with_shared_rows(problem, layouts)
    assert (merged.batch, merged.seqlen_q) == (batch, merged_rows)
    assert places(merged, moved) == places(problem, layouts)
    assert (merged.window_left, merged.window_right) == (None, None)


@pytest.mark.parametrize(
    ("options", "offset"),
    [
        ({"causal": True}, KEYS - 5),
        ({"causal": True, "kv_lengths": 12}, 7),
        ({"window": (3, 1), "offset": 9}, 9),
        ({"causal": True, "kv_lengths": BATCH_LENGTHS}, None),
        ({"causal": True, "offset": np.zeros((3, 1), np.int64)}, None),
    ],
)
def test_rows_with_a_bound_know_their_query(options: dict[str, Any], offset: int | None) -> None:
    problem = problem_of(5, {**SHARED, **options})
    layouts = layouts_of(problem)
    merged, moved = with_shared_rows(problem, layouts)
    assert (merged.batch, merged.seqlen_q, merged.num_queries) == ((3, 2), 15, 5)
    assert (merged.offset_value, merged.window_right) == (offset, problem.window_right)
    assert places(merged, moved) == places(problem, layouts)


def test_a_bound_on_one_row_is_a_length() -> None:
    for options, length in (
        ({"causal": True}, None),
        ({"causal": True, "kv_lengths": 30}, 30),
        ({"causal": True, "offset": 9}, 10),
        ({"causal": "top_left"}, 1),
        ({"window": (None, 4), "offset": 9}, 14),
        ({"window": (None, 4), "offset": 9, "kv_lengths": 12}, 12),
        ({"causal": True, "offset": -5}, 0),
        ({"causal": True, "offset": 99}, KEYS),
    ):
        problem = problem_of(1, {**SHARED, **options})
        merged, _ = with_shared_rows(problem, layouts_of(problem))
        assert (merged.seqlen_q, merged.kv_length_value) == (3, length)


def test_heads_over_keys_of_one_head() -> None:
    problem = problem_of(2, {}, heads_kv=1)
    merged, moved = with_shared_rows(problem, layouts_of(problem))
    assert (merged.batch, merged.seqlen_q) == ((3,), 12)
    assert places(merged, moved) == places(problem, layouts_of(problem))


def test_a_batch_over_keys_of_no_batch() -> None:
    q, k = np.zeros((3, 6, 1, 16), np.float16), np.zeros((KEYS, 16), np.float16)
    problem = describe(q, k, k, Options())
    merged, moved = with_shared_rows(problem, layouts_of(problem))
    assert (merged.batch, merged.seqlen_q) == ((), 18)
    assert places(merged, moved) == places(problem, layouts_of(problem))


KEPT: list[tuple[int, dict[str, Any]]] = [
    (65, SHARED),  # as many rows as a tile
    (1, {**SHARED, "window": (3, 0)}),
    (1, {**SHARED, "causal": True, "offset": np.zeros((3, 1), np.int64)}),
    (1, {**SHARED, "causal": True, "offset": 3, "kv_lengths": BATCH_LENGTHS}),
    (2, {**SHARED, "q_lengths": 1}),
    (1, {**SHARED, "q_lengths": np.ones((3, 1), np.int64)}),
    (1, {**SHARED, "kv_lengths": np.arange(6)}),
    (1, {**SHARED, "sink": np.zeros(6)}),
    (1, {**SHARED, "alibi_slopes": np.zeros(6)}),
    (1, {**SHARED, "bias": np.zeros((6, 1, KEYS))}),
    (1, {**SHARED, "mask": np.ones((1, KEYS), bool)}),
    (1, {**SHARED, "segment_ids": (np.zeros(1, int), np.zeros(KEYS, int))}),
    (1, {**SHARED, "dropout": 0.5, "seed": 1}),
]


@pytest.mark.parametrize(("rows", "options"), KEPT, ids=str)
def test_rows_that_differ_stay_apart(rows: int, options: dict[str, Any]) -> None:
    problem = problem_of(rows, options)
    layouts = layouts_of(problem)
    assert with_shared_rows(problem, layouts) == (problem, layouts)


def test_rows_that_are_not_evenly_apart_stay_apart() -> None:
    """In (batch, seqlen, heads, head_dim), where the next head is nearer, rows are not merged."""
    q, k = (np.zeros((3, n, h, 16), np.float16) for n, h in ((5, 6), (KEYS, 2)))
    problem = describe(q, k, k, Options(enable_gqa=True), axes=[(-3, -1)] * 4)
    layouts = layouts_of(problem)
    assert with_shared_rows(problem, layouts) == (problem, layouts)
    problem = describe(q[:, :1], k, k, Options(enable_gqa=True), axes=[(-3, -1)] * 4)
    layouts = layouts_of(problem)
    merged, moved = with_shared_rows(problem, layouts)
    assert (merged.batch, merged.seqlen_q) == ((3, 2), 3)
    assert places(merged, moved) == places(problem, layouts)
