"""Which calls should be tried? A call as a value, and Hypothesis strategies that draw whole ones.

Arrays of a `Call` are canonical (batch axes, then sequence and feature). Their placement in memory
and their axes order for cuflash are part of the call, so that one drawn value says all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cuflash
from cuflash import testing
from cuflash._problem.option_table import FIELDS
from cuflash.testing._strategies import DTYPES
from support import memory
from support.memory import Placement
from support.shared_kernels import kinds

Array = Any
Pairs = tuple[tuple[int, int], ...]
_OPERANDS = ("q", "k", "v")
CANONICAL: Pairs = ((-2, -1),) * 4
SEQUENCE_OUTSIDE_HEADS: Pairs = ((-3, -1),) * 4
FEATURE_FIRST: Pairs = ((-1, -2),) * 4
MIXED: Pairs = ((-2, -1), (-3, -1), (-1, -2), (-3, -2))


@dataclass(frozen=True, eq=False, repr=False)
class Call(testing.Call):
    """A call together with the placement of its arrays in memory.

    ``options`` are keyword arguments with NumPy arrays. ``axes`` is None or the four pairs.
    ``placements`` has inputs, array options and results by name; all others are dense, ``lead``
    elements behind the start of their buffer. ``sequences`` is the number of packed sequences of
    equal length, see :func:`packed`. ``tf32`` asks for products of TF32.
    """

    axes: Pairs | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    lead: int = memory.BAND
    deterministic: bool = True
    sequences: int = 0

    @classmethod
    def of(cls, call: testing.Call) -> Call:
        """Return a call of ``cuflash.testing``, dense in memory."""
        return cls(**{own.name: getattr(call, own.name) for own in fields(testing.Call)})


@dataclass(frozen=True)
class Limits:
    """What may be drawn for one array module: partial tiles, and what it supports.

    Each dtype, head_dim and option present is a kernel of its own that costs a second to compile,
    so few are drawn for a GPU.
    """

    dtypes: tuple[str, ...]
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    values_dims: tuple[int, ...]
    option_sets: tuple[frozenset[str], ...] | None  # None: any
    gradients: tuple[str, ...]  # beside those of q, k and v


EVERYWHERE = ("scale", "softcap", "bias", "mask")
RANGES = ("causal", "offset", "window", "q_lengths", "kv_lengths")
PER_HEAD = ("alibi_slopes", "sink")
WITHOUT_SINK = (*RANGES, *EVERYWHERE, "alibi_slopes", "segment_ids")
WITHOUT_DROPOUT = (*WITHOUT_SINK, "sink")
ALL_OPTIONS = (*WITHOUT_DROPOUT, "dropout")
#: Host tiles are made this small, so that small arrays have partial tiles.
HOST_TILE = 16
_HOST = Limits(
    dtypes=tuple(DTYPES),
    seqlens=(1, 2, 5, 15, 16, 17, 31, 32, 33, 40, 0),
    head_dims=(1, 3, 8, 17),
    values_dims=(1, 4, 8, 19, 0),
    option_sets=None,
    gradients=("bias", "alibi_slopes", "sink", "scale"),
)
_DEVICE = Limits(
    dtypes=tuple(DTYPES),
    seqlens=(1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 200, 0),
    head_dims=(40, 64),
    values_dims=(64,),
    option_sets=tuple(
        frozenset(names)
        for names in (
            (*RANGES, *EVERYWHERE, *PER_HEAD, "segment_ids", "dropout"),
            (),
            ("causal", "offset", *PER_HEAD),
            ("segment_ids", "sink"),
            ("causal", "kv_lengths", "dropout"),
            ("causal",),
            ("window", "offset", "q_lengths", "kv_lengths"),
            EVERYWHERE,
        )
    ),
    gradients=("bias", "alibi_slopes", "sink", "scale"),
)


def limits_of(xp: ModuleType) -> Limits:
    """Return the limits of NumPy or CuPy."""
    return _HOST if xp is np else _DEVICE


@dataclass
class Results:
    """What one run of a call returned, on the host and in canonical axes order."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


def make_call(*arguments: Any, **own: Any) -> Call:
    """Return a call with inputs of one family; fields of a Call may be given."""
    general = {f.name: own.pop(f.name) for f in fields(testing.Call) if f.name in own}
    return Call.of(testing.make_call(*arguments, **general)).but(**own)


def packed(call: Call) -> Call:
    """Return the call with the entries of its first batch axis as packed sequences."""
    arrays = {name: _joined(getattr(call, name), -3) for name in (*_OPERANDS, "dout")}
    dlse = None if call.dlse is None else _joined(call.dlse, -2)
    return call.but(sequences=call.batch[0], dlse=dlse, **arrays)


def unpacked(call: Call, results: Results) -> tuple[Call, Results]:
    """Return a packed call and its results as the batch that they were made of."""
    n = call.sequences
    arrays = {name: _parted(getattr(call, name), n, -3) for name in (*_OPERANDS, "dout")}
    dlse = None if call.dlse is None else _parted(call.dlse, n, -2)
    gradients = {
        name: _parted(array, n, -3) if name in _OPERANDS else array
        for name, array in results.gradients.items()
    }
    batch = call.but(sequences=0, axes=None, placements={}, dlse=dlse, **arrays)
    return batch, Results(_parted(results.out, n, -3), _parted(results.lse, n, -2), gradients)


def _joined(array: np.ndarray, heads: int) -> np.ndarray:
    """Return entries (sequences, heads, rows, ...) joined as (heads, sequences * rows, ...)."""
    moved = np.moveaxis(array, 0, heads)
    rows = moved.shape[heads] * moved.shape[heads + 1]
    return moved.reshape(*moved.shape[:heads], rows, *moved.shape[moved.ndim + heads + 2 :])


def _parted(array: np.ndarray, sequences: int, heads: int) -> np.ndarray:
    """Undo `_joined`."""
    at = array.ndim + heads + 1
    rows = array.shape[at] // sequences
    parts = array.reshape(*array.shape[:at], sequences, rows, *array.shape[at + 1 :])
    return np.moveaxis(parts, at, 0)


def check_a_query_without_keys(xp: ModuleType, clean: Call, row: int) -> None:
    """Assert that NaN in a query that sees no key reaches no result."""
    q, dout = clean.q.copy(), clean.dout.copy()
    q[..., row, :] = dout[..., row, :] = np.nan
    expected, result = run(xp, clean), run(xp, clean.but(q=q, dout=dout))
    assert (result.out[..., row, :] == 0).all()
    for name in _OPERANDS:
        np.testing.assert_array_equal(result.gradients[name], expected.gradients[name], name)


def probe(call: Call) -> Call:
    """Return the call with one-hot values, key j to column j mod d_v: out sums probabilities."""
    keys, columns = call.v.shape[-2:]
    hot = np.arange(keys)[:, None] % max(columns, 1) == np.arange(columns)
    v = np.broadcast_to(hot, call.v.shape).astype(call.v.dtype)
    return call.but(v=v, origin=call.origin + ", probe")


def run(
    xp: ModuleType,
    call: Call,
    *,
    backward: bool = True,
    poison: str = "nan",
    with_out: bool = False,
    out_dtype: Any = None,
    lse: np.ndarray | None = None,
    saved_out: np.ndarray | None = None,
) -> Results:
    """Run cuflash on poisoned memory, check what it touched, return results on the host.

    ``with_out`` passes ``out=`` and ``grads_out=`` inside canary bands. ``lse`` and ``saved_out``,
    the latter in canonical axes order, replace the forward's results in the backward.
    """
    pairs = call.axes or CANONICAL
    inputs = {
        name: _placed(xp, call, name, call.array(name), pair, poison)
        for name, pair in zip((*_OPERANDS, "dout"), pairs, strict=True)
    }
    for name, value in call.option_arrays.items():
        inputs[name] = _placed(xp, call, name, value, None, poison)
    given = {
        n: inputs[n].view if n in inputs else _on_device(xp, value)
        for n, value in call.options.items()
    }
    given["deterministic"] = call.deterministic
    given["precision"] = "tf32" if call.tf32 else None
    if "segment_ids" in given:
        given["segment_ids"] = (inputs["segment_ids_q"].view, inputs["segment_ids_k"].view)
    q, k, v, dout = (inputs[name].view for name in (*_OPERANDS, "dout"))
    outputs: dict[str, memory.Placed] = {}
    shape = (*call.batch, call.q.shape[-2], call.v.shape[-1])
    if with_out:
        outputs = {
            "out": _room(xp, call, "out", shape, out_dtype or call.dtype, pairs[3], poison),
            "lse": memory.reserve(
                xp, shape[:-1], call.lse_dtype, Placement.dense(len(shape) - 1), poison
            ),
        }
    rooms = tuple(room.view for room in outputs.values()) or None
    attend, attend_backward = cuflash.attention, cuflash.attention_backward
    ends: tuple[Array, ...] = ()
    if call.sequences:
        attend, attend_backward = cuflash.attention_varlen, cuflash.attention_varlen_backward
        ends = tuple(
            xp.asarray(np.linspace(0, n, call.sequences + 1, dtype=np.int32))
            for n in (call.q.shape[-2], call.k.shape[-2])
        )
    out, log_sum = attend(q, k, v, *ends, axes=call.axes, return_lse=True, out=rooms, **given)
    if rooms is None:
        assert type(out) is xp.ndarray
        assert type(log_sum) is xp.ndarray
        assert (out.dtype, log_sum.dtype) == (call.dtype, call.lse_dtype)
    else:
        assert out is rooms[0]
        assert log_sum is rooms[1]
    result = Results(_canonical(out, pairs[3]), memory.to_numpy(log_sum), {})
    assert result.out.shape == shape, f"out has shape {result.out.shape}, expected {shape}"
    assert result.lse.shape == shape[:-1], f"lse has shape {result.lse.shape}"
    if backward:
        dlse = None
        if call.dlse is not None:
            inputs["dlse"] = _placed(xp, call, "dlse", call.dlse, None, poison)
            dlse = inputs["dlse"].view
        buffers = {}
        if with_out:
            of = dict(zip(_OPERANDS, pairs, strict=False))
            for name in call.wrt:
                own, gradient = call.array(name), FIELDS[name]
                buffers[gradient] = _room(
                    xp, call, gradient, own.shape, own.dtype, of.get(name), poison
                )
        if saved_out is not None:
            out = memory.to_device(xp, np.moveaxis(saved_out, (-2, -1), pairs[3]))
        gradients = attend_backward(
            dout, q, k, v, out, log_sum if lse is None else memory.to_device(xp, lse), *ends,
            dlse=dlse, wrt=call.wrt, axes=call.axes,
            grads_out=cuflash.Gradients(**{n: room.view for n, room in buffers.items()})
            if with_out else None, **given,
        )  # fmt: skip
        outputs |= buffers
        _collect_gradients(call, pairs, gradients, result)
    for name, placed in inputs.items():
        memory.assert_unchanged(name, placed)
    for name, placed in outputs.items():
        memory.assert_written_inside(name, placed)
    return result


def _on_device(xp: ModuleType, value: Any) -> Any:
    """Return an option that is no array, with the arrays of a formula on the device."""
    if not hasattr(value, "arrays"):
        return value
    return replace(value, arrays={n: memory.to_device(xp, a) for n, a in value.arrays.items()})


def _collect_gradients(call: Call, pairs: Pairs, gradients: Any, result: Results) -> None:
    of = dict(zip(_OPERANDS, pairs, strict=False))
    for name, gradient_name in FIELDS.items():
        gradient = getattr(gradients, gradient_name)
        if name not in call.wrt:
            assert gradient is None, f"{gradient_name} was not asked for"
            continue
        own = call.array(name)
        assert gradient.dtype == own.dtype, f"{gradient_name} has dtype {gradient.dtype}"
        if name in of:
            result.gradients[name] = _canonical(gradient, of[name])
        else:
            result.gradients[name] = memory.to_numpy(gradient)
        assert result.gradients[name].shape == own.shape, f"{gradient_name}: {gradient.shape}"


def _placed(
    xp: ModuleType,
    call: Call,
    name: str,
    array: np.ndarray,
    pair: tuple[int, int] | None,
    poison: str,
) -> memory.Placed:
    moved = array if pair is None else np.moveaxis(array, (-2, -1), pair)
    placement = call.placements.get(name) or Placement.dense(array.ndim, call.lead)
    return memory.place(xp, moved, placement, poison)


def _room(
    xp: ModuleType,
    call: Call,
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    pair: tuple[int, int] | None,
    poison: str,
) -> memory.Placed:
    moved = shape if pair is None else np.moveaxis(np.empty(shape, bool), (-2, -1), pair).shape
    placement = call.placements.get(name) or Placement.dense(len(shape), call.lead)
    return memory.reserve(xp, moved, dtype, placement, poison)


def _canonical(array: Array, pair: tuple[int, int]) -> np.ndarray:
    return np.moveaxis(memory.to_numpy(array), pair, (-2, -1))


# What may be drawn.

_ABSURD = 99_990_001  # a legal stride of an axis of one element


@st.composite
def calls(
    draw: st.DrawFn,
    limits: Limits,
    *,
    layouts: bool = False,
    gradients: bool = False,
    seqlens: Sequence[int] | None = None,
    **drawn: Any,
) -> Call:
    """Draw a whole call: arguments of ``cuflash.testing.calls`` within ``limits``, and layouts.

    ``layouts`` also draws axes orders and strides, and ``gradients`` also asks for those of
    options. Without ``layouts`` either all arrays are aligned, for Hopper's kernels, or none is,
    for the portable ones. Where few sets of options are supported, kinds of `shared_kernels` are
    drawn.
    """
    aligned, kind = st.booleans(), None
    of_kind: dict[str, Any] = {"dtypes": limits.dtypes, "head_dims": limits.head_dims}
    if limits.option_sets is not None:
        those = (drawn["options"],) if "options" in drawn else ()
        kind = draw(
            st.sampled_from(kinds(limits.dtypes, limits.option_sets, limits.head_dims, *those))
        )
        aligned, of_kind = st.just(kind.aligned), kind.drawn
    call = draw(
        testing.calls(
            seqlens=limits.seqlens if seqlens is None else seqlens,
            values_dims=limits.values_dims,
            gradients=limits.gradients if gradients else (),
            **of_kind,
            **drawn,
        )
    )
    call = Call.of(call if kind is None else kind.of(call))
    if layouts:
        return _laid_out(draw, call)
    return call.but(lead=memory.ALIGNED if draw(aligned) else memory.BAND)


def _laid_out(draw: st.DrawFn, call: Call) -> Call:
    """Give the call an axes order, and each array strides that may be 0, negative or gapped."""
    ranks = [a.ndim for a in (call.q, call.k, call.v, call.dout)]
    orders = [None, FEATURE_FIRST] + ([SEQUENCE_OUTSIDE_HEADS, MIXED] if min(ranks) > 2 else [])
    pairs = draw(st.sampled_from(orders))
    changes: dict[str, Any] = {"axes": pairs}
    placements = {}
    for name, pair in zip((*_OPERANDS, "dout"), pairs or CANONICAL, strict=True):
        moved = np.moveaxis(call.array(name), (-2, -1), pair)
        placement = _placement(draw, moved.shape, zeros=True)
        for axis in np.flatnonzero(placement.zeros):
            moved = np.broadcast_to(moved.take([0], axis), moved.shape)
        changes[name] = np.moveaxis(moved, pair, (-2, -1)).copy()
        placements[name] = placement
        result = "out" if name == "dout" else "d" + name
        placements[result] = _placement(draw, moved.shape, zeros=False)
    others = {**call.option_arrays, **({} if call.dlse is None else {"dlse": call.dlse})}
    for name, value in others.items():
        placements[name] = _placement(draw, value.shape, zeros=False)
        if name in FIELDS:
            placements[FIELDS[name]] = _placement(draw, value.shape, zeros=False)
    return call.but(**changes, placements=placements)


def _placement(draw: st.DrawFn, shape: tuple[int, ...], *, zeros: bool) -> Placement:
    ndim = len(shape)
    plain = draw(st.booleans())
    if plain:
        return Placement.dense(ndim, lead=draw(st.sampled_from((0, 1, 7))))
    some = st.tuples(*[st.booleans()] * ndim)
    constant = draw(some) if zeros and draw(st.booleans()) else (False,) * ndim
    return Placement(
        tuple(draw(st.permutations(range(ndim)))),
        tuple(draw(st.sampled_from((1, 2, 3) if n > 1 else (1, _ABSURD))) for n in shape),
        draw(some),
        tuple(z and n > 1 for z, n in zip(constant, shape, strict=True)),
        draw(st.sampled_from((0, 1, 7))),
    )
