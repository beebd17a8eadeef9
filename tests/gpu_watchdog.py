"""Did a kernel hang? Then the test has failed, and the run ends with the line that repeats it.

A host thread that waits for a device cannot be interrupted, so the watchdog ends the process.
Before that it prints the stacks of all threads and the repro line, and writes the GPU report if one
was asked for. A property has the limit for each example. While the test's own thread compiles a
kernel the limit is longer, and afterwards it starts anew: beside other processes that compile too,
NVRTC is slow without hanging.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import gpu_report
from cuflash._jit import compilation

EXIT_STATUS = 3
GRACE = 10.0  # seconds for an orderly end; then faulthandler's own thread ends the process
SLOW_FACTOR = 10
STDERR = pytest.StashKey[int]()  # a file descriptor that pytest never captures


class Watchdog:
    """A timer, restarted at the start of every case, that ends the process when it runs out."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self.timer: threading.Timer | None = None

    def wind(self, *, slow: bool = False) -> None:
        """Restart the timer with the limit of the test, or with that of a slow test."""
        self.stop()
        seconds = limit(self.item, slow=slow)
        self.timer = threading.Timer(seconds, self.bite, [seconds])
        self.timer.daemon = True
        self.timer.start()
        # faulthandler needs no interpreter lock, so it also ends a call that holds the lock.
        faulthandler.dump_traceback_later(
            seconds + GRACE, exit=True, file=self.item.config.stash[STDERR]
        )

    def stop(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def bite(self, seconds: float) -> None:
        """Print the test that hung, record it as failed and end the process."""
        config = self.item.config
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        nodeid = self.item.nodeid
        print(f"\nHANG after {seconds:g} s: {nodeid}", file=sys.stderr)
        print(f'repeat: python -m pytest "{nodeid}"', file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        recorder = config.pluginmanager.get_plugin(gpu_report.NAME)
        if recorder is not None:
            recorder.record(nodeid, True, "failed", "call")
            recorder.finish()
            print(f"GPU report: {recorder.message}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_STATUS)


def limit(item: pytest.Item, *, slow: bool = False) -> float:
    """Return the seconds that one case of a test may take; more of them if it is slow."""
    seconds = float(item.config.getoption("--gpu-timeout"))
    return seconds * SLOW_FACTOR if slow or item.get_closest_marker("slow") else seconds


@contextmanager
def per_example(item: pytest.Item, watchdog: Watchdog) -> Iterator[None]:
    """Restart the watchdog before every example of a property."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None:
        yield
        return
    inner: Callable[..., Any] = handle.inner_test

    @functools.wraps(inner)
    def wound(*args: Any, **kwargs: Any) -> Any:
        watchdog.wind()
        return inner(*args, **kwargs)

    with mock.patch.object(handle, "inner_test", wound):
        yield


@contextmanager
def per_compile(watchdog: Watchdog) -> Iterator[None]:
    """Allow the time of a slow test for each NVRTC call of this thread, then restart the timer."""
    inner, own = compilation._nvrtc, threading.get_ident()

    @functools.wraps(inner)
    def wound(*args: Any) -> Any:
        if threading.get_ident() != own:
            return inner(*args)
        watchdog.wind(slow=True)
        try:
            return inner(*args)
        finally:
            watchdog.wind()

    with mock.patch.object(compilation, "_nvrtc", wound):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch set-up, call and tear-down of every test marked gpu."""
    if not item.get_closest_marker("gpu") or limit(item) <= 0:
        return (yield)
    watchdog = Watchdog(item)
    with per_example(item, watchdog), per_compile(watchdog):
        watchdog.wind()
        try:
            return (yield)
        finally:
            watchdog.stop()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-timeout", type=float, default=60.0, metavar="SECONDS",
        help="time for one GPU case, ten times that if slow; 0 watches nothing (default: 60)",
    )  # fmt: skip
