"""How is the time of a call on several ranks divided between computation, exchanges and host?

Figures for a weak cell of `scale_out.py`, with `--split`:

    compute_ms    without exchanges: sent arrays are copied into the arrays to receive
    exchange_ms   without computing
    host_ms       until the call returns, beginning with an idle GPU
    agree_ms      the part of host_ms that compares the call with other ranks

If the GPU needs less than `host_ms`, it is idle in between. `ms - compute_ms` is the time of
exchanges that computation does not hide. `compute_ms - size * block_ms` is the cost of float32
parts, merges and smaller blocks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cuflash.distributed import _all_gather, _ring
from cuflash.distributed._communicator import Communicator, Compute, Exchange

ROUNDS = 5


@contextlib.contextmanager
def without_exchanges(comm: Communicator) -> Iterator[None]:
    """Receive copies of own arrays: zeros would take less power."""

    def start(exchanges: Mapping[int, Exchange]) -> None:
        for rank, exchange in exchanges.items():
            sent = {a.shape: a for _, a in exchange.sends}
            with comm.on(rank):
                for _, array in exchange.receives:
                    array[...] = sent.get(array.shape, 0)

    vars(comm).update(start=start, wait=lambda _: None)
    try:
        yield
    finally:
        del vars(comm)["start"], vars(comm)["wait"]


@contextlib.contextmanager
def computing(record_of: Callable[[Callable[[], Any], int], Compute]) -> Iterator[None]:
    """Let schedules yield ``record_of(run, scores)`` for each block."""
    modules: tuple[Any, ...] = (_all_gather, _ring)
    for module in modules:
        module.Compute = record_of
    try:
        yield
    finally:
        for module in modules:
            module.Compute = Compute


def nothing(_: Callable[[], Any], scores: int) -> Compute:
    """A block that is not computed; uninitialised memory is sent."""
    return Compute(lambda: None, scores)


def split(
    comm: Communicator,
    call: Callable[[], Any],
    seconds: Callable[[Callable[[], Any]], float],
    synchronize: Callable[[], None],
) -> dict[str, float]:
    """Milliseconds of each figure; ``seconds`` times a call on the slowest rank."""

    def until_it_returns(action: Callable[[], Any]) -> float:
        found = []
        for _ in range(ROUNDS):
            synchronize()
            begin = time.perf_counter()
            action()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    with without_exchanges(comm):
        call()
        compute = seconds(call)
    with computing(nothing):
        call()
        exchange = seconds(call)
    words = dict.fromkeys(comm.ranks, b"1")
    parts = {
        "compute_ms": compute, "exchange_ms": exchange, "host_ms": until_it_returns(call),
        "agree_ms": until_it_returns(lambda: comm.agree(words)),
    }  # fmt: skip
    return {name: 1e3 * value for name, value in parts.items()}
