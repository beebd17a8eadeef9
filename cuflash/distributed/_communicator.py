"""What does a schedule ask of whatever joins the ranks, and how does it say that a rank failed?

A schedule is a generator, of one rank, that yields three kinds of record. Every rank of a call
yields the same kinds in the same order; what they hold differs.

    Compute    work of this rank alone, whose result is sent back
    Exchange   arrays to send and to receive; a ticket is sent back at once
    Wait       for a ticket; from then on received arrays hold data, and sent ones may be changed

Messages of one rank to another arrive in the order in which their exchanges list them.
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
    """Ranks do not meet: one is dead or stuck, or does other things than the rest.

    Attributes
    ----------
    rank : int or None
        The rank that failed, the same on all survivors; None where none can be named.

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
    """Work of one rank; ``scores`` of a query and a key of a head are its size."""

    run: Callable[[], Any]
    scores: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Contiguous arrays to send, each to a rank, and contiguous arrays to fill, each from one."""

    sends: tuple[tuple[int, Array], ...] = ()
    receives: tuple[tuple[int, Array], ...] = ()

    def __add__(self, other: Exchange) -> Exchange:
        """Both as one: what takes part in an exchange does not wait for another."""
        return Exchange(self.sends + other.sends, self.receives + other.receives)


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the exchange of this ticket is done."""

    ticket: Any


@dataclass(slots=True)
class Agreements:
    """What ranks have agreed on for calls that may come again, numbered alike on all ranks."""

    number: int = 0  # of agreements so far
    known: dict[Any, tuple[int, Any]] = field(default_factory=dict)  # by own rank and key


class Communicator(ABC):
    """Joins ranks, of which this process runs one, or all.

    Attributes
    ----------
    size : int
        How many ranks there are.
    ranks : tuple of int
        Those that this process runs.
    in_lists : bool
        Whether functions take and return a list with one array for each rank.
    """

    def __init__(self, size: int, rank: int | None = None) -> None:
        self.size, self.in_lists = size, rank is None
        self.ranks: tuple[int, ...] = tuple(range(size)) if rank is None else (rank,)
        self.agreements = Agreements()
        self._calling = threading.Lock()  # held during a call

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """What every rank says, in order of ranks; ``facts`` has what own ranks say."""
        return [facts[rank] for rank in self.ranks]

    @abstractmethod
    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        """Begin the exchanges of own ranks; a ticket."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Return when what was received can be used on the current stream."""

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """Context in which a rank's device is current."""
        del rank
        return nullcontext()

    def check_library(self, name: str, array: Array) -> None:  # noqa: B027
        """Raise a TypeError for an array of a library whose arrays it cannot send."""

    def free_memory(self, rank: int) -> int | None:
        """Bytes that a rank's device can still give; None where nobody has to ask."""
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
        """An own rank has raised in the middle of a call, which can never end on the others."""

    def close(self) -> None:  # noqa: B027
        """Leave; other ranks that still wait for this one get a CommunicationError."""


def checked_communicator(comm: Any) -> None:
    """Raise a TypeError for what does not join ranks."""
    if not isinstance(comm, Communicator):
        expected = (
            "a communicator of cuflash.distributed: connect, from_environment, from_mpi, "
            "from_devices or simulated"
        )
        raise wrong_type("comm", shown(comm), expected)


def drive(communicator: Communicator, schedules: Mapping[int, Schedule]) -> dict[int, Any]:
    """Run the schedules of a process's ranks, each in turn up to its next exchange or wait.

    No record is held while schedules run: its arrays are theirs alone.
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
    """Do what all ranks ask for; the ticket, if they exchange."""
    kinds = {rank: type(record).__name__ for rank, record in posted.items()}
    if ended or len(set(kinds.values())) > 1:
        at = kinds | dict.fromkeys(ended, "the end")
        told = ", ".join(f"rank {rank} at {at[rank]}" for rank in sorted(at))
        raise CommunicationError(f"ranks wait for each other and none can go on: {told}")
    first = next(iter(posted.values()))
    if isinstance(first, Exchange):
        return communicator.start(posted)
    return communicator.wait(first.ticket)
