"""How long does each rank compute and wait, by its schedule? A computed timeline of ranks.

    python benchmarks/rank_timeline.py --ranks 2 --tokens 8192 --heads 32 8 --causal

Simulated ranks run the real schedules over small arrays. Each block and each exchange is assigned
the time that it would take with ``--tokens`` rows on each rank, at the given speeds. An exchange
begins when all ranks have posted it and the exchange before has ended; it runs beside computation.
A wait ends with its exchange. The figures are the times of computing and waiting in a call, and the
numbers of calls and exchanges that the host posts. Other losses are not due to the schedule.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rank_split import computing  # noqa: E402
from cuflash import distributed  # noqa: E402
from cuflash.distributed._communicator import Compute, Exchange  # noqa: E402
from cuflash.distributed._simulated import Simulated  # noqa: E402

HEAD_DIM, ROWS = 128, 32  # rows of a rank in the simulation
PRODUCTS = {False: 4, True: 10}  # operations per score and feature: forward, gradient


@dataclass(frozen=True)
class Speeds:
    """Speeds, in units per second."""

    forward: float = 747e12  # floating-point operations
    gradient: float = 528e12
    link: float = 300e9  # bytes that a GPU sends and receives at the same time


@dataclass
class Timeline:
    """Times of one rank in seconds, and counts."""

    now: float = 0.0
    computed: float = 0.0
    waited: float = 0.0
    calls: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    steps: list[str] = field(default_factory=list)


class Timed(Simulated):
    """Simulated ranks that add up the times of their work at full size."""

    def __init__(self, size: int, scale: float, score: float, speeds: Speeds) -> None:
        super().__init__(size)
        self._scale, self._score, self._speeds = scale, score, speeds
        self._ends: dict[int, float] = {}
        self.begin()

    def begin(self) -> None:
        """Reset all timelines."""
        self._link_free = 0.0
        self.ranks_time = [Timeline() for _ in self.ranks]

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        self.rank = rank
        yield

    def computes(self, run: Callable[[], Any], scores: int) -> Compute:
        """A block whose time is counted when its rank runs it."""

        def timed() -> Any:
            line, took = self.ranks_time[self.rank], scores * self._scale**2 * self._score
            line.now += took
            line.computed += took
            line.calls += 1
            line.steps.append(f"computes {1e6 * took:,.0f} us")
            return run()

        return Compute(timed, scores)

    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        ticket = super().start(exchanges)
        moved = {
            rank: (sum(a.nbytes for _, a in e.sends), sum(a.nbytes for _, a in e.receives))
            for rank, e in exchanges.items()
        }
        begin = max(self._link_free, *(line.now for line in self.ranks_time))
        most = max(map(max, moved.values())) * self._scale
        self._link_free = self._ends[id(ticket)] = begin + most / self._speeds.link
        for rank, (sent, _) in moved.items():
            line = self.ranks_time[rank]
            line.exchanges += 1
            line.bytes_sent += round(sent * self._scale)
            line.steps.append(f"posts {sent * self._scale / 2**20:,.1f} MiB")
        return ticket

    def wait(self, ticket: Any) -> None:
        super().wait(ticket)
        end = self._ends[id(ticket)]
        for line in self.ranks_time:
            waits = max(0.0, end - line.now)
            line.now += waits
            line.waited += waits
            line.steps.append(f"waits {1e6 * waits:,.0f} us")


def timeline(
    size: int,
    tokens: int,
    heads: tuple[int, int],
    *,
    causal: bool,
    gradient: bool,
    method: str,
    speeds: Speeds,
) -> list[Timeline]:
    """The timelines of all ranks for a call of 16-bit arrays with ``tokens`` rows on each rank."""
    speed = speeds.gradient if gradient else speeds.forward
    score = PRODUCTS[gradient] * HEAD_DIM / speed
    comm = Timed(size, tokens / ROWS, score, speeds)
    rng = np.random.default_rng(0)
    shapes = [(n, ROWS, HEAD_DIM) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (
        [rng.standard_normal(shape).astype(np.float16) for _ in comm.ranks] for shape in shapes
    )
    how: dict[str, Any] = {"comm": comm, "method": method, "causal": causal, "enable_gqa": True}
    with computing(comm.computes):
        found = distributed.attention(q, k, v, return_lse=True, **how)
        if gradient:
            comm.begin()
            outs, lses = zip(*found, strict=True)
            distributed.attention_backward(dout, q, k, v, outs, lses, **how)
    return comm.ranks_time


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each method and direction, and with --steps the steps of each rank."""
    parser = argparse.ArgumentParser(description="What ranks wait for, by their schedules.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tflops", type=float, nargs=2, default=(747.0, 528.0))
    parser.add_argument("--gbytes", type=float, default=300.0, help="a second, each way")
    parser.add_argument("--methods", nargs="+", default=["ring", "all_gather", "ulysses"])
    parser.add_argument("--steps", action="store_true", help="what rank 0 does, one by one")
    given = parser.parse_args(argv)
    speeds = Speeds(1e12 * given.tflops[0], 1e12 * given.tflops[1], 1e9 * given.gbytes)
    print(f"computed, not measured: {given.ranks} ranks, {given.tokens} tokens each")
    print(f"{'':26}{'computes':>12}{'waits, us':>12}{'share':>8}{'calls':>7}{'exchanges':>11}")
    for method in given.methods:
        for gradient in (False, True):
            lines = timeline(
                given.ranks, given.tokens, tuple(given.heads), causal=given.causal,
                gradient=gradient, method=method, speeds=speeds,
            )  # fmt: skip
            last = max(lines, key=lambda line: line.now)
            name = f"{method} {'gradient' if gradient else 'forward'}"
            print(
                f"{name:26}{1e6 * last.computed:12,.0f}{1e6 * last.waited:12,.0f}"
                f"{last.computed / last.now:8.0%}{last.calls:7}{last.exchanges:11}"
            )
            if given.steps:
                print("\n".join(f"    {step}" for step in lines[0].steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
