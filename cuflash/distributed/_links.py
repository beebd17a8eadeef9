"""How do processes find each other and prove that they belong together? One socket for each pair.

Rank 0 listens at an address that all know. The others connect to it, tell where they listen
themselves, and get the table; then each connects to the ranks below it. Both ends of a connection
prove by HMAC-SHA256 of the other's random challenge that they know the secret, before a byte of
anything else is read. Nothing is unpickled, and every step has a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import struct
import time
from typing import Any

from cuflash.distributed._communicator import CommunicationError

_CHALLENGE = 32
_HELLO = struct.Struct("!I")
_MOST = 1 << 16  # bytes of a message about who is where
_RETRY = 0.05


class Deadline:
    """When a step has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; never 0, which means to a socket that it does not wait at all."""
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
    deadline = Deadline(timeout)
    with contextlib.ExitStack() as on_error:
        links: dict[int, socket.socket] = {}
        on_error.callback(_close_all, links)
        if rank == 0:
            _gather_all(size, address, secret, deadline, links)
        else:
            _join(rank, size, address, secret, deadline, links)
        for link in links.values():
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        on_error.pop_all()
        return links


def _gather_all(
    size: int,
    address: tuple[str, int],
    secret: bytes,
    deadline: Deadline,
    links: dict[int, socket.socket],
) -> None:
    """What rank 0 does: wait for all, then tell all where the others are."""
    places: dict[str, Any] = {}
    refused: list[str] = []
    with _listening(address, size) as listener:
        while len(links) < size - 1:
            link, found = _accepted(listener, secret, deadline, refused)
            if link is None:
                missing = [r for r in range(1, size) if r not in links]
                raise _missing(missing, refused)
            other, other_size, problem = found.get("rank"), found.get("size"), ""
            if other_size != size:
                problem = f"rank {other} was told of {other_size} ranks, rank 0 of {size}"
            elif not isinstance(other, int) or not 0 < other < size or other in links:
                problem = f"rank {other} is there twice, or is none of {size} ranks"
            if problem or other is None:
                _tell(link, {"error": problem})
                link.close()
                for known in links.values():
                    _tell(known, {"error": problem})
                raise CommunicationError(problem)
            links[other] = link
            places[str(other)] = [found["host"], found["port"]]
    for link in links.values():
        _tell(link, {"places": places})


def _join(
    rank: int,
    size: int,
    address: tuple[str, int],
    secret: bytes,
    deadline: Deadline,
    links: dict[int, socket.socket],
) -> None:
    """What another rank does: report to rank 0, connect to ranks below, accept ranks above."""
    first = links[0] = _connected(0, address, secret, deadline)
    host = first.getsockname()[0]
    with _listening((host, 0), size) as listener:
        port = listener.getsockname()[1]
        _tell(first, {"rank": rank, "size": size, "host": host, "port": port})
        first.settimeout(deadline.left)
        try:
            found = _told(first)
        except OSError as error:
            text = f"rank {rank} waited for other ranks, which did not all come"
            raise CommunicationError(text) from error
        if "error" in found:
            raise CommunicationError(found["error"])
        for other in range(1, rank):
            place = found["places"][str(other)]
            links[other] = _connected(other, (place[0], place[1]), secret, deadline)
            _tell(links[other], {"rank": rank})
        refused: list[str] = []
        while len(links) < size - 1:
            link, hello = _accepted(listener, secret, deadline, refused)
            if link is None:
                raise _missing([r for r in range(rank + 1, size) if r not in links], refused)
            links[hello["rank"]] = link


def _close_all(links: dict[int, socket.socket]) -> None:
    for link in links.values():
        link.close()


def _missing(ranks: list[int], refused: list[str]) -> CommunicationError:
    names = ", ".join(map(str, ranks))
    text = f"ranks that did not come in time: {names}"
    if refused:
        text += f"; {len(refused)} connections were refused ({refused[-1]})"
    return CommunicationError(text, ranks[0])


def is_loopback(host: str) -> bool:
    """Whether nothing beyond this machine reaches an address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


@contextlib.contextmanager
def _listening(address: tuple[str, int], backlog: int) -> Any:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
        yield listener


def _accepted(
    listener: socket.socket, secret: bytes, deadline: Deadline, refused: list[str]
) -> tuple[socket.socket | None, dict[str, Any]]:
    """The next connection that knows the secret, and its hello; None when time is over."""
    while not deadline.over:
        listener.settimeout(deadline.left)
        try:
            link, _ = listener.accept()
        except TimeoutError:
            break
        link.settimeout(min(deadline.left, 5.0))  # a stranger must not hold up the others
        try:
            nonce = secrets.token_bytes(_CHALLENGE)
            link.sendall(nonce)
            theirs = _exactly(link, _CHALLENGE)
            if not hmac.compare_digest(
                _exactly(link, 32), _proof(secret, b"connect", nonce, theirs)
            ):
                raise WrongSecretError("a wrong secret")
            link.sendall(_proof(secret, b"listen", theirs, nonce))
            return link, _told(link)
        except (OSError, ValueError, CommunicationError) as error:
            refused.append(str(error) or type(error).__name__)
            link.close()
    return None, {}


def _connected(
    other: int, address: tuple[str, int], secret: bytes, deadline: Deadline
) -> socket.socket:
    """A connection to a rank that may not listen yet."""
    while True:
        try:
            link = socket.create_connection(address, timeout=deadline.left)
            break
        except OSError as error:
            if deadline.over:
                text = f"rank {other} cannot be reached at {address[0]}:{address[1]} ({error})"
                raise CommunicationError(text, other) from error
            time.sleep(min(_RETRY, deadline.left))
    try:
        link.settimeout(deadline.left)
        theirs = _exactly(link, _CHALLENGE)
        nonce = secrets.token_bytes(_CHALLENGE)
        link.sendall(nonce + _proof(secret, b"connect", theirs, nonce))
        if not hmac.compare_digest(_exactly(link, 32), _proof(secret, b"listen", nonce, theirs)):
            raise WrongSecretError(f"rank {other} does not know the secret", other)
    except OSError as error:
        link.close()
        text = f"rank {other} refused the connection: its secret is another one"
        raise WrongSecretError(text, other) from error
    except CommunicationError:
        link.close()
        raise
    return link


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _exactly(link: socket.socket, number: int) -> bytes:
    """So many bytes; ConnectionError where the other end closes before."""
    found = bytearray()
    while len(found) < number:
        part = link.recv(number - len(found))
        if not part:
            raise ConnectionError("the other end closed the connection")
        found += part
    return bytes(found)


def _tell(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a small message; nobody may be left to read it."""
    text = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        link.sendall(_HELLO.pack(len(text)) + text)


def _told(link: socket.socket) -> dict[str, Any]:
    """A small message."""
    (length,) = _HELLO.unpack(_exactly(link, _HELLO.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes")
    found = json.loads(_exactly(link, length))
    if not isinstance(found, dict):
        raise ValueError("a message that is no table")
    return found
