"""What do ranks on GPUs have in common, however their arrays travel?

Each GPU has a stream of its own for what travels. It waits for what the caller's stream has done so
far, and the caller's stream waits for it where the schedule says so: the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cuflash._arrays import Array, imported_cupy, is_cupy
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash.distributed._communicator import Communicator, Exchange


class Gpu:
    """One GPU and its stream."""

    def __init__(self, device: int) -> None:
        self._cupy = imported_cupy()
        self.device = device
        with self.on():
            self.stream = self._cupy.cuda.Stream(non_blocking=True, priority=-1)

    def on(self) -> Any:
        """Context in which the GPU is current."""
        return self._cupy.cuda.Device(self.device)

    def done(self) -> Any:
        """An event where the current stream has come."""
        with self.on():
            return self._cupy.cuda.get_current_stream().record()

    def ended(self) -> Any:
        """An event where all that was posted ends."""
        with self.on():
            return self.stream.record()

    def wait(self, event: Any) -> None:
        """Let the current stream wait."""
        with self.on():
            self._cupy.cuda.get_current_stream().wait_event(event)

    def free_memory(self) -> int:
        """Bytes that the GPU, or CuPy's pool, can still give."""
        with self.on():
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            return int(free + self._cupy.get_default_memory_pool().free_bytes())


class Begun(NamedTuple):
    """Exchanges by rank, which hold arrays, and for each rank where they end on streams."""

    events: Mapping[int, tuple[Any, ...]]
    exchanges: Mapping[int, Exchange]


class Devices(Communicator):
    """Ranks on GPUs that one process runs, all or one of several."""

    def __init__(self, gpus: Mapping[int, Gpu], size: int, rank: int | None = None) -> None:
        super().__init__(size, rank)
        self.gpus = gpus  # of own ranks

    def check_library(self, name: str, array: Array) -> None:
        """Raise a TypeError for NumPy arrays."""
        if not is_cupy(array):
            fix = 'connect with transport="host" for NumPy arrays'
            raise wrong_type(name, "a NumPy array", "CuPy arrays for ranks on GPUs", fix)

    def wait(self, ticket: Begun) -> None:
        """Let the current stream of each GPU wait; what was sent is held until here."""
        for rank, gpu in self.gpus.items():
            for event in ticket.events[rank]:
                gpu.wait(event)

    def on(self, rank: int) -> Any:
        """Context in which a rank's GPU is current."""
        return self.gpus[rank].on()

    def free_memory(self, rank: int) -> int | None:
        """Bytes that a rank's GPU can still give."""
        return self.gpus[rank].free_memory()

    def give_up(self, error: BaseException) -> None:
        """Let each GPU wait for what has begun, before the memory of its arrays is given away."""
        del error
        ends = [gpu.ended() for gpu in self.gpus.values()]
        for gpu in self.gpus.values():
            for event in ends:
                gpu.wait(event)


def devices_of(devices: Any) -> tuple[int, ...]:
    """Numbers of GPUs, each once."""
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
