"""What is a call over packed sequences to the kernels? One Problem of all of them.

Its batch is that of q, k and v; arrays of score options have the sequences as one axis more, the
first. Where sequences end is not read by the host: kernels look it up, and stay within the arrays
whatever they find.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from cuflash._arrays import Array
from cuflash._errors import problem_with
from cuflash._problem.options import OPTION_NAMES, Options, signature
from cuflash._problem.problem import (
    FLOATS,
    Operand,
    Problem,
    check_lengths,
    check_module,
    checked_length,
    describe,
    option_operand,
)

_LENGTHS = ("q_lengths", "kv_lengths")
_FLOATING = ("bias", "alibi_slopes", "sink")
#: Core axes of options that have any: 0 for queries, 1 for keys.
_CORES = {"bias": (0, 1), "mask": (0, 1), "segment_ids_q": (0,), "segment_ids_k": (1,)}


def describe_packed(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    cu_seqlens: dict[str, Array],
    *,
    axes: Any,
    precision: str | None,
    out: Array | None = None,
) -> Problem:
    """Validate one call on a GPU; the two ``cu_seqlens`` have been checked."""
    whole = describe(q, k, v, _of_all(options), axes=axes, precision=precision, out=out)
    for name, array in options.arrays.items():
        check_module(name, array, q)
    check_lengths(whole, options)
    lengths = [
        checked_length(name, getattr(options, name), extent)
        for name, extent in zip(_LENGTHS, (whole.seqlen_q, whole.seqlen_k), strict=True)
    ]
    return _packed(
        whole,
        tuple((name, signature(array)) for name, array in cu_seqlens.items()),
        tuple((name, signature(array)) for name, array in options.arrays.items()),
        tuple(lengths),
    )


def _of_all(options: Options) -> Options:
    """The options that say the same of every sequence, lengths apart."""
    apart = {"segment_ids", *_LENGTHS, *options.arrays}
    return Options(**{n: getattr(options, n) for n in OPTION_NAMES if n not in apart})


@functools.lru_cache(maxsize=4096)
def _packed(
    whole: Problem,
    cu_seqlens: tuple[tuple[str, Any], ...],
    arrays: tuple[tuple[str, Any], ...],
    lengths: tuple[int | None, ...],
) -> Problem:
    ends = {name: Operand(dtype, shape, steps, ()) for name, (shape, steps, dtype) in cu_seqlens}
    sequences = ends["cu_seqlens_q"].shape[0] - 1
    operands = {name: _operand(whole, sequences, name, value) for name, value in arrays}
    limits = [whole.seqlen_q, whole.seqlen_k]
    for axis, length in enumerate(lengths):
        # What an array does not hold is no query and no key, wherever a sequence ends.
        for option, operand in operands.items():
            if axis in _CORES.get(option, ()):
                extent = operand.shape[len(operand.summed) + _CORES[option].index(axis)]
                limits[axis] = min(limits[axis], extent)
        limits[axis] = min(limits[axis], limits[axis] if length is None else length)
    lowest, highest = limits
    changes: dict[str, Any] = {**ends, **operands}
    return replace(whole, q_length_value=lowest, kv_length_value=highest, **changes)


def _operand(whole: Problem, sequences: int, name: str, value: Any) -> Operand:
    """Layout of an option's array: sequences, batch, core."""
    shape, _, dtype = value
    cores = _CORES.get(name, ())
    ndim = len(whole.batch_shape) + 1
    lead = (1,) * (ndim - len(shape) + len(cores)) + shape[: len(shape) - len(cores)]
    full = (sequences, *whole.batch_shape)
    fits = len(shape) >= len(cores) and len(lead) == ndim
    if not fits or any(a not in (1, b) for a, b in zip(lead, full, strict=True)):
        raise problem_with(
            name, ValueError, got=f"shape {shape}",
            expected=f"at most {ndim + len(cores)} axes, sequences first: "
            f"{full} or 1 in each before the core",
        )  # fmt: skip
    if name in _FLOATING and dtype not in FLOATS:
        raise problem_with(
            name, TypeError, got=f"dtype {dtype}", expected="a floating dtype of 16, 32 or 64 bits"
        )
    totals = (whole.seqlen_q, whole.seqlen_k)
    own = shape[len(shape) - len(cores) :]
    extents = tuple(totals[axis] if n == 1 else n for axis, n in zip(cores, own, strict=True))
    grouped = len(whole.batch) != len(whole.batch_shape)
    batch = (sequences, *whole.batch)
    return option_operand(value, batch, extents, whole.batch[-1] if grouped else None)
