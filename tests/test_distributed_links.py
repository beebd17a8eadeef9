"""How do communicators treat strangers, odd messages, ranks that leave, and races?"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
import types

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import _launchers, _links, _processes
from cuflash.distributed._communicator import Compute, Exchange, Wait, drive
from support.shards import in_threads

LIMITS = {"op_timeout": 5.0, "liveness_timeout": 5.0}


def test_who_does_not_answer_has_no_wrong_secret():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = silent.getsockname()
        with pytest.raises(distributed.CommunicationError, match="rank 0 did not answer") as found:
            _links.joined(1, 2, address, b"a secret", 0.3, {})
    assert (type(found.value), found.value.rank) == (distributed.CommunicationError, 0)


def test_a_rank_0_without_the_secret_is_refused():
    """A rank 0 that answers with bytes of the right size, but without the secret, is refused."""

    def answer():
        with listener, listener.accept()[0] as link:
            link.sendall(secrets.token_bytes(32))
            _links._exactly(link, 64, _links.Deadline(5.0))
            link.sendall(secrets.token_bytes(32))

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(_links.WrongSecretError, match="rank 0 does not know the secret"):
        _links.joined(1, 2, listener.getsockname(), b"a secret", 5.0, {})


def meeting(size, ranks, timeout=20.0):
    """Return an address, a list of what ranks find (links or an error), and the ranks' threads."""
    address, found = ("127.0.0.1", _launchers.free_port()), []

    def join(rank):
        try:
            links = _links.joined(rank, size, address, b"a secret", timeout, {})
        except distributed.CommunicationError as error:
            found.append(str(error))
            return
        found.append(sorted(links))
        for link in links.values():
            link.close()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    return address, found, threads


def assert_joined(found, *threads):
    """Assert that both ranks of a meeting have joined."""
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [[0], [1]]


def trickle(link, ended):
    """Send a byte now and then; return whether the other end refuses before the event."""
    try:
        while not ended.wait(0.1):
            link.sendall(b"x")
    except OSError:
        return True
    return False


def test_a_stranger_who_sends_a_byte_now_and_then_is_refused(monkeypatch):
    monkeypatch.setattr(_links, "_STRANGER", 0.5)
    address, found, (first, second) = meeting(2, [0, 1])
    first.start()
    with contextlib.closing(socket.socket()) as stranger:
        while stranger.connect_ex(address):
            time.sleep(0.01)
        late = threading.Event()
        timer = threading.Timer(4.0, late.set)  # 64 bytes would take 6 seconds
        timer.start()
        assert trickle(stranger, late)
        timer.cancel()
    second.start()
    assert_joined(found, first, second)


def test_a_rank_comes_while_a_stranger_says_nothing(monkeypatch):
    monkeypatch.setattr(_links, "_STRANGER", 60.0)
    address, found, (first, second) = meeting(2, [0, 1], timeout=5.0)
    first.start()
    with contextlib.closing(socket.socket()) as stranger:
        while stranger.connect_ex(address):
            time.sleep(0.01)
        second.start()
        assert_joined(found, first, second)


@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_that_come_one_by_one_do_not_put_off_the_deadline(rank):
    address, ended = ("127.0.0.1", _launchers.free_port()), threading.Event()

    def other():
        with contextlib.ExitStack() as held:
            if rank == 0:
                link = held.enter_context(socket.socket())
                while link.connect_ex(address):
                    time.sleep(0.01)
            else:
                listener = held.enter_context(socket.create_server(address))
                link = held.enter_context(listener.accept()[0])
            trickle(link, ended)

    thread = threading.Thread(target=other)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(distributed.CommunicationError, match="in time") as found:
        _links.joined(rank, 2, address, b"a secret", 1.0, {})
    assert time.monotonic() - begin < 4  # 64 bytes would take 6 seconds
    assert found.value.rank == 1 - rank
    ended.set()
    thread.join(30)


@pytest.mark.parametrize("heard", [0, 64])
def test_a_connection_that_ends_is_tried_again(heard):
    """Rank 0 resets the first connection, before or after rank 1 has sent its proof."""
    address, found, (first, second) = meeting(2, [0, 1])
    with socket.create_server(address) as listener:
        second.start()
        with listener.accept()[0] as link:
            link.sendall(secrets.token_bytes(32))
            _links._exactly(link, heard, _links.Deadline(5.0))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    first.start()
    assert_joined(found, first, second)


def test_a_socket_that_is_connected_to_itself_is_no_rank_0(monkeypatch):
    """A system may give a connection the very port to which it goes, if nobody listens there."""
    _, found, (first, second) = meeting(2, [0, 1])
    create, own = socket.create_connection, []

    def to_itself(address, timeout):
        if own:
            return create(address, timeout)
        own.append(socket.socket())
        own[0].bind(address)
        own[0].connect(address)
        return own[0]

    monkeypatch.setattr(_links.socket, "create_connection", to_itself)
    second.start()
    while not own or own[0].fileno() >= 0:  # until it is closed
        time.sleep(0.01)
        assert second.is_alive()
    first.start()
    assert_joined(found, first, second)


def test_a_rank_that_is_slow_to_prove_comes_in_the_end(monkeypatch):
    """Rank 0 ends its first connection, since the proof takes longer than _STRANGER."""
    monkeypatch.setattr(_links, "_STRANGER", 0.5)
    prove, times = _links._Meeting._proof, []

    def slow(meeting, role, *given):
        if role == b"connect" and meeting._rank == 1 and not times:
            times.append(time.sleep(1.0))
        return prove(meeting, role, *given)

    monkeypatch.setattr(_links._Meeting, "_proof", slow)
    _, found, threads = meeting(2, [0, 1])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [[0], [1]]
    assert times


def test_strangers_in_any_number_do_not_keep_ranks_out(monkeypatch):
    """Where too many connections have no proof, the oldest ends."""
    monkeypatch.setattr(_links, "_STRANGERS", 3)
    address, found, (first, second) = meeting(2, [0, 1])
    first.start()
    with contextlib.ExitStack() as held:
        for _ in range(9):
            stranger = held.enter_context(socket.socket())
            while stranger.connect_ex(address):
                time.sleep(0.01)
        second.start()
        assert_joined(found, first, second)


@pytest.mark.parametrize("size", [2, 2048, 65536])
def test_where_all_ranks_are_fits_into_a_message(size):
    meeting = _links._Meeting(1, size, b"a secret", _links.Deadline(5.0), {})
    host = "fe80:1111:2222:3333:4444:5555:6666:7777%ethernet0"
    of_one = json.dumps({str(size - 1): [host, 65535]})
    assert meeting._checked(len('{"places": {}}') + size * len(of_one))
    with pytest.raises(ValueError, match="a message of"):
        meeting._checked(size * 1024)


def test_two_ranks_of_one_number():
    _, found, threads = meeting(3, [0, 1, 1])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert all("rank 1 joined twice, or is not one of 3 ranks" in text for text in found), found


def errors_of(size, ranks, timeouts, software):
    """Return the errors of ranks that join, each with its own timeout and software."""
    address, errors = ("127.0.0.1", _launchers.free_port()), {}

    def join(rank):
        try:
            _links.joined(rank, size, address, b"a secret", timeouts[rank], software[rank])
        except distributed.CommunicationError as error:
            errors[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [errors.get(rank) for rank in ranks]


@pytest.mark.parametrize("first", [1.0, 20.0])
def test_all_waiting_ranks_learn_which_ranks_are_missing(first):
    """Also where another rank than rank 0 has to give up first."""
    begin = time.monotonic()
    errors = errors_of(5, [0, 2, 4], [first, 0, 20.0, 0, 1.2], [{}] * 5)
    assert time.monotonic() - begin < 5
    for error in errors:
        assert str(error) == "ranks that did not connect in time: 1, 3"
        assert error.rank == 1


def test_a_rank_0_that_ends_while_others_wait_is_named(monkeypatch):
    def leave(self, door):
        accepted(self, door)[0].close()
        raise KeyboardInterrupt

    accepted = _links._Meeting._accepted
    monkeypatch.setattr(_links._Meeting, "_accepted", leave)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    _, error = errors_of(3, [0, 1], [10.0] * 3, [{}] * 3)
    assert str(error).startswith("rank 1 waited, but rank 0 did not say where other ranks are")
    assert error.rank == 0


@pytest.mark.parametrize(
    ("name", "values", "got"),
    [
        ("cuflash", ("0.2.0", "0.3.0", "0.2.0", "0.3.0"), "0.3.0 on ranks 1, 3"),
        ("cuflash", ("0.2.0", "0.3.0", "0.2.1", "0.2.0"), "0.3.0 on rank 1, 0.2.1 on rank 2"),
        ("transport", ("0.2.0", None, "0.2.0", "0.2.0"), "None on rank 1"),
    ],
)
def test_ranks_of_different_software_are_told_what_differs_and_where(name, values, got):
    software = [{"alike": "1"} | ({name: value} if value else {}) for value in values]
    errors = errors_of(4, range(4), [10.0] * 4, software)
    assert [str(error) for error in errors] == [
        f"{name}: got {got}, expected 0.2.0 as on rank 0; "
        "connect all ranks with the same versions and transport"
    ] * 4


def test_ranks_of_different_transports_are_told(monkeypatch):
    """A rank over NCCL and one over sockets: both raise when they connect."""
    cupy = types.SimpleNamespace(__version__="14.0.1")
    monkeypatch.setattr(_launchers, "_require_nccl", lambda: cupy)
    nccl = types.SimpleNamespace(get_version=lambda: 22707)
    monkeypatch.setattr(_launchers, "nccl_module", lambda: nccl)
    for error in in_threads(2, lambda comm: None, transport=["nccl", "host"]):
        assert isinstance(error, distributed.CommunicationError)
        assert str(error).startswith("transport: got host on rank 1, expected nccl as on rank 0")


@pytest.fixture
def two():
    """Yield two ranks that are connected."""
    ends = socket.socketpair()
    ranks = [_processes.Processes(r, 2, {1 - r: end}, **LIMITS) for r, end in enumerate(ends)]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def one():
    """Yield a rank, and the socket by which the other rank would write to it."""
    own, other = socket.socketpair()
    rank = _processes.Processes(0, 2, {1: own}, op_timeout=5.0, liveness_timeout=1.0)
    yield rank, other
    rank.close()
    other.close()


def no_memory(*_):
    raise MemoryError("no memory is left")


def swap(ranks, sent, got):
    """Send from rank 0 to rank 1."""
    ranks[0].wait(ranks[0].start({0: Exchange(((1, sent),), ())}))
    ranks[1].wait(ranks[1].start({1: Exchange((), ((0, got),))}))


def test_bytes_that_are_sent_are_counted(two):
    sent, got = np.arange(6.0).reshape(2, 3), np.empty((2, 3))
    swap(two, sent, got)
    np.testing.assert_array_equal(got, sent)
    assert [rank.sent for rank in two] == [48, 0]


def test_a_message_of_another_size_fails_on_both(two):
    with pytest.raises(distributed.CommunicationError, match="rank 0 sent 24 bytes, expected 16"):
        swap(two, np.ones(3), np.ones(2))
    with pytest.raises(distributed.CommunicationError, match="rank 0 sent 24 bytes"):
        two[0]._received(1, _processes._DATA, 1)


def test_a_message_of_another_operation_is_refused_on_both(two):
    two[0].progress += 1  # as an operation that was interrupted
    with pytest.raises(distributed.CommunicationError, match="rank 0 is at operation 2, rank 1 at"):
        swap(two, np.ones(3), np.ones(3))
    with pytest.raises(distributed.CommunicationError, match="their calls do not match"):
        two[0].agree({0: b""})


def test_a_handshake_without_memory_reaches_the_other_rank(two, monkeypatch):
    monkeypatch.setattr(two[1], "_received", no_memory)
    with pytest.raises(MemoryError):
        two[1].agree({1: b""})
    with two[0]._changed:
        two[0]._changed.wait_for(lambda: two[0]._failure, timeout=5)
    with pytest.raises(distributed.CommunicationError, match=r"rank 1 raised .* MemoryError"):
        two[0].agree({0: b""})


def test_a_reader_without_memory_names_its_own_rank(two, monkeypatch):
    def room(number):
        return no_memory() if number == 1000 else bytearray(number)

    monkeypatch.setattr(_processes, "bytearray", room, raising=False)
    with pytest.raises(distributed.CommunicationError, match=r"rank 1 raised .*: no memory") as own:
        swap(two, np.ones(1000, np.uint8), np.ones(1000, np.uint8))
    with pytest.raises(
        distributed.CommunicationError, match=r"rank 1 raised .*: no memory"
    ) as told:
        two[0].agree({0: b""})
    assert own.value.rank == told.value.rank == 1


def test_a_rank_that_left_is_not_missed_by_who_needs_nothing_of_it(one):
    rank, other = one
    other.sendall(_processes._FRAME.pack(_processes._LEAVING, 0, 0))
    time.sleep(1.5)  # longer than a rank may be silent
    rank.check()
    with pytest.raises(distributed.CommunicationError, match="rank 1 has left") as found:
        rank.agree({0: b""})
    assert found.value.rank == 1


@pytest.mark.parametrize("word", ["has left", "raised in the middle of a call"])
def test_what_ends_is_told_though_a_sign_of_life_is_being_sent(two, word, monkeypatch):
    monkeypatch.setattr(_processes, "_GRACE", 1.0)
    lock = two[1]._locks[0]
    assert lock.acquire(timeout=5)
    threading.Timer(0.1, lock.release).start()
    if word == "has left":
        two[1].close()
    else:
        two[1].give_up(MemoryError())
    with pytest.raises(distributed.CommunicationError, match=f"rank 1 {word}"):
        two[0].agree({0: b""})


def test_a_closed_communicator_says_so(two):
    two[0].close()
    two[0].close()
    with pytest.raises(distributed.CommunicationError, match="the communicator is closed"):
        two[0].agree({0: b""})


@pytest.mark.parametrize("others", ["open", "silent", "failed"])
def test_closing_takes_as_long_for_many_ranks_as_for_one(others):
    """No other rank closes. Threads end where other ranks still read, and after a failure."""
    pairs = [socket.socketpair() for _ in range(12)]
    links = {other: own for other, (own, _) in enumerate(pairs, start=1)}
    rank, open_ranks = _processes.Processes(0, 13, links, **LIMITS), []
    if others == "open":
        open_ranks = [
            _processes.Processes(r, 13, {0: end}, **LIMITS) for r, (_, end) in enumerate(pairs, 1)
        ]
    if others == "failed":
        rank.give_up(MemoryError())
    began = time.monotonic()
    rank.close()
    assert time.monotonic() - began < 6 * _processes._GRACE
    assert others == "silent" or not any(thread.is_alive() for thread in rank._threads)
    for each in open_ranks:
        each.close()
    for _, end in pairs:
        end.close()


def test_what_was_sent_before_closing_arrives_at_a_slow_rank():
    """A slow rank gives a sign of life when it goes on, which must not reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = socket.create_connection(server.getsockname())
        own, _ = server.accept()
    rank = _processes.Processes(0, 2, {1: own}, **LIMITS)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    rank.start({0: Exchange(((1, np.ones(1 << 17, np.uint8)),), ())})
    rank.close()
    slow.sendall(_processes._FRAME.pack(_processes._LIFE, 1, 0))
    with slow, slow.makefile("rb") as stream:
        received = stream.read()
    assert len(received) > 1 << 17
    assert received.endswith(_processes._FRAME.pack(_processes._LEAVING, 0, 0))


def test_who_sends_to_a_rank_that_has_closed_learns_that_it_left(two):
    two[1].close()
    with pytest.raises(distributed.CommunicationError, match="rank 1 has left") as found:
        two[0].start({0: Exchange(((1, np.ones(3)),), ())})
    assert found.value.rank == 1


def test_a_message_beyond_all_bounds_is_not_waited_for(one):
    rank, other = one
    other.sendall(_processes._FRAME.pack(_processes._FACTS, 0, 1 << 40))
    with pytest.raises(distributed.CommunicationError, match="rank 1 died"):
        rank.agree({0: b""})


def test_a_long_message_is_a_sign_of_life(one):
    """A message that takes longer than a rank may be silent counts as a sign of life."""
    rank, other = one
    other.sendall(_processes._FRAME.pack(_processes._DATA, 0, 10))
    for byte in range(10):
        time.sleep(0.2)
        other.sendall(bytes([byte]))
    got = np.empty(10, np.uint8)
    rank.wait(rank.start({0: Exchange((), ((1, got),))}))
    np.testing.assert_array_equal(got, np.arange(10))


def suspended(rank, seconds):
    """Keep the threads of a rank from running, as SIGSTOP does, or C that holds the GIL."""
    with rank._changed:
        time.sleep(seconds)


def test_ranks_that_were_suspended_together_go_on(one):
    rank, other = one
    for _ in range(2):
        suspended(rank, 1.5)  # longer than a rank may be silent
        other.sendall(_processes._FRAME.pack(_processes._LIFE, 1, 0))
        time.sleep(0.3)
        rank.check()
    with rank._changed:
        rank._changed.wait_for(lambda: rank._failure, timeout=10)
    with pytest.raises(distributed.CommunicationError, match="rank 1 sent no heartbeat for 1 s"):
        rank.check()


def test_an_operation_does_not_time_out_while_all_ranks_are_suspended(two):
    rank, answers = two[0], []
    rank.op_timeout = 1.5
    thread = threading.Thread(target=lambda: answers.append(rank.agree({0: b"first"})))
    thread.start()
    time.sleep(0.1)
    suspended(rank, 1.8)
    time.sleep(0.1)
    two[1].agree({1: b"second"})
    thread.join(10)
    assert answers == [[b"first", b"second"]]


# --- ranks of one process --------------------------------------------------------------------


def racing(rank, size):
    a, b = np.ones(4), np.empty(4)
    ticket = yield Exchange((((rank + 1) % size, a),), (((rank - 1) % size, b),))
    a += 1
    yield Wait(ticket)


def stale(rank, size):
    b = np.empty(4)
    sends = (((rank + 1) % size, np.ones(4)),)
    ticket = yield Exchange(sends, (((rank - 1) % size, b),))
    early = yield Compute(lambda: float(b.sum()))
    yield Wait(ticket)
    return early, float(b.sum())


def uneven(rank, size):
    if rank == 1:
        return
    yield Exchange((), ())


def unanswered(rank, size):
    receives = ((0, np.empty(2)),) if rank == 1 else ()
    ticket = yield Exchange((), receives)
    yield Wait(ticket)


def surplus(rank, size):
    ticket = yield Exchange(((1, np.ones(2)),) if rank == 0 else (), ())
    yield Wait(ticket)


def unlike(rank, size):
    sends = ((1, np.ones((2, 2))),) if rank == 0 else ()
    ticket = yield Exchange(sends, ((0, np.ones(4)),) if rank == 1 else ())
    yield Wait(ticket)


def other_kinds(rank, size):
    yield Wait(None) if rank == 1 else Exchange()


def test_the_simulator_notices_what_would_race_or_hang():
    comm = distributed.simulated(3)

    def run(schedule):
        return drive(comm, {rank: schedule(rank, 3) for rank in comm.ranks})

    with pytest.raises(distributed.CommunicationError, match="rank 0 changed what it was sending"):
        run(racing)
    assert all(np.isnan(early) and late == 4 for early, late in run(stale).values())
    with pytest.raises(distributed.CommunicationError, match="rank 1 at the end") as found:
        run(uneven)
    assert "none can go on" in str(found.value)
    with pytest.raises(distributed.CommunicationError, match="rank 1 waits for rank 0") as found:
        run(unanswered)
    assert found.value.rank == 0
    for schedule, message in (
        (surplus, "rank 0 sends rank 1 an array that is not received"),
        (unlike, r"rank 0 sends rank 1 float64 \(2, 2\), not float64 \(4,\)"),
        (other_kinds, "rank 0 at Exchange, rank 1 at Wait, rank 2 at Exchange"),
    ):
        with pytest.raises(distributed.CommunicationError, match=message):
            run(schedule)
