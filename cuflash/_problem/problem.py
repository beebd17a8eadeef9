"""Is this call legal, and what exactly does it compute? Arrays and options -> frozen Problem.

A Problem is metadata only: extents, byte strides and flags. It is hashable and cached by the layout
of a call, so that a repeated call costs one lookup.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from cuflash._arrays import Array, array_module, is_cupy, same_module
from cuflash._errors import problem_with, shown
from cuflash._problem.destinations import check_destination
from cuflash._problem.formulas import Formulas
from cuflash._problem.options import FARTHEST, Options, Signature, signature

FLOATS = tuple(np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64))
HALVES = FLOATS[:2]
PRECISIONS = (None, "ieee", "tf32")
_MATRICES = ("q", "k", "v", "dout")
Axes = tuple[tuple[int, int], ...]
_MAX_BATCH_AXES = 30  # with both of the core, as many as NumPy broadcasts
CANONICAL: Axes = ((-2, -1),) * 4


@dataclass(frozen=True)
class Operand:
    """Where the elements of one array lie, in canonical order: batch axes, then core axes.

    ``strides`` are in bytes and 0 on broadcast axes. ``summed`` says per batch axis whether the
    array has one element where the problem has more: its gradient is summed over that axis.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    summed: tuple[bool, ...]


@dataclass(frozen=True)
class Problem:
    """One validated attention problem.

    ``batch`` are the canonical batch axes, heads last. Under GQA the head axis appears as the two
    axes (num_heads_kv, group_size), and k, v are broadcast along the second: GQA is a broadcast.
    """

    batch: tuple[int, ...]
    batch_shape: tuple[
        int, ...
    ]  # the caller's: out is batch_shape + (m, d_v), lse batch_shape + (m,)
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype[Any]
    precision: str | None
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    out_shape: tuple[int, ...]  # in the caller's axes order
    axes: Axes
    bias: Operand | None
    mask: Operand | None
    offset: Operand | None
    q_lengths: Operand | None
    kv_lengths: Operand | None
    alibi_slopes: Operand | None
    sink: Operand | None
    segment_ids_q: Operand | None
    segment_ids_k: Operand | None
    offset_value: int | None
    q_length_value: int | None
    kv_length_value: int | None
    causal: bool
    window_left: int | None
    window_right: int | None
    scale: float
    softcap: float | None
    dropout: float
    #: Where packed sequences end, (sequences + 1,): options then have the sequences as a first
    #: batch axis, which q, k and v have not.
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None
    formulas: Formulas | None = None  # where kernels compute

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """float64 for float64 problems, float32 otherwise."""
        return self.dtype if self.dtype == np.float64 else np.dtype(np.float32)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The caller's shape of lse."""
        return (*self.batch_shape, self.seqlen_q)

    @property
    def window_keys(self) -> int | None:
        """How many keys a query sees at most; None without a bound on either side."""
        if self.window_left is None or self.window_right is None:
            return None
        return self.window_left + self.window_right + 1


def describe(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    *,
    axes: Any = None,
    precision: str | None = None,
    out: Array | None = None,
) -> Problem:
    """Validate one call and return its Problem."""
    for name in options.arrays:
        check_module(name, options.arrays[name], q)
    if precision is not None and not isinstance(precision, str):
        raise problem_with(
            "precision", TypeError, got=shown(precision), expected='None, "ieee" or "tf32"'
        )
    checked = CANONICAL if axes is None else _axes(axes)
    problem = _describe(
        signature(q), signature(k), signature(v), options.signature, checked, precision,
        signature(out),
    )  # fmt: skip
    if out is not None:
        check_destination("out", out, q=q, k=k, v=v, **options.arrays)
    _check_values(problem, options)
    return problem


@functools.lru_cache(maxsize=4096)
def _describe(
    q: Signature,
    k: Signature,
    v: Signature,
    options: Any,
    axes: Axes,
    precision: str | None,
    out: Signature | None,
) -> Problem:
    if precision not in PRECISIONS:
        raise problem_with(
            "precision", ValueError, got=shown(precision), expected='None, "ieee" or "tf32"'
        )
    dtype = common_dtype({"q": q[2], "k": k[2], "v": v[2]})
    arrays = {"q": q, "k": k, "v": v}
    core = {n: _core_axes(n, a, pair) for (n, a), pair in zip(arrays.items(), axes, strict=False)}
    (seqlen_q, head_dim), (seqlen_k, d_k), (n_v, head_dim_v) = (
        tuple(arrays[n][0][a] for a in core[n]) for n in arrays
    )
    if d_k != head_dim:
        raise problem_with(
            "k", ValueError, got=f"head_dim {d_k} in shape {k[0]}",
            expected=f"head_dim {head_dim} as in q of shape {q[0]}",
            fix="the last axis is the feature axis; axes= serves other layouts",
        )  # fmt: skip
    if n_v != seqlen_k:
        raise problem_with(
            "v", ValueError, got=f"{n_v} values in shape {v[0]}",
            expected=f"{seqlen_k} values, one for each key of k of shape {k[0]}",
        )  # fmt: skip
    if head_dim == 0:
        raise problem_with("q", ValueError, got=f"shape {q[0]}", expected="head_dim at least 1")

    own_batch = {n: _without(arrays[n][0], core[n]) for n in arrays}
    batch_shape, group_size = _batch_shape(own_batch, options.enable_gqa)
    batch = batch_shape
    if options.enable_gqa:
        batch = (*batch_shape[:-1], own_batch["k"][-1], group_size)

    def operand(name: str, array: Signature, core_axes: tuple[int, ...]) -> Operand:
        kv = options.enable_gqa and name in ("k", "v")
        return _operand(array, core_axes, batch, group_size if options.enable_gqa else None, kv=kv)

    def option_array(
        name: str, value: Any, extents: tuple[int, ...], core_text: str, fix: str = ""
    ) -> Operand | None:
        if not isinstance(value, tuple):
            return None
        shape = value[0]
        full = batch_shape + extents
        if len(shape) < len(extents) or not _broadcastable(shape, full):
            raise problem_with(
                name, ValueError, got=f"shape {shape}",
                expected=f"a shape that broadcasts to {full} with core {core_text}", fix=fix,
            )  # fmt: skip
        return option_operand(value, batch, extents, group_size if options.enable_gqa else None)

    for name in ("bias", "alibi_slopes", "sink"):
        value = getattr(options, name)
        if value is not None and value[2] not in FLOATS:
            fix = "boolean masks go to mask=" if value[2] == np.bool_ else ""
            raise problem_with(
                name, TypeError, got=f"dtype {value[2]}",
                expected="a floating dtype of 16, 32 or 64 bits", fix=fix,
            )  # fmt: skip
    accumulator = np.float64 if dtype == np.float64 else np.float32
    if options.scale is not None and abs(options.scale) > float(np.finfo(accumulator).max):
        raise problem_with(
            "scale", ValueError, got=options.scale,
            expected=f"a number in the range of {np.dtype(accumulator)}",
            fix="pass float64 arrays, or put the factor into q",
        )  # fmt: skip
    segments = options.segment_ids or (None, None)
    per_entry = "" if not batch_shape else (
        f"lengths per batch entry have shape {(*batch_shape[:-1], 1)}: heads are the last axis"
    )  # fmt: skip
    left, right = options.window or (None, None)
    out_layout, out_shape = _out_layout(out, batch_shape, (seqlen_q, head_dim_v), axes, dtype)
    return Problem(
        batch=batch,
        batch_shape=batch_shape,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        precision=precision,
        q=operand("q", q, core["q"]),
        k=operand("k", k, core["k"]),
        v=operand("v", v, core["v"]),
        out=operand("out", out_layout, _core_axes("out", out_layout, axes[3])),
        out_shape=out_shape,
        axes=axes,
        bias=option_array("bias", options.bias, (seqlen_q, seqlen_k), "(m, n)"),
        mask=option_array("mask", options.mask, (seqlen_q, seqlen_k), "(m, n)"),
        offset=option_array("offset", options.offset, (), "()", per_entry),
        q_lengths=option_array("q_lengths", options.q_lengths, (), "()", per_entry),
        kv_lengths=option_array("kv_lengths", options.kv_lengths, (), "()", per_entry),
        alibi_slopes=option_array("alibi_slopes", options.alibi_slopes, (), "()"),
        sink=option_array("sink", options.sink, (), "()"),
        segment_ids_q=option_array("segment_ids[0]", segments[0], (seqlen_q,), "(m,)"),
        segment_ids_k=option_array("segment_ids[1]", segments[1], (seqlen_k,), "(n,)"),
        offset_value=0 if options.causal == "top_left" else _plain_int(options.offset),
        q_length_value=checked_length("q_lengths", options.q_lengths, seqlen_q),
        kv_length_value=checked_length("kv_lengths", options.kv_lengths, seqlen_k),
        causal=bool(options.causal),
        window_left=left,
        window_right=0 if options.causal else right,
        scale=1 / math.sqrt(head_dim) if options.scale is None else options.scale,
        softcap=options.softcap,
        dropout=options.dropout,
    )


def option_operand(
    array: Signature, batch: tuple[int, ...], extents: tuple[int, ...], group_size: int | None
) -> Operand:
    """Canonical layout of an option's array, whose core broadcasts to ``extents``."""
    ndim = len(array[0])
    widened = _operand(array, tuple(range(ndim - len(extents), ndim)), batch, group_size)
    core = zip(widened.shape[len(batch) :], widened.strides[len(batch) :], strict=True)
    strides = widened.strides[: len(batch)] + tuple(0 if own == 1 else s for own, s in core)
    return Operand(widened.dtype, batch + extents, strides, widened.summed)


def gradient_operand(problem: Problem, name: str, array: Array) -> Operand:
    """Layout of the gradient ``array`` of an input by name, or of 'dout'."""
    return _gradient_operand(problem, name, signature(array))


@functools.lru_cache(maxsize=4096)
def _gradient_operand(problem: Problem, name: str, array: Signature) -> Operand:
    core: tuple[int, ...]
    if name in _MATRICES:
        core = _core_axes(name, array, problem.axes[_MATRICES.index(name)])
    else:
        ndim = len(array[0])
        core = (ndim - 2, ndim - 1) if name == "bias" else ()
    gqa = len(problem.batch) != len(problem.batch_shape)
    return _operand(
        array, core, problem.batch, problem.batch[-1] if gqa else None,
        kv=gqa and name in ("k", "v"),
    )  # fmt: skip


def canonical_view(array: Array, operand: Operand, *, keep_summed: bool = False) -> Array:
    """View ``array`` in canonical order; broadcast axes have stride 0, or extent 1 if kept."""
    shape = operand.shape
    if keep_summed:
        ndim = len(operand.summed)
        shape = (
            *(1 if s else n for n, s in zip(shape, operand.summed, strict=False)),
            *shape[ndim:],
        )
    as_strided = array_module(array).lib.stride_tricks.as_strided
    return as_strided(array, shape=shape, strides=operand.strides)


def require_shape(name: str, array: Array, shape: tuple[int, ...], like: str) -> None:
    """Raise unless ``array`` has exactly this shape."""
    if array.shape != shape:
        raise problem_with(
            name, ValueError, got=f"shape {array.shape}", expected=f"shape {shape}, that of {like}"
        )


def require_float(name: str, array: Array) -> None:
    """Raise unless ``array`` has a floating dtype that the library serves."""
    if array.dtype not in FLOATS:
        raise problem_with(
            name, TypeError, got=f"dtype {array.dtype}",
            expected="float16, bfloat16, float32 or float64",
        )  # fmt: skip


def axes_without_values(axes: Any) -> Axes:
    """The four pairs of a call without values, from the pairs of q and k or from all four."""
    if axes is None:
        return CANONICAL
    if isinstance(axes, list | tuple) and len(axes) == 2:
        axes = [*axes, (-2, -1), (-2, -1)]
    q, k, _, _ = _axes(axes)
    return (q, k, k, (-2, -1))


def _axes(axes: Any) -> Axes:
    expected = "four pairs (sequence axis, feature axis), for q, k, v and out"
    fix = "(batch, seqlen, heads, head_dim) is axes=[(-3, -1)] * 4"
    if not isinstance(axes, list | tuple) or not all(isinstance(p, list | tuple) for p in axes):
        raise problem_with("axes", TypeError, got=shown(axes), expected=expected, fix=fix)
    if len(axes) != 4 or any(len(p) != 2 for p in axes):
        raise problem_with("axes", ValueError, got=shown(axes), expected=expected, fix=fix)
    if not all(isinstance(a, int) and not isinstance(a, bool) for p in axes for a in p):
        raise problem_with("axes", TypeError, got=shown(axes), expected=expected, fix=fix)
    return tuple((p[0], p[1]) for p in axes)


def _core_axes(name: str, array: Signature, pair: tuple[int, int]) -> tuple[int, int]:
    shape = array[0]
    if len(shape) < 2:
        raise problem_with(
            name, ValueError, got=f"shape {shape}",
            expected="at least two axes, (sequence, feature)",
            fix="for a single query write q[None, :]" if len(shape) == 1 else "",
        )  # fmt: skip
    ndim = len(shape)
    for axis in pair:
        if not -ndim <= axis < ndim:
            raise problem_with(
                "axes", ValueError, got=f"axis {axis} for {name} of {ndim} axes",
                expected=f"an axis from {-ndim} to {ndim - 1}",
            )  # fmt: skip
    sequence, feature = (axis % ndim for axis in pair)
    if sequence == feature:
        raise problem_with(
            "axes", ValueError, got=f"{pair} for {name} of {ndim} axes",
            expected="two different axes, (sequence, feature)",
        )  # fmt: skip
    return sequence, feature


def _without(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def common_dtype(dtypes: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype that q, k, v promote to; a TypeError for dtypes that cannot meet."""
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            fix = f"write {name}.astype(np.float32)" if dtype.kind in "iub" else ""
            raise problem_with(
                name, TypeError, got=f"dtype {dtype}",
                expected="float16, bfloat16, float32 or float64", fix=fix,
            )  # fmt: skip
    given = set(dtypes.values())
    if set(HALVES) <= given:
        text = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise problem_with(
            "q, k, v", TypeError, got=text, expected="float16 or bfloat16, not both",
            fix="convert one of them",
        )  # fmt: skip
    return max(given, key=lambda dtype: (dtype.itemsize, dtype not in HALVES))


def _batch_shape(own: dict[str, tuple[int, ...]], enable_gqa: bool) -> tuple[tuple[int, ...], int]:
    """The caller's batch shape, and the number of query heads per key/value head."""
    shapes, group_size = dict(own), 1
    most = _MAX_BATCH_AXES - int(enable_gqa)  # groups have an axis of their own
    for name, shape in own.items():
        if len(shape) > most:
            raise problem_with(
                name, ValueError, got=f"{len(shape)} batch axes", expected=f"at most {most}",
                fix="reshape some into one",
            )  # fmt: skip
    if enable_gqa:
        for name, shape in own.items():
            if not shape:
                raise problem_with(
                    name, ValueError, got="no heads axis", expected="a heads axis with enable_gqa"
                )
        heads_q, heads_k, heads_v = (shape[-1] for shape in own.values())
        if heads_k != heads_v:
            raise problem_with(
                "v", ValueError, got=f"{heads_v} heads", expected=f"{heads_k} heads as in k"
            )
        if heads_q % heads_k if heads_k else heads_q:
            raise problem_with(
                "k", ValueError, got=f"{heads_k} key/value heads",
                expected=f"a divisor of the {heads_q} query heads",
            )  # fmt: skip
        group_size = heads_q // heads_k if heads_k else 1
        shapes["k"] = (*own["k"][:-1], heads_q)
        shapes["v"] = (*own["v"][:-1], heads_q)
    try:
        return np.broadcast_shapes(*shapes.values()), group_size
    except ValueError:
        text = ", ".join(f"{name} {shape}" for name, shape in own.items())
        fix = "leading axes broadcast as in np.matmul"
        heads = [shape[-1] for shape in own.values() if shape]
        if len(heads) == 3 and heads[1] == heads[2] > 1 and heads[0] % heads[1] == 0:
            fix = "for grouped heads write enable_gqa=True"
        raise problem_with(
            "q, k, v", ValueError, got=f"batch shapes {text}",
            expected="batch shapes that broadcast", fix=fix,
        ) from None  # fmt: skip


def _operand(
    array: Signature,
    core_axes: tuple[int, ...],
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
    summed = tuple(n == 1 and full != 1 for (n, _), full in zip(own, batch, strict=True))
    batch_strides = tuple(0 if n == 1 else stride for n, stride in own)
    return Operand(
        dtype,
        batch + tuple(shape[i] for i in core_axes),
        batch_strides + tuple(strides[i] for i in core_axes),
        summed,
    )


def _out_layout(
    out: Signature | None,
    batch_shape: tuple[int, ...],
    core: tuple[int, int],
    axes: Axes,
    dtype: np.dtype[Any],
) -> tuple[Signature, tuple[int, ...]]:
    """The result's layout: the given array's, or C order in the caller's axes order."""
    ndim = len(batch_shape) + 2
    sequence, feature = _core_axes("out", ((1,) * ndim, None, None), axes[3])
    remaining = iter(batch_shape)
    expected = tuple(
        core[0] if i == sequence else core[1] if i == feature else next(remaining)
        for i in range(ndim)
    )
    if out is None:
        strides = [dtype.itemsize] * ndim
        for i in reversed(range(ndim - 1)):
            strides[i] = strides[i + 1] * max(expected[i + 1], 1)
        return (expected, tuple(strides), dtype), expected
    if out[0] != expected:
        raise problem_with("out", ValueError, got=f"shape {out[0]}", expected=f"shape {expected}")
    allowed = (dtype, np.dtype(np.float32)) if dtype in HALVES else (dtype,)
    if out[2] not in allowed:
        raise problem_with(
            "out", TypeError, got=f"dtype {out[2]}",
            expected=" or ".join(f"dtype {a}" for a in allowed),
        )  # fmt: skip
    return out, expected


def _broadcastable(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    padded = (1,) * (len(full) - len(shape)) + shape
    return len(padded) == len(full) and all(n in (1, m) for n, m in zip(padded, full, strict=True))


def _plain_int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def checked_length(name: str, value: Any, extent: int) -> int | None:
    if not isinstance(value, int):
        return None
    if not 0 <= value <= extent:
        raise problem_with(name, ValueError, got=value, expected=f"a length from 0 to {extent}")
    return value


def check_module(name: str, array: Array, q: Array) -> None:
    """Raise unless an option lives where q lives; lengths and offsets may come from the host."""
    if is_cupy(array) or name not in ("offset", "q_lengths", "kv_lengths"):
        same_module(**{"q": q, name: array})


def check_lengths(problem: Problem, options: Options) -> None:
    """Check lengths that the host can read; values on a device are clamped by the kernels."""
    for name, extent in (("q_lengths", problem.seqlen_q), ("kv_lengths", problem.seqlen_k)):
        value = getattr(options, name)
        if isinstance(value, np.ndarray) and value.size:
            low, high = int(value.min()), int(value.max())
            if low < 0 or high > extent:
                raise problem_with(
                    name, ValueError, got=f"values from {low} to {high}",
                    expected=f"lengths from 0 to {extent}",
                )  # fmt: skip


def _check_values(problem: Problem, options: Options) -> None:
    """Check lengths and offsets that the host can read."""
    check_lengths(problem, options)
    offset = options.offset
    if isinstance(offset, np.ndarray) and offset.size:
        low, high = int(offset.min()), int(offset.max())
        if low < -FARTHEST or high > FARTHEST:
            raise problem_with(
                "offset", ValueError, got=f"values from {low} to {high}",
                expected="values from -2^59 to 2^59",
            )  # fmt: skip
