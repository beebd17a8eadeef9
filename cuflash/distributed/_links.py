"""How do processes find each other and prove that they belong together? One socket for each pair.

Rank 0 listens at an address that all ranks know. The others connect to it, send the address where
they listen themselves, and receive the table of all addresses. Then each rank connects to the ranks
below it. Before anything else is read, both ends of a connection prove that they know the secret,
by HMAC-SHA256 of the other end's random challenge. Nothing is unpickled, and every step has a
deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from cuflash.distributed._communicator import CommunicationError

_CHALLENGE = 32
_HELLO = struct.Struct("!I")
_MOST = 1 << 16  # bytes; the longest message of addresses
_RETRY = 0.05
_STRANGER = 5.0  # seconds that a connection has to prove the secret, while other ranks wait


class Deadline:
    """The time by which a step must be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; never 0, which would make a socket non-blocking."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end


class WrongSecretError(CommunicationError):
    """The other end does not know the secret."""


def joined(
    rank: int, size: int, address: tuple[str, int], secret: bytes, timeout: float
) -> dict[int, socket.socket]:
    """Connections to all other ranks, by rank."""
    meeting = _Meeting(rank, size, secret, Deadline(timeout))
    try:
        if rank == 0:
            meeting.gather_all(address)
        else:
            meeting.join(address)
    except BaseException:
        for link in meeting.links.values():
            link.close()
        raise
    for link in meeting.links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return meeting.links


class _Meeting:
    """One rank while the ranks connect to each other."""

    def __init__(self, rank: int, size: int, secret: bytes, deadline: Deadline) -> None:
        self._rank, self._size, self._secret, self._deadline = rank, size, secret, deadline
        self.links: dict[int, socket.socket] = {}
        self._refused: list[str] = []

    def gather_all(self, address: tuple[str, int]) -> None:
        """Rank 0: accept all other ranks, then send everyone the addresses."""
        places: dict[str, Any] = {}
        size = self._size
        with _listening(address, size) as listener:
            while len(self.links) < size - 1:
                link, found = self._accepted(listener)
                other, problem = found.get("rank"), ""
                if found.get("size") != size:
                    problem = f"rank {other} got size {found.get('size')}, rank 0 got size {size}"
                elif not isinstance(other, int) or not 0 < other < size or other in self.links:
                    problem = f"rank {other} connected twice, or is none of {size} ranks"
                if problem or other is None:
                    for known in (link, *self.links.values()):
                        _tell(known, {"error": problem})
                    link.close()
                    raise CommunicationError(problem)
                self.links[other] = link
                places[str(other)] = [found["host"], found["port"]]
        for link in self.links.values():
            _tell(link, {"places": places})

    def join(self, address: tuple[str, int]) -> None:
        """Other ranks: report to rank 0, connect to lower ranks, accept higher ranks."""
        first = self.links[0] = self._connected(0, address)
        host, hello = first.getsockname()[0], {"rank": self._rank, "size": self._size}
        with _listening((host, 0), self._size) as listener:
            _tell(first, hello | {"host": host, "port": listener.getsockname()[1]})
            first.settimeout(self._deadline.left)
            try:
                found = _told(first)
            except OSError as error:
                text = f"rank {self._rank} waited, but not all other ranks connected"
                raise CommunicationError(text) from error
            if "error" in found:
                raise CommunicationError(found["error"])
            for other in range(1, self._rank):
                host, port = found["places"][str(other)]
                self.links[other] = self._connected(other, (host, port))
                _tell(self.links[other], hello)
            while len(self.links) < self._size - 1:
                link, theirs = self._accepted(listener)
                self.links[theirs["rank"]] = link

    def _accepted(self, listener: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
        """The next connection whose other end knows the secret, and its first message."""
        while not self._deadline.over:
            listener.settimeout(self._deadline.left)
            try:
                link, _ = listener.accept()
            except TimeoutError:
                break
            link.settimeout(min(self._deadline.left, _STRANGER))
            try:
                nonce = secrets.token_bytes(_CHALLENGE)
                link.sendall(nonce)
                theirs, proof = _exactly(link, _CHALLENGE), _exactly(link, 32)
                if not hmac.compare_digest(proof, self._proof(b"connect", nonce, theirs)):
                    raise WrongSecretError("a wrong secret")
                link.sendall(self._proof(b"listen", theirs, nonce))
                return link, _told(link)
            except (OSError, ValueError, CommunicationError) as error:
                self._refused.append(str(error) or type(error).__name__)
                link.close()
        low = self._rank + 1  # higher ranks connect to this one
        missing = [rank for rank in range(low, self._size) if rank not in self.links]
        text = f"ranks that did not connect in time: {', '.join(map(str, missing))}"
        if self._refused:
            text += f"; {len(self._refused)} connections were refused ({self._refused[-1]})"
        raise CommunicationError(text, missing[0])

    def _connected(self, other: int, address: tuple[str, int]) -> socket.socket:
        """Connect to a rank; retry while it does not listen yet."""
        while True:
            try:
                link = socket.create_connection(address, timeout=self._deadline.left)
                break
            except OSError as error:
                if self._deadline.over:
                    text = f"rank {other} cannot be reached at {address[0]}:{address[1]} ({error})"
                    raise CommunicationError(text, other) from error
                time.sleep(min(_RETRY, self._deadline.left))
        try:
            link.settimeout(self._deadline.left)
            theirs, nonce = _exactly(link, _CHALLENGE), secrets.token_bytes(_CHALLENGE)
            link.sendall(nonce + self._proof(b"connect", theirs, nonce))
            if not hmac.compare_digest(_exactly(link, 32), self._proof(b"listen", nonce, theirs)):
                raise WrongSecretError(f"rank {other} does not know the secret", other)
        except TimeoutError as error:
            link.close()
            text = f"rank {other} did not answer in time at {address[0]}:{address[1]}"
            raise CommunicationError(text, other) from error
        except OSError as error:
            link.close()
            text = f"rank {other} refused the connection: its secret differs"
            raise WrongSecretError(text, other) from error
        except CommunicationError:
            link.close()
            raise
        return link

    def _proof(self, role: bytes, first: bytes, second: bytes) -> bytes:
        return hmac.new(self._secret, role + first + second, hashlib.sha256).digest()


@contextlib.contextmanager
def _listening(address: tuple[str, int], backlog: int) -> Any:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(backlog)
        except OSError as error:
            text = f"cannot listen at {address[0]}:{address[1]} ({error.strerror or error})"
            raise CommunicationError(text) from error
        yield listener


def _exactly(link: socket.socket, number: int) -> bytes:
    """Receive this number of bytes; ConnectionError if the other end closes before."""
    found = bytearray()
    while len(found) < number:
        part = link.recv(number - len(found))
        if not part:
            raise ConnectionError("the other end closed the connection")
        found += part
    return bytes(found)


def _tell(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a small message; errors are ignored, since the other end may be gone."""
    text = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        link.sendall(_HELLO.pack(len(text)) + text)


def _told(link: socket.socket) -> dict[str, Any]:
    """Receive a small message."""
    (length,) = _HELLO.unpack(_exactly(link, _HELLO.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes, more than {_MOST}")
    found = json.loads(_exactly(link, length))
    if not isinstance(found, dict):
        raise ValueError("a message that is no JSON object")
    return found
