"""How do sweeps and the package kernel-tuner work together? Its searches, its files of results.

A cache file of kernel-tuner holds the result of every configuration; with it kernel-tuner simulates
searches without a device, and its dashboard shows them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash._errors import problem_with
from cuflash._select.measured import parse
from cuflash.tuning._rows import FORMAT, Row, Sweep, check_times, checked, short
from cuflash.tuning._space import Candidate, Space, space

if TYPE_CHECKING:
    from cuflash.tuning._strategies import Evaluate, Strategy

#: Names that kernel-tuner gives to what can go wrong, and those of a sweep.
_ERRORS = {
    "compile_error": "CompilationFailedConfig",
    "wrong": "RuntimeFailedConfig",
    "error": "RuntimeFailedConfig",
    "crash": "RuntimeFailedConfig",
    "hang": "RuntimeFailedConfig",
}
_STATES = {"CompilationFailedConfig": "compile_error", "RuntimeFailedConfig": "error"}
_INVALID = "InvalidConfig"
#: Strategies that are not offered.
_LEFT_OUT = {
    "brute_force",  # is "exhaustive" here
    "random_sample",  # is "random" here
    "nsga2",  # weighs several objectives, and a sweep has one
    "nsga3",
    "pyatf_strategies",  # combines the values itself, legal or not, and leaves a folder behind
}
#: Packages that kernel-tuner does not bring, by the strategy that is named after their module.
_PACKAGES = {"skopt": "scikit-optimize"}
#: Options of strategies that are not used as they come.
_STRATEGY_OPTIONS = {
    "bayes_opt": {"samplingmethod": "random"},  # no seed decides the other way's
    "skopt": {"acq_func": "EI"},  # the other way overflows where a configuration fails
}
_MAX_THREADS = 1024  # of a block, on every device
_POPULATION = 20  # of firefly_algorithm, which fails where a space has not more
_REQUIRED = ("device_name", "kernel_name", "tune_params_keys", "tune_params", "cache")


def strategies() -> tuple[str, ...]:
    """Names of kernel-tuner's search strategies; none where it is not installed."""
    try:
        from kernel_tuner.interface import strategy_map
    except ImportError:
        return ()
    return tuple(name for name in strategy_map if name not in _LEFT_OUT)


def search(name: str) -> Strategy | None:
    """A search strategy of kernel-tuner; None where it offers none of this name."""
    if name not in strategies():
        return None
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(name) is None:
        raise ImportError(f"{package} is not installed: pip install {package}")

    def run(chosen: Space, evaluate: Evaluate, budget: int | None, seed: int) -> None:
        states = random.getstate(), np.random.get_state()  # noqa: NPY002  kernel-tuner draws there
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            _search(name, chosen, evaluate, budget)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002

    return run


def _search(name: str, chosen: Space, evaluate: Evaluate, budget: int | None) -> None:
    from kernel_tuner.interface import Options, strategy_map
    from kernel_tuner.runners.runner import Runner
    from kernel_tuner.searchspace import Searchspace
    from kernel_tuner.util import (
        CompilationFailedConfig,
        RuntimeFailedConfig,
        StopCriterionReached,
        TuningBudget,
    )

    legal = {candidate.key: candidate for candidate in chosen}
    if len(legal) <= _POPULATION:
        evaluate(list(legal.values())[:budget])
        return
    parameters = {name: list(values) for name, values in chosen.parameters.items()}

    class OurRunner(Runner):  # type: ignore[misc]
        """Answers a strategy with rows of the sweep."""

        simulation_mode = False
        dev = SimpleNamespace(max_threads=_MAX_THREADS)  # bayes_opt reads it

        def get_device_info(self) -> Any:
            return None

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:  # noqa: ARG002
            return {"device_name": chosen.hardware.name}

        def run(self, parameter_space: Iterable[Any], tuning_options: Any) -> list[Any]:
            wanted = [tuple(int(v) for v in element) for element in parameter_space]
            served: list[Candidate] = []
            for values in wanted:
                if tuning_options.budget.is_done():
                    break
                tuning_options.budget.add_evaluations(1)
                served.append(legal[",".join(map(str, values))])
            rows = evaluate(served)
            results: list[Any] = [_result(row) for row in rows]
            return results + [None] * (len(wanted) - len(results))

    def _result(row: Row) -> dict[str, Any]:
        result = dict(row["values"])
        if row["status"] == "ok":
            return result | {"time": row["relative"]}  # no clocks in it; a search needs no more
        failed = CompilationFailedConfig if row["status"] == "compile_error" else None
        return result | {"__error__": (failed or RuntimeFailedConfig)()}

    known = {c.key: dict(zip(parameters, c.values, strict=True)) for c in legal.values()}
    searchspace = Searchspace(
        None, None, None, from_cache={"tune_params": parameters, "cache": known}
    )
    searchspace.get_LHS_sample = searchspace.get_random_sample  # diff_evo's, which no seed decides
    fevals = min(budget or len(legal), len(legal))
    options = Options(
        {
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
        }
    )
    with contextlib.suppress(StopCriterionReached):
        strategy_map[name].tune(searchspace, OurRunner(), options)


def write_cache(found: Sweep, path: str | os.PathLike[str]) -> None:
    """Write a sweep as a cache file of kernel-tuner, with what it has no name for under "cuflash".

    Times are :meth:`Sweep.steady_ms`, relative to the shipped configuration by its median: clocks
    drift by several percent within a sweep, and kernel-tuner would take what was timed at the
    highest for the fastest. What was measured is under "cuflash", from where it is read back.

    Combinations that are not legal are members, too, as invalid ones, as far as the space lists
    them, so that a simulation may meet any combination of the parameters that was swept.
    """
    names = list(found.header["parameters"])
    entries: dict[str, Any] = {}
    for candidate in _swept(found).candidates if found.header["workload"] else ():
        if candidate.config is None:
            values = dict(zip(names, candidate.values, strict=True))
            entries[candidate.key] = values | {"__error__": _INVALID, "time": _INVALID}
    for row in found.rows:
        entries[row["key"]] = _entry(found, row)
    work = found.header["workload"]
    content = {
        "device_name": found.device,
        "kernel_name": found.kernel,
        "problem_size": [work["batch"] * work["heads_q"], work["seqlen_q"]] if work else [],
        "tune_params_keys": names,
        "tune_params": found.header["parameters"],
        "objective": "time",  # a list, as kernel-tuner 1.5 writes, is none to its dashboard (D107)
        "cache": entries,
        "cuflash": {"header": found.header, "finals": found.finals, "rows": found.rows},
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _swept(found: Sweep) -> Space:
    header = found.header
    return space(found.workload, found.kernel, arch=header["arch"], parameters=header["parameters"])


def _entry(found: Sweep, row: Row) -> dict[str, Any]:
    """What kernel-tuner keeps of one configuration, in milliseconds."""
    compile_ms = 1000 * row.get("facts", {}).get("compile_seconds", 0.0)
    spent = 1000 * row.get("seconds", 0.0)
    entry = dict(row["values"]) | {
        "compile_time": compile_ms,
        "verification_time": 0.0,
        "benchmark_time": spent,
        "strategy_time": 0.0,
        "framework_time": 0.0,
        "timestamp": "",
    }
    if row["status"] != "ok":
        return entry | {"__error__": _ERRORS[row["status"]], "time": _ERRORS[row["status"]]}
    ms, known = found.steady_ms(row), found.header["workload"] is not None
    return entry | {"time": ms, "times": [ms], "TFLOP/s": found.tflops(row) if known else None}


def read_cache(path: str | os.PathLike[str]) -> Sweep:
    """Read a cache file of kernel-tuner, of our kernels or of any other; also one cut off.

    A ValueError that names the place for any other file.
    """
    path = Path(path)
    try:
        content = _content(path.read_text(encoding="utf-8"))
        ours = content.get("cuflash")
        return _own_sweep(ours) if ours else _foreign_sweep(content)
    except ValueError as error:
        raise problem_with(
            str(path), ValueError, got=f"something else ({error})",
            expected=f"a cache file of kernel-tuner, with {', '.join(_REQUIRED)}",
        ) from None  # fmt: skip


def _content(text: str) -> dict[str, Any]:
    """What a file holds, all that is required of it included; an interruption leaves it open."""
    content: Any = None
    for end in ("", "}\n}", "}}"):
        with contextlib.suppress(ValueError):
            content = parse(text.rstrip().rstrip(",") + end if end else text)
            break
    kinds = {"tune_params_keys": list, "tune_params": dict, "cache": dict}
    for name in _REQUIRED:
        if not isinstance(content, dict) or name not in content:
            raise ValueError(f"no {name}")
        if not isinstance(content[name], kinds.get(name, str)):
            raise ValueError(f"{name} {short(content[name])}")
    return dict(content)


def _own_sweep(ours: Any) -> Sweep:
    """The sweep that :func:`write_cache` wrote."""
    if not isinstance(ours, dict):
        raise ValueError(f"cuflash {short(ours)}")
    lists: list[Any] = [ours.get("rows"), ours.get("finals")]
    if not all(isinstance(rows, list) for rows in lists):
        raise ValueError("cuflash without lists of rows and finals")
    return checked(itertools.chain([ours.get("header")], *lists), "row")


def _foreign_sweep(content: dict[str, Any]) -> Sweep:
    """The rows of somebody else's kernel; times are relative to the fastest."""
    names = content["tune_params_keys"]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"tune_params_keys {short(names)}")
    header: Row = {
        "kind": "sweep",
        "format": FORMAT,
        "workload": None,
        "kernel": content["kernel_name"],
        "parameters": {name: content["tune_params"].get(name, []) for name in names},
        "default": "",
        "device": content["device_name"],
        "arch": "",
    }
    found = (_foreign_row(key, entry, names) for key, entry in content["cache"].items())
    rows = [row for row in found if row is not None]
    fastest = min((row["ms"] for row in rows if row["status"] == "ok"), default=0.0)
    for row in rows:
        if row["status"] == "ok":
            row["relative"] = row["ms"] / fastest
    return checked([header, *rows], "row")


def _foreign_row(key: str, entry: Any, names: Sequence[str]) -> Row | None:
    if not isinstance(entry, dict):
        raise ValueError(f"cache {key!r}: {short(entry)}")
    row: Row = {"kind": "config", "key": key, "values": {name: entry.get(name) for name in names}}
    error = entry.get("__error__")
    time: Any = entry.get("time")
    if error is None and isinstance(time, str):
        error = time
    if error is not None:
        name = str(error)
        if _INVALID in name:
            return None
        state = next((s for known, s in _STATES.items() if known in name), "error")
        return row | {"status": state, "reason": name}
    check_times(f"cache {key!r}", {"time": time})
    return row | {"status": "ok", "ms": float(time)}
