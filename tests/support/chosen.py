"""Which configurations does a call in C order get?"""

from __future__ import annotations

from typing import Any

from cuflash._problem.problem import Problem
from cuflash._select.choose import PORTABLE, Wanted, choose
from cuflash._select.hardware import Hardware


def forward_of(problem: Problem, hardware: Hardware, *, portable: bool = False) -> Any:
    """That of the forward; ``portable``: of the kernel that every architecture has."""
    return choose(problem, hardware, only=PORTABLE if portable else None)[-1].config


def backward_of(
    problem: Problem,
    hardware: Hardware,
    names: frozenset[str] | str = "qkv",
    *,
    portable: bool = False,
    ordered: bool = True,
) -> list[Any]:
    """Those of the gradients, beginning with that of delta."""
    steps = choose(
        problem, hardware, wanted=Wanted.of("".join(sorted(names))), deterministic=ordered,
        only=PORTABLE if portable else None,
    )  # fmt: skip
    return [step.config for step in steps if step.config.computes != "bounds"]
