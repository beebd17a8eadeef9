"""What do ranks on GPUs have in common, whether arrays travel by NCCL or by copies?

Each GPU has a second stream for transfers. A transfer waits for the work that was on the caller's
stream when the transfer was posted, and the caller's stream waits for the transfer where the
schedule says so. The host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cuflash._arrays import Array, imported_cupy, is_cupy
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash.distributed._communicator import Communicator, Exchange


class Gpu:
    """One GPU and its stream for transfers."""

    def __init__(self, device: int) -> None:
        self._cupy = imported_cupy()
        self.device = device
        with self.on():
            self.stream = self._cupy.cuda.Stream(non_blocking=True, priority=-1)

    def on(self) -> Any:
        """Context in which the GPU is current."""
        return self._cupy.cuda.Device(self.device)

    def done(self) -> Any:
        """An event after all work posted to the current stream."""
        with self.on():
            return self._cupy.cuda.get_current_stream().record()

    def ended(self) -> Any:
        """An event after all transfers posted so far."""
        with self.on():
            return self.stream.record()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        with self.on():
            self._cupy.cuda.get_current_stream().wait_event(event)

    def free_memory(self) -> int:
        """Bytes that are free on the GPU or in CuPy's pool."""
        with self.on():
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            return int(free + self._cupy.get_default_memory_pool().free_bytes())


class Begun(NamedTuple):
    """Exchanges by rank (which keep the arrays alive), and the events that end them by rank."""

    events: Mapping[int, tuple[Any, ...]]
    exchanges: Mapping[int, Exchange]


class Devices(Communicator):
    """Ranks on GPUs. This process runs all of them, or one."""

    def __init__(self, gpus: Mapping[int, Gpu], size: int, rank: int | None = None) -> None:
        super().__init__(size, rank)
        self.gpus = gpus  # by own rank

    def check_library(self, name: str, array: Array) -> None:
        """Raise a TypeError for NumPy arrays."""
        if not is_cupy(array):
            fix = 'connect with transport="host" for NumPy arrays'
            raise wrong_type(name, "a NumPy array", "CuPy arrays for ranks on GPUs", fix)

    def wait(self, ticket: Begun) -> None:
        """Let the current stream of each GPU wait. Sent arrays are kept alive until here."""
        for rank, gpu in self.gpus.items():
            for event in ticket.events[rank]:
                gpu.wait(event)

    def on(self, rank: int) -> Any:
        """Context in which a rank's GPU is current."""
        return self.gpus[rank].on()

    def free_memory(self, rank: int) -> int | None:
        """Bytes that are free on a rank's GPU."""
        return self.gpus[rank].free_memory()

    def give_up(self, error: BaseException) -> None:
        """Let each GPU wait for transfers that have begun, before their arrays may be reused."""
        del error
        ends = [gpu.ended() for gpu in self.gpus.values()]
        for gpu in self.gpus.values():
            for event in ends:
                gpu.wait(event)


def devices_of(devices: Any) -> tuple[int, ...]:
    """Checked numbers of GPUs, all different."""
    expected = "a list of distinct GPU numbers"
    if not isinstance(devices, list | tuple | range):
        raise wrong_type("devices", shown(devices), expected)
    numbers = tuple(devices)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise wrong_type("devices", shown(devices), expected)
    number = imported_cupy().cuda.runtime.getDeviceCount()
    if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(number)):
        raise wrong_value("devices", shown(devices), f"{expected} from 0 to {number - 1}")
    return numbers
