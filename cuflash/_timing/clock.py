"""How long does the device take for a call, without the time of the host?

Candidates of one cell are timed interleaved, in one run, so that all have the same clocks and
temperature; the median is taken. No call finds its inputs in the L2 cache. Long calls run between
two events, after fills that overwrite the cache. The fills last until the host has launched all of
the call; if the host was late, the sample is repeated after longer fills. Short calls, for which
events are too coarse, run in one CUDA graph over many copies of the inputs: each copy has left the
cache before it is used again.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]

#: Below this, launch gaps and the resolution of events (0.5 us) would matter: a graph is timed.
SHORT_MS = 0.2
MOST_COPIES = 512
HEAD_START_MS = 0.5  # longer than the host takes to launch a call (D112)
HEAD_STARTS = 4  # attempts, each twice as long; a call still late then waits for the device itself
ROUNDS = (11, 60)
WITHIN_ROUNDS = "{} to {} rounds".format(*ROUNDS)  # for help texts


@dataclass(frozen=True)
class Measurement:
    """Median milliseconds of one call, and how they were measured: "events" or "graph"."""

    ms: float
    timing: str


def balanced(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield orders in which each name has each place, and follows each other name, equally often.

    These are the rows of a Williams design: at its power limit a device is slower after a call that
    has heated it.
    """
    # D94.
    count = len(names)
    steps = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    for start in itertools.count():
        order = tuple(names[(start + step) % count] for step in steps)
        yield order
        if count % 2:
            yield order[::-1]


def interleaved(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every timer once per round and collect the results."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for order in itertools.islice(balanced(tuple(timers)), rounds):
        for name in order:
            samples[name].append(timers[name]())
    return samples


def number_of_rounds(slowest_ms: float, budget_ms: float) -> int:
    """The number of rounds for which the slowest candidate fits into the budget, within ROUNDS."""
    low, high = ROUNDS
    return max(low, min(high, int(budget_ms / max(slowest_ms, 1e-3))))


def medians(
    timers: Mapping[str, Callable[[], float]], first: Sequence[float], budget_ms: float, timing: str
) -> dict[str, Measurement]:
    """Interleave the timers, as often as the slowest of their ``first`` times allows."""
    samples = interleaved(timers, number_of_rounds(max(first, default=0.0), budget_ms))
    return {name: Measurement(statistics.median(ms), timing) for name, ms in samples.items()}


class DeviceClock:
    """Times calls on one stream that CuPy and torch share."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.l2_bytes = int(properties["l2CacheSize"])
        self.device_name = properties["name"].decode()
        self._buffer = cupy.empty(2 * self.l2_bytes // 4, cupy.int32)
        self._fills = 8
        with self.stream:
            self._flush()
            one = self.between_events(self._flush)[0] / self._fills
        self._fills = max(1, round(HEAD_START_MS / one))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make the stream current in CuPy, and in torch if it is loaded."""
        torch = sys.modules.get("torch")
        with self.stream:
            if torch is None:
                yield
            else:
                with torch.cuda.stream(torch.cuda.ExternalStream(self.stream.ptr)):
                    yield

    def copies_to_leave_l2(self, bytes_per_copy: int) -> int:
        """Number of copies of the inputs that take twice the size of the L2 cache."""
        return max(1, min(MOST_COPIES, -(-2 * self.l2_bytes // max(bytes_per_copy, 1))))

    def once(self, call: Call) -> float:
        """Milliseconds of one call between two events, its inputs not in the L2 cache."""
        for longer in range(HEAD_STARTS):
            for _ in range(2**longer):
                self._flush()
            ms, late = self.between_events(call)
            if not late:
                break
        return ms

    def measure(self, calls: Mapping[str, Call], budget_ms: float) -> dict[str, Measurement]:
        """Median time of each call between events."""
        timers = {name: functools.partial(self.once, call) for name, call in calls.items()}
        first = [self._warm(call) for call in calls.values()]
        return medians(timers, first, budget_ms, "events")

    def measure_graphs(
        self, graphs: Mapping[str, tuple[Call, int]], budget_ms: float
    ) -> dict[str, Measurement]:
        """Median time of one call, from graphs with a given number of calls."""
        timers = {name: functools.partial(self._share_of, *own) for name, own in graphs.items()}
        first = [self._warm(replay) for replay, _ in graphs.values()]
        return medians(timers, first, budget_ms, "graph")

    def capture(self, calls: Sequence[Call]) -> Call:
        """Capture the calls, one after another, in a CUDA graph; return a function to replay it."""
        for call in calls:
            call()
        self.stream.synchronize()
        self.stream.begin_capture()
        try:
            for call in calls:
                call()
        finally:
            graph = self.stream.end_capture()

        def replay() -> None:
            graph.launch(self.stream)

        return replay

    def _flush(self) -> None:
        for _ in range(self._fills):
            self._buffer.fill(0)

    def _warm(self, call: Call) -> float:
        call()
        return min(self.once(call) for _ in range(3))

    def _share_of(self, replay: Call, count: int) -> float:
        return self.between_events(replay)[0] / count

    def between_events(self, call: Call) -> tuple[float, bool]:
        """Milliseconds of one call, and whether the device began before all was launched."""
        start, stop = (self.cupy.cuda.Event() for _ in range(2))
        start.record(self.stream)
        call()
        stop.record(self.stream)
        late = bool(start.done)
        stop.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, stop)), late
