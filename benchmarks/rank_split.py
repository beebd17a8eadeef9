"""Where does the time of a call on several ranks go? The call without its exchanges, and so on.

Of a weak cell of `scale_out.py`, with `--split`:

    compute_ms    without exchanges: what is sent is copied into what is received
    exchange_ms   without computing
    host_ms       until the call returns, from an idle GPU; a GPU that needs less is idle
    agree_ms      of it the comparison of the call with the other ranks

`ms - compute_ms` is what exchanges cost beside what is computed, `compute_ms - size * block_ms`
what float32 parts, merges and smaller blocks cost.
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
    """Numbers that come are copies of own ones: zeros would take less power."""

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
    """Schedules yield ``record_of(run, scores)`` for a block."""
    modules: tuple[Any, ...] = (_all_gather, _ring)
    for module in modules:
        module.Compute = record_of
    try:
        yield
    finally:
        for module in modules:
            module.Compute = Compute


def nothing(_: Callable[[], Any], scores: int) -> Compute:
    """A block that is not computed: what is sent then is whatever memory holds."""
    return Compute(lambda: None, scores)


def split(
    comm: Communicator,
    call: Callable[[], Any],
    seconds: Callable[[Callable[[], Any]], float],
    synchronize: Callable[[], None],
) -> dict[str, float]:
    """Milliseconds of the parts; ``seconds`` times a call, on the slowest rank."""

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
