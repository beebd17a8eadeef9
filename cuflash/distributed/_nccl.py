"""How do ranks meet whose arrays are on GPUs? Over NCCL, by CuPy's own communicator.

Each GPU has one communicator; sends and receives of an exchange are one group, so that none waits
for another. A thread looks whether exchanges end in time, and where a rank fails it aborts the
communicator, which frees the GPU: kernels of NCCL wait for ever otherwise.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash._arrays import Array, imported_cupy
from cuflash.distributed._communicator import CommunicationError, Exchange
from cuflash.distributed._gpus import Begun, Devices, Gpu
from cuflash.distributed._processes import Processes

_LOOK = 0.1  # seconds between looks at exchanges that have begun


def nccl_module() -> Any:
    """CuPy's binding of NCCL, which is there without NCCL, too."""
    imported_cupy()
    from cupy.cuda import nccl

    return nccl


class _Awaited(NamedTuple):
    """An exchange of this rank: where it ends, since when, and a rank that takes part in it."""

    event: Any
    since: float
    other: int


class _Gpu(Gpu):
    """One GPU, its stream and its communicator of NCCL."""

    def __init__(self, device: int, nccl: Any) -> None:
        super().__init__(device)
        self.nccl = nccl

    def post(self, exchange: Exchange) -> None:
        """Begin sends and receives, within a group, after what the current stream has done.

        The current stream goes on when NCCL's has come here: a kernel with a block on every SM
        that began first would leave NCCL none until it ends.
        """
        byte = nccl_module().NCCL_UINT8
        with self.on():
            self.stream.wait_event(self.done())
            self.wait(self.ended())
            send, receive = self.nccl.send, self.nccl.recv
            for call, pairs in ((send, exchange.sends), (receive, exchange.receives)):
                for other, array in pairs:
                    if array.nbytes:
                        call(array.data.ptr, array.nbytes, byte, other, self.stream.ptr)

    def abort(self) -> None:
        """Give the communicator back; kernels that wait end."""
        with self.on():
            self.nccl.abort()


class NcclDevices(Devices):
    """Ranks on GPUs of one process, or one of several, over NCCL."""

    gpus: Mapping[int, _Gpu]

    @classmethod
    def of(cls, devices: Sequence[int]) -> NcclDevices:
        """All ranks."""
        found = nccl_module().NcclCommunicator.initAll(list(devices))
        return cls(dict(enumerate(map(_Gpu, devices, found))), len(devices))

    def start(self, exchanges: Mapping[int, Exchange]) -> Begun:
        """Begin all in one group."""
        nccl = nccl_module()
        nccl.groupStart()
        try:
            for rank, gpu in self.gpus.items():
                gpu.post(exchanges[rank])
        finally:
            nccl.groupEnd()
        return Begun({rank: (gpu.ended(),) for rank, gpu in self.gpus.items()}, exchanges)

    def close(self) -> None:
        """Give the communicators back."""
        for gpu in self.gpus.values():
            gpu.abort()


class Nccl(NcclDevices):
    """One rank of several processes, on one GPU; ``control`` joins the same processes.

    Attributes
    ----------
    rank : int
        This one.
    """

    def __init__(self, control: Processes, device: int, init_timeout: float) -> None:
        self.control, self.rank = control, control.rank
        cupy = imported_cupy()
        _refuse_shared_gpus(control, device)
        cupy.cuda.Device(device).use()
        identity = nccl_module().get_unique_id() if self.rank == 0 else b""
        identity = control.agree({self.rank: bytes(identity)})[0]
        nccl = _initialised(control.size, identity, self.rank, device, init_timeout)
        self._gpu = _Gpu(device, nccl)
        super().__init__({self.rank: self._gpu}, control.size, self.rank)
        self._begun: deque[_Awaited] = deque()  # without arrays, which may be freed before
        self._aborted, self._once = threading.Event(), threading.Lock()
        control.on_failure = self._abort
        threading.Thread(target=self._look, name="cuflash looks at NCCL", daemon=True).start()
        try:
            self._warm_up()
        except BaseException:
            self._abort()  # a rank may have failed before there was anybody to tell
            raise

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """What every rank says."""
        return self.control.agree(facts)

    def start(self, exchanges: Mapping[int, Exchange]) -> Begun:
        """Begin on the communicator's stream."""
        self.check()
        begun = super().start(exchanges)
        exchange = exchanges[self.rank]
        other = next((r for r, _ in (*exchange.receives, *exchange.sends)), self.rank)
        self._begun.append(_Awaited(begun.events[self.rank][0], time.monotonic(), other))
        self.control.progress += 1
        return begun

    def wait(self, ticket: Begun) -> None:
        """Let the current stream wait; what was sent is held until here."""
        self.check()
        super().wait(ticket)

    def give_up(self, error: BaseException) -> None:
        """Fail: an exchange of the next call would meet one of this."""
        self.control.give_up(error)

    def check(self) -> None:
        """Raise where a rank has failed: results since then are worth nothing."""
        self.control.check()

    def close(self) -> None:
        """Leave, without waiting for other ranks."""
        if self.control.forked:
            return  # the GPU and its communicator are the parent's
        if not self._aborted.is_set():
            with self._gpu.on():
                imported_cupy().cuda.get_current_stream().synchronize()
        self._abort()
        self.control.close()

    def _abort(self) -> None:
        if self._once.acquire(blocking=False):  # the threads that close and that look may meet here
            self._aborted.set()
            self._gpu.abort()

    def _look(self) -> None:
        """Forget exchanges that have ended; where one takes too long, blame a rank."""
        while not self._aborted.wait(_LOOK):
            with self._gpu.on():
                while self._begun and self._begun[0].event.done:
                    self._begun.popleft()
            limit = self.control.op_timeout
            if self._begun and time.monotonic() - self._begun[0].since > limit:
                what = f"an exchange of rank {self.rank} took longer than {limit:g} s"
                self.control.blame(self._begun[0].other, what)

    def _warm_up(self) -> None:
        """Connect all pairs now: NCCL does it at the first message, one pair after another."""
        cupy, others = imported_cupy(), [r for r in range(self.size) if r != self.rank]
        with self._gpu.on():
            rooms = cupy.zeros((2, self.size, 1), np.uint8)
        sends, receives = (tuple((r, room[r]) for r in others) for room in rooms)
        self.wait(self.start({self.rank: Exchange(sends, receives)}))


def _refuse_shared_gpus(control: Processes, device: int) -> None:
    """Raise where two ranks have one GPU: NCCL would wait for ever."""
    name: Array = imported_cupy().cuda.runtime.deviceGetPCIBusId(device)
    here = f"{name} of {platform.node()}"
    told = [t.decode() for t in control.agree({control.rank: here.encode()})]
    for rank, other in enumerate(told):
        first = told.index(other)
        if first != rank:
            raise CommunicationError(f"ranks {first} and {rank} have one GPU, {other}", rank)


def _initialised(size: int, identity: bytes, rank: int, device: int, timeout: float) -> Any:
    """NCCL's communicator, made in a thread, since NCCL waits for all ranks without an end."""
    cupy, found = imported_cupy(), []

    def make() -> None:
        cupy.cuda.Device(device).use()
        try:
            found.append(nccl_module().NcclCommunicator(size, identity, rank))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=make, name="cuflash begins NCCL", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise CommunicationError(f"NCCL did not begin within {timeout:g} s on rank {rank}", rank)
    if isinstance(found[0], Exception):
        text = f"NCCL did not begin on rank {rank}: {found[0]}"
        raise CommunicationError(text, rank) from found[0]
    return found[0]
