"""How is a call over packed sequences described? By one Problem for all sequences.

The problem has the batch axes of q, k and v. Arrays of score options have one more first axis, the
sequences. On a GPU only kernels read the ends of sequences. Whatever the ends are, kernels stay
within the arrays, and end.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from cuflash._arrays import Array
from cuflash._errors import wrong_value
from cuflash._problem.operand import Operand, broadcastable, option_operand
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import Options, signature
from cuflash._problem.problem import Problem, check_arrays, describe

Layouts = tuple[tuple[str, Any], ...]  # (name, (shape, strides, dtype)) of each array


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
    """Validate one call; the two ``cu_seqlens`` have been checked."""
    # Arrays of options have an axis of sequences, which q, k and v lack: `_packed` adds them.
    absent: dict[str, Any] = {ARRAYS[name][0].name: None for name in options.arrays}
    same = replace(options, **absent)
    whole = describe(q, k, v, same, axes=axes, precision=precision, out=out)
    check_arrays(whole, options, q)
    ends = tuple((name, signature(array)) for name, array in cu_seqlens.items())
    return _packed(whole, ends, options.signature.arrays)


@functools.lru_cache(maxsize=4096)
def _packed(whole: Problem, cu_seqlens: Layouts, arrays: Layouts) -> Problem:
    ends = {name: Operand(dtype, shape, steps, ()) for name, (shape, steps, dtype) in cu_seqlens}
    sequences = ends["cu_seqlens_q"].shape[0] - 1
    operands = {name: _operand(whole, sequences, name, layout) for name, layout in arrays}
    limits = {}
    for axis, total, length in (
        ("m", whole.seqlen_q, whole.q_length_value),
        ("n", whole.seqlen_k, whole.kv_length_value),
    ):
        # Rows beyond an array's extents are no queries and no keys, wherever a sequence ends.
        extents = [
            operand.shape[len(operand.summed) + ARRAYS[name][1].index(axis)]
            for name, operand in operands.items()
            if axis in ARRAYS[name][1]
        ]
        limits[axis] = min(total, *extents, total if length is None else length)
    changes: dict[str, Any] = {**ends, **operands}
    return replace(whole, q_length_value=limits["m"], kv_length_value=limits["n"], **changes)


def _operand(whole: Problem, sequences: int, name: str, layout: Any) -> Operand:
    """Layout of an option's array, with the axes sequences, batch, core."""
    shape, core = layout[0], ARRAYS[name][1]
    full = (sequences, *whole.batch_shape)
    split = len(shape) - len(core)
    if not 0 <= split <= len(full) or not broadcastable(shape[:split], full):
        axes = ", ".join((str(sequences), *("1" for _ in full[1:]), *core))
        example = f"({axes}{',' * (len(full) + len(core) == 1)})"
        expected = (
            f"{sequences} or 1 sequences on axis 0, then the batch axes: for example {example}"
        )
        raise wrong_value(name, f"shape {shape}", expected)
    totals = {"m": whole.seqlen_q, "n": whole.seqlen_k}
    own = zip(core, shape[split:], strict=True)
    extents = tuple(totals[axis] if n == 1 else n for axis, n in own)
    return option_operand(layout, (sequences, *whole.batch), extents, whole.group_size)
