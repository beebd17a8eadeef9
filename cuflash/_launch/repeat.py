"""What is a plan, and how is a plain call with a plan repeated? Results are new each time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._launch.kernel_launcher import KernelLauncher
from cuflash._launch.plan_cache import Repeat
from cuflash._launch.workspace import Workspace
from cuflash._problem.layout import Layout

#: Name, shape and dtype of an array to allocate.
New = tuple[str, tuple[int, ...], np.dtype[Any]]
Pick = Callable[[Any], tuple[int, ...]]  # picks the pointers of a launch from those of a call
_NOTHING = "nothing"  # name for absent operands, at address 0


class Plan(NamedTuple):
    """What calls with equal keys share: their launches in order, and their scratch memory."""

    launchers: tuple[KernelLauncher, ...]
    workspace: Workspace
    layouts: dict[str, Layout]  # by operand
    steps: tuple[tuple[Callable[..., None], Pick], ...]  # for each launch: run, pick its pointers

    @classmethod
    def of(
        cls,
        launchers: Sequence[KernelLauncher],
        workspace: Workspace,
        layouts: dict[str, Layout],
        operands: Mapping[str, int],
    ) -> Plan:
        """The plan of these launches. Only ``operands`` have an address; the others are absent."""
        places = {name: name for name in operands} | {"dropout_seed": "dropout_seed"}
        steps = tuple((own.run, _picking(own.names, places, _NOTHING)) for own in launchers)
        return cls(tuple(launchers), workspace, layouts, steps)

    def run(self, addresses: dict[str, int], stream: int, captured: bool = False) -> None:
        """Launch every kernel on ``stream``."""
        addresses[_NOTHING] = 0
        for run, pick in self.steps:
            run(pick(addresses), stream, captured)


def _picking(names: tuple[str, ...], places: Mapping[str, Any], nothing: Any) -> Pick:
    """A function that picks the operands ``names`` from ``places``, up to the last that exists."""
    last = max(number for number, name in enumerate(names) if name in places)
    return operator.itemgetter(*(places.get(name, nothing) for name in names[: max(last, 1) + 1]))


def repeat(
    plan: Plan,
    device: int,
    given: tuple[str, ...],
    results: tuple[New, ...],
    returned: Callable[..., Any],
) -> Repeat:
    """A function that repeats a checked call on new results, which ``returned`` wraps. (D66)

    It takes the addresses of the arrays called ``given``. In a capture it returns None, since
    nothing may be allocated.
    """
    parts = plan.workspace.addresses(0)  # offsets in memory that the pool has aligned
    names = (*given, *(name for name, _, _ in results), *parts)
    places = {name: place for place, name in enumerate(names)}
    steps = [(own.run, _picking(own.names, places, -1)) for own in plan.launchers]
    new = [(shape, dtype) for _, shape, dtype in results]
    size, offsets = plan.workspace.size, tuple(parts.values())

    def again(*pointers: int) -> Any:
        if runtime.getDevice() != device:
            with cupy.cuda.Device(device):
                return again(*pointers)
        stream = cupy.cuda.get_current_stream().ptr
        if runtime.streamIsCapturing(stream):  # this call also gives a new thread its context (D67)
            return None
        made, addresses = [], [*pointers]
        for shape, dtype in new:
            array = cupy.ndarray(shape, dtype)
            made.append(array)
            addresses.append(array.data.ptr)
        if size:
            memory = cupy.ndarray(size, np.uint8)
            start = memory.data.ptr
            addresses += [start + offset for offset in offsets]
        addresses.append(0)
        for run, pick in steps:
            run(pick(addresses), stream)
        return returned(*made)

    return again
