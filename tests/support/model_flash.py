"""How exact can attention be in the arithmetic that a dtype declares? The yardstick "M".

Model-flash is what a flawless fused kernel computes: scores, exponentials and all sums in the
accumulator (float32; float64 for float64), the unnormalised probabilities and the score gradients
rounded once to the operand dtype before their product, results rounded once at the end. It knows
nothing about tiles. Which keys a query sees comes from the definition; a mistake there is looked
for by comparing with the definition, not with this model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash import reference


def accumulator(dtype: Any) -> np.dtype:
    """The dtype in which sums are declared to be taken."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


@dataclass
class Expanded:
    """A call's arrays with every broadcast written out, in one arithmetic, non-finite values as 0.

    q (batch, m, d), k (batch, n, d), v (batch, n, e), dout (batch, m, e), dlse (batch, m),
    bias and visible (batch, m, n). Rows that see a non-finite value are not compared, so 0 serves.
    """

    call: Any
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    bias: np.ndarray
    visible: np.ndarray
    scale: float
    softcap: float | None

    def fold(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """Sum a written-out gradient over broadcast axes and head groups, to the input's shape."""
        shape = self.call.array(name).shape
        if name in ("k", "v") and self.call.group_size > 1:
            *batch, heads, rows, columns = gradient.shape
            group = self.call.group_size
            gradient = gradient.reshape(*batch, heads // group, group, rows, columns).sum(-3)
        gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
        axes = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
        return gradient.sum(axes, keepdims=True)

    def fold_count(self, name: str) -> int:
        """How many written-out elements are summed into one element of the gradient."""
        full = {"q": self.q, "k": self.k, "v": self.v}[name]
        return full.size // max(self.call.array(name).size, 1)


def expand(call: Any, dtype: Any) -> Expanded:
    """Write out every broadcast of ``call`` in ``dtype``."""

    def arithmetic(array: np.ndarray) -> np.ndarray:
        return np.nan_to_num(array.astype(dtype), nan=0.0, posinf=0.0, neginf=0.0)

    def heads(array: np.ndarray) -> np.ndarray:
        return np.repeat(array, call.group_size, -3) if call.group_size > 1 else array

    q, k, v = arithmetic(call.q), heads(arithmetic(call.k)), heads(arithmetic(call.v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    rows, keys = q.shape[-2], k.shape[-2]
    options = call.options
    bias = options.get("bias")
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
        ~np.isneginf(final_scores(call)),
        q.shape[-1] ** -0.5 if scale is None else scale,
        options.get("softcap"),
    )


def final_scores(call: Any) -> np.ndarray:
    """The definition's scores, batch + (m, n); batch axes that only v has are written out."""
    q = np.broadcast_to(call.q, (*call.batch, *call.q.shape[-2:]))
    return reference.scores(q, call.k, **call.options)


def forward(call: Any, inputs: Expanded, out_dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """``out`` rounded to ``out_dtype`` and ``lse`` in the accumulator's dtype."""
    scores, _ = _scores(inputs)
    largest = np.max(scores, -1, keepdims=True, initial=-np.inf)
    largest[np.isneginf(largest)] = 0
    p = np.exp(scores - largest)
    total = p.sum(-1, keepdims=True)
    seen = total > 0
    weighted = _rounded(p, call.dtype) @ inputs.v
    out = np.divide(weighted, total, out=np.zeros_like(weighted), where=seen)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, largest + np.log(total), -np.inf)
    with np.errstate(over="ignore"):
        return out.astype(out_dtype), lse[..., 0]


def backward(
    call: Any, inputs: Expanded, out: np.ndarray, lse: np.ndarray, wrt: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Gradients by recomputation from the model's own rounded ``out`` and ``lse``."""
    scores, slope = _scores(inputs)
    reach = np.where(np.isneginf(lse), np.inf, lse)[..., None]
    p = np.exp(scores - reach)
    dout = inputs.dout
    finite_out = np.nan_to_num(out.astype(dout.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    delta = (dout * finite_out).sum(-1) - inputs.dlse
    ds = p * (dout @ inputs.v.swapaxes(-1, -2) - delta[..., None])
    draw = _rounded(ds * slope, call.dtype)
    scale = dout.dtype.type(inputs.scale)
    full = {
        "q": lambda: scale * (draw @ inputs.k),
        "k": lambda: scale * (draw.swapaxes(-1, -2) @ inputs.q),
        "v": lambda: _rounded(p, call.dtype).swapaxes(-1, -2) @ dout,
    }
    with np.errstate(over="ignore"):
        return {n: inputs.fold(n, full[n]()).astype(call.array(n).dtype) for n in wrt}


def _scores(inputs: Expanded) -> tuple[np.ndarray, np.ndarray | float]:
    """Final scores, -inf where invisible, and the derivative of the softcap."""
    scores = (inputs.q @ inputs.k.swapaxes(-1, -2)) * inputs.q.dtype.type(inputs.scale)
    slope: np.ndarray | float = inputs.q.dtype.type(1)
    if inputs.softcap is not None:
        cap = inputs.q.dtype.type(inputs.softcap)
        tanh = np.tanh(scores / cap)
        scores, slope = cap * tanh, 1 - tanh * tanh
    with np.errstate(over="ignore"):
        scores = scores + inputs.bias
    return np.where(inputs.visible, scores, -np.inf).astype(inputs.q.dtype), slope


def _rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(dtype).astype(array.dtype)
