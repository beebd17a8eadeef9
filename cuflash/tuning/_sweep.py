"""How fast is every configuration of a space on this device? Sweeps and their progress."""

from __future__ import annotations

import datetime as dt
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuflash._errors import problem_with, wrong_type, wrong_value
from cuflash._jit import source
from cuflash._timing.machine import device_slug
from cuflash.tuning._facts import TIME_LIMIT as COMPILE_LIMIT
from cuflash.tuning._kernels import config_as_json
from cuflash.tuning._processes import Child, Failure
from cuflash.tuning._rows import FORMAT, Row, Sweep, SweepFile
from cuflash.tuning._space import Candidate, Space, space
from cuflash.tuning._strategies import strategy_of
from cuflash.tuning._workload import Workload, numbers_of

_COMMAND = (sys.executable, "-m", "cuflash.tuning._timing")
#: Seconds for the process to start, fill its arrays and compute the definition.
_OPEN_LIMIT = 180.0
#: Number of the fastest configurations that are compared again at the end.
_FINALISTS = 5
_QUIET_SECONDS = 3.0  # between lines that count compiled kernels, if written to a file


class Progress(NamedTuple):
    """What a sweep has just done: see the argument ``progress`` of :func:`sweep`.

    Attributes
    ----------
    stage : {"compile", "time", "final"}
        What is being done.
    done, total : int
        How many configurations are done, and how many there are.
    row : dict or None
        Row of the configuration that was timed, or left out of the final comparison.
    best : dict or None
        Row of the fastest configuration so far.

    Examples
    --------
    >>> from cuflash import tuning
    >>> def watch(step):
    ...     print(step.stage, f"{step.done}/{step.total}")
    >>> watch(tuning.Progress("time", done=3, total=250))
    time 3/250
    """

    stage: str
    done: int
    total: int
    row: Row | None = None
    best: Row | None = None


Watcher = Callable[[Progress], None]


def sweep(
    workload: Workload,
    chosen: Space | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    strategy: str = "exhaustive",
    budget: int | None = None,
    check: bool = True,
    seed: int = 0,
    time_limit: float = 30.0,
    budget_ms: float = 60.0,
    processes: int | None = None,
    progress: Watcher | bool = True,
    device_command: Sequence[str] = _COMMAND,
) -> Sweep:
    """Compile, check and time the configurations of a space; an existing file is continued.

    Configurations are compiled in advance, in parallel. Another process compares each one with the
    definition and times it through the library's own calls, interleaved with the shipped
    configuration, so that both have the same clocks and temperature. A configuration that fails or
    hangs affects only its own row; the process is started again. At the end the fastest are timed
    again, all interleaved. Configurations that fail or hang there are left out and cannot be the
    best.

    Parameters
    ----------
    workload : Workload
        The problem that is timed.
    chosen : Space, optional
        The configurations to try. The default is all of the forward kernel that runs here.
    file : path, optional
        The file for the rows, one JSON object per line. The default is :func:`default_file`. An
        existing file must be a sweep of the same problem, kernel, device, driver, NVRTC, kernel
        sources and ``check``; its rows are not measured again. Strategy, budget, seed and budget_ms
        are stored in its first line, and with each final comparison.
    strategy : str
        ``"exhaustive"``, ``"random"``, or a search strategy of the package kernel-tuner (extra
        ``tune``), such as ``"genetic_algorithm"``.
    budget : int, optional
        The largest number of configurations to time. The default is all.
    check : bool
        Compare with the definition before timing.
    seed : int
        Seed of strategies that draw.
    time_limit : float
        Seconds after which a configuration counts as hanging.
    budget_ms : float
        Milliseconds for the measurements of one configuration, within 11 to 60 rounds.
    processes : int, optional
        Number of processes that compile in parallel. The default is one for each core.
    progress : bool or callable
        Whether to print a line to standard error for each configuration, with the best so far; or
        a function that is called with :class:`Progress` after every step.
    device_command : sequence of str
        Command of the process that uses the device.

    Returns
    -------
    Sweep
        All rows of the file.

    Raises
    ------
    ValueError
        For an invalid argument, or a file that is not a sweep or is a different sweep.
    RuntimeError
        If there is no usable device, or the shipped configuration does not run.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(2, 16, 16, 8192, 8192, 128, 128, "bfloat16")
    >>> found = tuning.sweep(work, file="h100.jsonl")  # doctest: +SKIP
    >>> tuning.load("h100.jsonl").best["values"]
    {'block_m': 128, 'block_n': 128, 'num_stages': 2, 'num_q_stages': 2, 'overlap_quarters': 4}
    """
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise wrong_value("budget", repr(budget), "a positive int")
    if not isinstance(seed, int):
        raise wrong_type("seed", repr(seed), "an int")
    for name, value, unit in (("time_limit", time_limit, ""), ("budget_ms", budget_ms, "milli")):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            expected = f"a positive number of {unit}seconds"
            raise wrong_value(name, repr(value), expected)
    chosen = space(workload) if chosen is None else chosen
    if not isinstance(chosen, Space):
        raise wrong_type("chosen", type(chosen).__name__, "what tuning.space returns")
    if chosen.workload != workload:
        raise wrong_value("chosen", f"a space of {chosen.workload}", f"a space of {workload}")
    explore = strategy_of(strategy)
    file = default_file(chosen) if file is None else file
    watcher = (Lines() if progress else None) if isinstance(progress, bool) else progress
    running = _Running(
        chosen,
        Child(device_command),
        {"strategy": strategy, "budget": budget, "seed": seed, "budget_ms": float(budget_ms)},
        check=check,
        time_limit=time_limit,
        processes=processes,
        watcher=watcher,
    )
    try:
        running.open_file(file)
        explore(chosen, running.evaluate, budget, seed)
        running.compare_fastest()
        return running.file.sweep
    finally:
        running.child.close()


@dataclass
class _Running:
    """One running sweep."""

    space: Space
    child: Child
    made: Row  # strategy, budget, seed and budget_ms
    check: bool
    time_limit: float
    processes: int | None
    watcher: Watcher | None

    def __post_init__(self) -> None:
        every = len(self.space)
        self.total = min(every, self.made["budget"] or every)  # most configurations to time
        self.began = time.perf_counter()
        self.opened: object = None  # the process in which the problem is open

    def open_file(self, path: str | os.PathLike[str]) -> None:
        """Ask for the device, then begin or continue the file."""
        device = self._asked({"do": "describe"}, _OPEN_LIMIT)
        planned, here = self.space.hardware, f"{device['device']} ({device['arch']})"
        if f"{planned.name} ({planned.arch})" != here:
            raise problem_with(
                "chosen", ValueError, got=f"a space for {planned.name} ({planned.arch})",
                expected=f"one for the device here, {here}", fix="make the space without arch=",
            )  # fmt: skip
        del device["status"]
        header = {
            "kind": "sweep",
            "format": FORMAT,
            "workload": self.space.workload.as_json(),
            "kernel": self.space.kernel,
            "parameters": {name: list(v) for name, v in self.space.parameters.items()},
            "default": self.space.default_key,
            "multiprocessors": self.space.hardware.multiprocessors,
            **device,
            "kernels": source.digest(),
            "source": source.digest_of(self.space.default.source),
            "check": self.check,
            **self.made,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        }
        self.file = SweepFile(path, header)

    def evaluate(self, candidates: Sequence[Candidate]) -> list[Row]:
        """Rows of these candidates, in order: from the file, or newly measured."""
        rows = {row["key"]: row for row in self.file.sweep.rows}
        missing = {c.key: c for c in candidates if c.key not in rows}  # without duplicates
        if missing:
            self.space.compile(
                [*missing.values()], processes=self.processes, time_limit=COMPILE_LIMIT,
                progress=lambda done, total: self._tell("compile", done, total),
            )  # fmt: skip
        for key, candidate in missing.items():
            rows[key] = self._row(candidate)
            self.file.append(rows[key])
            self._tell("time", len(self.file.sweep.rows), self.total, rows[key])
        return [rows[c.key] for c in candidates]

    def _row(self, candidate: Candidate) -> Row:
        facts = self.space.facts[candidate.key]
        row: Row = {
            "kind": "config",
            "key": candidate.key,
            "values": dict(zip(self.space.parameters, candidate.values, strict=True)),
            "facts": facts.as_json(),
        }
        if facts.error or candidate.config is None:
            return row | {"status": "compile_error", "reason": facts.error or candidate.refusal}
        start = time.perf_counter()
        self._open()
        request = {"do": "time", "config": config_as_json(candidate.config)}
        answer = self._answer(request, self.time_limit)
        if answer["status"] == "ok":
            flops = self.space.workload.kernel_flops(self.space.kernel)
            answer["tflops"] = flops / answer["ms"] / 1e9
        return row | answer | {"seconds": round(time.perf_counter() - start, 3)}

    def _open(self) -> None:
        """Open the problem in the child, if it is not; an error here would hit every candidate."""
        if self.opened is not None and self.opened is self.child.process:
            return
        request = {
            "do": "open",
            "workload": self.space.workload.as_json(),
            "kernel": self.space.kernel,
            "default": config_as_json(self.space.default),
            "check": self.check,
            "budget_ms": self.made["budget_ms"],
        }
        self._asked(request, _OPEN_LIMIT)
        self.opened = self.child.process

    def _answer(self, request: Row, limit: float) -> Row:
        """The answer, or the reason why none came. After a device crash the process is ended."""
        try:
            answer = {"status": "ok"} | self.child.ask(request, limit)
        except Failure as failure:
            return {"status": failure.kind, "reason": str(failure)}
        if answer["status"] == "crash":
            self.child.close()
        return answer

    def _asked(self, request: Row, limit: float) -> Row:
        answer = self._answer(request, limit)
        if answer["status"] != "ok":
            raise RuntimeError(f"sweep: {answer['status']}: {answer['reason']}")
        return answer

    def compare_fastest(self) -> None:
        """Time the fastest and the shipped configuration again, all interleaved.

        If that fails, each one is timed with the shipped one alone; those that fail are left out.
        """
        sweep = self.file.sweep
        last: Row = sweep.finals[-1] if sweep.finals else {"ms": {}}
        left_out = dict(last.get("left_out", {}))
        keys = [row["key"] for row in sweep.timed[:_FINALISTS] if row["key"] not in left_out]
        if not keys or set(keys) <= set(last["ms"]):
            return
        answer = self._final(keys)
        if answer["status"] != "ok":
            alone = {key: self._final([key]) for key in keys}
            failed = {key: own for key, own in alone.items() if own["status"] != "ok"}
            for key, own in failed.items():
                self._tell("final", 0, len(failed), {"key": key, **own})
            left_out |= {key: f"{own['status']}, {own['reason']}" for key, own in failed.items()}
            keys = [key for key in keys if key not in failed]
            answer = self._final(keys) if keys else {"status": "ok", "ms": []}
        if answer["status"] != "ok":  # they fail together, though none fails alone
            for key in keys:
                self._tell("final", 0, len(keys), {"key": key, **answer})
            return
        row = {
            "kind": "final",
            "ms": dict(zip(keys, answer["ms"], strict=False)),  # the last time is the default's
            **({"default_ms": answer["ms"][-1]} if keys else {}),
            **({"left_out": left_out} if left_out else {}),
            "clocks": answer.get("clocks"),
            "made": self.made,
            "seconds": round(time.perf_counter() - self.began, 1),  # of the whole run
        }
        self.file.append(row)
        if keys:
            self._tell("final", len(keys), len(keys))

    def _final(self, keys: Sequence[str]) -> Row:
        """Interleaved times of these and the shipped configuration, or the reason of a failure."""
        self._open()
        configs = [self.space.candidate(key).config for key in keys] + [self.space.default]
        request = {"do": "final", "configs": [config_as_json(c) for c in configs if c]}
        return self._answer(request, self.time_limit * len(configs))

    def _tell(self, stage: str, done: int, total: int, row: Row | None = None) -> None:
        if self.watcher is not None:
            timed = self.file.sweep.timed
            self.watcher(Progress(stage, done, total, row, timed[0] if timed else None))


class Compiled:
    """Counts compiled kernels: in one line on a terminal, every few seconds in a file."""

    def __init__(self) -> None:
        self.said = -math.inf

    def __call__(self, done: int, total: int, before: str = "") -> None:
        """Print the count, unless a line was printed less than a few seconds ago."""
        text = f"{before}{done} of {total} compiled"
        now = time.monotonic()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{text}" + "\n" * (done == total))
        elif done == total or now - self.said >= _QUIET_SECONDS:
            sys.stderr.write(f"{text}\n")
            self.said = now
        sys.stderr.flush()


class Lines:
    """A line on standard error for each configuration, with the best so far."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.compiled = Compiled()

    def __call__(self, now: Progress) -> None:
        """Print the last step."""
        spent = f"{time.monotonic() - self.start:6.1f} s  "
        if now.stage == "compile":
            self.compiled(now.done, now.total, spent)
        else:
            sys.stderr.write(f"{spent}{_said(now)}\n")


def _said(now: Progress) -> str:
    row, best = now.row, now.best
    if row is None:
        return f"the fastest {now.total} compared again"
    if now.stage == "final":
        return f"{row['key']} left out of the final: {row['status']}, {row['reason']}"
    text = row.get("reason", "")[:70]
    if row["status"] == "ok":
        text = f"{row['ms']:.4g} ms, {row['relative']:.3f} of the default's"
    leader = "" if best is None else f"  best {best['key']} {best['relative']:.3f}"
    return f"{now.done:>4}/{now.total}  {row['key']:<16} {row['status']:<7} {text}{leader}"


def default_file(chosen: Space, folder: str | os.PathLike[str] = ".") -> Path:
    """Default file of a sweep; its name has the device, kernel, head sizes, options and lengths.

    Examples
    --------
    >>> from cuflash import tuning
    >>> work = tuning.Workload(2, 16, 16, 4096, 4096, 128, 128, "bfloat16")
    >>> tuning.default_file(tuning.space(work, arch="sm_90a")).suffix
    '.jsonl'
    """
    work = chosen.workload
    dims = [work.head_dim] + [work.head_dim_v] * (work.head_dim_v != work.head_dim)
    words = [device_slug(chosen.hardware.name), chosen.kernel, f"d{'-'.join(map(str, dims))}"]
    options = {
        work.dtype: True, "tf32": work.precision == "tf32", "causal": work.causal,
        "unordered": not work.deterministic, "window": work.window is not None, **numbers_of(work),
    }  # fmt: skip
    words += [name for name, given in options.items() if given]
    words += [*work.arrays, f"{work.seqlen_q}x{work.seqlen_k}"]
    return Path(folder, "-".join(words).replace("_", "-") + ".jsonl")
