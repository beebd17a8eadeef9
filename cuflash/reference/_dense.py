"""How are attention, its gradient and their relatives defined? By formulas of dense matrices."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from cuflash._problem.option_table import FIELDS
from cuflash._problem.options import Options, ScoreOptions, gradient_names, resolve
from cuflash._results import AttentionResult, Gradients
from cuflash.reference._score import (
    NO_AXES,
    Array,
    distance,
    kept_factor,
    operands,
    scale_of,
    score_and_slopes,
    sink_of_rows,
    softmax,
    to_axes,
    to_canonical,
)


@np.errstate(all="ignore")
def scores(
    q: Array,
    k: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Array:
    """The final scores, batch + (m, n), with -inf where a query does not see a key.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.ones((2, 4)), np.ones((3, 4))
    >>> cuflash.reference.scores(q, k, causal=True)
    array([[  2.,   2., -inf],
           [  2.,   2.,   2.]])
    """
    options = resolve(options, score_options)
    q, k, _ = operands(q, k, k, options, _without_values(axes), dtype)
    return score_and_slopes(q, k, options, dtype)[0]


@np.errstate(all="ignore")
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    return_lse: bool = False,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Dense attention; see :func:`cuflash.attention` for parameters.

    8-bit arrays are first multiplied by their scales, in ``dtype``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> exact = cuflash.reference.attention(q, k, v, causal=True)
    >>> np.allclose(cuflash.attention(q, k, v, causal=True), exact, rtol=1e-12)
    True
    """
    options = resolve(options, score_options)
    q, k, v = operands(q, k, v, options, axes, dtype)
    score, seen, *_ = score_and_slopes(q, k, options, dtype)
    p, lse = softmax(score, seen, sink_of_rows(options, score, dtype))
    p = p * kept_factor(options, score.shape, dtype)
    out = to_axes(_seen_product(p, v, seen), (axes or NO_AXES)[3])
    return AttentionResult(out, lse) if return_lse else out


@np.errstate(all="ignore")
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    /,
    *,
    dlse: Array | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    options: Options | None = None,
    axes: Any = None,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Gradients:
    """Gradient of ``sum(dout * out) + sum(dlse * lse)``; ``out`` and ``lse`` are recomputed.

    With p = softmax(score) and delta = rowsum(dout * out) - dlse (FlashAttention, appendix B)::

        dv = (p * kept)^T dout,   dp = (dout v^T) * kept
        dscore = p * (dp - delta) * (derivative of score_mod)
        draw = dscore * (1 - tanh(scale q.k / softcap)^2)
        dq = scale * draw k,   dk = scale * draw^T q,   dscale = sum(draw * q.k)
        dbias = dscore,   dslope = -sum(dscore * |m + offset - n|)
        dsink = -sum over rows of exp(sink - lse) * delta

    For 8-bit inputs, q, k and v in these formulas are the dequantised arrays (elements times their
    scales), and the gradients are with respect to them.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> grads = cuflash.reference.attention_backward(np.ones((5, 4)), q, k, v)
    >>> grads.dv.sum(axis=0)  # the weights of each of the 5 queries sum to 1
    array([5., 5., 5., 5.])
    """
    del out, lse
    options = resolve(options, score_options)
    pairs = axes or NO_AXES
    wanted = gradient_names(wrt, options)
    inputs = {"q": q, "k": k, "v": v}
    q, k, v = operands(q, k, v, options, axes, dtype)
    score, seen, slope, mod_slope = score_and_slopes(q, k, options, dtype)
    sink = sink_of_rows(options, score, dtype)
    p, lse = softmax(score, seen, sink)
    hidden = np.isneginf(score.max(-1, initial=-np.inf))
    dout = np.where(hidden[..., None], 0, to_canonical(dout, pairs[3]).astype(dtype))

    kept = kept_factor(options, score.shape, dtype)
    dp = np.where(seen, np.matmul(dout, np.swapaxes(v, -1, -2)) * kept, 0)
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - np.where(np.isneginf(lse), 0, np.broadcast_to(dlse, lse.shape))
    dscore = np.where(seen, p * (dp - delta[..., None]) * mod_slope, 0)
    draw = np.where(seen, dscore * slope, 0)
    scale = scale_of(options, q.shape[-1], dtype)
    seen_t = np.swapaxes(seen, -1, -2)
    full = {
        "q": scale * _seen_product(draw, k, seen),
        "k": scale * _seen_product(np.swapaxes(draw, -1, -2), q, seen_t),
        "v": _seen_product(np.swapaxes(p * kept, -1, -2), dout, seen_t),
    }
    gradients = {}
    for (name, given), pair in zip(inputs.items(), pairs, strict=False):
        if name in wanted:
            shape = to_canonical(given, pair).shape
            gradients["d" + name] = to_axes(_sum_heads_to(full[name], shape, options), pair)
    if "bias" in wanted:
        gradients["dbias"] = _sum_to(dscore, options.arrays["bias"].shape)
    if "alibi_slopes" in wanted:
        slopes = -(dscore * distance(options, score.shape)).sum((-1, -2))
        gradients["dslopes"] = _sum_to(slopes, options.arrays["alibi_slopes"].shape)
    if "sink" in wanted:
        share = np.where(np.isneginf(lse), 0, np.exp(sink - lse))
        gradients["dsink"] = _sum_to(-(share * delta).sum(-1), options.arrays["sink"].shape)
    if "scale" in wanted:
        raw = np.matmul(q, np.swapaxes(k, -1, -2))
        gradients["dscale"] = np.where(seen, draw * raw, 0).sum()
    return Gradients(**gradients, order=tuple(FIELDS[name] for name in dict.fromkeys(wrt)))


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    return_lse: bool = False,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> tuple[Any, Any]:
    """Attention and its pullback; see :func:`cuflash.attention_vjp`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> out, pullback = cuflash.reference.attention_vjp(q, k, v)
    >>> _, fast = cuflash.attention_vjp(q, k, v)
    >>> np.allclose(fast(out).dq, pullback(out).dq, rtol=1e-12)
    True
    """
    common: dict[str, Any] = {"options": resolve(options, score_options), "axes": axes}
    common["dtype"] = dtype

    def pullback(
        dout: Array, /, *, dlse: Array | None = None, wrt: tuple[str, ...] = ("q", "k", "v")
    ) -> Gradients:
        return attention_backward(dout, q, k, v, dlse=dlse, wrt=wrt, **common)

    return attention(q, k, v, return_lse=return_lse, **common), pullback


def logsumexp(q: Array, k: Array, /, **rest: Any) -> Array:
    """Logarithm of each row's sum of exponentials; see :func:`cuflash.logsumexp`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> cuflash.reference.logsumexp(np.zeros((1, 4)), np.zeros((8, 4))) == np.log(8)
    array([ True])
    """
    rest["axes"] = _without_values(rest.get("axes"))
    return attention(q, k, k, return_lse=True, **rest).lse


def logsumexp_backward(
    dlse: Array,
    q: Array,
    k: Array,
    lse: Array | None = None,
    /,
    *,
    wrt: tuple[str, ...] = ("q", "k"),
    **rest: Any,
) -> Gradients:
    """Gradient of ``sum(dlse * logsumexp(q, k))``; ``lse`` is recomputed.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> cuflash.reference.logsumexp_backward(np.ones(5), q, k).dk.shape
    (5, 4)
    """
    del lse
    rest["axes"] = _without_values(rest.get("axes"))
    nothing = np.zeros_like(attention(q, k, k, **rest))
    return attention_backward(nothing, q, k, k, dlse=dlse, wrt=wrt, **rest)


@np.errstate(all="ignore")
def weights(
    q: Array,
    k: Array,
    lse: Array | None = None,
    /,
    *,
    rows: Any = None,
    cols: Any = None,
    options: Options | None = None,
    axes: Any = None,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Array:
    """Probabilities exp(score - lse) of the selected rows and columns; ``lse`` is recomputed.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> cuflash.reference.weights(q, k, rows=slice(None)).sum(axis=-1)
    array([1., 1., 1., 1., 1.])
    """
    del lse
    options = resolve(options, score_options)
    q, k, _ = operands(q, k, k, options, _without_values(axes), dtype)
    score, seen, *_ = score_and_slopes(q, k, options, dtype)
    p, _ = softmax(score, seen, sink_of_rows(options, score, dtype))
    everything = slice(None)
    p = p[..., everything if rows is None else rows, :]
    return p[..., everything if cols is None else cols]


@np.errstate(all="ignore")
def merge(outs: Any, lses: Any, axis: int = 0, *, dtype: Any = np.float64) -> AttentionResult:
    """Combine attention over disjoint sets of keys, parts along ``axis``.

    ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i - lse) out_i``. A part with
    lse = -inf has no effect, and its out is not read. Any other part counts, however small its
    weight.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs, lses = np.array([[[1.0]], [[3.0]]]), np.zeros((2, 1))
    >>> cuflash.reference.merge(outs, lses).out
    array([[2.]])
    """
    outs, lses = (np.moveaxis(np.asarray(a).astype(dtype), axis, 0) for a in (outs, lses))
    weight, lse = softmax(np.moveaxis(lses, 0, -1), True, -np.inf)
    weighted = np.moveaxis(weight, -1, 0)[..., None] * outs
    return AttentionResult(np.where(np.isneginf(lses)[..., None], 0, weighted).sum(0), lse)


@np.errstate(all="ignore")
def merge_backward(
    dout: Array,
    outs: Any,
    lses: Any,
    /,
    *,
    dlse: Array | None = None,
    axis: int = 0,
    dtype: Any = np.float64,
) -> AttentionResult:
    """Gradient of :func:`merge` with respect to ``outs`` and ``lses``.

    With w_i = exp(lse_i - lse)::

        douts_i = w_i dout,   dlses_i = w_i (dlse + rowsum(dout * (out_i - out)))

    and exactly 0 where lse_i = -inf.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs, lses = np.array([[[1.0]], [[3.0]]]), np.zeros((2, 1))
    >>> cuflash.reference.merge_backward(np.ones((1, 1)), outs, lses).lse
    array([[-0.5],
           [ 0.5]])
    """
    out, lse = merge(outs, lses, axis, dtype=dtype)
    outs, lses = (np.moveaxis(np.asarray(a).astype(dtype), axis, 0) for a in (outs, lses))
    weight, hidden = np.exp(lses - lse), np.isneginf(lses)
    slope = (dout * (outs - out)).sum(-1) + (0 if dlse is None else dlse)
    douts = np.where(hidden[..., None], 0, weight[..., None] * dout)
    dlses = np.where(hidden, 0, weight * slope)
    return AttentionResult(np.moveaxis(douts, 0, axis), np.moveaxis(dlses, 0, axis))


def _without_values(axes: Any) -> Any:
    """Axes for a call that passes the keys as values, too."""
    return None if axes is None else (axes[0], axes[1], axes[1], (-2, -1))


def _seen_product(a: Array, b: Array, seen: Array) -> Array:
    """``a @ b``, ``a`` being 0 outside ``seen``: non-finite ``b`` affects only rows that see it."""
    finite = np.isfinite(b)
    if finite.all():
        return np.matmul(a, b)
    poisoned = np.matmul(seen.astype(np.float64), (~finite).astype(np.float64)) > 0
    return np.where(poisoned, np.nan, np.matmul(a, np.where(finite, b, 0)))


def _sum_heads_to(gradient: Array, shape: tuple[int, ...], options: Options) -> Array:
    """Sum over the query heads of each key/value head, then over broadcast axes, to ``shape``."""
    if options.enable_gqa and gradient.shape[-3] != shape[-3]:
        heads = (shape[-3], gradient.shape[-3] // shape[-3])
        grouped = gradient.reshape(*gradient.shape[:-3], *heads, *gradient.shape[-2:])
        gradient = grouped.sum(-3)
    return _sum_to(gradient, shape)


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over axes that ``shape`` lacks, or that have extent 1 in ``shape``."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
    return gradient.sum(axes, keepdims=True)
