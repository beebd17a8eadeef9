"""Which head sizes, shapes and options do the tests of Hopper's kernels use?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ml_dtypes import bfloat16

from support import problems
from support.problems import Call

#: (head_dim, head_dim_v): every row of the tables, and sizes between.
ROWS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
BETWEEN = [(16, 8), (32, 32), (72, 72), (80, 96), (104, 120), (64, 128), (144, 64), (208, 240)]
#: Partial tiles in every size; one query; one key.
SHAPES = [((2, 3), 77, 130), ((1, 2), 300, 515), ((3,), 1, 200), ((1, 2), 400, 1)]
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (70, 20)},
    "window and offset": {"window": (40, 0), "offset": -25},
    "left": {"window": (30, None)},
    "lengths": {"causal": True, "q_lengths": 61, "kv_lengths": 59},
    "no keys": {"kv_lengths": 0},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.2, "causal": True},
}
CASES = [(d, name) for d in ROWS for name in OPTIONS]
CASES += [(d, name) for d in BETWEEN for name in ("none", "causal", "window")]


def make(
    head_dims: tuple[int, int],
    shape: tuple[tuple[int, ...], int, int],
    options: dict[str, Any],
    dtype: Any = bfloat16,
    family: str = "normal",
) -> Call:
    """Return a call with batch, queries and keys of ``shape``."""
    batch, rows, keys = shape
    d, d_v = head_dims
    return problems.make_call(
        family, 3, dtype, (*batch, rows, d), (*batch, keys, d), (*batch, keys, d_v),
        options=options,
    )  # fmt: skip


def in_every_shape(head_dims: tuple[int, int], name: str) -> Iterator[Call]:
    """Yield calls with the options of this name, lengths cut to the shape."""
    for batch, rows, keys in SHAPES:
        ends = {"q_lengths": rows, "kv_lengths": keys}
        fitting = {n: min(x, ends[n]) if n in ends else x for n, x in OPTIONS[name].items()}
        yield make(head_dims, (batch, rows, keys), fitting)
