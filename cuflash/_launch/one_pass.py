"""How do CuPy's kernels add, round and copy in one pass, at the speed of memory?"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module, write_rounded

#: Elements that a thread takes. A thread of CuPy's own kernels takes one: 16.7 M elements then take
#: 80 us to be copied in 16 bits, or rounded to them from float32. Memory would take 16 or 24 us
#: (H200, 2026-11-28).
NEIGHBOURS = 8
_LOAD_BYTES = 16  # the most that a thread reads or writes at once
_BLOCK_SIZE = 256

#: Neighbours in memory, read and written by as few instructions as their alignment allows.
TYPES = f"""
template <typename E, int count>
struct alignas(count * sizeof(E) < {_LOAD_BYTES} ? count * sizeof(E) : {_LOAD_BYTES}) Neighbours {{
  E each[count];
}};
"""


def write_sum(total: Array, *parts: Array) -> None:
    """Write an array, or the sum of two, into ``total``: each element rounded once to its dtype.

    All have one shape, and parts one dtype. ``total`` may be one of the parts.
    """
    if parts[0].dtype == np.float64 and total.dtype.itemsize <= 2:
        write_rounded(total, functools.reduce(operator.add, parts))
    elif array_module(total) is np:
        _by_numpy(total, *parts)
    else:
        _by_kernel(total, *parts)


def in_dtype(dtype: Any, own: Array, *other: Array) -> Array:
    """An array, or its sum with another, in ``dtype``.

    ``own`` is overwritten if it has that dtype: nobody else may use it.
    """
    total = own if own.dtype == dtype else array_module(own).empty(own.shape, dtype)
    if other or total is not own:
        write_sum(total, own, *other)
    return total


def contiguous(array: Array) -> Array:
    """``array`` in C order; no copy if it is in C order already."""
    xp, itemsize = array_module(array), array.dtype.itemsize
    if xp is np or array.flags.c_contiguous or itemsize > np.dtype(np.uint64).itemsize:
        return xp.ascontiguousarray(array)
    copy, bits = xp.empty(array.shape, array.dtype), np.dtype(f"u{itemsize}")
    _by_kernel(copy.view(bits), array.view(bits))
    return copy


def _by_numpy(total: Array, *parts: Array) -> None:
    if len(parts) == 1:
        total[...] = parts[0]
    else:
        np.add(parts[0], parts[1], out=total, casting="unsafe")


def _by_kernel(total: Array, *parts: Array) -> None:
    by_neighbours(functools.partial(_kernel, array_module(total), len(parts)), *parts, total)


def by_neighbours(
    kernel: Callable[[int], Any], *arrays: Array, of_rows: tuple[Any, ...] = ()
) -> None:
    """Run a CuPy kernel with threads that take several neighbours of each array, or one element.

    ``kernel`` returns the kernel for a number of neighbours. Its first parameters are ``of_rows``:
    numbers, or arrays with one element for a whole row.
    """
    count = NEIGHBOURS if all(map(has_neighbours, arrays)) else 1
    if count > 1:
        arrays = tuple(a[..., ::count] for a in arrays)  # CuPy sees the first of each group only
    kernel(count)(*of_rows, *arrays, block_size=_BLOCK_SIZE)


def has_neighbours(array: Array) -> bool:
    """Whether rows consist of groups of neighbours, aligned so that a thread reads one at once."""
    itemsize = array.dtype.itemsize
    unit = min(NEIGHBOURS * itemsize, _LOAD_BYTES)
    return (
        array.ndim > 0
        and array.shape[-1] % NEIGHBOURS == 0
        and array.strides[-1] == itemsize
        and not any(distance % unit for distance in (array.data.ptr, *array.strides[:-1]))
    )


@functools.cache
def _kernel(xp: Any, terms: int, count: int) -> Any:
    names = ("a", "b")[:terms]
    inputs = ", ".join(f"S {name}" for name in names)
    own = f"cuflash_sum_of_{terms}_by_{count}"
    return xp.ElementwiseKernel(inputs, "T total", body(terms, count), own, preamble=TYPES)


def body(terms: int, count: int) -> str:
    """CUDA text of a thread: its parameters are references to the first of ``count`` neighbours."""
    names = ("a", "b")[:terms]
    reads = "".join(
        f"const auto from_{n} = reinterpret_cast<const Neighbours<S, {count}>&>({n});\n"
        for n in names
    )
    term = " + ".join(f"from_{n}.each[k]" for n in names)
    return f"""
{reads}Neighbours<T, {count}> rounded;
#pragma unroll
for (int k = 0; k < {count}; ++k) rounded.each[k] = T({term});
reinterpret_cast<Neighbours<T, {count}>&>(total) = rounded;
"""
