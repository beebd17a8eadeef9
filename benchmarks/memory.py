"""How fast is each level of the device's memory, and how long does a single access take?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuflash._select.hardware import Hardware, present
from cuflash._timing.clock import DeviceClock

_SOURCES = Path(__file__).with_name("memory_cu")
_ROUNDS = 15
_THREADS = 512
_AT_ONCE = 4  # vectors that a thread moves together
_BLOCKS_A_PROCESSOR = 4
_SHARED_BLOCKS, _SHARED_THREADS, _SHARED_REPEATS = 2, 1024, 2000
_SHARED_BYTES = 16 * 16  # read by a thread in one repeat
_LINE_WORDS = 32  # 128 bytes: no two reads of a chain share a line
_STEPS = 4000


class Level(NamedTuple):
    """One measured property of a level of memory."""

    name: str
    value: float
    unit: str
    sheet: float | None = None  # value of the data sheet, if it has one


def measure() -> list[Level]:
    """Measure every level of the current device; RuntimeError without a device."""
    hardware = present()
    if hardware is None:
        raise RuntimeError("bench --memory: no NVIDIA device can be used")
    bench = _Bench(hardware)
    found: list[Level] = []
    for step in (bench.device_memory, bench.l2, bench.shared, bench.latencies):
        found += step()
    return found


class _Bench:
    def __init__(self, hardware: Hardware) -> None:
        import cupy

        self.cupy, self.hardware, self.clock = cupy, hardware, DeviceClock()
        self.blocks = hardware.multiprocessors * _BLOCKS_A_PROCESSOR
        self.sink = cupy.zeros(1, cupy.uint32)
        self._round = 16 * _AT_ONCE * self.blocks * _THREADS  # bytes

    def _median_ms(self, call: Callable[[], Any], *, cold: bool) -> float:
        with self.clock.scope():
            call()
            if cold:
                return statistics.median(self.clock.once(call) for _ in range(_ROUNDS))
            return statistics.median(self.clock.between_events(call)[0] for _ in range(_ROUNDS))

    def _kernel(self, name: str) -> Callable[..., None]:
        code = (_SOURCES / f"{name}.cu").read_text(encoding="utf-8")
        module = self.cupy.RawModule(code=code, options=("--std=c++17",))
        kernel = module.get_function(f"cuflash_{name}")
        return lambda grid, block, *given: kernel((grid,), (block,), given)

    def _whole_rounds(self, size: int) -> int:
        """``size`` rounded down so that all threads move equally many bytes: see ``read.cu``."""
        return size // self._round * self._round

    def device_memory(self) -> list[Level]:
        """Read, write and copy arrays of 1 GiB, of which nothing is in L2."""
        cupy = self.cupy
        size = self._whole_rounds(1 << 30)
        source, target = cupy.ones(size, cupy.uint8), cupy.empty(size, cupy.uint8)
        vectors = np.int64(size // 16)
        read, write, copy = (self._kernel(name) for name in ("read", "write", "copy"))
        calls: dict[str, tuple[Callable[[], None], int]] = {
            "device memory read": (
                lambda: read(self.blocks, _THREADS, source, self.sink, vectors, np.int32(1)), size
            ),
            "device memory write": (
                lambda: write(self.blocks, _THREADS, target, vectors, np.uint32(7)), size
            ),
            "device memory copy": (
                lambda: copy(self.blocks, _THREADS, source, target, vectors), 2 * size
            ),
        }  # fmt: skip
        sheet = self.hardware.peak.gbytes if self.hardware.peak else None
        return [
            Level(name, moved / self._median_ms(call, cold=True) / 1e6, "GB/s", sheet)
            for name, (call, moved) in calls.items()
        ]

    def l2(self) -> list[Level]:
        """Repeatedly read a quarter of L2, or one round of all threads if that is more."""
        size, repeats = max(self._whole_rounds(self.hardware.l2_bytes // 4), self._round), 40
        source = self.cupy.ones(size, self.cupy.uint8)
        read = self._kernel("read")

        def call() -> None:
            read(self.blocks, _THREADS, source, self.sink, np.int64(size // 16), np.int32(repeats))

        return [Level("L2 read", repeats * size / self._median_ms(call, cold=False) / 1e6, "GB/s")]

    def shared(self) -> list[Level]:
        """Every multiprocessor reads 32 KiB of its own."""
        shared = self._kernel("shared")
        blocks = self.hardware.multiprocessors * _SHARED_BLOCKS

        def call() -> None:
            repeats, step = np.int32(_SHARED_REPEATS), np.int32(_SHARED_THREADS)
            shared(blocks, _SHARED_THREADS, self.sink, repeats, step)

        moved = blocks * _SHARED_THREADS * _SHARED_REPEATS * _SHARED_BYTES
        ms = self._median_ms(call, cold=False)
        return [Level("shared memory read", moved / ms / 1e6, "GB/s")]

    def latencies(self) -> list[Level]:
        """Dependent accesses of one thread: within L2, and in an array too large for L2."""
        found = []
        for level, size in (
            ("L2", self.hardware.l2_bytes // 8),
            ("device memory", 16 * self.hardware.l2_bytes),
        ):
            chain = self._chain(size // 4)
            found.append(self._latency(level, "read", chain))
            target = self.cupy.zeros(chain.size, self.cupy.int32)
            words = self.cupy.asarray([chain.size], np.int32)
            found.append(self._latency(level, "write", words, target))
        return found

    def _latency(self, level: str, way: str, *given: Any) -> Level:
        run = self._kernel(f"{way}_latency")
        last = self.cupy.zeros(1, self.cupy.int32)

        def call(steps: int) -> Callable[[], None]:
            return lambda: run(1, 1, *given, last, np.int32(steps))

        cold = level == "device memory"
        short, long = (self._median_ms(call(n), cold=cold) for n in (_STEPS, 3 * _STEPS))
        return Level(f"{level} {way} latency", 1e6 * (long - short) / (2 * _STEPS), "ns")

    def _chain(self, words: int) -> Any:
        """Indices of a cycle in random order that reads every cache line once."""
        lines = words // _LINE_WORDS
        order = np.random.default_rng(0).permutation(lines)
        order = np.roll(order, -int(np.flatnonzero(order == 0)[0]))  # the cycle starts at word 0
        following = np.zeros(words, np.int32)
        following[order * _LINE_WORDS] = np.roll(order, -1) * _LINE_WORDS
        return self.cupy.asarray(following)


def table(levels: list[Level]) -> str:
    """The measurements as lines."""
    lines = []
    for level in levels:
        share = ""
        if level.sheet is not None:
            share = f"  {level.value / level.sheet:.2f} of the data sheet"
        lines.append(f"{level.name:<28} {level.value:10.1f} {level.unit:<4}{share}")
    return "\n".join(lines)
