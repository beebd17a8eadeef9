"""How is a problem described on the command line?"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from cuflash.tuning._workload import ARRAY_OPTIONS, DTYPES, NUMBERS, PRECISIONS, Workload

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
#: The field whose value a size has unless it is given.
_SAME = {"heads_kv": "heads_q", "seqlen_k": "seqlen_q", "head_dim_v": "head_dim"}


def _typed(read: Callable[[str], Value], expected: str) -> Callable[[str], Value]:
    """An argparse type from a function that raises ValueError for a wrong text."""

    def parse(text: str) -> Value:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}") from None

    return parse


def listed(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """An argparse type: values separated by commas, at least one."""

    def read(text: str) -> list[Value]:
        found = [kind(part) for part in text.split(",") if part]
        if not found:
            raise ValueError
        return found

    return _typed(read, f"comma-separated {'ints' if kind is int else 'values'}")


def _above_zero(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        value = kind(text)
        if not 0 < value < math.inf:
            raise ValueError
        return value

    return read


positive = _typed(_above_zero(int), "a positive int")
positive_number = _typed(_above_zero(float), "a positive number")  # and finite


def sides(text: str) -> tuple[int | None, int | None]:
    """An argparse type: a window, such as "512,0"; an empty side has no bound."""
    left, right = (int(part) if part else None for part in text.split(","))
    return left, right


def add_problem(p: argparse.ArgumentParser) -> None:
    """Add the shape, dtype and options of one problem, named as the fields of a workload."""
    group = p.add_argument_group("problem")
    group.add_argument("--batch", type=int, default=2, help="default: 2")
    group.add_argument(
        "--heads", dest="heads_q", type=int, default=16, help="query heads (default: 16)"
    )
    group.add_argument("--heads-kv", type=int, help="default: as many as query heads")
    group.add_argument(
        "--seqlen", dest="seqlen_q", type=int, default=8192, help="queries (default: 8192)"
    )
    group.add_argument("--seqlen-k", type=int, help="keys (default: as many as queries)")
    group.add_argument("--head-dim", type=int, default=128, help="default: 128")
    group.add_argument("--head-dim-v", type=int, help="default: as --head-dim")
    group.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    group.add_argument("--precision", choices=PRECISIONS, default="ieee", help="of float32")
    group.add_argument("--causal", action="store_true")
    group.add_argument(
        "--unordered", dest="deterministic", action="store_false",
        help="a gradient with deterministic=False",
    )  # fmt: skip
    expected = "LEFT,RIGHT, an empty side for no bound"
    group.add_argument("--window", type=_typed(sides, expected), metavar="LEFT,RIGHT")
    for name in NUMBERS:
        group.add_argument(f"--{name}", type=float, default=getattr(Workload, name))
    group.add_argument(
        "--arrays", type=listed(str), default=[], metavar="NAMES",
        help=f"options given as arrays: {', '.join(ARRAY_OPTIONS)}",
    )  # fmt: skip


def problem_of(given: argparse.Namespace) -> Workload:
    """The problem from the arguments of :func:`add_problem`."""
    known = Workload.__dataclass_fields__
    fields = {name: value for name, value in vars(given).items() if name in known}
    fields |= {name: fields[other] for name, other in _SAME.items() if fields[name] is None}
    return Workload(**fields | {"arrays": tuple(given.arrays)})
