"""Which part of the tests runs: that of the inner loop, the usual one, or everything?

    python -m pytest --quick | (no option) | --full | --slow

Each part holds the part before it. A part runs fixed shares: of the cases of every short test, of
the long ones and the compile gates of every file, of the kernels of a gate and of the examples of a
property. A hash of the names chooses them: every run chooses the same, and no list of tests has to
be kept. A run that names a test by its node id leaves nothing out, one that names a file no case of
a short test.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Shares, in [0, 1], of what a part runs; rounded up, so that none above 0 is empty."""

    name: str
    cases: float  # of the cases of each test without the markers below
    short: float  # of these, in each file
    long: float  # of the cases with the marker long in each file
    gate: float  # of the cases of compile gates in each file
    full: float  # of the cases with the marker full in each file
    kernels: float  # of the kernels of each case of a compile gate
    examples: int  # examples of each property


QUICK = Part("quick", cases=0.12, short=0.12, long=0.0, gate=0.0, full=0.0, kernels=0.0, examples=5)
USUAL = Part(
    "usual", cases=0.12, short=1.0, long=0.05, gate=0.12, full=0.0, kernels=0.02, examples=20
)
OF_FILES = replace(USUAL, name="of files", cases=1.0)
FULL = Part("full", cases=1.0, short=1.0, long=1.0, gate=1.0, full=1.0, kernels=1.0, examples=100)
PARTS = (QUICK, USUAL, OF_FILES, FULL)


@dataclass
class Run:
    """The run of this process: its part, what was collected, and what was left out."""

    part: Part = FULL
    collected: tuple[pytest.Item, ...] = ()
    tests: int = 0
    kernels: int = 0


RUN = Run()


def sample(things: Iterable[T], share: float, name: Callable[[T], str]) -> list[T]:
    """Keep a share of some things in the order of their names' hashes.

    A larger share starts with every smaller share.
    """
    ordered = sorted(things, key=lambda thing: hashlib.sha256(name(thing).encode()).digest())
    return ordered[: math.ceil(share * len(ordered))]


def kernels_of_part(configs: Iterable[T]) -> list[T]:
    """Keep those kernels of a compile gate that this run compiles."""
    every = list(configs)
    kept = sample(every, RUN.part.kernels, repr)
    RUN.kernels += len(every) - len(kept)
    return kept


def node_ids_of(items: Iterable[pytest.Item], part: Part) -> set[str]:
    """Return the node ids of the tests that a part runs.

    Cases marked gpu or slow have shares of their own: they cannot replace the cases that run.
    """
    short, of_files = defaultdict(list), defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        kind = next((kind for kind in ("full", "gate", "long") if kind in marks), "short")
        name, group = item.nodeid, (kind, "gpu" in marks, "slow" in marks)
        if kind == "short":
            short[name.partition("[")[0], group].append(name)
        else:
            of_files[name.partition("::")[0], group].append(name)
    for (test, group), nodeids in short.items():
        of_files[test.partition("::")[0], group] += sample(nodeids, part.cases, str)
    return {
        nodeid
        for (_, (kind, *_)), nodeids in of_files.items()
        for nodeid in sample(nodeids, getattr(part, kind), str)
    }


def chosen(config: pytest.Config) -> Part:
    """Return the part that the command line asks for."""
    asked = [part for part in (QUICK, FULL) if config.getoption(f"--{part.name}")]
    if len(asked) > 1:
        raise pytest.UsageError("--quick and --full exclude each other: give one of them")
    if config.getoption("--slow") or any("::" in argument for argument in config.args):
        return FULL
    names_files = any(argument.endswith(".py") for argument in config.args)
    return asked[0] if asked else OF_FILES if names_files else USUAL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run what takes less than a minute")
    parser.addoption("--full", action="store_true", help="run everything but the tests marked slow")
    parser.addoption("--slow", action="store_true", help="run everything")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bound the examples of properties, unless a profile of Hypothesis is asked for."""
    RUN.part = chosen(config)
    if not config.getoption("--hypothesis-profile"):
        # Evidence from a GPU and its rehearsal need the same kernels each time.
        same = any(config.getoption(name, None) for name in ("--gpu-report", "--rehearse"))
        settings.register_profile(
            "part", deadline=None, max_examples=RUN.part.examples, derandomize=same
        )
        settings.load_profile("part")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the part does not run."""
    RUN.collected = tuple(items)
    kept = node_ids_of(items, RUN.part)
    left = [item for item in items if item.nodeid not in kept]
    RUN.tests = len(left)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid in kept]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the parent process, if there is one, what was left out here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = (RUN.tests, RUN.kernels)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what workers left out: each the same tests, and kernels of its own gates."""
    tests, kernels = getattr(node, "workeroutput", {}).get("left out", (0, 0))
    RUN.tests = max(RUN.tests, tests)
    RUN.kernels += kernels


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out."""
    if RUN.tests or RUN.kernels:
        terminalreporter.write_line(
            f"left out: {RUN.tests} tests, {RUN.kernels} kernels of compile gates; "
            "--full runs them",
            yellow=True,
        )
