"""Do GPUs of one process copy what they should, when they should, without a GPU?"""

from __future__ import annotations

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import _copies, _gpus, _launchers, _nccl
from cuflash.distributed._communicator import Exchange
from support.fake_cuda import FakeCuda


@pytest.fixture
def fake(monkeypatch):
    found = FakeCuda()
    for module in (_launchers, _gpus, _nccl, _copies):
        monkeypatch.setattr(module, "imported_cupy", lambda: found.cupy)
    for module in (_launchers, _nccl):
        monkeypatch.setattr(module, "nccl_module", lambda: found.nccl)
    return found


def test_messages_arrive_in_order_and_senders_wait_for_their_readers(fake):
    """Rank 0 sends two arrays to rank 1, which sends one to rank 2: order and waiting are right."""
    peers = distributed.from_devices([2, 0, 1])
    assert isinstance(peers, _copies.Peers)
    sent, got = np.arange(3.0), np.zeros(3)
    exchanges = {
        0: Exchange(tuple((1, fake.array(sent[i : i + 1])) for i in (0, 1)), ()),
        1: Exchange(
            ((2, fake.array(sent[2:])),), tuple((0, fake.array(got[i : i + 1])) for i in (0, 1))
        ),
        2: Exchange((), ((1, fake.array(got[2:])),)),
    }
    fake.log.clear()
    ticket = peers.start(exchanges)
    assert got.tolist() == [0, 1, 2]
    own = ("own", "waits for", "current")
    assert fake.log == [
        *[("record", "current")] * 3,
        own,  # rank 0 reads nothing
        own, own, *[("copy", 2, "to", 0)] * 2,  # it waits for itself and its source
        own, own, ("copy", 0, "to", 1),
        *[("record", "own")] * 3,
    ]  # fmt: skip
    assert [len(ticket.events[rank]) for rank in range(3)] == [2, 2, 1]
    fake.log.clear()
    peers.wait(ticket)
    assert fake.log == [("current", "waits for", "own")] * 5
    peers.close()


def test_an_array_without_elements_is_not_copied_and_keeps_its_place(fake):
    peers = distributed.from_devices([0, 1], transport="copy")
    sent, got = ([fake.array(np.full(n, x)) for n in (0, 2)] for x in (3.0, 0.0))
    exchanges = {
        0: Exchange(tuple((1, a) for a in sent)),
        1: Exchange((), tuple((0, a) for a in got)),
    }
    peers.wait(peers.start(exchanges))
    assert fake.memory[got[1].data.ptr].tolist() == [3, 3]
    assert [e for e in fake.log if e[0] == "copy"] == [("copy", 0, "to", 1)]


def test_every_pair_of_peers_is_enabled_once(fake):
    distributed.from_devices([0, 1, 2])
    assert sorted(e for e in fake.log if e[0] == "enabled") == [
        ("enabled", n) for n in (0, 0, 1, 1, 2, 2)
    ]


def test_how_gpus_that_are_no_peers_exchange(fake):
    assert isinstance(distributed.from_devices([0, 3]), _nccl.NcclDevices)
    with pytest.raises(ValueError, match=r"devices: got GPUs \[0, 3\], some of which are not"):
        distributed.from_devices([0, 3], transport="copy")
    assert isinstance(distributed.from_devices([0, 1], transport="nccl"), _nccl.NcclDevices)


def test_peers_need_no_nccl(fake, monkeypatch):
    def missing():
        raise ImportError("no NCCL")

    monkeypatch.setattr(_launchers, "nccl_module", missing)
    assert distributed.from_devices([0, 1]).size == 2
    with pytest.raises(ImportError, match="needs CuPy; install"):
        distributed.from_devices([0, 3])


@pytest.mark.parametrize("transport", ["host", None, 3])
def test_other_transports_of_devices(fake, transport):
    expected = "transport: got .*, expected 'auto' or 'copy' or 'nccl'"
    with pytest.raises((TypeError, ValueError), match=expected):
        distributed.from_devices([0, 1], transport=transport)
