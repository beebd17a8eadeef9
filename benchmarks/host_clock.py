"""How long does the host take for a call?"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cuflash._timing.clock import Call, Measurement, medians

WARM_UP_S = 0.3  # the CPU wakes up and raises its clock while it works (D113)


class HostClock:
    """Times synchronous calls: the NumPy path."""

    device_name = "cpu"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """A context without effect, for the interface of DeviceClock."""
        yield

    def once(self, call: Call) -> float:
        """Milliseconds of one call."""
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def measure(self, calls: Mapping[str, Call], budget_ms: float) -> dict[str, Measurement]:
        """Median wall time of each call."""
        timers = {name: functools.partial(self.once, call) for name, call in calls.items()}
        first = [min(timer(), timer()) for timer in timers.values()]
        return medians(timers, first, budget_ms, "wall")


def host_microseconds(
    calls: Sequence[Call],
    synchronize: Call,
    batch: int = 50,
    repeats: int = 20,
    windows: int = 50,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Host time of a call that only enqueues, in microseconds.

    It is the median of batches in the fastest window: other programs on the processor can only add
    time, for seconds at a stretch. ``calls`` are used in rotation. The queue is emptied between
    batches, so that the host never waits for the device while the clock runs.
    """
    turns = itertools.cycle(calls)

    def of_batch() -> float:
        chosen = list(itertools.islice(turns, batch))
        synchronize()
        start = time.perf_counter()
        for call in chosen:
            call()
        return 1e6 * (time.perf_counter() - start) / batch

    awake = time.perf_counter() + warm_up_s
    while time.perf_counter() < awake:
        of_batch()
    found = min(statistics.median(of_batch() for _ in range(repeats)) for _ in range(windows))
    synchronize()
    return found
