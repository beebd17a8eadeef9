"""May a result be written to this array?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash._arrays import Array, is_cupy, same_module
from cuflash._errors import wrong_value

#: Effort to prove that interleaved arrays do not overlap. Beyond it they count as overlapping.
_OVERLAP_WORK: Any = 100_000


def check_destination(name: str, destination: Array, **inputs: Array) -> None:
    """Raise unless ``destination`` can be written and overlaps neither itself nor an input.

    It must be of the same array library as the first input. Pass other destinations as inputs too.
    """
    first, like = next(iter(inputs.items()))
    same_module(**{first: like, name: destination})
    if isinstance(destination, np.ndarray) and not destination.flags.writeable:
        raise wrong_value(name, "a read-only array", "an array that can be written")
    if _overlaps_itself(destination):
        raise wrong_value(
            name, f"strides {destination.strides} of shape {destination.shape}",
            "an array whose elements do not overlap each other",
        )  # fmt: skip
    for other_name, other in inputs.items():
        if is_cupy(destination) == is_cupy(other) and _share_memory(destination, other):
            raise wrong_value(
                name, f"memory shared with {other_name}", "memory of its own",
                "results are never computed in place",
            )  # fmt: skip


def _overlaps_itself(array: Array) -> bool:
    """Whether two elements may share memory; also true for some axes that merely interleave."""
    if array.size == 0:
        return False
    reach = array.itemsize
    axes = zip(array.shape, array.strides, strict=True)
    for extent, stride in sorted((a for a in axes if a[0] > 1), key=lambda a: abs(a[1])):
        if abs(stride) < reach:
            return True
        reach += abs(stride) * (extent - 1)
    return False


def _share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays have an element in common: by addresses, on the host."""
    if a.size == 0 or b.size == 0:
        return False
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def _addresses(array: Array) -> Array:
    """A NumPy array with the same addresses; it must not be read if they are on a device."""
    if not is_cupy(array):
        return array
    interface = {"version": 3, "typestr": f"|V{array.itemsize}", "data": (array.data.ptr, True)}
    interface |= {"shape": array.shape, "strides": array.strides}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
