"""How exact can attention be in the arithmetic that a dtype implies? The model "M" of the budget.

Model-flash computes what a flawless fused kernel computes. Scores, exponentials and all sums are in
the accumulator's dtype (float32; float64 for float64). The unnormalised probabilities and the score
gradients are rounded once to the operand dtype before their product, results once at the end. If a
call allows TF32, every operand of a product is cut to 11 significant bits. If operands have 8 bits,
probabilities, times 2^8, are rounded to float8_e4m3fn. There are no tiles. Which keys a query sees
is taken from the definition, so this model cannot find mistakes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import reference
from cuflash._api.probabilities import dropout_mask
from cuflash._arrays import Array

finfo: Any = ml_dtypes.finfo  # which has no types


#: Dtype of probabilities if operands have 8 bits, and the factor before they are rounded to it.
WEIGHTS, WEIGHT_FACTOR = np.dtype(ml_dtypes.float8_e4m3fn), np.float32(2**8)


def accumulator(dtype: Any) -> np.dtype[Any]:
    """The dtype in which sums are computed."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


@dataclass
class Expanded:
    """A call's arrays with every broadcast written out, in one dtype, with 0 for non-finite values.

    q (batch, m, d), k (batch, n, d), v (batch, n, e), dout (batch, m, e), dlse (batch, m);
    bias, distance (what a slope multiplies), visible and kept (batch, m, n); slopes (batch, 1, 1);
    sink (batch, m, 1), -inf without a sink or beyond q_lengths. Dropout multiplies a kept weight by
    kept_scale. A formula turns a score into sign * score + shift (batch, m, n), with sign 1 or -1.
    Rows that see a non-finite value are not compared, so that 0 can replace it.
    """

    call: Any
    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    bias: Array
    distance: Array
    slopes: Array
    sink: Array
    visible: Array
    kept: Array
    kept_scale: float
    scale: float
    softcap: float | None
    sign: Array
    shift: Array

    def fold(self, name: str, gradient: Array) -> Array:
        """Sum a written-out gradient over broadcast axes and head groups, to the input's shape."""
        shape = self.call.array(name).shape
        if name == "scale":
            return gradient.sum()
        if name in ("k", "v") and self.call.group_size > 1:
            *batch, heads, rows, columns = gradient.shape
            group = self.call.group_size
            gradient = gradient.reshape(*batch, heads // group, group, rows, columns).sum(-3)
        gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
        axes = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
        return gradient.sum(axes, keepdims=True)

    def fold_count(self, name: str) -> int:
        """Number of written-out elements that are summed into one element of the gradient."""
        full: Array = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink}.get(
            name, self.visible
        )
        count: int = full.size // max(self.call.array(name).size, 1)
        return count


def expand(call: Any, dtype: Any) -> Expanded:
    """Write out every broadcast of ``call`` in ``dtype``."""

    def arithmetic(array: Array) -> Array:
        return np.nan_to_num(array.astype(dtype), nan=0.0, posinf=0.0, neginf=0.0)

    def heads(array: Array) -> Array:
        return np.repeat(array, call.group_size, -3) if call.group_size > 1 else array

    q, k, v = arithmetic(call.q), heads(arithmetic(call.k)), heads(arithmetic(call.v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    rows, keys = q.shape[-2], k.shape[-2]
    options = call.options
    bias = options.get("bias")
    slopes = options.get("alibi_slopes")
    scale = options.get("scale")
    core = (rows, keys)
    return Expanded(
        call,
        np.broadcast_to(q, batch + q.shape[-2:]),
        np.broadcast_to(k, batch + k.shape[-2:]),
        np.broadcast_to(v, batch + v.shape[-2:]),
        np.broadcast_to(arithmetic(call.dout), (*batch, rows, v.shape[-1])),
        np.zeros((*batch, rows), dtype) if call.dlse is None else arithmetic(call.dlse),
        np.broadcast_to(np.zeros((), dtype) if bias is None else arithmetic(bias), batch + core),
        np.broadcast_to(_distance(call, dtype), batch + core),
        np.zeros((), dtype) if slopes is None else arithmetic(slopes)[..., None, None],
        _sinks(call, (*batch, rows, 1), dtype),
        ~np.isneginf(final_scores(call)),
        *_dropout(call, batch + core),
        q.shape[-1] ** -0.5 if scale is None else scale,
        options.get("softcap"),
        *_formula(call, batch + core, dtype),
    )


def _formula(call: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """The derivative of the caller's formula, 1 or -1, and its value at 0."""
    formula = call.options.get("score_mod")
    if formula is None:
        return np.ones((), dtype), np.zeros((), dtype)
    *batch, heads, rows, keys = shape
    b, h, q, k = np.ogrid[: int(np.prod(batch)), :heads, :rows, :keys]
    zeros = np.zeros((b.size, heads, rows, keys), dtype)
    slope = formula.host_grad(zeros, b, h, q, k, **formula.arrays)
    sign = np.unique(slope)
    if sign.size != 1 or abs(sign[0]) != 1:
        raise NotImplementedError(
            "score_mod: got a formula whose derivative is not 1 everywhere, nor -1, expected one "
            "that adds to the score or negates it; compare with cuflash.reference instead"
        )
    shift = np.broadcast_to(formula.host(zeros, b, h, q, k, **formula.arrays), zeros.shape)
    return sign[0].astype(dtype), shift.reshape(shape).astype(dtype)


def _sinks(call: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """The sink of each query; -inf for rows beyond ``q_lengths``."""
    rows = shape[-2]
    sink = np.asarray(call.options.get("sink", -np.inf)).astype(dtype)[..., None, None]
    lengths = np.asarray(call.options.get("q_lengths", rows))[..., None, None]
    sinks = np.where(np.arange(rows)[:, None] < lengths, sink, -np.inf).astype(dtype)
    return np.broadcast_to(sinks, shape)


def _dropout(call: Any, shape: tuple[int, ...]) -> tuple[Array, float]:
    """Which weights are kept, batch + (m, n), and the factor that multiplies them."""
    p = call.options.get("dropout", 0.0)
    dropped = round(65536 * p)
    if not dropped:
        return np.broadcast_to(True, shape), 1.0
    kept = dropout_mask(shape, p, call.options["seed"])
    return kept, 65536 / (65536 - dropped) if dropped < 65536 else 0.0


def _distance(call: Any, dtype: Any) -> Array:
    """|m + offset - n|, (batch, m, n)."""
    rows, keys = call.q.shape[-2], call.k.shape[-2]
    options = call.options
    lengths = [
        np.asarray(options.get("q_lengths", rows)),
        np.asarray(options.get("kv_lengths", keys)),
    ]
    offset = np.asarray(options.get("offset", lengths[1] - lengths[0]))
    if options.get("causal") == "top_left":
        offset = np.zeros((), int)
    m, n = np.arange(rows)[:, None], np.arange(keys)
    return np.abs(m + offset[..., None, None] - n).astype(dtype)


def final_scores(call: Any) -> Array:
    """The definition's scores, batch + (m, n); batch axes that only v has are written out."""
    q = np.broadcast_to(call.q, (*call.batch, *call.q.shape[-2:]))
    return reference.scores(q, call.k, **call.options)


def forward(inputs: Expanded, *, rounding: bool = True) -> tuple[Array, Array]:
    """Return out and lse; lse (without ``rounding`` also out) in the accumulator's dtype."""
    dtype = inputs.call.dtype if rounding else inputs.q.dtype
    scores, _ = _scores(inputs, rounding)
    largest = np.maximum(np.max(scores, -1, keepdims=True, initial=-np.inf), inputs.sink)
    largest[np.isneginf(largest)] = 0
    if rounding:
        largest = largest + _reference_error(largest, dtype)
    p = np.exp(scores - largest)
    total = p.sum(-1, keepdims=True) + np.exp(inputs.sink - largest)
    seen = total > 0
    if rounding and inputs.call.float8:
        rounded = _rounded(p * inputs.kept * WEIGHT_FACTOR, WEIGHTS) / WEIGHT_FACTOR
    else:
        rounded = _rounded(p * inputs.kept, dtype)
    weighted = _product(inputs, rounded, inputs.v, rounding)
    weighted = weighted * p.dtype.type(inputs.kept_scale)
    out = np.divide(weighted, total, out=np.zeros_like(weighted), where=seen)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, largest + np.log(total), -np.inf)
    with np.errstate(over="ignore"):
        return out.astype(dtype), lse[..., 0]


def _reference_error(largest: Array, dtype: np.dtype[Any]) -> Array:
    """Difference between the reference that a row subtracts and the row's largest score.

    Softmax is the same for every reference. A kernel that holds scores in other units (log 2,
    unscaled products) rounds the reference: by up to u |largest|, differently for each row. This
    affects how weights are rounded to the operand dtype, for the largest weight is exactly 1 only
    with an exact reference. Up to a quarter of the dtype's eps it is still rounded to 1 and nothing
    changes. Beyond that, the model draws references from the whole range. For rows that have only
    scores such as -1e30 the range is cut at 1: no kernel may give equal keys infinite weights.
    """
    reach = np.minimum(np.finfo(largest.dtype).eps / 2 * np.abs(largest), 1)
    if reach.max(initial=0) < finfo(dtype).eps / 4:
        return np.zeros_like(largest)
    return reach * np.random.default_rng(0).uniform(-1, 1, largest.shape).astype(largest.dtype)


def backward(
    inputs: Expanded, out: Array, lse: Array, *, rounding: bool = True
) -> dict[str, Array]:
    """Gradients by recomputation from given ``out`` and ``lse``."""
    call = inputs.call
    dtype = call.dtype if rounding else inputs.q.dtype

    def multiply(a: Array, b: Array) -> Array:
        return _product(inputs, a, b, rounding)

    scores, slope = _scores(inputs, rounding)
    reach = np.where(np.isneginf(lse), np.inf, lse)[..., None]
    p = np.exp(scores - reach)
    dout = inputs.dout
    finite_out = np.nan_to_num(out.astype(dout.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    delta = (dout * finite_out).sum(-1) - inputs.dlse
    kept_scale = dout.dtype.type(inputs.kept_scale)
    dp = multiply(dout, inputs.v.swapaxes(-1, -2)) * inputs.kept * kept_scale
    ds = p * (dp - delta[..., None])
    draw = _rounded(ds * slope, dtype)
    sink = np.exp(inputs.sink - reach)[..., 0]
    scale = dout.dtype.type(inputs.scale)
    full = {
        "q": lambda: scale * multiply(draw, inputs.k),
        "k": lambda: scale * multiply(draw.swapaxes(-1, -2), inputs.q),
        "v": lambda: kept_scale * multiply(_rounded(p * inputs.kept, dtype).swapaxes(-1, -2), dout),
        "bias": lambda: ds * inputs.sign,
        "alibi_slopes": lambda: -(ds * inputs.sign * inputs.distance).sum((-1, -2)),
        "sink": lambda: -(sink * delta).sum(-1),
        "scale": lambda: ds * slope * multiply(inputs.q, inputs.k.swapaxes(-1, -2)),
    }
    gradients = {name: inputs.fold(name, full[name]()) for name in call.wrt}
    if not rounding:
        return gradients
    with np.errstate(over="ignore"):
        return {name: g.astype(call.array(name).dtype) for name, g in gradients.items()}


def _scores(inputs: Expanded, rounding: bool) -> tuple[Array, Array | float]:
    """Final scores, -inf where invisible, and the derivative of softcap and formula."""
    products = _product(inputs, inputs.q, inputs.k.swapaxes(-1, -2), rounding)
    scores = products * inputs.q.dtype.type(inputs.scale)
    slope: Array | float = inputs.q.dtype.type(1)
    if inputs.softcap is not None:
        cap = inputs.q.dtype.type(inputs.softcap)
        tanh = np.tanh(scores / cap)
        scores, slope = cap * tanh, 1 - tanh * tanh
    with np.errstate(over="ignore"):
        scores = scores + inputs.bias - inputs.slopes * inputs.distance
    scores, slope = inputs.sign * scores + inputs.shift, inputs.sign * slope
    return np.where(inputs.visible, scores, -np.inf).astype(inputs.q.dtype), slope


def _product(inputs: Expanded, a: Array, b: Array, rounding: bool) -> Array:
    if inputs.call.tf32 and rounding:
        a, b = to_tf32(a), to_tf32(b)
    return a @ b


def to_tf32(array: Array) -> Array:
    """Cut off after 11 significant bits; a factor compensates for the average loss."""
    bits = (array.astype(np.float32) * np.float32(1 + 0.72 / 2048)).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(dtype).astype(array.dtype)
