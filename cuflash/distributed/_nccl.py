"""How do ranks meet whose arrays are on GPUs? Over NCCL, by CuPy's own communicator.

Each GPU has one communicator and one stream of its own for it; sends and receives of an exchange
are one group, so that none waits for another. The stream waits for what the caller's stream has
done so far, and the caller's stream waits for it where the schedule says so: the host waits for
nothing. A thread looks whether exchanges end in time, and where a rank fails it aborts the
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

from cuflash._arrays import Array, imported_cupy, is_cupy
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash.distributed._communicator import CommunicationError, Communicator, Exchange
from cuflash.distributed._processes import Processes

_LOOK = 0.1  # seconds between looks at exchanges that have begun


def nccl_module() -> Any:
    """CuPy's binding of NCCL, which is there without NCCL, too."""
    imported_cupy()
    from cupy.cuda import nccl

    return nccl


class _Begun(NamedTuple):
    """Exchanges by rank, which hold arrays, and where they end on their streams."""

    events: Mapping[int, Any]
    exchanges: Mapping[int, Exchange]


class _Awaited(NamedTuple):
    """An exchange of this rank: where it ends, since when, and a rank that takes part in it."""

    event: Any
    since: float
    other: int


class _Gpu:
    """One GPU's communicator and stream."""

    def __init__(self, device: int, nccl: Any) -> None:
        self._cupy = imported_cupy()
        self.device, self.nccl = device, nccl
        with self.on():
            self._stream = self._cupy.cuda.Stream(non_blocking=True, priority=-1)

    def on(self) -> Any:
        """Context in which the GPU is current."""
        return self._cupy.cuda.Device(self.device)

    def post(self, exchange: Exchange) -> None:
        """Begin sends and receives, within a group, after what the current stream has done."""
        byte = nccl_module().NCCL_UINT8
        with self.on():
            self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
            send, receive = self.nccl.send, self.nccl.recv
            for call, pairs in ((send, exchange.sends), (receive, exchange.receives)):
                for other, array in pairs:
                    if array.nbytes:
                        call(array.data.ptr, array.nbytes, byte, other, self._stream.ptr)

    def ended(self) -> Any:
        """An event where all that was posted ends."""
        with self.on():
            return self._stream.record()

    def wait(self, event: Any) -> None:
        """Let the current stream wait."""
        with self.on():
            self._cupy.cuda.get_current_stream().wait_event(event)

    def abort(self) -> None:
        """Give the communicator back; kernels that wait end."""
        with self.on():
            self.nccl.abort()

    def free_memory(self) -> int:
        """Bytes that the GPU, or CuPy's pool, can still give."""
        with self.on():
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            return int(free + self._cupy.get_default_memory_pool().free_bytes())


class Devices(Communicator):
    """Ranks on GPUs that one process runs, all or one of several."""

    def __init__(self, gpus: Mapping[int, _Gpu], size: int, rank: int | None = None) -> None:
        super().__init__(size, rank)
        self._gpus = gpus  # of own ranks

    @classmethod
    def of(cls, devices: Sequence[int]) -> Devices:
        """All ranks."""
        found = nccl_module().NcclCommunicator.initAll(list(devices))
        gpus = map(_Gpu, devices, found)
        return cls(dict(enumerate(gpus)), len(devices))

    def check_library(self, name: str, array: Array) -> None:
        """Raise a TypeError for NumPy arrays."""
        if not is_cupy(array):
            fix = 'connect with transport="host" for NumPy arrays'
            raise wrong_type(name, "a NumPy array", "CuPy arrays over NCCL", fix)

    def start(self, exchanges: Mapping[int, Exchange]) -> _Begun:
        """Begin all in one group."""
        nccl = nccl_module()
        nccl.groupStart()
        try:
            for rank, gpu in self._gpus.items():
                gpu.post(exchanges[rank])
        finally:
            nccl.groupEnd()
        events = {rank: gpu.ended() for rank, gpu in self._gpus.items()}
        return _Begun(events, exchanges)

    def wait(self, ticket: _Begun) -> None:
        """Let the current stream of each GPU wait; what was sent is held until here."""
        for rank, gpu in self._gpus.items():
            gpu.wait(ticket.events[rank])

    def on(self, rank: int) -> Any:
        """Context in which a rank's GPU is current."""
        return self._gpus[rank].on()

    def free_memory(self, rank: int) -> int | None:
        """Bytes that a rank's GPU can still give."""
        return self._gpus[rank].free_memory()

    def give_up(self, error: BaseException) -> None:
        """Let each GPU wait for what has begun, before the memory of its arrays is given away."""
        del error
        for gpu in self._gpus.values():
            gpu.wait(gpu.ended())

    def close(self) -> None:
        """Give the communicators back."""
        for gpu in self._gpus.values():
            gpu.abort()


class Nccl(Devices):
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

    def start(self, exchanges: Mapping[int, Exchange]) -> _Begun:
        """Begin on the communicator's stream."""
        self.check()
        begun = super().start(exchanges)
        exchange = exchanges[self.rank]
        other = next((r for r, _ in (*exchange.receives, *exchange.sends)), self.rank)
        self._begun.append(_Awaited(begun.events[self.rank], time.monotonic(), other))
        self.control.progress += 1
        return begun

    def wait(self, ticket: _Begun) -> None:
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


def devices_of(devices: Any) -> tuple[int, ...]:
    """Numbers of GPUs, each once."""
    expected = "a list of different numbers of GPUs"
    if not isinstance(devices, list | tuple | range):
        raise wrong_type("devices", shown(devices), expected)
    numbers = tuple(devices)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise wrong_type("devices", shown(devices), expected)
    number = imported_cupy().cuda.runtime.getDeviceCount()
    if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(number)):
        raise wrong_value("devices", shown(devices), f"{expected} from 0 to {number - 1}")
    return numbers


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
