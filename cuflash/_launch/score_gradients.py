"""How do sums of kernels become the gradients of bias, slopes, sink and scale?"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import cupy
import numpy as np

from cuflash._arrays import Array, write_rounded
from cuflash._kernels.backward_dscore_sm80 import GradOf
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand, canonical_view, option_operand
from cuflash._problem.problem import Problem
from cuflash._select.score_sums import ScoreSums

_GROUP = 32  # rows that are added at once


def write(
    problem: Problem, name: GradOf, own: ScoreSums, sums: Array, gradient: Array, ends: Array | None
) -> None:
    """Add up what is left to add of ``sums``, and write the gradient of the input ``name``.

    ``ends`` is cu_seqlens_q, or None where sequences are not packed.
    """
    if name == "scale":
        gradient[...] = sums.sum()
        return
    core: tuple[int, ...] = gradient.shape[-2:] if name == "bias" else ()
    operand, view = _canonical(problem, gradient, core)
    if own.parts > 1:
        sums = functools.reduce(operator.add, sums)  # in the order of parts
    if name == "bias":
        if own.sums_to == "queries":
            sums = sums.sum(-1, keepdims=True) if core[0] == 1 else sums
            sums = sums[..., None]
        elif own.sums_to == "keys":
            sums = sums[..., None, :]
        rows, columns = sums.shape[-2:]
        write_rounded(view[..., :rows, :columns], sums)
    elif ends is None:
        write_rounded(view, sums.sum(-1))
    else:
        write_rounded(view, _added(of_sequences(sums, ends), operand.summed[:1]))


def layout(problem: Problem, gradient: Array) -> Layout:
    """Layout of the gradient of a bias, where a kernel writes it itself."""
    return Layout.of(_canonical(problem, gradient, gradient.shape[-2:])[0])


def write_sink(
    problem: Problem,
    rows: Array,
    lse: Array,
    sink: Array,
    gradient: Array,
    lengths: Array | None,
    ends: Array | None,
) -> None:
    """Write the gradient of the sink, from lse and delta of every query.

    ``rows``, of any shape, begins with lse and delta of each query; a query that sees no key has a
    delta of 0. Rows beyond ``lengths``, the array of ``q_lengths``, do not count, whatever ``rows``
    holds there.
    """
    dtype = problem.lse_dtype
    count = 2 * math.prod(problem.batch) * problem.seqlen_q
    statistics = rows.reshape(-1)[: dtype.itemsize * count].view(dtype)
    delta = statistics.reshape(*problem.batch, problem.seqlen_q, 2)[..., 1]
    lse = lse.reshape(delta.shape)
    lse = cupy.where(cupy.isneginf(lse), np.inf, lse)
    if sink.dtype == np.float64 != dtype:  # finite scores stay finite
        limit = float(np.finfo(np.float32).max)
        sink = cupy.where(cupy.isinf(sink), sink, cupy.clip(sink, -limit, limit))
    score = _canonical(problem, sink, ())[1].astype(dtype)
    operand, view = _canonical(problem, gradient, ())
    of_rows, places = _of_rows(problem, ends)
    shares = cupy.exp(of_rows(score) - lse) * delta
    if problem.q_length_value is not None:
        shares = cupy.where(places < problem.q_length_value, shares, 0)
    if lengths is not None and problem.q_lengths is not None:
        own = of_rows(canonical_view(lengths, problem.q_lengths))  # they may be an unbroadcast copy
        shares = cupy.where(places < own, shares, 0)
    sums = -shares.sum(-1) if ends is None else of_sequences(-shares, ends)
    write_rounded(view, _added(sums, operand.summed))


def _of_rows(problem: Problem, ends: Array | None) -> tuple[Callable[[Array], Array], Array]:
    """A function from values of entries to values of rows (.., m), and each row's query index."""
    rows = cupy.arange(problem.seqlen_q)
    if ends is None:
        return lambda values: values[..., None], rows
    numbers = cupy.searchsorted(ends[1:-1], rows, side="right")  # the sequence of each row

    def of_rows(values: Array) -> Array:
        each = cupy.broadcast_to(values, (ends.size - 1, *values.shape[1:]))
        return cupy.moveaxis(each, 0, -1)[..., numbers]

    return of_rows, rows - cupy.clip(ends, 0, problem.seqlen_q)[numbers]


def of_sequences(rows: Array, ends: Array) -> Array:
    """Sums over the rows (.., total) of each packed sequence: (sequences, ..), in float64.

    Rows before and after whole groups of ``_GROUP`` are added, then sums of groups in the same way.
    So rows of other sequences change neither a sum nor its rounding.
    """
    ends = cupy.clip(ends, 0, rows.shape[-1]).astype(np.int64)
    begin, end = ends[:-1], ends[1:]
    steps = cupy.arange(_GROUP)
    sums = cupy.zeros((*rows.shape[:-1], begin.size), np.float64)
    while rows.shape[-1]:
        whole = cupy.minimum(-(-begin // _GROUP) * _GROUP, end)
        rest = cupy.maximum(end // _GROUP * _GROUP, whole)
        for first, last in ((begin, whole), (rest, end)):
            at = first[:, None] + steps
            own = cupy.where(at < last[:, None], rows[..., cupy.minimum(at, rows.shape[-1] - 1)], 0)
            sums += own.sum(-1, dtype=np.float64)
        begin, end = whole // _GROUP, rest // _GROUP
        groups = rows.shape[-1] // _GROUP
        grouped = rows[..., : groups * _GROUP].reshape(*rows.shape[:-1], groups, _GROUP)
        rows = grouped.sum(-1, dtype=np.float64)
    return cupy.moveaxis(sums, -1, 0)


def _canonical(problem: Problem, array: Array, core: tuple[int, ...]) -> tuple[Operand, Array]:
    """Layout and view of an option's array, sequences first; extent 1 where it is broadcast."""
    batch = problem.batch
    if problem.cu_seqlens_q is not None:
        batch = (problem.cu_seqlens_q.shape[0] - 1, *batch)
    grouped = len(problem.batch) != len(problem.batch_shape)
    layout = (array.shape, array.strides, array.dtype)
    operand = option_operand(layout, batch, core, problem.batch[-1] if grouped else None)
    return operand, canonical_view(array, operand, keep_summed=True)


def _added(full: Array, summed: tuple[bool, ...]) -> Array:
    axes = tuple(i for i, own in enumerate(summed) if own)
    return full.sum(axes, keepdims=True) if axes else full
