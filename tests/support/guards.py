"""Did anything write beside an array? Guard bands surround every block that CuPy hands out.

`guarded` makes a test's allocations of three parts: a guard, the bytes asked for, a guard. Guards
hold a pattern. A block stays out of the pool until its guards have been compared, so that a write
beside an array that is already freed is found, too. The bands belong to the allocator, not to
single tests: outputs, gradients, workspaces and CuPy's own arrays all have them. Reads beside an
array are not seen (compute-sanitizer finds them, `tools/sanitize.py`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

#: Bytes of a guard. In front of the bytes asked for it keeps them as aligned as CuPy's blocks.
GUARD = 512
PATTERN = 0xA5
#: Bytes kept out of the pool. Beyond them the oldest blocks are compared and released.
KEPT = 256 << 20

SOURCE = Path(__file__).with_name("guards.cu").read_text(encoding="utf-8")


class Memory(Protocol):
    """What guards need of a device."""

    def malloc(self, size: int) -> Any:
        """Return memory of the pool, with ``ptr``; adding an integer gives a position inside."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured, when nothing may be written."""

    def fill(self, address: int) -> None:
        """Write the pattern to a guard, in the current stream's order."""

    def device(self) -> int:
        """Return the current device."""

    def damaged(self, device: int, addresses: Sequence[int]) -> np.ndarray:
        """Return whether each guard at ``addresses`` lost its pattern, once the device is idle."""


@dataclass(frozen=True)
class Block:
    """One block with its guards, kept from being used again."""

    memory: Any
    size: int  # bytes asked for
    device: int

    @property
    def guards(self) -> tuple[int, int]:
        """Return the addresses of the guards in front and behind."""
        return self.memory.ptr, self.memory.ptr + GUARD + self.size

    @property
    def taken(self) -> int:
        """Return the bytes of the block with both guards."""
        return self.size + 2 * GUARD


class Guards:
    """An allocator of guarded blocks."""

    def __init__(self, memory: Memory, kept: int = KEPT) -> None:
        self.memory = memory
        self.kept = kept
        self.blocks: deque[Block] = deque()  # oldest first
        self.held = 0  # bytes of `blocks`
        self.lock = threading.Lock()  # for both
        self.damages: list[str] = []

    def malloc(self, size: int) -> Any:
        """Return a block for CuPy."""
        if not size or self.memory.capturing():
            return self.memory.malloc(size)
        block = Block(self.memory.malloc(size + 2 * GUARD), size, self.memory.device())
        for guard in block.guards:
            self.memory.fill(guard)
        with self.lock:
            self.blocks.append(block)
            self.held += block.taken
        if self.held > self.kept:
            self.compare(down_to=self.kept // 2)
        return block.memory + GUARD

    def compare(self, down_to: int = 0) -> None:
        """Compare and release the oldest blocks until ``down_to`` bytes are kept."""
        of_device: dict[int, list[Block]] = {}
        with self.lock:
            while self.blocks and self.held > down_to:
                block = self.blocks.popleft()
                self.held -= block.taken
                of_device.setdefault(block.device, []).append(block)
        for device, blocks in of_device.items():
            addresses = [guard for block in blocks for guard in block.guards]
            damaged = self.memory.damaged(device, addresses).reshape(-1, 2)
            for number, side in np.argwhere(damaged):
                where = ("in front of", "behind")[side]
                self.damages.append(f"{where} an array of {blocks[number].size} bytes")

    def check(self) -> None:
        """Compare the guards of all blocks; raise if one was damaged."""
        self.compare()
        assert not self.damages, "memory was written " + "; ".join(self.damages)


class CupyMemory:
    """CuPy's default pool."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.malloc = cupy.get_default_memory_pool().malloc

    def capturing(self) -> bool:
        try:
            return bool(self.cupy.cuda.get_current_stream().is_capturing())
        except self.cupy.cuda.runtime.CUDARuntimeError:
            return True  # the default stream, beside one that is captured

    def fill(self, address: int) -> None:
        stream = self.cupy.cuda.get_current_stream().ptr
        self.cupy.cuda.runtime.memsetAsync(address, PATTERN, GUARD, stream)

    def device(self) -> int:
        return int(self.cupy.cuda.runtime.getDevice())

    def damaged(self, device: int, addresses: Sequence[int]) -> np.ndarray:
        cupy = self.cupy
        with cupy.cuda.Device(device) as current, cupy.cuda.using_allocator(self.malloc):
            current.synchronize()
            found = cupy.zeros(len(addresses), np.uint8)
            guards = cupy.asarray(np.array(addresses, np.uint64))
            _kernel()((len(addresses),), (GUARD,), (guards, np.uint8(PATTERN), found))
            return np.asarray(found.get(), bool)


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(SOURCE, "compare")


@contextmanager
def guarded() -> Iterator[None]:
    """Guard all allocations of CuPy inside, in all threads; raise at the end if one was damaged."""
    import cupy

    guards, before = Guards(CupyMemory()), cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(guards.malloc)
    try:
        yield
    finally:
        cupy.cuda.set_allocator(before)
    guards.check()
