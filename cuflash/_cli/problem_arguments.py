"""How is a problem spelled on the command line?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from cuflash.tuning._workload import ARRAY_OPTIONS, DTYPES, PRECISIONS, Workload

Value = TypeVar("Value")


def listed(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """An argparse type: values between commas, one at least."""

    def parse(text: str) -> list[Value]:
        try:
            found = [kind(part) for part in text.split(",") if part]
        except ValueError:
            found = []
        if not found:
            what = "ints" if kind is int else "values"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {what} between commas")
        return found

    return parse


def positive(text: str) -> int:
    """An argparse type: an int from 1 on."""
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive int")
    return value


def positive_number(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number")
    return value


def sides(text: str) -> tuple[int | None, int | None]:
    """A window: "512,0", one side empty for no bound."""
    parts = text.split(",")
    try:
        left, right = (int(part) if part else None for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected LEFT,RIGHT, an empty side for no bound"
        ) from None
    return left, right


def add_problem(p: argparse.ArgumentParser) -> None:
    """The shape, dtype and options of one problem."""
    group = p.add_argument_group("problem")
    group.add_argument("--batch", type=int, default=2, help="default: 2")
    group.add_argument("--heads", type=int, default=16, help="query heads (default: 16)")
    group.add_argument("--heads-kv", type=int, help="default: as many as query heads")
    group.add_argument("--seqlen", type=int, default=8192, help="queries (default: 8192)")
    group.add_argument("--seqlen-k", type=int, help="keys (default: as many as queries)")
    group.add_argument("--head-dim", type=int, default=128, help="default: 128")
    group.add_argument("--head-dim-v", type=int, help="default: that of q")
    group.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    group.add_argument("--precision", choices=PRECISIONS, default="ieee", help="of float32")
    group.add_argument("--causal", action="store_true")
    group.add_argument(
        "--unordered", action="store_true", help="a gradient with deterministic=False"
    )
    group.add_argument("--window", type=sides, metavar="LEFT,RIGHT")
    group.add_argument("--softcap", type=float)
    group.add_argument("--dropout", type=float, default=0.0)
    group.add_argument(
        "--arrays", type=listed(str), default=[], metavar="NAMES",
        help=f"options given as arrays: {', '.join(ARRAY_OPTIONS)}",
    )  # fmt: skip


def problem_of(given: argparse.Namespace) -> Workload:
    """The problem that :func:`add_problem` describes."""
    return Workload(
        given.batch,
        given.heads,
        given.heads if given.heads_kv is None else given.heads_kv,
        given.seqlen,
        given.seqlen if given.seqlen_k is None else given.seqlen_k,
        given.head_dim,
        given.head_dim if given.head_dim_v is None else given.head_dim_v,
        given.dtype,
        precision=given.precision,
        causal=given.causal,
        deterministic=not given.unordered,
        window=given.window,
        softcap=given.softcap,
        dropout=given.dropout,
        arrays=tuple(given.arrays),
    )
