"""Is a write beside an array noticed, whatever becomes of the array afterwards?"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import guards
from support.guards import GUARD, PATTERN, Guards
from support.nvrtc import compiler_of


@dataclass(frozen=True)
class Place:
    """A place in the memory of `HostMemory`."""

    ptr: int

    def __add__(self, offset: int) -> Place:
        return Place(self.ptr + offset)


@dataclass
class HostMemory:
    """A simulated device, whose memory is a NumPy array with blocks one after the other."""

    bytes: np.ndarray = field(default_factory=lambda: np.zeros(1 << 16, np.uint8))
    end: int = 0
    is_captured: bool = False
    compared: list[int] = field(default_factory=list)  # guards of each comparison

    def malloc(self, size: int) -> Place:
        place = Place(self.end)
        self.end += -(-size // GUARD) * GUARD
        return place

    def capturing(self) -> bool:
        return self.is_captured

    def fill(self, address: int) -> None:
        self.bytes[address : address + GUARD] = PATTERN

    def device(self) -> int:
        return 0

    def damaged(self, device: int, addresses: Sequence[int]) -> np.ndarray:
        self.compared.append(len(addresses))
        return np.array([(self.bytes[a : a + GUARD] != PATTERN).any() for a in addresses])


def kernel(memory: HostMemory, place: Place, first: int, last: int) -> None:
    """Write bytes ``first`` to ``last`` - 1 of an array."""
    memory.bytes[place.ptr + first : place.ptr + last] = 0


def test_writes_inside_arrays_are_theirs() -> None:
    memory = HostMemory()
    allocator = Guards(memory)
    places = {size: allocator.malloc(size) for size in (1, 511, 512, 513, 4000)}
    for size, place in places.items():
        assert place.ptr % GUARD == 0
        kernel(memory, place, 0, size)
    allocator.check()
    assert memory.compared == [2 * len(places)], "all guards are compared at once"


@pytest.mark.parametrize("size", [1, 511, 512, 513])
@pytest.mark.parametrize(
    ("byte", "side"), [(-1, "in front of"), (-GUARD, "in front of"), (0, "behind"), (511, "behind")]
)
def test_one_byte_beside_an_array(byte: int, side: str, size: int) -> None:
    memory = HostMemory()
    allocator = Guards(memory)
    allocator.malloc(100)
    place = allocator.malloc(size)
    first = byte + size * (side == "behind")
    kernel(memory, place, first, first + 1)
    with pytest.raises(AssertionError, match=rf"written {side} an array of {size} bytes$"):
        allocator.check()


def test_the_oldest_blocks_are_let_go_and_what_they_showed_is_kept() -> None:
    memory = HostMemory()
    allocator = Guards(memory, kept=8 * GUARD)
    kernel(memory, allocator.malloc(GUARD), 0, GUARD + 1)
    for _ in range(2):
        allocator.malloc(GUARD)
    assert memory.compared == [4]
    assert len(allocator.blocks) == 1
    assert allocator.held == 3 * GUARD
    with pytest.raises(AssertionError, match=r"behind an array of 512 bytes$"):
        allocator.check()
    assert not allocator.blocks
    assert allocator.held == 0


def test_nothing_is_written_to_a_stream_that_is_captured() -> None:
    memory = HostMemory(is_captured=True)
    allocator = Guards(memory)
    assert (allocator.malloc(100).ptr, allocator.malloc(100).ptr) == (0, GUARD)
    memory.is_captured = False
    assert allocator.malloc(0).ptr == 2 * GUARD == memory.end
    allocator.check()
    assert not memory.bytes.any()


class HostArray(np.ndarray):
    """An array of the simulated CuPy."""

    get = np.ndarray.copy


def standing_for_cupy(memory: HostMemory, patch: pytest.MonkeyPatch) -> Any:
    """Return a simulated CuPy on host memory, with what the module uses."""
    allocators = [memory.malloc]

    def memset(address: int, value: int, size: int, _: int) -> None:
        memory.bytes[address : address + size] = value

    def compare(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        addresses, pattern, found = arguments
        assert grid == (len(addresses),) == found.shape
        for i, address in enumerate(addresses):
            found[i] = (memory.bytes[address : address + np.uint64(block[0])] != pattern).any()

    stream = SimpleNamespace(ptr=0, is_capturing=lambda: memory.is_captured)
    runtime = SimpleNamespace(
        memsetAsync=memset, getDevice=lambda: 0, CUDARuntimeError=RuntimeError
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        get_current_stream=lambda: stream,
        get_allocator=lambda: allocators[-1],
        set_allocator=allocators.append,
        using_allocator=nullcontext,
        Device=lambda _: nullcontext(SimpleNamespace(synchronize=lambda: None)),
    )
    cupy = SimpleNamespace(
        cuda=cuda,
        get_default_memory_pool=lambda: SimpleNamespace(malloc=memory.malloc),
        zeros=lambda *given: np.zeros(*given).view(HostArray),
        asarray=np.asarray,
    )
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setattr(guards, "_kernel", lambda: compare)
    return cupy


def test_the_allocator_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    cupy = standing_for_cupy(memory, monkeypatch)

    def run(first: int, last: int) -> None:
        with guards.guarded():
            malloc = cupy.cuda.get_allocator()
            assert malloc != memory.malloc
            kernel(memory, malloc(1000), first, last)
        assert cupy.cuda.get_allocator() == memory.malloc

    run(0, 1000)
    for beside, side in (((-1, 1000), "in front of"), ((0, 1001), "behind")):
        with pytest.raises(AssertionError, match=rf"written {side} an array of 1000 bytes$"):
            run(*beside)


@pytest.mark.nvrtc
def test_the_kernel_compiles(generation: int) -> None:
    compile_ = compiler_of(generation)
    assert compile_ is not None
    compile_(guards.SOURCE, ("-arch=sm_90",))


@pytest.mark.gpu
@pytest.mark.own_memory
@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize(("byte", "side"), [(-1, "in front of"), (1001, "behind")])
def test_one_byte_on_the_device(byte: int, side: str, freed: bool) -> None:
    import cupy

    def write_beside() -> None:
        arrays = [cupy.zeros(size, np.uint8) for size in (1000, 1001, 1002)]
        cupy.cuda.runtime.memset(arrays[1].data.ptr + byte, 0, 1)
        if freed:
            arrays.clear()
            gc.collect()
        cupy.zeros(1001, np.uint8)

    with (
        pytest.raises(AssertionError, match=rf"written {side} an array of 1001 bytes$"),
        guards.guarded(),
    ):
        write_beside()


@pytest.mark.gpu
def test_gpu_tests_are_guarded() -> None:
    import cupy

    assert isinstance(cupy.cuda.get_allocator().__self__, Guards)
    array = cupy.zeros(1001, np.uint8)
    assert array.data.ptr % GUARD == 0
    cupy.cuda.runtime.memset(array.data.ptr, 1, array.nbytes)
    with cupy.cuda.Stream(non_blocking=True):
        assert array.copy().get().all()


@pytest.mark.gpu
@pytest.mark.own_memory
def test_tests_of_memory_are_not() -> None:
    import cupy

    assert not isinstance(getattr(cupy.cuda.get_allocator(), "__self__", None), Guards)
