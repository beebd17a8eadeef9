"""How do processes exchange arrays over sockets, and how do they learn that a rank has failed?

For each other rank a thread reads, so that no send waits for long. One more thread sends signs of
life and checks those of other ranks. A rank has failed when its connection ends, when it gives no
sign of life for ``liveness_timeout``, or when an operation takes longer than ``op_timeout``. In the
last case the rank that has begun the fewest operations is blamed. The rank that finds a failure
tells the others, so that all raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuflash._arrays import Array, is_cupy
from cuflash._errors import wrong_type
from cuflash.distributed._communicator import CommunicationError, Communicator, Exchange

_FRAME = struct.Struct("!BQQ")  # kind, a number, number of bytes that follow
_LIFE, _DATA, _FACTS, _FAILED, _LEAVING = range(5)
_MOST_FACTS = 1 << 24
_ONE_PACKET = 1 << 12  # bytes; shorter payloads are copied behind their frame and sent with it
_GRACE = 0.25  # seconds in which other ranks may tell which rank failed first
_NO_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
_ALL: weakref.WeakSet[Processes] = weakref.WeakSet()  # of this process


class Processes(Communicator):
    """One rank of several processes, over NumPy arrays.

    Attributes
    ----------
    rank : int
        The rank of this process.
    sent : int
        Bytes of arrays sent so far.
    forked : bool
        Whether this process is a forked child, which cannot use its parent's communicator.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: dict[int, socket.socket],
        *,
        op_timeout: float,
        liveness_timeout: float,
    ) -> None:
        super().__init__(size, rank)
        self.rank, self.sent, self.forked = rank, 0, False
        self.op_timeout, self._liveness = op_timeout, liveness_timeout
        #: Called once when a rank has failed, by any thread.
        self.on_failure: Callable[[], None] = lambda: None
        #: Number of operations that this rank has begun.
        self.progress = 0
        self._links = links
        self._locks = {other: threading.Lock() for other in links}
        self._changed = threading.Condition()
        #: By rank and kind: the sender's progress and the payload of each message.
        self._inbox: dict[tuple[int, int], deque[tuple[int, bytearray]]] = defaultdict(deque)
        self._seen = dict.fromkeys(links, time.monotonic())
        self._progress_of = dict.fromkeys(links, 0)
        self._left: set[int] = set()
        self._failure: CommunicationError | None = None
        self._closed = False
        _ALL.add(self)
        self._threads = [self._begun(f"reads rank {other}", self._read, other) for other in links]
        self._threads.append(self._begun("lives", self._pulse))

    def _begun(self, what: str, target: Callable[..., None], *args: int) -> threading.Thread:
        name = f"cuflash rank {self.rank} {what}"
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def check_library(self, name: str, array: Array) -> None:
        """Raise a TypeError for CuPy arrays."""
        if is_cupy(array):
            raise wrong_type(
                name, "a CuPy array", 'NumPy arrays with transport="host"',
                'connect with transport="nccl" for CuPy arrays',
            )  # fmt: skip

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """Return the facts of all ranks."""
        own = facts[self.rank]
        self.progress += 1
        try:
            for other in self._links:
                self._send(other, _FACTS, own)
            return [
                own if r == self.rank else bytes(self._received(r, _FACTS, self.progress))
                for r in range(self.size)
            ]
        except MemoryError as error:
            self.give_up(error)
            raise

    def start(self, exchanges: Mapping[int, Exchange]) -> Any:
        """Send. Threads receive in the meantime; :meth:`wait` copies into the arrays."""
        exchange = exchanges[self.rank]
        self.progress += 1
        for other, array in exchange.sends:
            payload = memoryview(array.reshape(-1).view(np.uint8))
            self.sent += len(payload)
            self._send(other, _DATA, payload)
        return self.progress, exchange

    def wait(self, ticket: tuple[int, Exchange]) -> None:
        """Fill the arrays to receive."""
        number, exchange = ticket
        for other, array in exchange.receives:
            payload = self._received(other, _DATA, number)
            if len(payload) != array.nbytes:
                text = f"rank {other} sent {len(payload)} bytes, expected {array.nbytes}"
                self.fail(other, text)
                self.check()
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload, np.uint8)

    def check(self) -> None:
        """Raise if a rank has failed."""
        if self._failure is not None:
            raise CommunicationError(str(self._failure), self._failure.rank)
        if self._closed:
            raise CommunicationError("the communicator is closed")

    def require_all(self, patience: float = 0.0) -> None:
        """Raise if a rank has failed or has left, or does within ``patience`` seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._closed or self._left, timeout=patience
            )
            if self._left:  # perhaps since another has failed
                self._changed.wait_for(lambda: self._failure or self._closed, timeout=_GRACE)
            gone = min(self._left, default=None)
        if gone is not None:
            self.fail(gone, f"rank {gone} has left before all ranks were ready")
        self.check()

    def fail(self, rank: int | None, text: str, *, tell: bool = True) -> None:
        """Note that a rank has failed, tell the others, and wake the threads that wait."""
        with self._changed:
            if self._failure is not None or self._closed:
                return
            self._failure = CommunicationError(text, rank)
            self._changed.notify_all()
        message = json.dumps({"rank": rank, "text": text}).encode()
        for other in self._links:
            if tell:
                self._tell(other, _FAILED, 0, message, _GRACE)
        if rank in self._links:
            with contextlib.suppress(OSError):  # ends a send to it that may be waiting
                self._links[rank].shutdown(socket.SHUT_RDWR)
        self.on_failure()

    def give_up(self, error: BaseException) -> None:
        """Fail: else data that others send for this call would be read as data of the next."""
        text = f"rank {self.rank} raised in the middle of a call: {type(error).__name__}: {error}"
        self.fail(self.rank, text)

    def blame(self, waited_for: int, what: str) -> None:
        """Fail the rank that has begun the fewest operations; among equals, ``waited_for``.

        If this rank has not begun more operations than that one, no rank can be named.
        """
        with self._changed:
            begun = dict(self._progress_of)
        who = min(begun, key=lambda other: (begun[other], other != waited_for), default=None)
        if who is None or begun[who] >= self.progress:
            self.fail(None, f"no rank is behind the others, but {what}")
        else:
            self.fail(who, f"rank {who} is stuck: {what}")

    def close(self) -> None:
        """Leave; ranks that still wait for this one get a CommunicationError."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for other in self._links:
            self._tell(other, _LEAVING, 0, b"", _GRACE)
        # A rank that has read all shuts its end down, which ends the reader here. Without a failure
        # the reader of a slow rank goes on: closing its link would take from that rank what it has
        # not read yet.
        how = socket.SHUT_RDWR if self._failure else socket.SHUT_WR
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(how)
        deadline = time.monotonic() + _GRACE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        for link in self._links.values():
            link.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its descriptors, which does not end the parent's connections.

        No thread runs here that could release a lock which it held in the parent.
        """
        self._changed, self._calling = threading.Condition(), threading.Lock()
        self._closed = self.forked = True
        text = (
            f"this process was forked from rank {self.rank}, which alone can use the communicator"
        )
        self._failure = CommunicationError(text)
        for link in self._links.values():
            link.close()

    def _send(self, other: int, kind: int, payload: Any) -> None:
        self.check()
        try:
            frame = _FRAME.pack(kind, self.progress, len(payload))
            with self._locks[other]:
                if len(payload) < _ONE_PACKET:
                    self._links[other].sendall(frame + payload)
                else:
                    self._links[other].sendall(frame)
                    self._links[other].sendall(payload)
        except OSError as error:
            self._ended(other)
            self.check()
            raise CommunicationError(f"rank {other} cannot be reached", other) from error

    def _tell(
        self, other: int, kind: int, number: int, payload: bytes, patience: float = 0.0
    ) -> None:
        """Send a small frame without blocking, once no other send holds the lock.

        ``patience`` limits the wait for the lock, in seconds; it is 0 for a sign of life.
        """
        frame = _FRAME.pack(kind, number, len(payload)) + payload
        if not self._locks[other].acquire(timeout=patience):
            return  # the data being sent is a sign of life, too
        try:
            sent = self._links[other].send(frame, _NO_WAIT)
            if 0 < sent < len(frame):
                self._links[other].shutdown(socket.SHUT_RDWR)  # the other end does not read
        except OSError:
            pass  # buffer full: liveness decides; connection gone: the reading thread finds out
        finally:
            self._locks[other].release()

    def _received(self, other: int, kind: int, number: int) -> bytearray:
        """Wait for the next message of a kind from a rank: it must be of operation ``number``."""
        left, turn = self.op_timeout, min(1.0, self.op_timeout / 4)
        with self._changed:
            box = self._inbox[other, kind]
            while not box:
                self.check()
                if other in self._left or left <= 0:
                    break
                began = time.monotonic()
                self._changed.wait(min(left, turn))
                left -= min(time.monotonic() - began, turn)  # longer: this process was suspended
            sent, payload = box.popleft() if box else (None, bytearray())
            gone = other in self._left
        if sent in (number, 0):  # versions up to 0.2.0 send 0: the handshake names the version
            return payload
        if sent is not None:
            text = (
                f"rank {other} is at operation {sent}, rank {self.rank} at {number}: their calls "
                "do not match, for instance since one was interrupted"
            )
            self.fail(None, text)
        elif gone:
            self.fail(other, f"rank {other} has left, and rank {self.rank} waits for it")
        else:
            what = f"rank {self.rank} waited {self.op_timeout:g} s for rank {other}"
            self.blame(other, what)
        self.check()
        raise CommunicationError(f"rank {other} sent no message", other)

    def _read(self, other: int) -> None:
        link = self._links[other]
        try:
            while True:
                kind, number, length = _FRAME.unpack(self._exactly(link, other, _FRAME.size))
                if kind != _DATA and length > _MOST_FACTS:
                    raise ConnectionError(f"a message of {length} bytes")
                payload = self._exactly(link, other, length)
                if kind == _LIFE:
                    with self._changed:
                        self._progress_of[other] = number
                elif kind == _FAILED:
                    found = json.loads(payload)
                    rank = None if found["rank"] is None else int(found["rank"])
                    self.fail(rank, str(found["text"]), tell=False)
                elif kind == _LEAVING:
                    break
                else:
                    with self._changed:
                        self._inbox[other, kind].append((number, payload))
                        self._changed.notify_all()
        except (OSError, ValueError, KeyError):
            self._ended(other)
        except Exception as error:  # no memory for a message: this rank fails, not the other
            self.give_up(error)
        with self._changed:
            self._left.add(other)
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the other end reads nothing more, and waits for this
            link.shutdown(socket.SHUT_WR)

    def _exactly(self, link: socket.socket, other: int, number: int) -> bytearray:
        found = bytearray(number)
        view, start = memoryview(found), 0
        while start < number:
            part = link.recv_into(view[start:])
            if not part:
                raise ConnectionError("the connection ended")
            start += part
            self._seen[other] = time.monotonic()
        return found

    def _ended(self, other: int) -> None:
        """A connection ended; that rank may have left, or another rank may tell why it failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._closed or other in self._left, timeout=_GRACE
            )
            gone = other in self._left
        if gone:
            self.fail(other, f"rank {other} has left, and rank {self.rank} sends to it")
        else:
            self.fail(other, f"rank {other} died: its connection to rank {self.rank} ended")

    def _pulse(self) -> None:
        every = min(2.0, self._liveness / 5, self.op_timeout / 4)
        now = time.monotonic()
        while True:
            before = now
            with self._changed:
                if self._changed.wait_for(lambda: self._failure or self._closed, timeout=every):
                    return
                here = [other for other in self._links if other not in self._left]
            now = time.monotonic()
            if now - before > self._liveness / 2:
                # This process was suspended, or C code held the GIL: signs of life may be unread.
                self._seen.update(dict.fromkeys(here, now))
            for other in here:
                if now - self._seen[other] > self._liveness:
                    text = f"rank {other} sent no heartbeat for {self._liveness:g} s"
                    self.fail(other, text)
                self._tell(other, _LIFE, self.progress, b"")


def _forked() -> None:
    for each in list(_ALL):
        each.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
