"""How do ranks on GPUs communicate by NCCL, through CuPy's own communicator?

Each GPU has one NCCL communicator. The sends and receives of an exchange are one NCCL group, so
that none waits for another. A thread watches whether exchanges end in time. If a rank fails, the
communicator is aborted, which frees the GPU: NCCL's kernels would otherwise wait for ever.
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
from cuflash.distributed._links import Deadline
from cuflash.distributed._processes import Processes

_LOOK = 0.1  # seconds between checks of exchanges that have begun
_PATIENCE = 1.0  # seconds in which a rank that failed while NCCL starts shows, to be named first


def nccl_module() -> Any:
    """CuPy's binding of NCCL. It can be imported without NCCL, too."""
    imported_cupy()
    from cupy.cuda import nccl

    return nccl


class _Awaited(NamedTuple):
    """An exchange of this rank: the event that ends it, when it began, and another rank in it."""

    event: Any
    since: float
    other: int


class _Gpu(Gpu):
    """One GPU, its stream for transfers and its NCCL communicator."""

    def __init__(self, device: int, nccl: Any) -> None:
        super().__init__(device)
        self.nccl = nccl

    def post(self, exchange: Exchange) -> None:
        """Begin sends and receives, within a group, after the work posted to the current stream.

        The current stream waits until NCCL's stream has reached this point. Otherwise a kernel that
        occupies every SM could start first and leave no SM to NCCL until it ends.
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
        """Abort the communicator; its waiting kernels end."""
        with self.on():
            self.nccl.abort()


class NcclDevices(Devices):
    """Ranks on GPUs over NCCL. This process runs all of them, or one."""

    gpus: Mapping[int, _Gpu]

    @classmethod
    def of(cls, devices: Sequence[int]) -> NcclDevices:
        """All ranks, in this process."""
        found = nccl_module().NcclCommunicator.initAll(list(devices))
        return cls(dict(enumerate(map(_Gpu, devices, found))), len(devices))

    def start(self, exchanges: Mapping[int, Exchange]) -> Begun:
        """Begin the exchanges of all own ranks in one NCCL group."""
        nccl = nccl_module()
        nccl.groupStart()
        try:
            for rank, gpu in self.gpus.items():
                gpu.post(exchanges[rank])
        finally:
            nccl.groupEnd()
        return Begun({rank: (gpu.ended(),) for rank, gpu in self.gpus.items()}, exchanges)

    def close(self) -> None:
        """Abort the NCCL communicators."""
        for gpu in self.gpus.values():
            gpu.abort()


class Nccl(NcclDevices):
    """One rank of several processes, on one GPU; ``control`` connects the same ranks by sockets.

    Attributes
    ----------
    rank : int
        The rank of this process.
    """

    def __init__(self, control: Processes, device: int, init_timeout: float) -> None:
        self.control, self.rank = control, control.rank
        cupy = imported_cupy()
        _refuse_shared_gpus(control, device)
        cupy.cuda.Device(device).use()
        identity = nccl_module().get_unique_id() if self.rank == 0 else b""
        identity = control.agree({self.rank: bytes(identity)})[0]
        nccl = _initialised(control, identity, device, init_timeout)
        self._gpu = _Gpu(device, nccl)
        super().__init__({self.rank: self._gpu}, control.size, self.rank)
        self._begun: deque[_Awaited] = deque()  # holds no arrays, which may be freed earlier
        self._aborted, self._once = threading.Event(), threading.Lock()
        control.on_failure = self._abort
        threading.Thread(target=self._look, name="cuflash looks at NCCL", daemon=True).start()
        try:
            self._warm_up()
        except BaseException as error:
            self._abort()  # a rank may have failed before on_failure was set
            _blame(control, error)
            raise

    def agree(self, facts: Mapping[int, bytes]) -> list[bytes]:
        """Return the facts of all ranks."""
        return self.control.agree(facts)

    def start(self, exchanges: Mapping[int, Exchange]) -> Begun:
        """Begin the exchange on the stream for transfers."""
        self.check()
        begun = super().start(exchanges)
        exchange = exchanges[self.rank]
        other = next((r for r, _ in (*exchange.receives, *exchange.sends)), self.rank)
        self._begun.append(_Awaited(begun.events[self.rank][0], time.monotonic(), other))
        self.control.progress += 1
        return begun

    def wait(self, ticket: Begun) -> None:
        """Let the current stream wait. Sent arrays are kept alive until here."""
        self.check()
        super().wait(ticket)

    def give_up(self, error: BaseException) -> None:
        """Fail: else an exchange of the next call could be paired with one of this call."""
        self.control.give_up(error)

    def check(self) -> None:
        """Raise if a rank has failed: results since then are invalid."""
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
        if self._once.acquire(blocking=False):  # two threads may abort: the caller's and _look's
            self._aborted.set()
            self._gpu.abort()

    def _look(self) -> None:
        """Forget exchanges that have ended; if one takes too long, blame a rank."""
        while not self._aborted.wait(_LOOK):
            with self._gpu.on():
                while self._begun and self._begun[0].event.done:
                    self._begun.popleft()
            limit = self.control.op_timeout
            if self._begun and time.monotonic() - self._begun[0].since > limit:
                what = f"an exchange of rank {self.rank} took longer than {limit:g} s"
                self.control.blame(self._begun[0].other, what)

    def _warm_up(self) -> None:
        """Connect all pairs now. NCCL connects a pair at its first message, one after another."""
        cupy, others = imported_cupy(), [r for r in range(self.size) if r != self.rank]
        with self._gpu.on():
            rooms = cupy.zeros((2, self.size, 1), np.uint8)
        sends, receives = (tuple((r, room[r]) for r in others) for room in rooms)
        self.wait(self.start({self.rank: Exchange(sends, receives)}))


def _refuse_shared_gpus(control: Processes, device: int) -> None:
    """Raise if two ranks have the same GPU: NCCL would wait for ever."""
    name: Array = imported_cupy().cuda.runtime.deviceGetPCIBusId(device)
    here = f"{name} of {platform.node()}"
    told = [t.decode() for t in control.agree({control.rank: here.encode()})]
    for rank, other in enumerate(told):
        first = told.index(other)
        if first != rank:
            raise CommunicationError(f"ranks {first} and {rank} share GPU {other}", rank)


def _initialised(control: Processes, identity: bytes, device: int, timeout: float) -> Any:
    """Make NCCL's communicator in a thread: NCCL waits for all ranks, also for one that is dead."""
    cupy, found = imported_cupy(), []

    def make() -> None:
        try:
            cupy.cuda.Device(device).use()
            found.append(nccl_module().NcclCommunicator(control.size, identity, control.rank))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=make, name="cuflash begins NCCL", daemon=True)
    thread.start()
    deadline = Deadline(timeout)
    while not found:
        thread.join(min(_LOOK, deadline.left))
        if not found:
            control.require_all()
            if deadline.over:  # any rank may be the reason
                text = f"NCCL did not start within {timeout:g} s on rank {control.rank}"
                control.fail(None, text)
    if isinstance(found[0], Exception):
        _blame(control, found[0])
    return found[0]


def _blame(control: Processes, error: BaseException) -> None:
    """Raise for an error of this rank while NCCL starts; another rank may be its reason."""
    if isinstance(error, Exception) and not isinstance(error, CommunicationError):
        control.require_all(_PATIENCE)
        text = f"NCCL did not start on rank {control.rank}: {error}"
        control.fail(control.rank, text)
        raise CommunicationError(text, control.rank) from error
