"""How do processes find each other and prove that they belong together? One socket for each pair.

Rank 0 listens at an address that all ranks know. The others connect to it, send the address where
they listen themselves, and receive the table of all addresses. Then each rank connects to the ranks
below it. If ranks are missing or have other software, rank 0 tells all others, so that all raise
the same. Before anything else is read, both ends of a connection prove that they know the secret,
by HMAC-SHA256 of the other end's random challenge. Nothing is unpickled. Every step has a deadline,
however slowly bytes arrive, and a stranger's connection delays no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from cuflash.distributed._communicator import CommunicationError

_CHALLENGE = _PROOF = 32  # bytes
_HELLO = struct.Struct("!I")
_MOST = 1 << 9  # bytes for each rank, in a message of addresses
_RETRY = 0.05
_GRACE = 0.5  # seconds after the deadline in which rank 0 tells the others who is missing
_FOREVER = float("inf")
_STRANGER = 5.0  # seconds in which a connection has to prove that it knows the secret
_STRANGERS = 64  # so many connections beside one for each rank may be open without a proof


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

    def shorten(self, seconds: float) -> None:
        """Let it pass after this time, if it would pass later."""
        self._end = min(self._end, time.monotonic() + seconds)


#: Yields the number of bytes to read next and their deadline; returns the other end's hello.
_Greeting = Generator[tuple[int, Deadline], bytes, dict[str, Any]]


class WrongSecretError(CommunicationError):
    """The other end does not know the secret."""


def joined(
    rank: int,
    size: int,
    address: tuple[str, int],
    secret: bytes,
    timeout: float,
    software: Mapping[str, str],
) -> dict[int, socket.socket]:
    """Connections to all other ranks, by rank; a single rank needs no port.

    If ranks differ in ``software``, names and versions, all of them raise.
    """
    if size == 1:
        return {}
    meeting = _Meeting(rank, size, secret, Deadline(timeout), software)
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


class _Caller:
    """A connection that has not said hello yet."""

    def __init__(self, greeting: _Greeting) -> None:
        self._greeting, self._found = greeting, bytearray()
        self._wanted, self.deadline = next(greeting)

    def read(self, link: socket.socket) -> dict[str, Any] | None:
        """Read the bytes that have come; the hello once it is complete."""
        try:
            part = link.recv(self._wanted - len(self._found))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("the other end closed the connection")
        self._found += part
        if len(self._found) == self._wanted:
            found, self._found = bytes(self._found), bytearray()
            try:
                self._wanted, self.deadline = self._greeting.send(found)
            except StopIteration as end:
                hello: dict[str, Any] = end.value
                return hello
        return None


class _Door:
    """A listener that hears all connections at once, so that a silent one holds up no other."""

    def __init__(
        self,
        listener: socket.socket,
        greeting: Callable[[socket.socket], _Greeting],
        most: int,
        deadline: Deadline,
    ) -> None:
        self._listener, self._greeting, self._most = listener, greeting, most
        self._deadline = deadline
        self._callers: dict[socket.socket, _Caller] = {}
        self.refused: list[str] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def next_link(self) -> tuple[socket.socket, dict[str, Any]]:
        """The next connection that knows the secret, and its hello; TimeoutError if none comes."""
        while not self._deadline.over:
            ends = [self._deadline, *(caller.deadline for caller in self._callers.values())]
            for key, _ in self._selector.select(min(end.left for end in ends)):
                link: socket.socket = key.data
                if link is self._listener:
                    self._accept()
                elif link in self._callers:
                    hello = self._heard(link)
                    if hello is not None:
                        return link, hello
            for link, caller in list(self._callers.items()):
                if caller.deadline.over:
                    self._refuse(link, "no proof in time")
        raise TimeoutError

    def close(self) -> None:
        """End the connections that have not said hello."""
        for link in self._callers:
            link.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        link.setblocking(False)
        try:
            caller = _Caller(self._greeting(link))
        except OSError as error:
            self.refused.append(str(error))
            link.close()
            return
        unproved = [
            known for known, one in self._callers.items() if one.deadline is not self._deadline
        ]
        if len(unproved) >= self._most:
            self._refuse(unproved[0], "too many connections without a proof")
        self._callers[link] = caller
        self._selector.register(link, selectors.EVENT_READ, link)

    def _heard(self, link: socket.socket) -> dict[str, Any] | None:
        try:
            hello = self._callers[link].read(link)
        except (OSError, ValueError, CommunicationError) as error:
            self._refuse(link, str(error) or type(error).__name__)
            return None
        if hello is not None:
            self._forget(link)
        return hello

    def _refuse(self, link: socket.socket, why: str) -> None:
        self.refused.append(why)
        self._forget(link)
        link.close()

    def _forget(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        del self._callers[link]


class _Meeting:
    """One rank while the ranks connect to each other."""

    def __init__(
        self, rank: int, size: int, secret: bytes, deadline: Deadline, software: Mapping[str, str]
    ) -> None:
        self._rank, self._size, self._secret, self._deadline = rank, size, secret, deadline
        self._software = dict(software)
        self.links: dict[int, socket.socket] = {}

    def gather_all(self, address: tuple[str, int]) -> None:
        """Rank 0: accept all other ranks, then send everyone the addresses."""
        places: dict[str, Any] = {}
        software = {0: self._software}
        size = self._size
        with self._door(address) as door:
            while len(self.links) < size - 1:
                try:
                    link, found = self._accepted(door)
                except CommunicationError as error:
                    self._tell_all({"error": str(error), "rank": error.rank})
                    raise
                other, problem = found.get("rank"), ""
                if found.get("size") != size:
                    problem = f"rank {other} got size {found.get('size')}, rank 0 got size {size}"
                elif not isinstance(other, int) or not 0 < other < size or other in self.links:
                    problem = f"rank {other} joined twice, or is not one of {size} ranks"
                if problem or other is None:
                    _tell(link, {"error": problem}, self._deadline)
                    self._tell_all({"error": problem})
                    link.close()
                    raise CommunicationError(problem)
                self.links[other] = link
                places[str(other)] = [found["host"], found["port"]]
                software[other] = found.get("software", {})
                # When the first of the ranks has to give up, all learn which ranks are missing.
                self._deadline.shorten(found.get("left", _FOREVER))
        problem = _difference(software)
        self._tell_all({"error": problem} if problem else {"places": places})
        if problem:
            raise CommunicationError(problem)

    def join(self, address: tuple[str, int]) -> None:
        """Other ranks: report to rank 0, connect to lower ranks, accept higher ranks."""
        first = self.links[0] = self._connected(0, address)
        host = first.getsockname()[0]
        hello = {"rank": self._rank, "size": self._size, "software": self._software}
        with self._door((host, 0)) as door:
            place = {"host": host, "port": door.port, "left": self._deadline.left}
            _tell(first, hello | place, self._deadline)
            until = Deadline(self._deadline.left + _GRACE)  # rank 0 tells at the deadline
            try:
                (length,) = _HELLO.unpack(_exactly(first, _HELLO.size, until))
                found = _message(_exactly(first, self._checked(length), until))
            except OSError as error:
                text = f"rank {self._rank} waited, but rank 0 did not say where other ranks are"
                raise CommunicationError(f"{text} ({error})", 0) from error
            if "error" in found:
                raise CommunicationError(found["error"], found.get("rank"))
            for other in range(1, self._rank):
                host, port = found["places"][str(other)]
                self.links[other] = self._connected(other, (host, port))
                _tell(self.links[other], hello, self._deadline)
            while len(self.links) < self._size - 1:
                link, theirs = self._accepted(door)
                self.links[theirs["rank"]] = link

    def _tell_all(self, message: dict[str, Any]) -> None:
        """Rank 0: send a small message to all ranks that have connected."""
        for link in self.links.values():
            _tell(link, message, self._deadline)

    @contextlib.contextmanager
    def _door(self, address: tuple[str, int]) -> Iterator[_Door]:
        most = self._size + _STRANGERS
        with (
            _listening(address, self._size) as listener,
            contextlib.closing(_Door(listener, self._greeting, most, self._deadline)) as door,
        ):
            yield door

    def _greeting(self, link: socket.socket) -> _Greeting:
        """What another rank has to send."""
        soon, nonce = Deadline(min(self._deadline.left, _STRANGER)), secrets.token_bytes(_CHALLENGE)
        link.sendall(nonce)
        found = yield _CHALLENGE + _PROOF, soon
        theirs, proof = found[:_CHALLENGE], found[_CHALLENGE:]
        if not hmac.compare_digest(proof, self._proof(b"connect", nonce, theirs)):
            link.sendall(bytes(_PROOF))  # no proof: the other end need not try again
            raise WrongSecretError("a wrong secret")
        link.sendall(self._proof(b"listen", theirs, nonce))
        (length,) = _HELLO.unpack((yield _HELLO.size, self._deadline))
        return _message((yield self._checked(length), self._deadline))

    def _accepted(self, door: _Door) -> tuple[socket.socket, dict[str, Any]]:
        """The next connection that knows the secret, and its hello."""
        with contextlib.suppress(TimeoutError):
            return door.next_link()
        low = self._rank + 1  # ranks above this one come to it
        missing = [rank for rank in range(low, self._size) if rank not in self.links]
        text = f"ranks that did not connect in time: {', '.join(map(str, missing))}"
        if door.refused:
            text += f"; {len(door.refused)} connections were refused ({door.refused[-1]})"
        raise CommunicationError(text, missing[0])

    def _connected(self, other: int, address: tuple[str, int]) -> socket.socket:
        """A connection to a rank, which may not listen yet or may end a connection that is slow."""
        place = f"{address[0]}:{address[1]}"
        while True:
            problem = f"rank {other} cannot be reached at {place}"
            with contextlib.ExitStack() as held:
                try:
                    link = held.enter_context(
                        socket.create_connection(address, timeout=self._deadline.left)
                    )
                    _require_other_end(link)
                    problem = f"rank {other} did not answer in time at {place}"
                    self._prove(link, other)
                    held.pop_all()
                    return link
                except OSError as error:
                    if self._deadline.over:
                        raise CommunicationError(f"{problem} ({error})", other) from error
            time.sleep(min(_RETRY, self._deadline.left))

    def _prove(self, link: socket.socket, other: int) -> None:
        """Prove to a rank that listens that this one knows the secret, and check its proof."""
        theirs = _exactly(link, _CHALLENGE, self._deadline)
        nonce = secrets.token_bytes(_CHALLENGE)
        link.sendall(nonce + self._proof(b"connect", theirs, nonce))
        answer = _exactly(link, _PROOF, self._deadline)
        if not hmac.compare_digest(answer, self._proof(b"listen", nonce, theirs)):
            raise WrongSecretError(
                f"rank {other} does not know the secret, or is of another run", other
            )

    def _checked(self, length: int) -> int:
        """The length of a message, if it is small."""
        if length > _MOST * self._size:
            raise ValueError(f"a message of {length} bytes")
        return length

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


def _require_other_end(link: socket.socket) -> None:
    """Raise ConnectionError for a socket that is connected to itself.

    Where nobody listens yet at a port from which the system takes ports of connections, a
    connection to that port may be given the port itself.
    """
    if link.getsockname() == link.getpeername():
        # Without a wait for late packets, so that rank 0 can listen at the port at once.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionError("the connection has no other end")


def _exactly(link: socket.socket, number: int, deadline: Deadline) -> bytes:
    """Receive this number of bytes; TimeoutError at the deadline, ConnectionError at its end."""
    found = bytearray()
    while len(found) < number:
        if deadline.over:
            raise TimeoutError("timed out")
        link.settimeout(deadline.left)
        part = link.recv(number - len(found))
        if not part:
            raise ConnectionError("the other end closed the connection")
        found += part
    return bytes(found)


def _tell(link: socket.socket, message: dict[str, Any], deadline: Deadline) -> None:
    """Send a small message; errors are ignored, since the other end may be gone."""
    text = json.dumps(message).encode()
    link.settimeout(deadline.left)  # for all bytes together
    with contextlib.suppress(OSError):
        link.sendall(_HELLO.pack(len(text)) + text)


def _difference(software: Mapping[int, Mapping[str, str]]) -> str:
    """What differs first between rank 0 and other ranks, and on which ranks; "" if nothing does."""
    for name in dict.fromkeys(name for own in software.values() for name in own):
        ranks: dict[str | None, list[str]] = {}
        for rank in sorted(software):
            ranks.setdefault(software[rank].get(name), []).append(str(rank))
        expected = software[0].get(name)
        del ranks[expected]
        if ranks:
            got = (f"{v} on rank{'s'[: len(r) - 1]} {', '.join(r)}" for v, r in ranks.items())
            alike = "connect all ranks with the same versions and transport"
            return f"{name}: got {', '.join(got)}, expected {expected} as on rank 0; {alike}"
    return ""


def _message(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("a message that is no JSON object")
    return found
