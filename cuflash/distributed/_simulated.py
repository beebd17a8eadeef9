"""How do ranks meet that are all in one process and on the CPU? For tests, and to try a layout.

What is received is NaN until it is waited for, and what is sent must not change until then: a
schedule that would race on a GPU fails here.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.checks import integer_value, is_integer
from cuflash.distributed._communicator import Agreements, CommunicationError, Exchange


class Simulated:
    """Ranks in one process, over NumPy arrays, that run in lock-step.

    Attributes
    ----------
    size : int
        How many ranks.
    sent : Counter
        Bytes by (from, to).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = tuple(range(size))
        self.in_lists = True
        self.agreements = Agreements()
        self.sent: Counter[tuple[int, int]] = Counter()

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """What every rank says."""
        return [facts[rank] for rank in self.ranks]

    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        """Keep what is sent, and poison what will be received."""
        kept = []
        for rank, exchange in exchanges.items():
            for other, array in exchange.sends:
                self.sent[rank, other] += array.nbytes
                kept.append((rank, other, array, array.copy()))
            for _, array in exchange.receives:
                array.view(np.uint8)[...] = 0xFF  # a NaN of every dtype of floats
        return exchanges, kept

    def wait(self, ticket: Any) -> None:
        """Deliver."""
        exchanges, kept = ticket
        mail: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)
        for rank, other, array, copy in kept:
            if array.tobytes() != copy.tobytes():
                raise CommunicationError(f"rank {rank} changed what it was sending", rank)
            mail[rank, other].append(copy)
        for rank, exchange in exchanges.items():
            for other, array in exchange.receives:
                if not mail[other, rank]:
                    text = f"rank {rank} waits for rank {other}, which sends it nothing"
                    raise CommunicationError(text, other)
                copy = mail[other, rank].popleft()
                if (copy.shape, copy.dtype) != (array.shape, array.dtype):
                    got = f"{copy.dtype} {copy.shape}, not {array.dtype} {array.shape}"
                    raise CommunicationError(f"rank {other} sends rank {rank} {got}", other)
                array[...] = copy
        for (rank, other), left in mail.items():
            if left:
                text = f"rank {rank} sends rank {other} what that does not expect"
                raise CommunicationError(text, rank)

    def on(self, rank: int) -> contextlib.AbstractContextManager[Any]:
        """Nothing has to be current."""
        del rank
        return contextlib.nullcontext()

    def free_memory(self, rank: int) -> int | None:
        """Nobody has to ask."""
        del rank
        return None

    def close(self) -> None:
        """Nothing is held."""


def simulated(size: int) -> Simulated:
    """Ranks that are all in this process, over NumPy arrays.

    Functions take and return lists then, with an array for each rank.

    Parameters
    ----------
    size : int
        How many ranks.

    Returns
    -------
    communicator
        Its ``sent`` counts bytes by (from, to).

    Raises
    ------
    TypeError, ValueError
        Unless it is a positive int.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.simulated(4).ranks
    (0, 1, 2, 3)
    """
    if not is_integer(size):
        raise wrong_type("size", shown(size), "a positive int")
    if integer_value("size", size, "a positive int") < 1:
        raise wrong_value("size", shown(size), "a positive int")
    return Simulated(int(size))
