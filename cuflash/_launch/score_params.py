"""Which parameters of score options do kernels get? Numbers, layouts and arrays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from cuflash._arrays import Array, array_module, refuse_capture
from cuflash._kernels import segment_bounds
from cuflash._problem.formulas import formula_arrays, formulas_of
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand, canonical_view
from cuflash._problem.option_table import ARRAYS, OPTIONS
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem, changed

_LENGTHS = tuple(name for name, (option, _) in ARRAYS.items() if option.from_host)
_SEGMENTS = ("segment_ids_q", "segment_ids_k")
_PACKING = ("cu_seqlens_q", "cu_seqlens_k")
_INTEGERS = {np.dtype(np.int32), np.dtype(np.int64)}  # dtypes that kernels read
_UNBOUNDED = 1 << 60  # largest offset and window that kernels get
_DISTANCE = 1 << 30  # no key is that far from a query


def fill(score: Any, problem: Problem) -> None:
    """Write the numbers of ``ScoreParams``."""
    q_length = problem.seqlen_q if problem.q_length_value is None else problem.q_length_value
    score["num_queries"] = problem.num_queries or 0
    kv_length = problem.seqlen_k if problem.kv_length_value is None else problem.kv_length_value
    offset = kv_length - q_length if problem.offset_value is None else problem.offset_value
    score["offset_value"] = max(-_UNBOUNDED, min(offset, _UNBOUNDED))
    left, right = (
        0 if bound is None else min(bound, _UNBOUNDED)
        for bound in (problem.window_left, problem.window_right)
    )
    score["window_left"], score["window_right"] = left, right
    score["diagonal_begin"] = max(-_DISTANCE, min(offset - left, _DISTANCE))
    score["diagonal_end"] = max(-_DISTANCE, min(offset + right + 1, _DISTANCE))
    score["seqlen_q"], score["seqlen_k"] = problem.seqlen_q, problem.seqlen_k
    score["num_heads"] = problem.num_heads + problem.origin.heads_elsewhere
    score["first_query"], score["first_key"] = problem.origin.query, problem.origin.key
    if problem.cu_seqlens_q is not None:
        score["num_sequences"] = problem.cu_seqlens_q.shape[0] - 1
    score["q_length"], score["kv_length"] = q_length, kv_length
    for option in OPTIONS:
        if option.number is None or getattr(problem, option.name) is not None:
            for name, (_, value, _) in option.params.items():
                score[name] = value(problem)


def recomputes_far_rows(problem: Problem) -> bool:
    """Whether kernels compute rows far from 0 pair by pair: ``score/score.cuh`` says why."""
    formula = problem.formulas is not None and problem.formulas.score_mod
    return problem.dtype == np.float64 or (problem.bias is None and not formula)


def layouts(problem: Problem) -> dict[str, Layout]:
    """Layouts of the option arrays that a problem has, by name."""
    named = {name: getattr(problem, name) for name in (*ARRAYS, *_PACKING)}
    found = {name: _layout(problem, name, o) for name, o in named.items() if o is not None}
    if problem.segment_ids_q is not None:
        packed = problem.cu_seqlens_q is not None
        found |= segment_bounds.bounds_of(problem).layouts(packed)
    if problem.dropout or problem.formulas is not None:
        steps = tuple(itertools.accumulate((1, *problem.batch[::-1]), int.__mul__))[::-1]
        heads, whole = problem.num_heads, problem.num_heads + problem.origin.heads_elsewhere
        steps = tuple(s // heads * whole if s >= heads else s for s in steps)
        found["entry_number"] = Layout(1, steps[1:], sequence=steps[0])
    return found


def _layout(problem: Problem, name: str, operand: Operand) -> Layout:
    if name in _PACKING:
        return Layout(operand.dtype.itemsize, (0,) * len(problem.batch))
    layout = Layout.of(operand)
    if problem.cu_seqlens_q is None:
        return layout
    return layout._replace(batch=layout.batch[1:], sequence=layout.batch[0])


def arrays_of(
    problem: Problem, options: Options, q: Array, cu_seqlens: Mapping[str, Array]
) -> tuple[Problem, dict[str, Array]]:
    """The problem with the layouts of the arrays of score options, and these arrays by name.

    Kernels read int32 and int64. Lengths and offsets of other dtypes or in host memory are copied
    without broadcast axes. So are segment ids and cu_seqlens, unless both arrays are contiguous and
    of one of these dtypes. The caller holds the arrays until its last launch: no other call may get
    their memory before.
    """
    formulas = formulas_of(options)
    if not options.arrays and not cu_seqlens and formulas is None:
        return problem, {}
    arrays = {**options.arrays, **cu_seqlens}
    if formulas is not None:
        problem = changed(problem, formulas=formulas)
        arrays |= formula_arrays(options, q)
    copied = [
        name
        for name in _LENGTHS
        if name in arrays
        and (isinstance(arrays[name], np.ndarray) or arrays[name].dtype not in _INTEGERS)
    ]
    for names in (_SEGMENTS, _PACKING):
        if any(name in arrays for name in names) and not _alike(problem, names):
            copied += names
    of_ids = {arrays[name].dtype for name in _SEGMENTS if name in arrays}
    for name in copied:
        refuse_capture(name, "contiguous int32 or int64 arrays on the device")
        operand: Operand = getattr(problem, name)
        shared = [not stride for stride in operand.strides[: len(operand.summed)]]
        index = *(slice(1 if s else None) for s in shared), ...
        own = canonical_view(arrays[name], operand)[index]
        array = cupy.asarray(_as_int64(own, of_ids if name in _SEGMENTS else set()))
        steps = [0 if s else n for s, n in itertools.zip_longest(shared, array.strides)]
        operand = replace(operand, dtype=array.dtype, strides=tuple(steps))
        arrays[name], problem = array, changed(problem, **{name: operand})
    return problem, arrays


def _as_int64(integers: Array, others: set[np.dtype[Any]]) -> Array:
    """As int64 in C order, equal to the same ids of arrays with dtypes ``others`` as before.

    Where one dtype is uint64 and one is signed, uint64 above int64 become -1 and negative ids -2.
    """
    xp, dtype = array_module(integers), integers.dtype
    if dtype == np.uint64 and any(other.kind == "i" for other in others):
        return xp.where(integers > np.iinfo(np.int64).max, -1, integers.astype(np.int64))
    if dtype.kind == "i" and np.dtype(np.uint64) in others:
        return xp.where(integers < 0, -2, integers.astype(np.int64))
    return integers.astype(np.int64, order="C")


def _alike(problem: Problem, names: tuple[str, ...]) -> bool:
    """Whether integer arrays (.., n) are of one dtype that kernels read, and contiguous."""
    operands: list[Operand] = [getattr(problem, name) for name in names]
    dtypes = {operand.dtype for operand in operands}
    return (
        len(dtypes) == 1
        and dtypes <= _INTEGERS
        and all(o.shape[-1] == 1 or o.strides[-1] == o.dtype.itemsize for o in operands)
    )
