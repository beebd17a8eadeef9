"""A small transformer, forward and backward, written with arrays only and without a framework.

It reads an image as a sequence of pixels and predicts its class. The input of each layer is
normalised (Xiong et al. 2020, https://arxiv.org/abs/2002.04745). Like `cuflash.attention_vjp`,
every function returns its result and its pullback, a function that maps the gradient of the result
to the gradients of the arguments. Arrays are NumPy or CuPy arrays; attention is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any
Parameters = dict[str, Array]
Pullback = Callable[[Array], Any]
#: Maps q, k, v (batch, seqlen, heads, head_dim) to out of that shape and its pullback, which maps
#: dout to (dq, dk, dv).
Attend = Callable[[Array, Array, Array], tuple[Array, Pullback]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. Widths are numbers of features."""

    seqlen: int = 64
    num_layers: int = 2
    num_heads: int = 3
    head_dim: int = 16
    num_classes: int = 10

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.num_heads * self.head_dim


class Evaluation(NamedTuple):
    """Mean cross-entropy of a batch in nats, the share of right answers, and the gradient."""

    loss: float
    accuracy: float
    gradient: Parameters


def initial_parameters(shape: Shape, seed: int, xp: Any = np) -> Parameters:
    """Draw float64 parameters; matrices are scaled so that they keep the size of features."""
    rng = np.random.default_rng(seed)
    width = shape.width

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)) / math.sqrt(rows)

    parameters: dict[str, np.ndarray] = {
        "pixel": rng.standard_normal(width),
        "position": 0.5 * rng.standard_normal((shape.seqlen, width)),
    }
    for layer in range(shape.num_layers):
        parameters |= {
            f"{layer}.attention.gain": np.ones(width),
            f"{layer}.attention.shift": np.zeros(width),
            f"{layer}.qkv": matrix(width, 3 * width),
            f"{layer}.project": matrix(width, width),
            f"{layer}.hidden.gain": np.ones(width),
            f"{layer}.hidden.shift": np.zeros(width),
            f"{layer}.widen": matrix(width, 2 * width),
            f"{layer}.narrow": matrix(2 * width, width),
        }
    parameters |= {"gain": np.ones(width), "shift": np.zeros(width)}
    parameters["classes"] = matrix(width, shape.num_classes)
    return {name: xp.asarray(array) for name, array in parameters.items()}


def linear(x: Array, w: Array) -> tuple[Array, Pullback]:
    """Return the matrix product x w over the last axis of x."""

    def pullback(dy: Array) -> tuple[Array, Array]:
        rows = x.reshape(-1, w.shape[0]).T
        return dy @ w.T, rows @ dy.reshape(-1, w.shape[1])

    return x @ w, pullback


def normalise(xp: Any, x: Array, gain: Array, shift: Array) -> tuple[Array, Pullback]:
    """Layer normalisation of the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    normal = centred * inverse

    def pullback(dy: Array) -> tuple[Array, Array, Array]:
        leading = tuple(range(dy.ndim - 1))
        dnormal = dy * gain
        mean = dnormal.mean(axis=-1, keepdims=True)
        along = (dnormal * normal).mean(axis=-1, keepdims=True)
        dx = inverse * (dnormal - mean - normal * along)
        return dx, (dy * normal).sum(axis=leading), dy.sum(axis=leading)

    return normal * gain + shift, pullback


def silu(xp: Any, x: Array) -> tuple[Array, Pullback]:
    """Return x / (1 + exp(-x)). It is smooth, so finite differences can check its gradient."""
    gate = 1 / (1 + xp.exp(-x))
    return x * gate, lambda dy: dy * (gate * (1 + x * (1 - gate)))


def cross_entropy(xp: Any, logits: Array, labels: Array) -> tuple[Array, Pullback]:
    """The mean over the batch of -log(probability of the label)."""
    rows = xp.arange(len(labels))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probabilities = shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))

    def pullback(dloss: Array) -> Array:
        dlogits = xp.exp(log_probabilities)
        dlogits[rows, labels] -= 1
        return dlogits * (dloss / len(labels))

    return -log_probabilities[rows, labels].mean(), pullback


def evaluate(
    xp: Any, shape: Shape, parameters: Parameters, images: Array, labels: Array, attend: Attend
) -> Evaluation:
    """Loss and its gradient for images (batch, seqlen) with values from 0 to 1."""
    gradient: Parameters = {}
    x = images[..., None] * parameters["pixel"] + parameters["position"]
    pullbacks = []
    for layer in range(shape.num_layers):
        for enter in (add_attention, add_hidden):
            added, pullback = enter(xp, shape, parameters, f"{layer}.", x, attend)
            x = x + added
            pullbacks.append(pullback)
    normal, back_normal = normalise(xp, x, parameters["gain"], parameters["shift"])
    pooled = normal.mean(axis=1)
    logits, back_classes = linear(pooled, parameters["classes"])
    loss, back_loss = cross_entropy(xp, logits, labels)

    dpooled, gradient["classes"] = back_classes(back_loss(1.0))
    dnormal = xp.broadcast_to(dpooled[:, None] / shape.seqlen, normal.shape)
    dx, gradient["gain"], gradient["shift"] = back_normal(dnormal)
    for pullback in reversed(pullbacks):
        dadded, of_parameters = pullback(dx)
        dx = dx + dadded
        gradient |= of_parameters
    gradient["position"] = dx.sum(axis=0)
    gradient["pixel"] = xp.einsum("bt,btw->w", images, dx)
    accuracy = (logits.argmax(axis=-1) == labels).mean()
    return Evaluation(float(loss), float(accuracy), gradient)


def add_attention(
    xp: Any, shape: Shape, parameters: Parameters, layer: str, x: Array, attend: Attend
) -> tuple[Array, Pullback]:
    """The term that attention adds to x (batch, seqlen, width)."""
    names = [layer + name for name in ("attention.gain", "attention.shift", "qkv", "project")]
    gain, shift, w_qkv, w_project = (parameters[name] for name in names)
    normal, back_normal = normalise(xp, x, gain, shift)
    qkv, back_qkv = linear(normal, w_qkv)
    heads = qkv.reshape(*x.shape[:2], 3, shape.num_heads, shape.head_dim)
    out, back_attention = attend(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
    y, back_project = linear(out.reshape(x.shape), w_project)

    def pullback(dy: Array) -> tuple[Array, Parameters]:
        dout, dproject = back_project(dy)
        dheads = xp.stack(back_attention(dout.reshape(out.shape)), axis=2)
        dnormal, dqkv = back_qkv(dheads.reshape(qkv.shape))
        dx, dgain, dshift = back_normal(dnormal)
        return dx, dict(zip(names, (dgain, dshift, dqkv, dproject), strict=True))

    return y, pullback


def add_hidden(
    xp: Any, shape: Shape, parameters: Parameters, layer: str, x: Array, attend: Attend
) -> tuple[Array, Pullback]:
    """The term that the hidden features of each token add to x (batch, seqlen, width)."""
    del shape, attend
    names = [layer + name for name in ("hidden.gain", "hidden.shift", "widen", "narrow")]
    gain, shift, w_widen, w_narrow = (parameters[name] for name in names)
    normal, back_normal = normalise(xp, x, gain, shift)
    wide, back_widen = linear(normal, w_widen)
    active, back_silu = silu(xp, wide)
    y, back_narrow = linear(active, w_narrow)

    def pullback(dy: Array) -> tuple[Array, Parameters]:
        dactive, dnarrow = back_narrow(dy)
        dnormal, dwiden = back_widen(back_silu(dactive))
        dx, dgain, dshift = back_normal(dnormal)
        return dx, dict(zip(names, (dgain, dshift, dwiden, dnarrow), strict=True))

    return y, pullback


class Adam:
    """Adam (Kingma and Ba 2014, https://arxiv.org/abs/1412.6980), with its recommended decays."""

    def __init__(self, xp: Any, parameters: Parameters, learning_rate: float) -> None:
        self._xp = xp
        self.rate = learning_rate
        self._steps = 0
        self._mean = {name: xp.zeros_like(array) for name, array in parameters.items()}
        self._square = {name: xp.zeros_like(array) for name, array in parameters.items()}

    def step(self, parameters: Parameters, gradient: Parameters) -> None:
        """Update the parameters in place."""
        self._steps += 1
        mean_decay, square_decay = 0.9, 0.999
        mean_scale = 1 / (1 - mean_decay**self._steps)
        square_scale = 1 / (1 - square_decay**self._steps)
        for name, g in gradient.items():
            mean, square = self._mean[name], self._square[name]
            mean += (1 - mean_decay) * (g - mean)
            square += (1 - square_decay) * (g * g - square)
            size = self._xp.sqrt(square * square_scale) + 1e-8
            parameters[name] -= self.rate * mean_scale * mean / size
