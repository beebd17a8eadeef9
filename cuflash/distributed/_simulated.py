"""Ranks that all run in one process on the CPU, for tests and to try a layout.

Received arrays are NaN until their ticket is waited for, and sent arrays must not change until
then: a schedule with a race on GPUs fails here.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from cuflash._arrays import Array
from cuflash.distributed._communicator import CommunicationError, Communicator, Exchange
from cuflash.distributed._layout import MOST_RANKS, counted


class Simulated(Communicator):
    """Ranks in one process, over NumPy arrays, that run in lock-step.

    Attributes
    ----------
    sent : Counter
        Bytes sent, by (sender, receiver).
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sent: Counter[tuple[int, int]] = Counter()

    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        """Copy what is sent, and fill the arrays to receive with NaN."""
        kept = []
        for rank, exchange in exchanges.items():
            for other, array in exchange.sends:
                self.sent[rank, other] += array.nbytes
                kept.append((rank, other, array, array.copy()))
            for _, array in exchange.receives:
                array.view(np.uint8)[...] = 0xFF  # a NaN of every dtype of floats
        return exchanges, kept

    def wait(self, ticket: Any) -> None:
        """Deliver the messages, and check that sent arrays have not changed."""
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
                text = f"rank {rank} sends rank {other} an array that is not received"
                raise CommunicationError(text, rank)


def simulated(size: int) -> Simulated:
    """Ranks that all run in this process, over NumPy arrays.

    Functions then take and return lists with one array for each rank.

    Parameters
    ----------
    size : int
        Number of ranks.

    Returns
    -------
    communicator
        Its ``sent`` counts bytes by (sender, receiver).

    Raises
    ------
    TypeError, ValueError
        Unless ``size`` is a positive int.

    Examples
    --------
    >>> from cuflash import distributed
    >>> distributed.simulated(4).ranks
    (0, 1, 2, 3)
    """
    return Simulated(counted("size", size, 1, MOST_RANKS))
