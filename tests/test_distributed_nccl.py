"""Does the NCCL communicator order streams and calls correctly, without NCCL?"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import types
import weakref
from functools import partial

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import _gpus, _launchers, _nccl, _processes
from cuflash.distributed._communicator import Exchange, drive
from support.fake_cuda import FakeCuda
from support.shards import in_threads


@pytest.fixture
def fake(monkeypatch):
    found = FakeCuda()
    for module in (_launchers, _gpus, _nccl):
        monkeypatch.setattr(module, "imported_cupy", lambda: found.cupy)
    for module in (_launchers, _nccl):
        monkeypatch.setattr(module, "nccl_module", lambda: found.nccl)
    monkeypatch.setattr(_gpus, "is_cupy", lambda array: not isinstance(array, np.ndarray))
    return found


def test_devices_exchange_in_one_group_between_the_right_streams(fake):
    devices = _nccl.NcclDevices.of([2, 0, 1])
    sent = [np.full(5, float(rank)) for rank in range(3)]
    got = [np.zeros(5) for _ in range(3)]
    exchanges = {
        rank: Exchange(
            (((rank + 1) % 3, fake.array(sent[rank])),), (((rank - 1) % 3, fake.array(got[rank])),)
        )
        for rank in range(3)
    }
    ticket = devices.start(exchanges)
    begun = fake.log.copy()
    # NCCL's kernel starts first: a kernel of the current stream would take every SM.
    assert begun[:4] == [
        ("record", "current"), ("own", "waits for", "current"),
        ("record", "own"), ("current", "waits for", "own"),
    ]  # fmt: skip
    assert begun[-3:] == [("record", "own")] * 3
    devices.wait(ticket)
    assert fake.log[len(begun) :] == [("current", "waits for", "own")] * 3
    assert [a[0] for a in got] == [2, 0, 1]
    assert devices.free_memory(0) == 1024
    devices.close()
    assert fake.log[-3:] == [("abort", rank) for rank in range(3)]


def test_arrays_of_the_host_over_nccl_are_refused(fake):
    devices, x = _nccl.NcclDevices.of([0, 1]), [np.zeros((8, 4))] * 2
    with pytest.raises(TypeError, match="q: got a NumPy array, expected CuPy arrays"):
        distributed.attention(x, x, x, comm=devices)
    with pytest.raises(TypeError, match="x: got a NumPy array, expected CuPy arrays"):
        distributed.unshard(x, comm=devices)


def test_arrays_of_gpus_over_sockets_are_refused(monkeypatch):
    monkeypatch.setattr(_processes, "is_cupy", lambda _: True)

    def run(comm):
        with pytest.raises(TypeError, match="x: got a CuPy array, expected NumPy arrays with"):
            distributed.unshard(np.zeros((8, 4)), comm=comm)

    assert in_threads(2, run) == [None, None]


def test_a_group_that_cannot_be_posted_is_left(fake):
    devices = _nccl.NcclDevices.of([0, 1])
    exchange = Exchange(((1, types.SimpleNamespace(nbytes=3)),), ())
    with pytest.raises(AttributeError):
        devices.start({0: exchange, 1: Exchange((), ())})
    assert fake.depth == 0


def test_memory_of_an_exchange_in_flight_is_not_given_away(fake):
    """When one GPU of a process raises, every GPU waits for the exchanges in flight."""
    devices = _nccl.NcclDevices.of([0, 1])

    def schedule(rank):
        got, sent = np.zeros(3), np.ones(3)
        yield Exchange(((1 - rank, fake.array(sent)),), ((1 - rank, fake.array(got)),))
        fake.log.clear()
        raise MemoryError

    with pytest.raises(MemoryError):
        drive(devices, {rank: schedule(rank) for rank in range(2)})
    assert fake.log == [("record", "own")] * 2 + [("current", "waits for", "own")] * 4


def of_two_ranks(run, devices=(0, 1), op_timeout=5.0):
    """Return what ``run(rank, communicator)`` returns or raises on two ranks over NCCL."""
    how = {"transport": "nccl", "device": list(devices), "op_timeout": op_timeout}
    return in_threads(2, lambda comm: run(comm.rank, comm), **how)


def swapped(fake, rank, comm):
    """Exchange one array with the other rank."""
    sent, got = np.full(3, float(rank)), np.zeros(3)
    exchange = Exchange(((1 - rank, fake.array(sent)),), ((1 - rank, fake.array(got)),))
    comm.wait(comm.start({rank: exchange}))
    return got[0]


def test_processes_exchange_over_nccl(fake):
    """Two processes exchange over NCCL, after a warm-up of all pairs."""

    def run(rank, comm):
        before = comm.control.progress
        return swapped(fake, rank, comm), comm.control.progress - before

    assert of_two_ranks(run) == [(1.0, 1), (0.0, 1)]
    assert fake.log.count(("current", "synchronized")) == 2
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


def test_a_forked_child_leaves_the_gpu_to_its_parent(fake):
    def run(rank, comm):
        comm.control.forked = True
        comm.close()
        comm.control.forked = False
        return comm._aborted.is_set()

    assert of_two_ranks(run) == [False, False]


def test_arrays_of_an_exchange_are_not_kept_until_the_gpu_has_done_it(fake):
    """Arrays of an exchange are freed once it is launched, or those of all steps would pile up."""
    fake.frozen = True

    def run(rank, comm):
        array = fake.array(np.full(3, float(rank)))
        ticket = comm.start({rank: Exchange(((1 - rank, array),), ())})
        comm.wait(ticket)
        kept = weakref.ref(array)
        del array, ticket
        return kept()

    assert of_two_ranks(run) == [None, None]


def test_a_call_that_raises_on_one_rank_frees_the_gpus_of_all(fake):
    def schedule(rank):
        sent = np.ones(3)
        yield Exchange(((1 - rank, fake.array(sent)),), ())
        if rank == 1:
            raise MemoryError("no memory is left")

    def run(rank, comm):
        with contextlib.suppress(MemoryError):
            drive(comm, {rank: schedule(rank)})
        until = time.monotonic() + 10
        with contextlib.suppress(distributed.CommunicationError):
            while time.monotonic() < until:
                comm.check()
                time.sleep(0.01)
        comm.wait(None)  # after an abort the ticket does not matter

    for error in of_two_ranks(run):
        assert "rank 1 raised in the middle of a call: MemoryError: no memory is left" in str(error)
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


def test_a_rank_that_fails_while_nccl_begins_frees_its_gpu(fake, monkeypatch):
    """A failure while NCCL initialises frees the GPU, though ``on_failure`` is not set yet."""
    begin = _nccl._initialised

    def failing(control, *given):
        control.fail(1, "rank 1 is gone")
        return begin(control, *given)

    monkeypatch.setattr(_nccl, "_initialised", failing)
    for error in of_two_ranks(lambda rank, comm: None):
        assert "rank 1 is gone" in str(error)
    assert sorted(fake.log) == [("abort", 0), ("abort", 1)]


def while_nccl_starts(fake, monkeypatch, act, **how):
    """Return the errors of three ranks, and seconds: NCCL starts on none, as rank 1 acts."""
    controls, ended = {}, threading.Event()

    def start(size, identity, rank):
        if rank == 1:
            act(controls[rank])
        ended.wait(20)  # as NCCL, for all ranks
        raise AssertionError("too late")

    nccl = types.SimpleNamespace(**vars(fake.nccl) | {"NcclCommunicator": start})
    monkeypatch.setattr(_nccl, "nccl_module", lambda: nccl)
    monkeypatch.setattr(
        _nccl, "_refuse_shared_gpus", lambda control, _: controls.update({control.rank: control})
    )
    begin = time.monotonic()
    try:
        errors = in_threads(3, lambda comm: None, transport="nccl", device=[0, 1, 2], **how)
    finally:
        ended.set()
    return errors, time.monotonic() - begin


def dies(control):
    for link in control._links.values():
        with contextlib.suppress(OSError):  # the other end has ended it
            link.shutdown(socket.SHUT_RDWR)


def no_memory(control):
    raise MemoryError("no memory is left")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (dies, "rank 1 died: its connection to rank"),
        (lambda control: control.close(), "rank 1 has left before all ranks were ready"),
        (no_memory, "NCCL did not start on rank 1: no memory is left"),
    ],
    ids=["dies", "leaves", "raises"],
)
def test_a_rank_that_fails_while_nccl_starts_is_named_on_all_survivors(
    fake, monkeypatch, act, text
):
    (first, _, last), seconds = while_nccl_starts(fake, monkeypatch, act)
    for error in (first, last):
        assert isinstance(error, distributed.CommunicationError)
        assert (error.rank, str(error)[: len(text)]) == (1, text)
    assert seconds < 5


def test_no_rank_is_named_where_nccl_does_not_start_in_time(fake, monkeypatch):
    errors, seconds = while_nccl_starts(fake, monkeypatch, lambda _: None, init_timeout=1.0)
    for error in errors:
        assert "NCCL did not start within 1 s on rank" in str(error)
        assert error.rank is None
    assert seconds < 5


def test_an_error_of_nccl_because_of_a_dead_rank_names_the_dead_rank(fake, monkeypatch):
    """NCCL may see that a rank is dead before the socket's reader does."""

    def failing(control, _):
        if control.rank == 1:
            threading.Timer(0.3, dies, [control]).start()
            time.sleep(1)
        raise RuntimeError("ncclRemoteError")

    monkeypatch.setattr(_nccl.Nccl, "_warm_up", lambda comm: failing(comm.control, None))
    first, _ = of_two_ranks(lambda rank, comm: None)
    assert (first.rank, str(first)) == (1, "rank 1 died: its connection to rank 0 ended")


@pytest.mark.parametrize(
    ("name", "cupy", "nccl"),
    [("NCCL", ("14.0.1", "14.0.1"), (22707, 22809)), ("CuPy", ("14.0.1", "13.6.0"), (1, 1))],
)
def test_ranks_with_another_nccl_or_cupy_are_refused(fake, monkeypatch, name, cupy, nccl):
    """Both ranks name what differs, and where, before anything is done on a GPU."""
    of_cupy, of_nccl = (iter(versions) for versions in (cupy, nccl))
    numbers = types.SimpleNamespace(get_version=lambda: next(of_nccl))
    monkeypatch.setattr(_launchers, "nccl_module", lambda: numbers)
    monkeypatch.setattr(
        _launchers, "_require_nccl", lambda: types.SimpleNamespace(__version__=next(of_cupy))
    )
    first, second = map(str, of_two_ranks(lambda rank, comm: None))
    assert first == second
    assert re.match(rf"{name}: got \S+ on rank 1, expected \S+ as on rank 0; connect all", first)
    assert not fake.log


@pytest.mark.parametrize("other", [3, 7])
def test_two_ranks_on_one_gpu(fake, other):
    """Two of four ranks on one GPU are refused, and named."""
    for error in of_two_ranks(partial(swapped, fake), devices=(3, other)):
        assert "ranks 0 and 1 share GPU bus 3" in str(error)


def test_gpus_of_two_hosts_may_have_one_number(fake, monkeypatch):
    host = types.SimpleNamespace(node=lambda: threading.current_thread().name)
    monkeypatch.setattr(_nccl, "platform", host)
    assert of_two_ranks(partial(swapped, fake), devices=(3, 3)) == [1.0, 0.0]


@pytest.mark.parametrize("late", [None, 1])
def test_an_exchange_that_does_not_end_is_aborted_on_all_ranks(fake, late):
    """An exchange that never ends is aborted on all ranks; a rank that never began it is named."""

    both = threading.Barrier(2)

    def run(rank, comm):
        time.sleep(0.3)  # by now the warm-up has been seen to end
        both.wait()
        fake.frozen = True
        if rank != late:
            comm.start({rank: Exchange(((1 - rank, fake.array(np.zeros(3))),), ())})
        until = time.monotonic() + 10
        while time.monotonic() < until:
            comm.check()
            time.sleep(0.02)

    found = of_two_ranks(run, op_timeout=0.6)
    word = "no rank is behind" if late is None else "rank 1 is stuck: an exchange of rank 0"
    assert [word in str(error) for error in found] == [True, True], found
    assert [found[rank].rank for rank in range(2)] == [late, late]
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


def test_threads_that_abort_at_once_abort_once(fake):
    class Slow(threading.Event):
        def is_set(self):
            found = super().is_set()
            time.sleep(0.05)  # time for the other thread to ask, too
            return found

    def run(rank, comm):
        comm._aborted.__class__ = Slow
        threads = [threading.Thread(target=comm._abort) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0.0

    assert of_two_ranks(run) == [0.0, 0.0]
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


@pytest.mark.parametrize("devices", [[], [0, 0], [4], [-1], "01", [True], 2])
def test_wrong_devices(fake, devices):
    with pytest.raises((TypeError, ValueError), match="devices: got"):
        _gpus.devices_of(devices)
