"""Does the NCCL communicator order what it should, without NCCL?"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import types
import weakref
from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import _launchers, _nccl, _processes
from cuflash.distributed._communicator import Exchange, drive
from support.shards import in_threads


class Array(types.SimpleNamespace):
    """An array on a GPU."""


class FakeCuda:
    """CuPy and NCCL over NumPy arrays: what is posted happens at the end of a group."""

    def __init__(self):
        self.memory = {}
        self.mail = defaultdict(queue.Queue)
        self.own = threading.local()
        self.log = []
        self.frozen = False

    def array(self, array):
        pointer = id(array)
        self.memory[pointer] = array
        return Array(data=types.SimpleNamespace(ptr=pointer), nbytes=array.nbytes)

    @property
    def depth(self):
        return getattr(self.own, "depth", 0)

    def group_start(self):
        self.own.depth, self.own.posted = self.depth + 1, []

    def group_end(self):
        self.own.depth -= 1
        for kind, rank, other, pointer, number in sorted(
            self.own.posted, key=lambda p: p[0] != "send"
        ):
            flat = self.memory[pointer].reshape(-1).view(np.uint8)
            assert flat.size == number
            if kind == "send":
                self.mail[rank, other].put(flat.copy())
            else:
                flat[:] = self.mail[other, rank].get(timeout=5)

    def communicator(self, rank):
        def post(kind):
            def call(pointer, number, dtype, other, stream):
                assert self.depth == 1, "outside of a group"
                assert (dtype, stream) == ("byte", 7)
                self.own.posted.append((kind, rank, other, pointer, number))

            return call

        return types.SimpleNamespace(
            send=post("send"), recv=post("recv"), abort=lambda: self.log.append(("abort", rank))
        )

    def zeros(self, shape, dtype):
        return [[self.array(np.zeros(shape[2], dtype)) for _ in range(shape[1])]
                for _ in range(shape[0])]  # fmt: skip

    @property
    def cupy(self):
        fake = self

        class Event(str):
            @property
            def done(self):
                return not fake.frozen

        class Stream:
            ptr = 7

            def __init__(self, non_blocking=False, priority=0):
                self.name = "own" if non_blocking else "current"

            def record(self):
                fake.log.append(("record", self.name))
                return Event(self.name)

            def wait_event(self, event):
                fake.log.append((self.name, "waits for", event))

            def synchronize(self):
                fake.log.append((self.name, "synchronized"))

        class Device(contextlib.nullcontext):
            def use(self):
                pass

        runtime = types.SimpleNamespace(
            getDeviceCount=lambda: 4, memGetInfo=lambda: (1000, 2000),
            deviceGetPCIBusId=lambda number: f"bus {number}",
        )  # fmt: skip
        cuda = types.SimpleNamespace(
            Device=Device, Stream=Stream, get_current_stream=Stream, runtime=runtime
        )
        pool = types.SimpleNamespace(free_bytes=lambda: 24)
        return types.SimpleNamespace(
            cuda=cuda, zeros=self.zeros, get_default_memory_pool=lambda: pool
        )

    @property
    def nccl(self):
        fake = self

        class NcclCommunicator:
            def __new__(cls, size, identity, rank):
                assert (size, identity) == (2, b"identity")
                return fake.communicator(rank)

            @staticmethod
            def initAll(devices):
                return [fake.communicator(rank) for rank in range(len(devices))]

        return types.SimpleNamespace(
            NCCL_UINT8="byte", groupStart=self.group_start, groupEnd=self.group_end,
            NcclCommunicator=NcclCommunicator, get_unique_id=lambda: b"identity", available=True,
        )  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    found = FakeCuda()
    monkeypatch.setattr(_launchers, "imported_cupy", lambda: found.cupy)
    monkeypatch.setattr(_launchers, "nccl_module", lambda: found.nccl)
    monkeypatch.setattr(_nccl, "imported_cupy", lambda: found.cupy)
    monkeypatch.setattr(_nccl, "nccl_module", lambda: found.nccl)
    monkeypatch.setattr(_nccl, "is_cupy", lambda array: not isinstance(array, np.ndarray))
    return found


def test_devices_exchange_in_one_group_between_the_right_streams(fake):
    devices = _nccl.Devices.of([2, 0, 1])
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
    assert begun[:2] == [("record", "current"), ("own", "waits for", "current")]
    assert begun[-3:] == [("record", "own")] * 3
    devices.wait(ticket)
    assert fake.log[len(begun) :] == [("current", "waits for", "own")] * 3
    assert [a[0] for a in got] == [2, 0, 1]
    assert devices.free_memory(0) == 1024
    devices.close()
    assert fake.log[-3:] == [("abort", rank) for rank in range(3)]


def test_arrays_of_the_host_over_nccl_are_refused(fake):
    devices, x = _nccl.Devices.of([0, 1]), [np.zeros((8, 4))] * 2
    with pytest.raises(TypeError, match="q: got a NumPy array, expected CuPy arrays over NCCL"):
        distributed.attention(x, x, x, comm=devices)
    with pytest.raises(TypeError, match="x: got a NumPy array, expected CuPy arrays over NCCL"):
        distributed.unshard(x, comm=devices)


def test_arrays_of_gpus_over_sockets_are_refused(monkeypatch):
    monkeypatch.setattr(_processes, "is_cupy", lambda _: True)

    def run(comm):
        with pytest.raises(TypeError, match="x: got a CuPy array, expected NumPy arrays over"):
            distributed.unshard(np.zeros((8, 4)), comm=comm)

    assert in_threads(2, run) == [None, None]


def test_a_group_that_cannot_be_posted_is_left(fake):
    devices = _nccl.Devices.of([0, 1])
    exchange = Exchange(((1, types.SimpleNamespace(nbytes=3)),), ())
    with pytest.raises(AttributeError):
        devices.start({0: exchange, 1: Exchange((), ())})
    assert fake.depth == 0


def test_memory_of_an_exchange_in_flight_is_not_given_away(fake):
    """One of several GPUs of a process raises: every GPU waits for what has begun."""
    devices = _nccl.Devices.of([0, 1])

    def schedule(rank):
        got, sent = np.zeros(3), np.ones(3)
        yield Exchange(((1 - rank, fake.array(sent)),), ((1 - rank, fake.array(got)),))
        fake.log.clear()
        raise MemoryError

    with pytest.raises(MemoryError):
        drive(devices, {rank: schedule(rank) for rank in range(2)})
    assert fake.log == [("record", "own"), ("current", "waits for", "own")] * 2


def of_two_ranks(run, devices=(0, 1), op_timeout=5.0):
    """What ``run(rank, communicator)`` returns, or raises, of two ranks over NCCL."""
    how = {"transport": "nccl", "device": list(devices), "op_timeout": op_timeout}
    return in_threads(2, lambda comm: run(comm.rank, comm), **how)


def swapped(fake, rank, comm):
    """An exchange of one array with the other rank."""
    sent, got = np.full(3, float(rank)), np.zeros(3)
    exchange = Exchange(((1 - rank, fake.array(sent)),), ((1 - rank, fake.array(got)),))
    comm.wait(comm.start({rank: exchange}))
    return got[0]


def test_processes_exchange_over_nccl(fake):
    """After a warm-up of all pairs."""

    def run(rank, comm):
        before = comm.control.progress
        return swapped(fake, rank, comm), comm.control.progress - before

    assert of_two_ranks(run) == [(1.0, 1), (0.0, 1)]
    assert fake.log.count(("current", "synchronized")) == 2
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


def test_arrays_of_an_exchange_are_not_kept_until_the_gpu_has_done_it(fake):
    """A host runs ahead of its GPU: kept until then, arrays of all steps would live at once."""
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
        comm.wait(None)  # for what is worth nothing now

    for error in of_two_ranks(run):
        assert "rank 1 raised in the middle of a call: MemoryError: no memory is left" in str(error)
    assert sorted(e for e in fake.log if e[0] == "abort") == [("abort", 0), ("abort", 1)]


def test_a_rank_that_fails_while_nccl_begins_frees_its_gpu(fake, monkeypatch):
    """Nobody has asked yet to be told of failures."""
    controls, begin = {}, _nccl._initialised

    def failing(size, identity, rank, *limits):
        controls[rank].fail(1, "rank 1 is gone")
        return begin(size, identity, rank, *limits)

    monkeypatch.setattr(
        _nccl, "_refuse_shared_gpus", lambda control, _: controls.update({control.rank: control})
    )
    monkeypatch.setattr(_nccl, "_initialised", failing)
    for error in of_two_ranks(lambda rank, comm: None):
        assert "rank 1 is gone" in str(error)
    assert sorted(fake.log) == [("abort", 0), ("abort", 1)]


@pytest.mark.parametrize("other", [3, 7])
def test_two_ranks_on_one_gpu(fake, other):
    """Of four."""
    for error in of_two_ranks(partial(swapped, fake), devices=(3, other)):
        assert "ranks 0 and 1 have one GPU, bus 3" in str(error)


def test_gpus_of_two_hosts_may_have_one_number(fake, monkeypatch):
    host = types.SimpleNamespace(node=lambda: threading.current_thread().name)
    monkeypatch.setattr(_nccl, "platform", host)
    assert of_two_ranks(partial(swapped, fake), devices=(3, 3)) == [1.0, 0.0]


@pytest.mark.parametrize("late", [None, 1])
def test_an_exchange_that_does_not_end_is_aborted_on_all_ranks(fake, late):
    """The rank that has not begun it is named, if there is one."""

    both = threading.Barrier(2)

    def run(rank, comm):
        time.sleep(0.3)  # the warm-up has been seen to end
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
            time.sleep(0.05)  # in which the other thread asks too
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
        _nccl.devices_of(devices)
