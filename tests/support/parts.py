"""Which part of the tests runs: that of the inner loop, the usual one, or everything?

    python -m pytest --quick | (no option) | --full | --slow

Each part holds the part before it. A part runs a fixed share of the cases of every test, of the
kernels of every compile gate and of the examples of every property. A hash of the names chooses
the share: every run chooses the same, and no list of tests has to be kept. A run that names a test
by its node id leaves nothing out.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Shares are in [0, 1] and rounded up, so that a share above zero keeps something."""

    name: str
    cases: float  # of each test without the marker long
    long_cases: float  # of each test with the marker long
    kernels: float  # of each compile gate
    examples: int  # of each property


QUICK = Part("quick", cases=0.1, long_cases=0.0, kernels=0.01, examples=5)
USUAL = Part("usual", cases=1.0, long_cases=0.1, kernels=0.08, examples=25)
FULL = Part("full", cases=1.0, long_cases=1.0, kernels=1.0, examples=100)
PARTS = (QUICK, USUAL, FULL)


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
    """Node ids of the tests that a part runs.

    Cases that need a GPU are counted apart: elsewhere they would stand for the cases that can run.
    """
    cases = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        marks = tuple(bool(item.get_closest_marker(marker)) for marker in ("gpu", "long"))
        cases[test, marks].append(item.nodeid)
    return {
        nodeid
        for (_, (_, long)), nodeids in cases.items()
        for nodeid in sample(nodeids, part.long_cases if long else part.cases, str)
    }


def chosen(config: pytest.Config) -> Part:
    """Return the part that the command line asks for."""
    asked = [part for part in (QUICK, FULL) if config.getoption(f"--{part.name}")]
    if len(asked) > 1:
        raise pytest.UsageError("--quick and --full exclude each other: give one of them")
    if config.getoption("--slow") or any("::" in argument for argument in config.args):
        return FULL
    return asked[0] if asked else USUAL


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run what takes less than a minute")
    parser.addoption("--full", action="store_true", help="run everything but the tests marked slow")
    parser.addoption("--slow", action="store_true", help="run everything")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bound the examples of properties, unless a profile of Hypothesis is asked for."""
    RUN.part = chosen(config)
    if not config.getoption("--hypothesis-profile"):
        settings.register_profile("part", deadline=None, max_examples=RUN.part.examples)
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out."""
    if RUN.tests or RUN.kernels:
        terminalreporter.write_line(
            f"left out: {RUN.tests} tests, {RUN.kernels} kernels of compile gates; "
            "--full runs them",
            yellow=True,
        )
