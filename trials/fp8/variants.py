"""Which variants of the forward of 8 bits are tried? Shared by the scripts beside this file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import numpy as np  # noqa: E402

from cuflash import Options  # noqa: E402
from cuflash._kernels import forward_fp8_sm90  # noqa: E402
from cuflash._kernels.forward_fp8_sm90 import ForwardFp8Sm90Config  # noqa: E402
from cuflash._kernels.request import Request  # noqa: E402
from cuflash._problem.float8 import E4M3  # noqa: E402
from cuflash._problem.problem import describe  # noqa: E402

CAUSAL = (False, True)
#: By head size: changes of the table's row.
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    64: {
        "table": {},
        "four chains": {"max_chains": 4},
        "halves": {"scores_in_halves": True},
        "halves, chains": {"scores_in_halves": True, "max_chains": 2},
        "follows weights": {"follows_weights": True, "weight_exponent": 5},
        "follows weights, 2^3": {"follows_weights": True, "weight_exponent": 3},
        "160 keys": {"block_n": 160, "num_stages": 3},
        "192 keys": {"block_n": 192, "num_stages": 3},
        "224 keys, one sum": {"block_n": 224, "num_stages": 2, "promotes": False},
        "192 rows": {"block_m": 192, "num_warps": 16},
        "192 rows, one sum": {"block_m": 192, "num_warps": 16, "promotes": False},
    },
    128: {
        "table": {},
        "four chains": {"max_chains": 4},
        "halves": {"scores_in_halves": True},
        "halves, chains": {"scores_in_halves": True, "max_chains": 2},
        "follows weights": {"follows_weights": True, "weight_exponent": 5},
        "follows weights, 2^3": {"follows_weights": True, "weight_exponent": 3},
        "follows weights, one sum": {"follows_weights": True, "weight_exponent": 5,
                                     "promotes": False},
        "one sum": {"promotes": False},
        "sums of half": {"column_parts": 2},
        "160 keys, sums of half": {"block_n": 160, "num_stages": 2, "column_parts": 2},
        "160 keys, one sum": {"block_n": 160, "num_stages": 2, "promotes": False},
        "192 keys, one sum": {"block_n": 192, "num_stages": 2, "promotes": False},
        "224 keys, one sum": {"block_n": 224, "num_stages": 2, "promotes": False},
        "192 rows, one sum": {"block_m": 192, "num_warps": 16, "block_n": 96, "num_stages": 3,
                              "promotes": False},
    },
    256: {
        "table": {},
        "four chains": {"max_chains": 4},
        "follows weights": {"follows_weights": True, "weight_exponent": 5},
        "sums of a quarter, 96 keys": {"block_n": 96, "num_stages": 2, "promotes": True,
                                       "column_parts": 4},
        "sums of a quarter, 64 keys": {"block_n": 64, "num_stages": 3, "promotes": True,
                                       "column_parts": 4},
        "sums of an eighth, 128 keys": {"block_n": 128, "num_stages": 2, "promotes": True,
                                        "column_parts": 8},
    },
}  # fmt: skip


def config_of(head_dim: int, *, causal: bool, **changes: Any) -> ForwardFp8Sm90Config:
    """The table's row for plain calls with bfloat16 results, changed."""
    like = np.broadcast_to(np.zeros((), E4M3), (1, 8, 8192, head_dim))
    ones = np.ones((1, 8), np.float32)
    options = replace(Options(causal=causal), q_scale=ones, k_scale=ones, v_scale=ones)
    (config,) = ForwardFp8Sm90Config.chosen(Request(describe(like, like, like, options)))
    return config.replace(**changes)


@contextmanager
def used(changes: dict[str, Any]) -> Iterator[None]:
    """Let calls of every head size take the kernel of 8 bits, changed in this way."""
    from cuflash._launch import plan_cache

    chosen = ForwardFp8Sm90Config.__dict__["chosen"]

    def changed(cls: type[ForwardFp8Sm90Config], request: Request) -> tuple[Any, ...]:
        return tuple(c.replace(**changes) for c in chosen.__func__(cls, request))

    plan_cache.forget()
    ForwardFp8Sm90Config.chosen = classmethod(changed)  # type: ignore[assignment]
    forward_fp8_sm90.SLOWER_UP_TO = 0
    try:
        yield
    finally:
        ForwardFp8Sm90Config.chosen = chosen
        forward_fp8_sm90.SLOWER_UP_TO = 192
        plan_cache.forget()
