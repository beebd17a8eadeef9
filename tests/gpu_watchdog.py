"""Did a kernel hang? Then the test has failed, and the run ends with the line that repeats it.

A host thread that waits for a device cannot be interrupted, so the process ends: the stacks of all
threads, the repro line and, where one is written, the GPU report come first. A property's limit is
per example.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_report

EXIT_STATUS = 3
GRACE = 10.0  # seconds for the polite end; then faulthandler's own thread ends the process
SLOW_FACTOR = 10
STDERR = pytest.StashKey[int]()  # a file descriptor that pytest never captures


class Watchdog:
    """A timer that is wound at the start of every case and ends the process when it runs out."""

    def __init__(self, item: pytest.Item, seconds: float) -> None:
        self.item = item
        self.seconds = seconds
        self.timer: threading.Timer | None = None

    def wind(self) -> None:
        """Start the time anew."""
        self.stop()
        self.timer = threading.Timer(self.seconds, self.bite)
        self.timer.daemon = True
        self.timer.start()
        # Does its work without the interpreter lock, should a call hold that.
        faulthandler.dump_traceback_later(
            self.seconds + GRACE, exit=True, file=self.item.config.stash[STDERR]
        )

    def stop(self) -> None:
        """Let it sleep."""
        if self.timer is not None:
            self.timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def bite(self) -> None:
        """Tell what hung, record it as failed and end the process."""
        config = self.item.config
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        nodeid = self.item.nodeid
        print(f"\nHANG after {self.seconds:g} s: {nodeid}", file=sys.stderr)
        print(f'repeat: python -m pytest "{nodeid}"', file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        recorder = config.pluginmanager.get_plugin(gpu_report.NAME)
        if recorder is not None:
            recorder.record(nodeid, True, "failed", "call")
            recorder.finish()
            print(f"GPU report: {recorder.message}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(EXIT_STATUS)


def limit(item: pytest.Item) -> float:
    """Seconds that one case of a test may take."""
    seconds = float(item.config.getoption("--gpu-timeout"))
    return seconds * SLOW_FACTOR if item.get_closest_marker("slow") else seconds


def per_example(item: pytest.Item, watchdog: Watchdog) -> Callable[[], None]:
    """Wind the watchdog before every example of a property; return what undoes that."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None:
        return lambda: None
    inner: Callable[..., Any] = handle.inner_test

    @functools.wraps(inner)
    def wound(*args: Any, **kwargs: Any) -> Any:
        watchdog.wind()
        return inner(*args, **kwargs)

    handle.inner_test = wound

    def restore() -> None:
        handle.inner_test = inner

    return restore


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch set-up, call and tear-down of every test marked gpu."""
    if not item.get_closest_marker("gpu") or limit(item) <= 0:
        return (yield)
    watchdog = Watchdog(item, limit(item))
    restore = per_example(item, watchdog)
    watchdog.wind()
    try:
        return (yield)
    finally:
        watchdog.stop()
        restore()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-timeout", type=float, default=60.0, metavar="SECONDS",
        help="time for one GPU case, ten times that if slow; 0 watches nothing (default: 60)",
    )  # fmt: skip
