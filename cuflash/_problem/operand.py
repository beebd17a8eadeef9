"""How is an array laid out? Byte strides in canonical order: batch axes, then core axes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.options import Signature

Axes = tuple[tuple[int, int], ...]
CANONICAL: Axes = ((-2, -1),) * 4


@dataclass(frozen=True)
class Operand:
    """Memory layout of one array in canonical order: batch axes, then core axes.

    ``strides`` are in bytes, and 0 on broadcast axes. ``summed`` says for each batch axis whether
    the array has extent 1 where the problem has more: its gradient is summed over that axis.
    ``page`` is the number of bytes from one page of rows to the next, 0 without pages.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    summed: tuple[bool, ...]
    page: int = 0


def operand_of(
    array: Signature,
    core_axes: Collection[int],
    batch: tuple[int, ...],
    group_size: int | None,
    *,
    kv: bool = False,
) -> Operand:
    """Canonical layout of an array that broadcasts to ``batch``.

    With ``group_size`` the array's head axis becomes (heads_kv, group): split in two for a
    query-like array, given a broadcast group axis for k and v.
    """
    shape, strides, dtype = array
    own = [(shape[i], strides[i]) for i in range(len(shape)) if i not in core_axes]
    if group_size is not None and own:
        heads, stride = own.pop()
        if kv:
            own += [(heads, stride), (1, 0)]
        elif heads == 1:
            own += [(1, 0), (1, 0)]
        else:
            own += [(heads // max(group_size, 1), stride * group_size), (group_size, stride)]
    own = [(1, 0)] * (len(batch) - len(own)) + own
    return Operand(
        dtype,
        batch + tuple(shape[i] for i in core_axes),
        tuple(0 if n == 1 else stride for n, stride in own) + tuple(strides[i] for i in core_axes),
        tuple(n == 1 and full != 1 for (n, _), full in zip(own, batch, strict=True)),
    )


def option_operand(
    array: Signature,
    batch: tuple[int, ...],
    extents: tuple[int, ...],
    group_size: int | None,
    *,
    kv: bool = False,
) -> Operand:
    """Canonical layout of an option's array; its core axes broadcast to ``extents``."""
    ndim = len(array[0])
    own = operand_of(array, range(ndim - len(extents), ndim), batch, group_size, kv=kv)
    core = zip(own.shape[len(batch) :], own.strides[len(batch) :], strict=True)
    strides = own.strides[: len(batch)] + tuple(0 if n == 1 else s for n, s in core)
    return Operand(own.dtype, batch + extents, strides, own.summed)


def broadcastable(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of ``shape`` broadcasts to ``full``."""
    padded = (1,) * (len(full) - len(shape)) + shape
    return len(padded) == len(full) and all(n in (1, m) for n, m in zip(padded, full, strict=True))


def index_with_new_axes(
    shape: tuple[int, ...], batch: tuple[int, ...], core: tuple[int, ...]
) -> str:
    """An index with which an array of ``shape`` broadcasts to ``batch + core``; "" if none does.

    The array's axes are taken for as many core axes as possible, and for the first batch axes.
    """
    full = batch + core
    for own in {2: ((0, 1), (1,), (0,)), 1: ((0,),), 0: ((),)}[len(core)]:
        last, count = tuple(len(batch) + i for i in own), len(shape) - len(own)
        for first in itertools.combinations(range(len(batch)), count) if count >= 0 else ():
            places = (*first, *last)
            if broadcastable(shape, tuple(full[i] for i in places)):
                text = (":" if i in places else "None" for i in range(len(full)))
                return f"[{', '.join(text)}]"
    return ""


def canonical_view(array: Array, operand: Operand, *, keep_summed: bool = False) -> Array:
    """View in canonical order. Broadcast axes have stride 0, or extent 1 with ``keep_summed``."""
    shape = operand.shape
    if keep_summed:
        batch = zip(shape, operand.summed, strict=False)
        shape = (*(1 if s else n for n, s in batch), *shape[len(operand.summed) :])
    if array.shape == shape and _same_places(shape, array.strides, operand.strides):
        return array
    as_strided = array_module(array).lib.stride_tricks.as_strided
    return as_strided(array, shape=shape, strides=operand.strides)


def _same_places(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides lead to the same elements; the stride of extent 1 does not matter."""
    return a == b or all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def checked_axes(axes: Any) -> Axes:
    """The four pairs of ``axes=``."""
    expected = "four pairs (sequence axis, feature axis), for q, k, v and out"
    fix = "(batch, seqlen, heads, head_dim) is axes=[(-3, -1)] * 4"
    if axes is None:
        return CANONICAL
    if not isinstance(axes, list | tuple) or not all(isinstance(p, list | tuple) for p in axes):
        raise wrong_type("axes", shown(axes), expected, fix)
    if len(axes) != 4 or any(len(p) != 2 for p in axes):
        raise wrong_value("axes", shown(axes), expected, fix)
    if not all(isinstance(a, int) and not isinstance(a, bool) for p in axes for a in p):
        raise wrong_type("axes", shown(axes), expected, fix)
    return tuple((p[0], p[1]) for p in axes)


def axes_without_values(axes: Any) -> Axes:
    """The four pairs of a call without values, from the pairs of q and k or from all four."""
    if axes is None:
        return CANONICAL
    if isinstance(axes, list | tuple) and len(axes) == 2:
        axes = [*axes, (-2, -1), (-2, -1)]
    q, k, _, _ = checked_axes(axes)
    return (q, k, k, (-2, -1))


def core_axes(name: str, shape: tuple[int, ...], pair: tuple[int, int]) -> tuple[int, int]:
    """The sequence and the feature axis of an array, counted from its first axis."""
    ndim = len(shape)
    if ndim < 2:
        fix = "for a single query write q[None, :]" if ndim == 1 else ""
        raise wrong_value(name, f"shape {shape}", "at least two axes, (sequence, feature)", fix)
    for axis in pair:
        if not -ndim <= axis < ndim:
            got = f"axis {shown(axis)} for {name} of {ndim} axes"
            raise wrong_value("axes", got, f"an axis from {-ndim} to {ndim - 1}")
    sequence, feature = (axis % ndim for axis in pair)
    if sequence == feature:
        got = f"{pair} for {name} of {ndim} axes"
        raise wrong_value("axes", got, "two different axes, (sequence, feature)")
    return sequence, feature
