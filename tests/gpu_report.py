"""Which GPU tests passed, on what device, and for which state of the sources?

    python -m pytest --gpu-report tests/gpu_report.json

writes ``device, driver, cupy, nvrtc, passed, failed, skipped, seconds, digest, ranks_digest`` and,
under ``tests``, the outcome of every test marked gpu. The counts are of GPU tests alone; ``others``
counts the rest of the same runs. A report of the same digest is continued, so that a run may be
split into shards: the latest result of a test counts, and being skipped displaces no result. Tests
of several ranks are left out where ``ranks_digest`` is another. A run in which no GPU test ran
leaves the file alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cuflash._timing.machine import versions
from gpu_digest import sources

OUTCOMES = ("passed", "failed", "skipped")
MACHINE = ("device", "driver", "cupy", "nvrtc")
NAME = "gpu-report-recorder"
#: Tests that go through ``cuflash/distributed``.
OF_RANKS = {
    "tests/test_parts_of_calls.py::test_dropout_of_ranks_has_the_bits_of_one_gpu",
    "tests/test_parts_of_calls.py::test_ranks_on_one_gpu",
}
Outcomes = dict[str, str]  # node id -> outcome


def describe_machine() -> dict[str, str | None]:
    """Return device, driver, CuPy and NVRTC, each None where it is missing."""
    found: dict[str, str | None] = dict.fromkeys(MACHINE)
    try:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        found |= {"device": properties["name"].decode(), **versions()}
    except (ImportError, RuntimeError):
        pass
    return found


class Recorder:
    """Collects the outcomes of one run and joins them with the outcomes in the file."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path = path
        self.config = config
        self.started = time.perf_counter()
        self.sources = sources()
        self.gpu: Outcomes = {}
        self.others: Outcomes = {}
        self.message = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the worst of set-up, call and tear-down; an expected failure counts as skipped."""
        self.record(report.nodeid, "gpu" in report.keywords, report.outcome, report.when)

    def record(self, nodeid: str, on_gpu: bool, outcome: str, when: str | None) -> None:
        """Record one outcome."""
        tests = self.gpu if on_gpu else self.others
        if outcome == "passed" and when != "call":
            return
        if tests.get(nodeid) != "failed":
            tests[nodeid] = outcome

    def pytest_sessionfinish(self) -> None:
        """Write the report, unless this process is a worker: the process that started it writes."""
        if not hasattr(self.config, "workerinput"):
            self.finish()

    def finish(self) -> None:
        """Write all recorded outcomes."""
        ran = Counter(self.gpu.values())
        if not ran["passed"] + ran["failed"]:
            self.message = "no GPU test ran, the report is left as it is"
        elif sources() != self.sources:
            self.message = "the sources changed during the run, nothing written"
        else:
            report = joined(self.read(), self.report())
            self.path.write_text(formatted(report))
            counts = ", ".join(f"{report[outcome]} {outcome}" for outcome in OUTCOMES)
            self.message = f"{self.path.name}: {counts}"

    def read(self) -> dict[str, Any]:
        """Return the report of earlier shards, or {} where no report can be read."""
        try:
            report = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return report if isinstance(report, dict) else {}

    def report(self) -> dict[str, Any]:
        """Return the report of this run alone."""
        return {
            **describe_machine(),
            "seconds": time.perf_counter() - self.started,
            **self.sources,
            "others": dict(Counter(self.others.values())),
            "tests": self.gpu,
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say whether the report was written."""
        terminalreporter.write_line(f"GPU report: {self.message}")


def joined(earlier: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Add one run to the report of earlier shards; another digest starts a new report."""
    tests = still_valid(earlier, run)
    seconds, others = run["seconds"], Counter(run["others"])
    machine = {name: run[name] for name in MACHINE}
    if earlier.get("digest") == run["digest"]:
        seconds += earlier["seconds"]
        others += Counter(earlier["others"])
        for name in MACHINE:
            known = [part for part in str(earlier[name] or "").split("; ") if part]
            new = [] if run[name] is None or run[name] in known else [run[name]]
            machine[name] = "; ".join(known + new) or None
    for nodeid, outcome in run["tests"].items():
        if outcome != "skipped" or nodeid not in tests:
            tests[nodeid] = outcome
    counts = Counter(tests.values())
    return {
        **machine,
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "seconds": round(seconds, 1),
        "digest": run["digest"],
        "ranks_digest": run["ranks_digest"],
        "others": {outcome: others[outcome] for outcome in OUTCOMES},
        "tests": nested(tests),
    }


def still_valid(report: dict[str, Any], now: dict[str, Any]) -> Outcomes:
    """Return the outcomes in a report that were measured on the present sources."""
    if report.get("digest") != now["digest"]:
        return {}
    same_ranks = report.get("ranks_digest") == now["ranks_digest"]
    tests = flat(report.get("tests", {}))
    return {n: o for n, o in tests.items() if same_ranks or n.partition("[")[0] not in OF_RANKS}


def nested(tests: Outcomes) -> dict[str, dict[str, list[str]]]:
    """Group node ids: function -> outcome -> parameters, '' for a test without parameters."""
    groups: dict[str, dict[str, list[str]]] = {}
    for nodeid, outcome in sorted(tests.items()):
        function, bracket, parameters = nodeid.partition("[")
        groups.setdefault(function, {}).setdefault(outcome, []).append(bracket + parameters)
    return groups


def flat(groups: dict[str, dict[str, list[str]]]) -> Outcomes:
    """Undo `nested`."""
    return {
        function + parameters: outcome
        for function, outcomes in groups.items()
        for outcome, cases in outcomes.items()
        for parameters in cases
    }


def formatted(report: dict[str, Any]) -> str:
    """Return JSON with one line for each field and each test function."""
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in report.items() if k != "tests"]
    tests = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in report["tests"].items())
    return "\n".join(["{", *lines, ' "tests": {', tests, " }", "}"]) + "\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-report", type=Path, metavar="JSON", help="write the outcomes of GPU tests to a file"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--gpu-report")
    if path is not None:
        config.pluginmanager.register(Recorder(path.absolute(), config), NAME)
