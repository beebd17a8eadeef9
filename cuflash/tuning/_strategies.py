"""Which configurations are tried, and in which order?

A strategy receives a space and a function that returns the rows of candidates. It passes as many
candidates at a time as possible, because these are compiled in parallel. Two strategies are built
in; the others are search strategies of the package kernel-tuner.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash._errors import pip_install, problem_with
from cuflash.tuning._rows import Row
from cuflash.tuning._space import Candidate, Space

Evaluate = Callable[[Sequence[Candidate]], list[Row]]
Strategy = Callable[[Space, Evaluate, int | None, int], None]

#: Strategies of kernel-tuner that are not offered.
_LEFT_OUT = {
    "brute_force",  # called "exhaustive" here
    "random_sample",  # called "random" here
    "nsga2",  # for several objectives; a sweep has one
    "nsga3",
    "pyatf_strategies",  # combines values itself, legal or not, and leaves a folder behind
}
#: Packages that kernel-tuner does not install, by strategy, which has the name of their module.
_PACKAGES = {"skopt": "scikit-optimize"}
#: Options of strategies whose defaults are not used.
_STRATEGY_OPTIONS = {
    "bayes_opt": {"samplingmethod": "random"},  # the default method ignores the seed
    "skopt": {"acq_func": "EI"},  # the default overflows if a configuration fails
}
_MAX_THREADS = 1024  # of a thread block, on every device
_POPULATION = 20  # of firefly_algorithm, which fails unless a space is larger


def exhaustive(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:  # noqa: ARG001
    """Try all candidates in order; with a budget, the first ones."""
    evaluate(list(chosen)[:budget])


def drawn(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:
    """Try as many candidates as the budget allows, drawn without replacement."""
    everything = list(chosen)
    random.Random(seed).shuffle(everything)
    evaluate(everything[:budget])


_BUILT_IN: dict[str, Strategy] = {"exhaustive": exhaustive, "random": drawn}


def strategy_of(name: str) -> Strategy:
    """A strategy by name, of this package or of kernel-tuner."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    searches = offered()
    if name in searches:
        return search(name)
    raise problem_with(
        "strategy", ValueError, got=repr(name),
        expected=f"one of {', '.join((*_BUILT_IN, *searches))}",
        fix="" if searches else f"{pip_install('tune')} adds others",
    )  # fmt: skip


def offered() -> tuple[str, ...]:
    """Names of kernel-tuner's search strategies; empty if it is not installed."""
    try:
        from kernel_tuner.interface import strategy_map
    except ImportError:
        return ()
    return tuple(name for name in strategy_map if name not in _LEFT_OUT)


def search(name: str) -> Strategy:
    """A search strategy of kernel-tuner."""
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(name) is None:
        raise ImportError(f"{package} is not installed: pip install {package}")

    def run(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:
        if len(chosen) <= _POPULATION:
            evaluate(list(chosen)[:budget])
            return
        states = random.getstate(), np.random.get_state()  # noqa: NPY002  kernel-tuner uses both
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            _search(name, chosen, evaluate, min(budget or len(chosen), len(chosen)))
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002

    return run


def _search(name: str, chosen: Space, evaluate: Evaluate, fevals: int) -> None:
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.runners.runner import Runner
    from kernel_tuner.searchspace import Searchspace
    from kernel_tuner.util import (
        CompilationFailedConfig,
        RuntimeFailedConfig,
        StopCriterionReached,
        TuningBudget,
    )

    legal = {candidate.values: candidate for candidate in chosen}
    parameters = {name: list(values) for name, values in chosen.parameters.items()}

    class OurRunner(Runner):  # type: ignore[misc]
        """Returns rows of the sweep to a strategy."""

        simulation_mode = False
        dev = SimpleNamespace(max_threads=_MAX_THREADS)  # bayes_opt reads it

        def get_device_info(self) -> Any:
            return None

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:  # noqa: ARG002
            return {"device_name": chosen.hardware.name}

        def run(self, parameter_space: Iterable[Any], tuning_options: Any) -> list[Any]:
            wanted = list(parameter_space)
            served: list[Candidate] = []
            for values in wanted:
                if tuning_options.budget.is_done():
                    break
                tuning_options.budget.add_evaluations(1)
                served.append(legal[tuple(map(int, values))])
            unserved = [None] * (len(wanted) - len(served))
            return [_result(row) for row in evaluate(served)] + unserved

    def _result(row: Row) -> dict[str, Any]:
        if row["status"] == "ok":  # relative times do not depend on clocks
            return {**row["values"], "time": row["relative"]}
        compiled = row["status"] != "compile_error"
        failed = RuntimeFailedConfig() if compiled else CompilationFailedConfig()
        return {**row["values"], "__error__": failed}

    known = {c.key: dict(zip(parameters, c.values, strict=True)) for c in legal.values()}
    searchspace = Searchspace(
        None, None, None, from_cache={"tune_params": parameters, "cache": known}
    )
    searchspace.get_LHS_sample = searchspace.get_random_sample  # diff_evo's method ignores the seed
    options = Options({
        "tune_params": parameters,
        "strategy_options": Options({"max_fevals": fevals, **_STRATEGY_OPTIONS.get(name, {})}),
        "max_fevals": fevals,
        "objective": ["time"],
        "objective_higher_is_better": [False],
        "budget": TuningBudget(None, fevals),
        "restrictions": None,
        "cache": {},
        "metrics": None,
        "verbose": False,
        "simulated_time": 0,
    })  # fmt: skip
    with contextlib.suppress(StopCriterionReached):
        strategy_map[name].tune(searchspace, OurRunner(), options)
