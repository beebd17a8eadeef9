"""In which order are configurations tried, and which of them?

A strategy is given a space and a function that returns rows of candidates, and calls it with as
many candidates at a time as it can: they are compiled side by side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from cuflash._errors import problem_with
from cuflash.tuning._space import Candidate, Space

Evaluate = Callable[[Sequence[Candidate]], list[dict[str, Any]]]
Strategy = Callable[[Space, Evaluate, int | None, int], None]


def exhaustive(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:  # noqa: ARG001
    """All, in order; with a budget, the first."""
    evaluate(list(chosen)[:budget])


def drawn(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:
    """As many as the budget allows, drawn without return."""
    everything = list(chosen)
    random.Random(seed).shuffle(everything)
    evaluate(everything[:budget])


_BUILT_IN: dict[str, Strategy] = {"exhaustive": exhaustive, "random": drawn}


def strategy_of(name: str) -> Strategy:
    """A strategy by name, of this package or of kernel-tuner."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    from cuflash.tuning import _kernel_tuner

    searched = _kernel_tuner.search(name)
    if searched is None:
        known = [*_BUILT_IN, *_kernel_tuner.strategies()]
        raise problem_with(
            "strategy", ValueError, got=repr(name), expected=f"one of {', '.join(known)}",
            fix="" if _kernel_tuner.strategies() else 'pip install "cuflash[tune]" brings others',
        )  # fmt: skip
    return searched
