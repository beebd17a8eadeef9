"""Is this call legal, and what exactly does it compute? Arrays and options -> frozen Problem.

A Problem is metadata only: extents, byte strides and flags. It is hashable, and cached by the
layout of a call, so that a repeated call costs one lookup.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash._arrays import Array, is_cupy, same_module
from cuflash._errors import wrong_type, wrong_value
from cuflash._problem.checks import FARTHEST, FLOATS, precision_word
from cuflash._problem.float8 import E4M3, FLOAT8
from cuflash._problem.formulas import Formulas
from cuflash._problem.operand import (
    Axes,
    Operand,
    broadcastable,
    checked_axes,
    core_axes,
    index_with_new_axes,
    operand_of,
    option_operand,
)
from cuflash._problem.option_table import ARRAYS, OPTIONS, Option
from cuflash._problem.options import Options, Signature, signature
from cuflash._problem.philox import WHOLE, Origin

HALVES = FLOATS[:2]
_MATRICES = ("q", "k", "v", "dout")
_MAX_BATCH_AXES = 30  # with the two core axes, as many as NumPy broadcasts
_NUMBERS = {option.name: option.number for option in OPTIONS if option.number}
#: Fields of Problem from the option table: an Operand or None for each array, and the numbers.
_OfOptions: Any = make_dataclass(
    "_OfOptions", [(name, Any, None) for name in (*ARRAYS, *_NUMBERS)], frozen=True, kw_only=True
)


class Pages(NamedTuple):
    """Rows of k and v in pages, and the table that puts them in order."""

    table: Operand  # int32, (pages of an entry,)
    size: int  # rows of a page
    num_pages: int


@dataclass(frozen=True, kw_only=True)
class Problem(_OfOptions):  # type: ignore[misc]
    """One validated attention problem.

    ``batch`` are the canonical batch axes, heads last. Under GQA the head axis appears as the two
    axes (num_heads_kv, group_size), and k and v are broadcast along the second.
    """

    batch: tuple[int, ...]
    batch_shape: tuple[int, ...]  # the caller's batch axes: lse has batch_shape + (m,)
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
    out_shape: tuple[int, ...]  # in the caller's order of axes
    axes: Axes
    offset_value: int | None
    q_length_value: int | None
    kv_length_value: int | None
    causal: bool
    window_left: int | None
    window_right: int | None
    scale: float
    #: Cumulative lengths of packed sequences, (sequences + 1,). Arrays of options then have the
    #: sequences as a first batch axis, which q, k and v lack.
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None
    formulas: Formulas | None = None  # for kernels only
    origin: Origin = WHOLE  # place of a part in its call, for dropout and formulas
    merges_partial: bool = False  # is the result merged with a result over other keys?
    pages: Pages | None = None  # if rows of k and v are in pages
    num_queries: int | None = None  # PackGQA with bounds: queries of each head in rows

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Computed once: every call looks a plan up by its problem."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def has(self, option: Option) -> bool:
        """Whether this option, which has an array or a number, is present."""
        return getattr(self, next(iter(option.arrays), option.name)) not in (None, 0)

    @property
    def has_8_bit_keys(self) -> bool:
        """Whether k and v have 8 bits, and q more."""
        return self.k.dtype in FLOAT8 and self.k.dtype != self.dtype

    @property
    def lse_dtype(self) -> np.dtype[Any]:
        """float64 for float64 problems, float32 otherwise."""
        return self.dtype if self.dtype == np.float64 else np.dtype(np.float32)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of lse in the caller's axes."""
        return (*self.batch_shape, self.seqlen_q)

    @property
    def window_keys(self) -> int | None:
        """The most keys that a query's window holds; None unless both sides have a bound."""
        if self.window_left is None or self.window_right is None:
            return None
        return self.window_left + self.window_right + 1

    @property
    def num_heads(self) -> int:
        """Number of query heads; 1 without an axis of heads, or if it is empty."""
        return max(self.batch_shape[-1], 1) if self.batch_shape else 1

    @property
    def group_size(self) -> int | None:
        """Number of query heads of each key/value head; None without GQA."""
        return self.batch[-1] if len(self.batch) != len(self.batch_shape) else None


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
    precision_word("precision", precision)
    layouts = [signature(array) for array in (q, k, v, out)]
    problem = _describe(*layouts, options.signature, checked_axes(axes), precision)
    check_arrays(problem, options, q)
    return problem


@functools.lru_cache(maxsize=4096)
def _describe(
    q: Signature,
    k: Signature,
    v: Signature,
    out: Signature | None,
    options: Any,  # an OptionLayout
    axes: Axes,
    precision: str | None,
) -> Problem:
    arrays = {"q": q, "k": k, "v": v}
    shapes = {name: array[0] for name, array in arrays.items()}
    dtype = common_dtype({name: array[2] for name, array in arrays.items()})
    core = {n: core_axes(n, s, pair) for (n, s), pair in zip(shapes.items(), axes, strict=False)}
    (seqlen_q, head_dim), (seqlen_k, d_k), (n_v, head_dim_v) = (
        tuple(shapes[n][a] for a in core[n]) for n in arrays
    )
    if d_k != head_dim:
        raise wrong_value(
            "k", f"head_dim {d_k} in shape {k[0]}", f"head_dim {head_dim} as in q of shape {q[0]}",
            "the last axis is the feature axis; axes= supports other layouts",
        )  # fmt: skip
    if n_v != seqlen_k:
        expected = f"{seqlen_k} values, one for each key of k of shape {k[0]}"
        raise wrong_value("v", f"{n_v} values in shape {v[0]}", expected)
    if head_dim == 0:
        raise wrong_value("q", f"shape {q[0]}", "head_dim at least 1")
    largest = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).max)
    if options.scale is not None and abs(options.scale) > largest:
        raise wrong_value(
            "scale", options.scale, "a number in the range of float32",
            "pass float64 arrays, or put the factor into q",
        )  # fmt: skip

    own_batch = {
        name: tuple(n for i, n in enumerate(shape) if i not in core[name])
        for name, shape in shapes.items()
    }
    batch_shape, group_size = _batch_shape(own_batch, options.enable_gqa, (seqlen_q, seqlen_k))
    batch = batch_shape
    if group_size is not None:
        batch = (*batch_shape[:-1], own_batch["k"][-1], group_size)

    def operand(name: str) -> Operand:
        return operand_of(arrays[name], core[name], batch, group_size, kv=name != "q")

    def option_array(name: str, array: Signature) -> Operand:
        option, axes = ARRAYS[name]
        extents = tuple({"m": seqlen_q, "n": seqlen_k}[axis] for axis in axes)
        of_keys = option.stage == "operand" and name != "q_scale"
        heads = batch_shape[-1:] if group_size is None or not of_keys else own_batch["k"][-1:]
        shape, full = array[0], (*batch_shape[:-1], *heads, *extents)
        if len(shape) < len(extents) or not broadcastable(shape, full):
            own = list(option.arrays)
            argument = option.name if len(own) == 1 else f"{option.name}[{own.index(name)}]"
            fix = ""
            if option.from_host and batch_shape:
                per_entry = (*batch_shape[:-1], 1)
                fix = f"; lengths per batch entry have shape {per_entry}: heads are the last axis"
            if index := index_with_new_axes(shape, batch_shape, extents):
                of_list = f", for a list np.array({argument}){index}" if option.from_host else ""
                fix = f"; write {argument}{index}{of_list}{fix}"
            example = (*batch_shape[:1], *(1 for _ in batch_shape[1:]), *extents)
            expected = f"a shape that broadcasts to {full}, for example {example}"
            raise wrong_value(argument, f"shape {shape}", expected, fix.removeprefix("; "))
        return option_operand(array, batch, extents, group_size, kv=of_keys)

    of_options: dict[str, Any] = {name: option_array(name, a) for name, a in options.arrays}
    for name, number in _NUMBERS.items():
        if getattr(options, name) is not None:
            of_options[name] = number(getattr(options, name))
    left, right = options.window or (None, None)
    own = HALVES[::-1] if dtype == E4M3 else (dtype,)  # of out; the first is the default
    out_layout = _out_layout(out, batch_shape, (seqlen_q, head_dim_v), axes, own)
    return Problem(
        batch=batch,
        batch_shape=batch_shape,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        precision=precision,
        q=operand("q"),
        k=operand("k"),
        v=operand("v"),
        out=operand_of(out_layout, core_axes("out", out_layout[0], axes[3]), batch, group_size),
        out_shape=out_layout[0],
        axes=axes,
        offset_value=0 if options.causal == "top_left" else options.offset,
        q_length_value=_checked_length("q_lengths", options.q_lengths, seqlen_q),
        kv_length_value=_checked_length("kv_lengths", options.kv_lengths, seqlen_k),
        causal=bool(options.causal),
        window_left=left,
        window_right=0 if options.causal else right,
        scale=1 / math.sqrt(head_dim) if options.scale is None else options.scale,
        **of_options,
    )


#: ``replace`` with a cache: equal changes give the same object, whose hash is computed once.
changed: Any = functools.lru_cache(maxsize=1024)(replace)


@functools.lru_cache(maxsize=4096)
def in_pages(problem: Problem, k: Signature, v: Signature, table: Signature) -> Problem:
    """The problem with keys and values in pages.

    ``k`` and ``v`` are (pages,) + heads + (page_size, d); the table is (sequences,) + (1, ..) for
    heads + (pages of a sequence,).
    """
    own = operand_of(table, (len(table[0]) - 1,), problem.batch, problem.group_size)
    return replace(
        problem,
        k=replace(problem.k, page=k[1][0]),
        v=replace(problem.v, page=v[1][0]),
        pages=Pages(own, size=k[0][-2], num_pages=k[0][0]),
    )


def gradient_operand(problem: Problem, name: str, array: Array) -> Operand:
    """Layout of the gradient ``array`` of an input by name, or of 'dout'."""
    return _gradient_operand(problem, name, signature(array))


@functools.lru_cache(maxsize=4096)
def _gradient_operand(problem: Problem, name: str, array: Signature) -> Operand:
    ndim = len(array[0])
    if name in _MATRICES:
        core = core_axes(name, array[0], problem.axes[_MATRICES.index(name)])
        kv = name in ("k", "v")
        return operand_of(array, core, problem.batch, problem.group_size, kv=kv)
    own = range(ndim - len(ARRAYS[name][1]), ndim)
    return operand_of(array, own, problem.batch, problem.group_size)


def common_dtype(dtypes: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype that q, k, v promote to; TypeError for dtypes that do not promote."""
    known = (*FLOATS, *(FLOAT8 if dtypes["q"] in HALVES else (E4M3,)))
    for name, dtype in dtypes.items():
        if dtype not in known:
            fix = f"write {name}.astype(np.float32)" if dtype.kind in "iub" else ""
            expected = "float16, bfloat16, float32 or float64"
            raise wrong_type(name, f"dtype {dtype}", expected, fix)
    given = set(dtypes.values())
    if set(HALVES) <= given:
        text = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise wrong_type("q, k, v", text, "float16 or bfloat16, not both", "convert one of them")
    return max(given, key=lambda dtype: (dtype.itemsize, dtype not in HALVES))


def _batch_shape(
    own: dict[str, tuple[int, ...]], enable_gqa: bool, seqlens: tuple[int, int]
) -> tuple[tuple[int, ...], int | None]:
    """The caller's batch shape, and under GQA the number of query heads per key/value head."""
    shapes, group_size = dict(own), None
    most = _MAX_BATCH_AXES - int(enable_gqa)  # groups have an axis of their own
    for name, shape in own.items():
        if len(shape) > most:
            got = f"{len(shape)} batch axes"
            raise wrong_value(name, got, f"at most {most}", "merge some of them with reshape")
        if enable_gqa and not shape:
            raise wrong_value(name, "no heads axis", "a heads axis, since enable_gqa is True")
    if enable_gqa:
        heads_q, heads_k, heads_v = (shape[-1] for shape in own.values())
        if heads_k != heads_v:
            raise wrong_value("v", f"{heads_v} heads", f"{heads_k} heads as in k")
        if heads_q % heads_k if heads_k else heads_q:
            expected = f"a divisor of the {heads_q} query heads"
            raise wrong_value("k", f"{heads_k} key/value heads", expected)
        group_size = heads_q // heads_k if heads_k else 1
        shapes |= {name: (*own[name][:-1], heads_q) for name in ("k", "v")}
    try:
        return np.broadcast_shapes(*shapes.values()), group_size
    except ValueError:
        text = ", ".join(f"{name} {shape}" for name, shape in own.items())
        fix = "leading axes broadcast as in np.matmul"
        heads = [shape[-1] for shape in own.values() if shape]
        if len(heads) == 3 and heads[1] == heads[2] > 1 and heads[0] % heads[1] == 0:
            fix = "for grouped heads write enable_gqa=True"
        elif len(heads) == 3 and heads[0] != heads[1] == heads[2] and seqlens[0] == seqlens[1]:
            fix = "for (batch, seqlen, heads, head_dim) write axes=[(-3, -1)] * 4"
        expected = "batch shapes that broadcast"
        raise wrong_value("q, k, v", f"batch shapes {text}", expected, fix) from None


def _out_layout(
    out: Signature | None,
    batch_shape: tuple[int, ...],
    core: tuple[int, int],
    axes: Axes,
    dtypes: tuple[np.dtype[Any], ...],
) -> Signature:
    """The layout of the given array, or of a result in C order of the caller's axes."""
    ndim = len(batch_shape) + 2
    of_core = dict(zip(core_axes("out", (1,) * ndim, axes[3]), core, strict=True))
    remaining = iter(batch_shape)
    expected = tuple(of_core[i] if i in of_core else next(remaining) for i in range(ndim))
    if out is None:
        strides = [dtypes[0].itemsize] * ndim
        for i in reversed(range(ndim - 1)):
            strides[i] = strides[i + 1] * max(expected[i + 1], 1)
        return (expected, tuple(strides), dtypes[0])
    if out[0] != expected:
        raise wrong_value("out", f"shape {out[0]}", f"shape {expected}")
    allowed = (*dtypes, np.dtype(np.float32)) if dtypes[0] in HALVES else dtypes
    if out[2] not in allowed:
        text = " or ".join(f"dtype {a}" for a in allowed)
        raise wrong_type("out", f"dtype {out[2]}", text)
    return out


def _checked_length(name: str, value: int | None, extent: int) -> int | None:
    if value is not None and not 0 <= value <= extent:
        raise wrong_value(name, value, f"a length from 0 to {extent}")
    return value


def check_arrays(problem: Problem, options: Options, q: Array) -> None:
    """Raise unless option arrays are on the device of q, and integers in host memory in range.

    Lengths and offsets may be in host memory. Kernels clamp their values on a device.
    """
    for name, array in options.arrays.items():
        if is_cupy(array) or not ARRAYS[name][0].from_host:
            same_module(**{"q": q, name: array})
        elif array.size:
            longest = {"q_lengths": problem.seqlen_q, "kv_lengths": problem.seqlen_k}
            low, high = (0, longest[name]) if name in longest else (-FARTHEST, FARTHEST)
            least, most = int(array.min()), int(array.max())
            if least < low or most > high:
                expected = f"lengths from 0 to {high}" if low == 0 else "values from -2^59 to 2^59"
                raise wrong_value(name, f"values from {least} to {most}", expected)
