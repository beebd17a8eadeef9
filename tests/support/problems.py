"""Which calls should be tried? A call as a value, and Hypothesis strategies that draw whole ones.

Arrays of a `Call` are canonical (batch axes, then sequence and feature); how they lie in memory and
in which axes order the library gets them is part of the call, so that one drawn value says all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import cuflash
import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from support import families, memory
from support.memory import Placement

Array = Any
Pairs = tuple[tuple[int, int], ...]
DTYPES = {t.__name__: np.dtype(t) for t in (np.float16, bfloat16, np.float32, np.float64)}
HALVES = ("float16", "bfloat16")
_OPERANDS = ("q", "k", "v")
CANONICAL: Pairs = ((-2, -1),) * 4
SEQUENCE_OUTSIDE_HEADS: Pairs = ((-3, -1),) * 4
FEATURE_FIRST: Pairs = ((-1, -2),) * 4
MIXED: Pairs = ((-2, -1), (-3, -1), (-1, -2), (-3, -2))


@dataclass(frozen=True, eq=False)
class Call:
    """Everything about one forward and backward call.

    ``options`` are keyword arguments with NumPy arrays; ``axes`` is None or the four pairs;
    ``placements`` says for names among q, k, v, dout, out how they lie in memory (default: dense).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: Pairs | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    wrt: tuple[str, ...] = _OPERANDS
    origin: str = ""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result: that of q, k, v, which are of one dtype here."""
        return self.q.dtype

    @property
    def lse_dtype(self) -> np.dtype:
        return self.dtype if self.dtype == np.float64 else np.dtype(np.float32)

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        if not self.options.get("enable_gqa"):
            return 1
        return self.q.shape[-3] // self.k.shape[-3]

    @cached_property
    def batch(self) -> tuple[int, ...]:
        k = self.k.shape[:-2]
        if self.group_size > 1:
            k = (*k[:-1], k[-1] * self.group_size)
        v = self.v.shape[:-2]
        if self.group_size > 1:
            v = (*v[:-1], v[-1] * self.group_size)
        return np.broadcast_shapes(self.q.shape[:-2], k, v)

    def array(self, name: str) -> np.ndarray:
        """The input called ``name``."""
        return getattr(self, name)

    def but(self, **changes: Any) -> Call:
        """The same call with some fields replaced."""
        return replace(self, **changes)

    def with_options(self, **changes: Any) -> Call:
        """The same call with some score options replaced; None removes one."""
        merged = {**self.options, **changes}
        return replace(self, options={n: v for n, v in merged.items() if v is not None})

    def __repr__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, np.ndarray):
                return f"{value.dtype}{list(value.shape)}"
            return repr(value)

        parts = [f"{name}={text(self.array(name))}" for name in (*_OPERANDS, "dout")]
        parts += [f"{name}={text(value)}" for name, value in self.options.items()]
        parts += [] if self.dlse is None else [f"dlse={text(self.dlse)}"]
        parts += [] if self.axes is None else [f"axes={self.axes}"]
        parts += [f"placements={dict(self.placements)}"] if self.placements else []
        return f"Call({', '.join(parts)}, wrt={self.wrt}, origin={self.origin!r})"


@dataclass
class Results:
    """What one run of a call returned, on the host and in canonical axes order."""

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


def make_call(
    family: str,
    seed: int,
    dtype: Any,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    **fields: Any,
) -> Call:
    """A call with inputs of one family; dout is standard normal and of the full batch shape."""
    rng = np.random.default_rng(seed)
    arrays = families.make(family, rng, dtype, tuple(q), tuple(k), tuple(v))
    call = Call(*arrays, dout=arrays[0], origin=f"{family}, seed {seed}", **fields)
    dout = rng.standard_normal((*call.batch, q[-2], v[-1])).astype(dtype)
    return call.but(dout=dout)


def probe(call: Call) -> Call:
    """The call with one-hot values, key j to column j mod d_v: out is sums of probabilities."""
    keys, columns = call.v.shape[-2:]
    hot = np.arange(keys)[:, None] % max(columns, 1) == np.arange(columns)
    v = np.broadcast_to(hot, call.v.shape).astype(call.dtype)
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
) -> Results:
    """Run the library on poisoned memory, check what it touched, return results on the host.

    ``with_out`` passes ``out=`` and ``grads_out=`` inside canary bands; ``lse`` replaces the
    forward's logsumexp in the backward.
    """
    pairs = call.axes or CANONICAL
    inputs = {
        name: _placed(xp, call, name, call.array(name), pair, poison)
        for name, pair in zip((*_OPERANDS, "dout"), pairs, strict=True)
    }
    given = dict(call.options)
    for name, value in call.options.items():
        if isinstance(value, np.ndarray):
            inputs[name] = memory.place(xp, value, Placement.dense(value.ndim), poison)
            given[name] = inputs[name].view
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
    out, log_sum = cuflash.attention(
        q, k, v, axes=call.axes, return_lse=True, out=rooms, **given
    )
    if rooms is None:
        assert type(out) is xp.ndarray and type(log_sum) is xp.ndarray
        assert (out.dtype, log_sum.dtype) == (call.dtype, call.lse_dtype)
    else:
        assert out is rooms[0] and log_sum is rooms[1]
    result = Results(_canonical(out, pairs[3]), memory.to_numpy(log_sum), {})
    assert result.out.shape == shape, f"out has shape {result.out.shape}, expected {shape}"
    assert result.lse.shape == shape[:-1], f"lse has shape {result.lse.shape}"
    if backward:
        dlse = None if call.dlse is None else memory.to_device(xp, call.dlse)
        buffers = {}
        if with_out:
            for name, pair in zip(_OPERANDS, pairs, strict=False):
                own = call.array(name)
                if name in call.wrt:
                    buffers["d" + name] = _room(
                        xp, call, "d" + name, own.shape, own.dtype, pair, poison
                    )
        gradients = cuflash.attention_backward(
            dout, q, k, v, out, log_sum if lse is None else memory.to_device(xp, lse),
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


def _collect_gradients(call: Call, pairs: Pairs, gradients: Any, result: Results) -> None:
    for name, pair in zip(_OPERANDS, pairs, strict=False):
        gradient = getattr(gradients, "d" + name)
        if name not in call.wrt:
            assert gradient is None, f"d{name} was not asked for"
            continue
        own = call.array(name)
        assert gradient.dtype == own.dtype, f"d{name} has dtype {gradient.dtype}"
        result.gradients[name] = _canonical(gradient, pair)
        assert result.gradients[name].shape == own.shape, f"d{name} has shape {gradient.shape}"


def _placed(
    xp: ModuleType,
    call: Call,
    name: str,
    array: np.ndarray,
    pair: tuple[int, int],
    poison: str,
) -> memory.Placed:
    moved = np.moveaxis(array, (-2, -1), pair)
    placement = call.placements.get(name) or Placement.dense(array.ndim)
    return memory.place(xp, moved, placement, poison)


def _room(
    xp: ModuleType,
    call: Call,
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    pair: tuple[int, int],
    poison: str,
) -> memory.Placed:
    moved = np.moveaxis(np.empty(shape, bool), (-2, -1), pair).shape
    placement = call.placements.get(name) or Placement.dense(len(shape))
    return memory.reserve(xp, moved, dtype, placement, poison)


def _canonical(array: Array, pair: tuple[int, int]) -> np.ndarray:
    return np.moveaxis(memory.to_numpy(array), pair, (-2, -1))
