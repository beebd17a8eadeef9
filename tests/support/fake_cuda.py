"""CuPy, CUDA's runtime and NCCL over NumPy arrays, for communicators of GPUs."""

from __future__ import annotations

import contextlib
import queue
import threading
import types
from collections import defaultdict

import numpy as np


class Array(types.SimpleNamespace):
    """An array on a GPU."""


class FakeCuda:
    """CuPy and NCCL on NumPy arrays; posted sends and receives happen at the end of a group."""

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

    def enable(self, device):
        """Enable peer access; for device 1 it is enabled already."""
        self.log.append(("enabled", device))
        if device == 1:
            raise RuntimeError("peer access is already enabled")

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

    def copy(self, to, device, source, other, number, stream):
        """Copy between peers, at once."""
        assert stream == 7
        self.log.append(("copy", other, "to", device))
        ours, theirs = (self.memory[p].reshape(-1).view(np.uint8) for p in (to, source))
        assert ours.size == theirs.size == number
        ours[:] = theirs

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
            deviceCanAccessPeer=lambda one, other: 3 not in (one, other),
            deviceEnablePeerAccess=self.enable, memcpyPeerAsync=self.copy,
            CUDARuntimeError=RuntimeError,
        )  # fmt: skip
        cuda = types.SimpleNamespace(
            Device=Device, Stream=Stream, get_current_stream=Stream, runtime=runtime
        )
        pool = types.SimpleNamespace(free_bytes=lambda: 24)
        return types.SimpleNamespace(
            cuda=cuda, zeros=self.zeros, get_default_memory_pool=lambda: pool, __version__="14.0.1"
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
            get_version=lambda: 22707,
        )  # fmt: skip
