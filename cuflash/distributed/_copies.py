"""How do GPUs of one process exchange arrays? Each GPU copies from the memory of the others.

Copy engines do this and need no SM: a copy runs beside kernels that occupy every SM, where an NCCL
kernel would wait until a thread block ends. A rank's copies begin when the senders have reached the
exchange. A sender may change its arrays when all ranks that read them are done.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from cuflash._arrays import Array, imported_cupy
from cuflash.distributed._communicator import Exchange
from cuflash.distributed._gpus import Begun, Devices, Gpu


class Peers(Devices):
    """Ranks on GPUs of one process that can access each other's memory."""

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__(dict(enumerate(map(Gpu, devices))), len(devices))
        runtime = imported_cupy().cuda.runtime
        for gpu, other in itertools.permutations(self.gpus.values(), 2):
            with gpu.on(), contextlib.suppress(runtime.CUDARuntimeError):  # enabled before
                runtime.deviceEnablePeerAccess(other.device)

    def start(self, exchanges: Mapping[int, Exchange]) -> Begun:
        """Begin the copies of every rank on its own stream."""
        runtime = imported_cupy().cuda.runtime
        come = {rank: gpu.done() for rank, gpu in self.gpus.items()}
        sent: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)
        for rank, exchange in exchanges.items():
            for other, array in exchange.sends:
                sent[rank, other].append(array)
        read_by: dict[int, set[int]] = {rank: {rank} for rank in self.ranks}
        for rank, gpu in self.gpus.items():
            sources = dict.fromkeys(source for source, _ in exchanges[rank].receives)
            with gpu.on():
                for each in dict.fromkeys((rank, *sources)):
                    gpu.stream.wait_event(come[each])
                for source, array in exchanges[rank].receives:
                    read_by[source].add(rank)
                    there = sent[source, rank].popleft()
                    if array.nbytes:
                        runtime.memcpyPeerAsync(
                            array.data.ptr, gpu.device, there.data.ptr,
                            self.gpus[source].device, array.nbytes, gpu.stream.ptr,
                        )  # fmt: skip
        ended = {rank: gpu.ended() for rank, gpu in self.gpus.items()}
        events = {rank: tuple(ended[r] for r in sorted(read_by[rank])) for rank in self.ranks}
        return Begun(events, exchanges)


def are_peers(devices: Sequence[int]) -> bool:
    """Whether each GPU can access the memory of all others."""
    can = imported_cupy().cuda.runtime.deviceCanAccessPeer
    return all(can(*pair) for pair in itertools.permutations(devices, 2))
