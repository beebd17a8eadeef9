"""What is a result compared with? The truth, models and bounds of every tensor of a call.

:mod:`cuflash.testing._budget` has the derivation and applies the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cuflash import reference
from cuflash._arrays import Array
from cuflash._problem.option_table import FIELDS
from cuflash.testing import _model_flash as model_flash
from cuflash.testing._model_flash import WEIGHT_FACTOR, WEIGHTS, finfo

#: Number of scores of a call from which on its batch entries are computed one after the other: the
#: system takes longer to allocate and clear larger arrays than the computation takes.
TOGETHER = 1 << 20
OUT_RMS, GRADIENT_RMS = 1.25, 1.5


@dataclass
class Tensor:
    """One result: truth T, models M and M', bounds E (accumulation) and W (declared roundings)."""

    name: str
    truth: Array
    model: Array
    unrounded: Array
    accumulation: Array
    rounding: Array
    dtype: np.dtype[Any]
    rms_factor: float


@dataclass
class Forward:
    """What out and lse are compared with; ``lse_error`` is the part of exponents in R4's bound."""

    out: Tensor
    lse: Array
    lse_error: Array
    visible: Array  # whether a row has a key


def sum_error(terms: int) -> float:
    """c(n): the error of a sum of ``terms`` terms is at most c(n) * u * sum|x|."""
    return min(float(terms), 3 * math.sqrt(terms))


#: Tensor cores sum products of 8-bit operands in steps of 32 products. These and the sum so far are
#: cut off 13 bits below the largest of them, and so is their sum.
_STEP, _CUT = 32, 2.0**-13
#: For out, sums over this many keys are added in float32.
_KEYS_OF_SUM = 128


class Bounds:
    """Truth, models and bounds of the results of one call."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.accumulator = model_flash.accumulator(call.dtype)
        double = self.accumulator == np.float64
        self.truth_dtype: np.dtype[Any] = np.dtype(np.longdouble if double else np.float64)
        eps, truth_eps = np.finfo(self.accumulator).eps, np.finfo(self.truth_dtype).eps
        self.u = float(eps / 2 * (1 + truth_eps / eps))
        half = np.dtype(call.dtype).itemsize == 2
        self.w = float(finfo(call.dtype).eps) / 2 if half else 0.0
        self.t = float(finfo(call.dtype).smallest_subnormal) / 2 if half else 0.0
        self.z = (1 + 2.0**-10) ** 2 - 1 if call.tf32 else 0.0  # z' of the derivation
        self.z_out = self.z
        if call.float8:
            self.w = float(finfo(WEIGHTS).eps) / 2
            self.t = float(finfo(WEIGHTS).smallest_subnormal) / float(2 * WEIGHT_FACTOR)
            self.z_out = _KEYS_OF_SUM // _STEP * (_STEP + 2) * _CUT
        self.tiny = float(np.finfo(self.accumulator).tiny)
        self.given: tuple[Array, Array] | None = None

    @cached_property
    def inputs(self) -> model_flash.Expanded:
        return model_flash.expand(self.call, np.float64)

    @cached_property
    def entries(self) -> tuple[Any, ...]:
        """A call for each batch entry, if the entries are large and independent; else empty."""
        c = self.call
        scores = math.prod(c.batch) * c.q.shape[-2] * c.k.shape[-2]
        whole = all(a.shape[:-2] == c.batch for a in (c.q, c.k, c.v, c.dout))
        numbered = {"dropout", "score_mod", "mask_mod"} & set(c.options)
        apart = whole and not numbered and not c.option_arrays and set(c.wrt) <= {"q", "k", "v"}
        if not c.batch or not apart or scores < TOGETHER:
            return ()

        def entry(i: tuple[int, ...]) -> Any:
            dlse = None if c.dlse is None else c.dlse[i]
            return c.but(q=c.q[i], k=c.k[i], v=c.v[i], dout=c.dout[i], dlse=dlse)

        return tuple(map(entry, np.ndindex(c.batch)))

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join the results of all batch entries."""

        def stacked(name: str) -> Array:
            return self.stacked([getattr(tensor, name) for tensor in tensors])

        names = ("truth", "model", "unrounded", "accumulation", "rounding")
        changes: dict[str, Any] = {name: stacked(name) for name in names}
        return replace(tensors[0], **changes)

    def stacked(self, arrays: Sequence[Array]) -> Array:
        """Join the arrays of all batch entries."""
        return np.stack(arrays).reshape(*self.call.batch, *arrays[0].shape)

    @cached_property
    def forward(self) -> Forward:
        """The forward results of all batch entries."""
        if self.entries:
            parts = [type(self)(entry).forward for entry in self.entries]
            rows = ([getattr(p, n) for p in parts] for n in ("lse", "lse_error", "visible"))
            return Forward(self.joined([p.out for p in parts]), *map(self.stacked, rows))
        error = (self.mean_error + self.lost_mean)[..., 0]
        return Forward(self.out, self.truth.lse, error, self.inputs.visible.any(-1))

    @cached_property
    def truth(self) -> Any:
        """Out and lse of the definition."""
        c = self.call
        return reference.attention(
            c.q, c.k, c.v, return_lse=True, dtype=self.truth_dtype.type, **c.options
        )

    @cached_property
    def model(self) -> tuple[Array, Array]:
        """Out and lse of model-flash."""
        return model_flash.forward(self.model_inputs)

    @cached_property
    def unrounded(self) -> tuple[Array, Array]:
        """Out and lse of model-flash without roundings to the operand dtype."""
        return model_flash.forward(self.model_inputs, rounding=False)

    @cached_property
    def model_inputs(self) -> model_flash.Expanded:
        return model_flash.expand(self.call, self.accumulator)

    @cached_property
    def lse(self) -> Array:
        """The truth's lse in float64, 0 where it is not finite."""
        return np.nan_to_num(self.truth.lse.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)

    @cached_property
    def p(self) -> Array:
        """Probabilities, (batch, m, n), 0 where invisible or not finite."""
        x = self.inputs
        scores = np.nan_to_num(model_flash.final_scores(self.call))
        seen = np.isfinite(self.truth.lse)[..., None]
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.exp(scores - self.lse[..., None])
        return np.where(x.visible & seen & np.isfinite(p), p, 0.0)

    @cached_property
    def score_sum(self) -> Array:
        """S = |scale| sum|q||k|, (batch, m, n)."""
        x = self.inputs
        return abs(x.scale) * (np.abs(x.q) @ np.abs(x.k).swapaxes(-1, -2))

    @cached_property
    def exponent_error(self) -> Array:
        """Exponent error e of the derivation; 0 where P is 0, since it has no effect there."""
        x, u = self.inputs, self.u
        with np.errstate(divide="ignore"):
            distance = np.where(self.p > 0, np.abs(np.log(self.p)), 0.0)
        e = (sum_error(x.q.shape[-1]) + 4) * self.score_sum
        added = np.abs(x.bias) + np.abs(x.slopes) * x.distance + np.abs(x.shift)
        e = e + 8 * (x.softcap or 0.0) + 4 * added + 2 * distance
        return np.where(self.p > 0, u * e, 0.0)

    @cached_property
    def sink(self) -> tuple[Array, Array]:
        """P and e of the sink, (batch, m, 1); both 0 without a sink."""
        sink, lse = self.inputs.sink, self.lse[..., None]
        there = np.isfinite(sink) & np.isfinite(self.truth.lse)[..., None]
        score = np.where(there, sink, 0.0)
        p = np.where(there, np.exp(np.where(there, score - lse, 0.0)), 0.0)
        return p, np.where(there, self.u * (4 * np.abs(score) + 2 * np.abs(score - lse)), 0.0)

    @cached_property
    def mean_error(self) -> Array:
        """sum_n(P e), the sink included, (batch, m, 1)."""
        p, e = self.sink
        return (self.p * self.exponent_error).sum(-1, keepdims=True) + p * e

    @cached_property
    def relative_error(self) -> Array:
        """Relative error r of the derivation, (batch, m, n)."""
        return self.exponent_error + self.row_error

    @cached_property
    def row_error(self) -> Array:
        """The difference r - e of the derivation, (batch, m, 1)."""
        constant = 2 * sum_error(self.p.shape[-1]) + 16 + 2 * np.abs(self.lse[..., None])
        return self.mean_error + self.u * (constant + 2 * (self.inputs.kept_scale != 1))

    @cached_property
    def factor(self) -> Array:
        """K of the derivation, (batch, m, n)."""
        return self.inputs.kept * self.inputs.kept_scale

    @cached_property
    def score_lost(self) -> Array:
        """Exponent error e from TF32, or from sums of products of 8-bit operands, (batch, m, n)."""
        if not self.call.float8:
            return self.z * self.score_sum
        x = self.inputs
        keys = x.k.swapaxes(-1, -2)
        total, lost = np.zeros((2, *self.p.shape))
        for first in range(0, x.q.shape[-1], _STEP):
            q, k = x.q[..., first : first + _STEP], keys[..., first : first + _STEP, :]
            largest = np.hypot(total, np.sqrt(q**2 @ k**2))  # an upper bound
            total = total + q @ k
            lost = lost + _CUT * ((_STEP + 1) * largest + np.abs(total))
        return abs(x.scale) * lost

    @cached_property
    def lost_mean(self) -> Array:
        """sum_n(P e), with e = ``score_lost``, (batch, m, 1)."""
        return (self.p * self.score_lost).sum(-1, keepdims=True)

    @cached_property
    def lost_weight(self) -> Array:
        """P r, with e = ``score_lost``, (batch, m, n)."""
        return self.p * (self.score_lost + self.lost_mean)

    @cached_property
    def out(self) -> Tensor:
        x = self.inputs
        v = np.abs(x.v)
        accumulation = ((self.p * self.relative_error + self.tiny * x.visible) * self.factor) @ v
        lost = (self.w + self.z_out) * self.p + self.t * x.visible + self.lost_weight
        rounding = (lost * self.factor) @ v
        return Tensor(
            "out", self.truth.out, self.model[0], self.unrounded[0], accumulation, rounding,
            self.call.dtype, OUT_RMS,
        )  # fmt: skip

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """One Tensor for each gradient in ``call.wrt``."""
        if self.entries:
            parts = []
            for number, entry in zip(np.ndindex(self.call.batch), self.entries, strict=True):
                part = type(self)(entry)
                if self.given is not None:
                    part.given = self.given[0][number], self.given[1][number]
                parts.append(part.gradients)
            return {name: self.joined([part[name] for part in parts]) for name in self.call.wrt}
        c, x, u, w, p = self.call, self.inputs, self.u, self.w, self.p
        wrt = c.wrt
        exact = reference.attention_backward(
            c.dout, c.q, c.k, c.v, self.truth.out, self.truth.lse, dlse=c.dlse, wrt=wrt,
            dtype=self.truth_dtype.type, **c.options,
        )  # fmt: skip
        model = model_flash.backward(self.model_inputs, *(self.given or self.model))
        unrounded = model_flash.backward(self.model_inputs, *self.unrounded, rounding=False)
        q, k, v, dout = (np.abs(a) for a in (x.q, x.k, x.v, x.dout))
        rows, keys, features, values = p.shape[-2], p.shape[-1], q.shape[-1], v.shape[-1]
        r = self.relative_error
        factor = self.factor
        products = factor * (dout @ v.swapaxes(-1, -2))
        mean = (p * products).sum(-1, keepdims=True)
        y = np.abs(x.dlse)[..., None]
        reach = products + mean + y
        delta_error = (p * r * products).sum(-1, keepdims=True)
        ds = p * (
            (r + 4 * u) * reach + u * (sum_error(values) + 2) * (products + mean) + delta_error
        )
        sink_p, sink_e = self.sink
        sink = sink_p * (
            (sink_e + self.row_error + 4 * u) * (mean + y)
            + u * (sum_error(values) + 2) * mean
            + delta_error
        )
        tanh = np.zeros_like(p)
        steep = 0.0
        if x.softcap is not None:
            raw = x.scale * (x.q @ x.k.swapaxes(-1, -2))
            tanh = np.tanh(raw / x.softcap)
            steep = 2 * (sum_error(features) + 4) * self.score_sum / x.softcap * (1 - tanh**2) + 16
        slope = 1 - tanh**2
        draw = ds * slope + p * reach * u * steep
        out = np.abs(np.nan_to_num(self.truth.out.astype(np.float64), posinf=0.0, neginf=0.0))
        delta_w = w * (dout * out).sum(-1, keepdims=True)
        z, weight = self.z, self.lost_weight
        lost = (w + z) * p + self.t * x.visible + weight
        delta_w = delta_w + (lost * products).sum(-1, keepdims=True)
        ds_w = weight * reach + p * (z * products + delta_w)
        raw_w = slope * (ds_w + z * p * reach)
        if x.softcap is not None:
            raw_w = raw_w + p * reach * 2 * slope * z * self.score_sum / x.softcap
        draw_w = raw_w + w * p * slope * reach + self.t * x.visible
        raw_sum = q @ k.swapaxes(-1, -2)
        flushed = self.tiny * x.visible

        def times(array: Array, terms: int) -> Array:
            return array + u * (sum_error(terms) + 4) * p * reach * slope + flushed * (1 + reach)

        scale = abs(x.scale)
        accumulation = {
            "q": lambda: scale * (times(draw, keys) @ k),
            "k": lambda: scale * (times(draw, rows).swapaxes(-1, -2) @ q),
            "v": lambda: (
                ((p * (r + u * sum_error(rows)) + flushed) * factor).swapaxes(-1, -2) @ dout
            ),
            "bias": lambda: ds + flushed * (1 + reach),
            "alibi_slopes": lambda: ((ds + flushed * (1 + reach)) * x.distance).sum((-1, -2)),
            "sink": lambda: (sink + self.tiny * (1 + mean + y))[..., 0].sum(-1),
            "scale": lambda: times(draw, features) * raw_sum,
        }
        rounding = {
            "q": lambda: scale * (draw_w @ k),
            "k": lambda: scale * (draw_w.swapaxes(-1, -2) @ q),
            "v": lambda: (lost * factor).swapaxes(-1, -2) @ dout,
            "bias": lambda: ds_w,
            "alibi_slopes": lambda: (ds_w * x.distance).sum((-1, -2)),
            "sink": lambda: (sink_p * (delta_w + self.lost_mean * (mean + y)))[..., 0].sum(-1),
            "scale": lambda: raw_w * raw_sum,
        }
        magnitude = {
            "q": lambda: scale * ((p * reach * slope) @ k),
            "k": lambda: scale * ((p * reach * slope).swapaxes(-1, -2) @ q),
            "v": lambda: (p * factor).swapaxes(-1, -2) @ dout,
            "bias": lambda: p * reach,
            "alibi_slopes": lambda: (p * reach * x.distance).sum((-1, -2)),
            "sink": lambda: (sink_p * (mean + y))[..., 0].sum(-1),
            "scale": lambda: p * reach * slope * raw_sum,
        }

        def tensor(name: str) -> Tensor:
            count = x.fold_count(name)
            summed = u * sum_error(count) if count > 1 else 0.0
            bound = accumulation[name]() + summed * magnitude[name]()
            return Tensor(
                FIELDS[name],
                getattr(exact, FIELDS[name]),
                model[name],
                unrounded[name],
                x.fold(name, bound),
                x.fold(name, rounding[name]()),
                c.array(name).dtype,
                GRADIENT_RMS,
            )

        return {name: tensor(name) for name in wrt}

    def signless(self, name: str) -> tuple[Array, Array]:
        """Z and Y of the derivation for dq or dk."""
        x, u, p = self.inputs, self.u, self.p
        q, k, v, dout = (np.abs(a) for a in (x.q, x.k, x.v, x.dout))
        rows, keys = p.shape[-2:]

        def g(terms: int) -> float:
            return u * math.sqrt(terms / 3)

        products = dout @ v.swapaxes(-1, -2)
        mean = (p * products).sum(-1, keepdims=True)
        delta = (x.dout * np.nan_to_num(self.truth.out.astype(np.float64))).sum(-1, keepdims=True)
        ds = np.abs(p * (x.dout @ x.v.swapaxes(-1, -2) - delta))
        of_pair = p * g(v.shape[-1]) * products
        of_out = dout * (g(keys) + 4 * u) * (p @ v)
        of_row = (g(v.shape[-1]) * mean) ** 2 + (of_out**2).sum(-1, keepdims=True)
        of_score = g(q.shape[-1]) * self.score_sum * ds
        common = u * (4 * self.score_sum + np.abs(self.lse[..., None]) + 8) + g(keys)
        common = ds * common
        if name == "q":
            square = (of_pair**2 + of_score**2) @ k**2 + of_row * (p @ x.k) ** 2
            square = square + (g(keys) * (ds @ k)) ** 2
            shared = common @ k
        else:
            square = ((of_pair**2 + of_score**2) + p**2 * of_row).swapaxes(-1, -2) @ q**2
            square = square + (g(rows) * (ds.swapaxes(-1, -2) @ q)) ** 2
            shared = common.swapaxes(-1, -2) @ q
        return abs(x.scale) * np.sqrt(square), abs(x.scale) * shared
