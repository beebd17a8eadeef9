"""The interface between schedules and communicators, and the error for a rank that failed.

A schedule is a generator that runs on one rank and yields three kinds of record. All ranks of a
call yield the same kinds in the same order; the contents differ.

    Compute    work of this rank alone; its result is sent back into the generator
    Exchange   arrays to send and to receive; a ticket is sent back at once
    Wait       for a ticket; afterwards received arrays hold data, and sent arrays may be changed

Messages from one rank to another arrive in the order in which their exchanges list them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from cuflash._arrays import Array
from cuflash._errors import shown, wrong_type

Schedule = Generator[Any, Any, Any]


class CommunicationError(RuntimeError):
    """Ranks cannot communicate: one is dead or stuck, or makes a different call than the others.

    Attributes
    ----------
    rank : int or None
        The rank that failed, the same on all survivors; None if no rank can be named.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.distributed.CommunicationError("rank 2 is gone", rank=2).rank
    2
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of one rank; its size is the number of ``scores`` (query, key and head)."""

    run: Callable[[], Any]
    scores: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Contiguous arrays to send, each to one rank, and contiguous arrays to receive from ranks."""

    sends: tuple[tuple[int, Array], ...] = ()
    receives: tuple[tuple[int, Array], ...] = ()

    def __add__(self, other: Exchange) -> Exchange:
        """Join both: the messages of one exchange do not wait for each other."""
        return Exchange(self.sends + other.sends, self.receives + other.receives)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the exchange of this ticket is done."""

    ticket: Any


@dataclass(slots=True)
class Agreements:
    """What ranks agreed on for calls that may be repeated. All ranks use the same numbers."""

    number: int = 0  # agreements so far
    known: dict[Any, tuple[int, Any]] = field(default_factory=dict)  # by own rank and key


class Communicator(ABC):
    """Connects ranks. This process runs one of them, or all.

    Attributes
    ----------
    size : int
        Number of ranks.
    ranks : tuple of int
        The ranks that this process runs (its own ranks).
    in_lists : bool
        Whether functions take and return a list with one array for each rank.
    """

    def __init__(self, size: int, rank: int | None = None) -> None:
        self.size, self.in_lists = size, rank is None
        self.ranks: tuple[int, ...] = tuple(range(size)) if rank is None else (rank,)
        self.agreements = Agreements()
        self._calling = threading.Lock()  # held during a call

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """Return the facts of all ranks, in order of ranks; ``facts`` has those of own ranks."""
        return [facts[rank] for rank in self.ranks]

    @abstractmethod
    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        """Begin the exchanges of own ranks and return a ticket."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Return when the received arrays can be used on the current stream."""

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """Context in which a rank's device is current."""
        del rank
        return nullcontext()

    def check_library(self, name: str, array: Array) -> None:  # noqa: B027
        """Raise a TypeError for an array of a library that this communicator cannot send."""

    def free_memory(self, rank: int) -> int | None:
        """Bytes still free on a rank's GPU; None on the CPU."""
        del rank
        return None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context of a whole call, from the first comparison to the results.

        An interrupt (Ctrl-C) within it ends the communicator: other ranks have made this call, or
        wait in it, and would take this rank's next call for a part of it. A call in a second thread
        ends it, too: no rank knows with which of two calls another rank has begun.
        """
        if not self._calling.acquire(blocking=False):
            ranks = "all ranks" if self.in_lists else f"rank {self.ranks[0]}"
            refused = RuntimeError(
                f"comm: got a call of {ranks} during another one, for instance in a second thread, "
                "expected one call at a time"
            )
            self.give_up(refused)
            raise refused
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.give_up(error)
            raise
        finally:
            self._calling.release()

    def give_up(self, error: BaseException) -> None:  # noqa: B027
        """Called when an own rank raised during a call, which then cannot end on other ranks."""

    def close(self) -> None:  # noqa: B027
        """Leave; ranks that still wait for this one get a CommunicationError."""


def checked_communicator(comm: Any) -> None:
    """Raise a TypeError unless the argument is a communicator."""
    if not isinstance(comm, Communicator):
        expected = (
            "a communicator of cuflash.distributed: connect, from_environment, from_mpi, "
            "from_devices or simulated"
        )
        raise wrong_type("comm", shown(comm), expected)


def drive(communicator: Communicator, schedules: Mapping[int, Schedule]) -> dict[int, Any]:
    """Run the schedules of this process's ranks, each in turn up to its next exchange or wait.

    No reference to a record is kept while schedules run, so that they can free its arrays.
    """
    try:
        return _driven(communicator, schedules)
    except BaseException as error:
        communicator.give_up(error)
        raise


def _driven(communicator: Communicator, schedules: Mapping[int, Schedule]) -> dict[int, Any]:
    replies: dict[int, Any] = dict.fromkeys(schedules)
    results: dict[int, Any] = {}
    while True:
        posted: dict[int, Exchange | Wait] = {}
        for rank, schedule in schedules.items():
            with communicator.on(rank):
                try:
                    posted[rank] = _computed(schedule, replies.pop(rank))
                except StopIteration as end:
                    results[rank] = end.value
        if not posted:
            return results
        replies = dict.fromkeys(posted, _done(communicator, posted, results))


def _computed(schedule: Schedule, reply: Any) -> Exchange | Wait:
    """Run a schedule up to its next exchange or wait."""
    while True:
        record: Compute | Exchange | Wait = schedule.send(reply)
        if not isinstance(record, Compute):
            return record
        reply = record.run()
        del record


def _done(communicator: Communicator, posted: Mapping[int, Any], ended: Collection[int]) -> Any:
    """Start the exchanges of all ranks and return the ticket, or wait for their ticket."""
    kinds = {rank: type(record).__name__ for rank, record in posted.items()}
    if ended or len(set(kinds.values())) > 1:
        at = kinds | dict.fromkeys(ended, "the end")
        told = ", ".join(f"rank {rank} at {at[rank]}" for rank in sorted(at))
        raise CommunicationError(f"ranks wait for each other and none can go on: {told}")
    first = next(iter(posted.values()))
    if isinstance(first, Exchange):
        return communicator.start(posted)
    return communicator.wait(first.ticket)
