"""What does cuflash compute? The definition: dense attention and its gradient in float64 NumPy.

Every function has the signature of its fast counterpart plus ``dtype``, the dtype of the arithmetic
and of the results (float64; ``np.longdouble`` as the truth for float64 inputs). Memory is O(M N).
Where the fast functions and this file disagree, this file is right.

A score is made in this order::

    scale * q.k  ->  softcap * tanh(score / softcap)  ->  + bias - slope * |m + offset - n|
                 ->  score_mod  ->  -inf where invisible

and ``out = dropout(softmax(score)) v``, ``lse = log(sum(exp(score)))`` over the visible keys of a
row and its sink, a score without a value. A row that sees nothing has out = 0, lse = -inf (or the
sink) and takes no part in any gradient but that of lse with respect to the sink. Rows beyond
``q_lengths`` are no queries, and have no sink: out = 0, lse = -inf, no gradient to anything.

A key or value that a row cannot see has no effect on that row, whatever it holds: the products
below read an operand only where it is seen, so that 0 * NaN does not arise.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from typing import Any, Unpack

import numpy as np

from cuflash._arrays import native
from cuflash._errors import wrong_type
from cuflash._problem import philox
from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash._problem.score_mod import lent
from cuflash._results import AttentionResult, Gradients

Array = Any
_NO_AXES = ((-2, -1),) * 4


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
    """Final scores, batch + (m, n), with -inf where a key is invisible to a query."""
    options = resolve(options, score_options)
    q, k, _ = _operands(q, k, k, options, axes, dtype)
    return _scores(q, k, options, dtype)[0]


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
    """Dense attention; see :func:`cuflash.attention` for parameters."""
    options = resolve(options, score_options)
    q, k, v = _operands(q, k, v, options, axes, dtype)
    score, seen, *_ = _scores(q, k, options, dtype)
    p, lse = _softmax(score, seen, _sink(options, score, dtype))
    p = p * _kept(options, score.shape, dtype)
    out = _to_axes(_seen_product(p, v, seen), (axes or _NO_AXES)[3])
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
    """
    del out, lse
    options = resolve(options, score_options)
    pairs = axes or _NO_AXES
    inputs = dict(zip(("q", "k", "v"), (q, k, v), strict=True))
    q, k, v = _operands(q, k, v, options, axes, dtype)
    score, seen, slope, mod_slope = _scores(q, k, options, dtype)
    sink = _sink(options, score, dtype)
    p, lse = _softmax(score, seen, sink)
    hidden = np.isneginf(score.max(-1, initial=-np.inf))
    dout = np.where(hidden[..., None], 0, _to_canonical(dout, pairs[3]).astype(dtype))

    kept = _kept(options, score.shape, dtype)
    dp = np.where(seen, np.matmul(dout, np.swapaxes(v, -1, -2)) * kept, 0)
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - np.where(np.isneginf(lse), 0, np.broadcast_to(dlse, lse.shape))
    dscore = np.where(seen, p * (dp - delta[..., None]) * mod_slope, 0)
    draw = np.where(seen, dscore * slope, 0)
    scale = _scale(options, q.shape[-1], dtype)
    seen_t = np.swapaxes(seen, -1, -2)
    full = {
        "q": scale * _seen_product(draw, k, seen),
        "k": scale * _seen_product(np.swapaxes(draw, -1, -2), q, seen_t),
        "v": _seen_product(np.swapaxes(p * kept, -1, -2), dout, seen_t),
    }
    gradients = {}
    for (name, given), pair in zip(inputs.items(), pairs, strict=False):
        if name in wrt:
            shape = _to_canonical(given, pair).shape
            gradients["d" + name] = _to_axes(_sum_heads_to(full[name], shape, options), pair)
    if "bias" in wrt:
        gradients["dbias"] = _sum_to(dscore, options.arrays["bias"].shape)
    if "alibi_slopes" in wrt:
        distance = _distance(options, score.shape)
        slopes = -(dscore * distance).sum((-1, -2))
        gradients["dslopes"] = _sum_to(slopes, options.arrays["alibi_slopes"].shape)
    if "sink" in wrt:
        share = np.where(np.isneginf(lse), 0, np.exp(sink - lse))
        gradients["dsink"] = _sum_to(-(share * delta).sum(-1), options.arrays["sink"].shape)
    if "scale" in wrt:
        raw = np.matmul(q, np.swapaxes(k, -1, -2))
        gradients["dscale"] = np.where(seen, draw * raw, 0).sum()
    return Gradients(**gradients)


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
    """Attention and its pullback; see :func:`cuflash.attention_vjp`."""
    common: dict[str, Any] = {"options": resolve(options, score_options), "axes": axes}
    common["dtype"] = dtype

    def pullback(
        dout: Array, /, *, dlse: Array | None = None, wrt: tuple[str, ...] = ("q", "k", "v")
    ) -> Gradients:
        return attention_backward(dout, q, k, v, dlse=dlse, wrt=wrt, **common)

    return attention(q, k, v, return_lse=return_lse, **common), pullback


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    return_lse: bool = False,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Attention over packed sequences: a padded batch (sequences,) + batch with lengths.

    The ``b`` of formulas counts the entries of that batch, heads apart: the sequences, where batch
    has no axis before heads. Without a heads axis ``h`` is 0.
    """
    chosen = resolve(options, score_options)
    q, k, v = (_to_canonical(a, p) for a, p in zip((q, k, v), axes or _NO_AXES, strict=False))
    q, k, v = _of_one_ndim(q, k, v)
    q_slices, k_slices = _slices(cu_seqlens_q), _slices(cu_seqlens_k)
    chosen = _padded_options(chosen, q_slices, k_slices, q.ndim - 2)
    padded = (_padded(q, q_slices), _padded(k, k_slices), _padded(v, k_slices))
    result = attention(*padded, options=chosen, return_lse=True, dtype=dtype)
    out = _packed(result.out, q_slices, q.shape[-2])
    lse = np.full(out.shape[:-1], -np.inf, out.dtype)
    for i, part in enumerate(q_slices):
        lse[..., part] = result.lse[i][..., : part.stop - part.start]
    out = _to_axes(out, (axes or _NO_AXES)[3])
    return AttentionResult(out, lse) if return_lse else out


def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    /,
    *,
    dlse: Array | None = None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    options: Options | None = None,
    axes: Any = None,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Gradients:
    """Gradient of :func:`attention_varlen`, through the same padding."""
    del out, lse
    pairs = axes or _NO_AXES
    chosen = resolve(options, score_options)
    q, k, v, dout = (_to_canonical(a, p) for a, p in zip((q, k, v, dout), pairs, strict=True))
    inputs = (q, k, v)
    q, k, v = _of_one_ndim(q, k, v)
    q_slices, k_slices = _slices(cu_seqlens_q), _slices(cu_seqlens_k)
    own = chosen
    chosen = _padded_options(chosen, q_slices, k_slices, q.ndim - 2)
    padded = (_padded(q, q_slices), _padded(k, k_slices), _padded(v, k_slices))
    rows = None if dlse is None else _padded(dlse[..., None], q_slices)[..., 0]
    gradients = attention_backward(
        _padded(dout, q_slices), *padded, dlse=rows, wrt=wrt, options=chosen, dtype=dtype
    )
    results = {f.name: getattr(gradients, f.name) for f in fields(gradients)}
    for name, array, slices, pair in zip(
        ("dq", "dk", "dv"), inputs, (q_slices, k_slices, k_slices), pairs, strict=False
    ):
        if results[name] is not None:
            packed = _packed(results[name], slices, array.shape[-2])
            results[name] = _to_axes(packed.reshape(array.shape), pair)
    for name, option in (("dbias", "bias"), ("dslopes", "alibi_slopes"), ("dsink", "sink")):
        if results[name] is not None:
            whole = np.zeros(own.arrays[option].shape, dtype)
            part = results[name]
            whole[tuple(slice(0, n) for n in part.shape)] = part
            results[name] = whole
    return Gradients(**results)


def logsumexp(q: Array, k: Array, /, **rest: Any) -> Array:
    """Logarithm of each row's sum of exponentials; see :func:`cuflash.logsumexp`."""
    return attention(q, k, k, return_lse=True, **_without_values(rest)).lse


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
    """Gradient of ``sum(dlse * logsumexp(q, k))``; ``lse`` is recomputed."""
    del lse
    rest = _without_values(rest)
    nothing = np.zeros_like(attention(q, k, k, **rest))
    return attention_backward(nothing, q, k, k, dlse=dlse, wrt=wrt, **rest)


@np.errstate(all="ignore")
def merge(outs: Any, lses: Any, axis: int = 0, *, dtype: Any = np.float64) -> AttentionResult:
    """Combine attention over disjoint sets of keys, parts along ``axis``.

    ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i - lse) out_i``; a part with
    lse = -inf is neutral, its out is not read. Any other part counts, however small its weight.
    """
    outs = np.moveaxis(np.asarray(outs).astype(dtype), axis, 0)
    lses = np.moveaxis(np.asarray(lses).astype(dtype), axis, 0)
    weight, lse = _softmax(np.moveaxis(lses, 0, -1), True, -np.inf)
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
    """
    out, lse = merge(outs, lses, axis, dtype=dtype)
    outs = np.moveaxis(np.asarray(outs).astype(dtype), axis, 0)
    lses = np.moveaxis(np.asarray(lses).astype(dtype), axis, 0)
    weight, hidden = np.exp(lses - lse), np.isneginf(lses)
    slope = (dout * (outs - out)).sum(-1) + (0 if dlse is None else dlse)
    douts = np.where(hidden[..., None], 0, weight[..., None] * dout)
    dlses = np.where(hidden, 0, weight * slope)
    return AttentionResult(np.moveaxis(douts, 0, axis), np.moveaxis(dlses, 0, axis))


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
    """Probabilities exp(score - lse) of the selected rows and columns; ``lse`` is recomputed."""
    del lse
    options = resolve(options, score_options)
    q, k, _ = _operands(q, k, k, options, axes, dtype)
    score, seen, *_ = _scores(q, k, options, dtype)
    p, _ = _softmax(score, seen, _sink(options, score, dtype))
    rows = slice(None) if rows is None else rows
    cols = slice(None) if cols is None else cols
    return p[..., rows, :][..., cols]


def dropout_mask(shape: tuple[int, ...], p: float, seed: Any) -> Array:
    """Which scores dropout keeps, batch + (m, n), by the bits of `cuflash._problem.philox`."""
    *batch, seqlen_q, seqlen_k = shape
    entries = np.arange(math.prod(batch)).reshape(batch)
    return philox.kept(entries, slice(0, seqlen_q), slice(0, seqlen_k), p, seed, np)


def visible(options: Options, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> Array:
    """Which keys each query may see by lengths, causality, window and mask: batch + (m, n)."""
    m = np.arange(seqlen_q)[:, None]
    n = np.arange(seqlen_k)[None, :]
    offset = _offset(options, batch, seqlen_q, seqlen_k)
    left, right = options.window or (None, None)
    right = 0 if options.causal else right
    result = m < _per_entry(options.q_lengths, seqlen_q, batch)
    result = result & (n < _per_entry(options.kv_lengths, seqlen_k, batch))
    if left is not None:
        result = result & (n >= m + offset - left)
    if right is not None:
        result = result & (n <= m + offset + right)
    if options.mask is not None:
        result = result & options.mask
    if options.mask_mod is not None:
        mod = options.mask_mod
        result = result & mod.host(*_places((*batch, seqlen_q, seqlen_k)), **lent(mod.arrays))
    if options.segment_ids is not None:
        ids_q, ids_k = options.segment_ids
        result = result & (ids_q[..., :, None] == ids_k[..., None, :])
    return np.broadcast_to(result, (*batch, seqlen_q, seqlen_k))


def _per_entry(value: Any, default: int, batch: tuple[int, ...]) -> Array:
    array = np.asarray(default if value is None else value).astype(np.int64)
    return np.broadcast_to(array, batch)[..., None, None]


def _offset(options: Options, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> Array:
    """Position of query 0 among the keys: batch + (1, 1)."""
    if options.causal == "top_left":
        return np.zeros((1, 1), np.int64)
    if options.offset is not None:
        return _per_entry(options.offset, 0, batch)
    kv_lengths = _per_entry(options.kv_lengths, seqlen_k, batch)
    return kv_lengths - _per_entry(options.q_lengths, seqlen_q, batch)


def _distance(options: Options, shape: tuple[int, ...]) -> Array:
    """|m + offset - n|: batch + (m, n)."""
    *batch, seqlen_q, seqlen_k = shape
    m, n = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    return np.abs(m + _offset(options, tuple(batch), seqlen_q, seqlen_k) - n)


def _kept(options: Options, shape: tuple[int, ...], dtype: Any) -> Array:
    """Factor of each probability: 1 / (1 - p) where dropout keeps it, 0 where not."""
    *batch, seqlen_q, seqlen_k = shape
    if not philox.threshold(options.dropout):
        return np.ones((), dtype)
    mask = dropout_mask((*batch, seqlen_q, seqlen_k), options.dropout, options.seed)
    return mask * dtype(philox.kept_scale(options.dropout))


def _sink(options: Options, score: Array, dtype: Any) -> Array:
    """The sink of each row, batch + (m,); -inf is none, as in rows that are no queries."""
    sink = np.asarray(-np.inf if options.sink is None else options.sink).astype(dtype)
    *batch, seqlen_q, _ = score.shape
    lengths = _per_entry(options.q_lengths, seqlen_q, tuple(batch))[..., 0]
    return np.where(np.arange(seqlen_q) < lengths, sink[..., None], -np.inf)


def _of_one_ndim(*arrays: Array) -> list[Array]:
    """Leading axes of extent 1, so that a new first axis is the same axis of all."""
    ndim = max(a.ndim for a in arrays)
    return [a[(None,) * (ndim - a.ndim)] for a in arrays]


def _slices(ends: Array) -> list[slice]:
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def _padded(packed: Array, slices: list[slice]) -> Array:
    """Packed batch + (total, d) as (sequences,) + batch + (longest, d), padded with zeros."""
    longest = max((s.stop - s.start for s in slices), default=0)
    shape = (len(slices), *packed.shape[:-2], longest, packed.shape[-1])
    padded = np.zeros(shape, packed.dtype)
    for i, s in enumerate(slices):
        padded[i, ..., : s.stop - s.start, :] = packed[..., s, :]
    return padded


def _packed(padded: Array, slices: list[slice], total: int) -> Array:
    """The inverse of `_padded`; 0 in rows of no sequence."""
    packed = np.zeros((*padded.shape[1:-2], total, padded.shape[-1]), padded.dtype)
    for i, s in enumerate(slices):
        packed[..., s, :] = padded[i, ..., : s.stop - s.start, :]
    return packed


def _padded_options(
    options: Options, q_slices: list[slice], k_slices: list[slice], batch_ndim: int
) -> Options:
    """The options of the padded batch: lengths of its entries, arrays cut to its extents."""
    changes: dict[str, Any] = {}
    longest = []
    for name, slices in (("q_lengths", q_slices), ("kv_lengths", k_slices)):
        own = np.array([s.stop - s.start for s in slices], np.int64)
        own = own.reshape(len(slices), *(1,) * batch_ndim)
        given = getattr(options, name)
        changes[name] = own if given is None else np.minimum(given, own)
        longest.append(int(own.max(initial=0)))
    for name in ("bias", "mask"):
        if name in options.arrays:
            changes[name] = options.arrays[name][..., : longest[0], : longest[1]]
    if options.segment_ids is not None:
        ids_q, ids_k = options.segment_ids
        changes["segment_ids"] = (ids_q[..., : longest[0]], ids_k[..., : longest[1]])
    if batch_ndim == 0:
        for name in ("score_mod", "mask_mod"):
            if getattr(options, name) is not None:
                changes[name] = _without_heads(getattr(options, name))
    return replace(options, **changes)


def _without_heads(mod: Any) -> Any:
    """The formula for a batch (sequences,), whose only axis `_places` takes for heads."""

    def swapped(formula: Any) -> Any:
        def of_sequence(*args: Array, **arrays: Array) -> Array:
            *score, b, h, m, n = args
            return formula(*score, h, b, m, n, **arrays)

        return of_sequence

    names = ("host", "host_grad") if hasattr(mod, "host_grad") else ("host",)
    return replace(mod, **{name: swapped(getattr(mod, name)) for name in names})


def _without_values(rest: dict[str, Any]) -> dict[str, Any]:
    """Axes for a call whose values are its keys."""
    axes = rest.get("axes")
    return rest if axes is None else rest | {"axes": (axes[0], axes[1], axes[1], (-2, -1))}


def _operands(
    q: Array, k: Array, v: Array, options: Options, axes: Any, dtype: Any
) -> tuple[Array, Array, Array]:
    """Canonical order, one dtype, q with every batch axis; k, v repeated per group under GQA."""
    arrays = {}
    for (name, array), pair in zip(
        {"q": q, "k": k, "v": v}.items(), axes or _NO_AXES, strict=False
    ):
        if not isinstance(native(name, array), np.ndarray):
            raise wrong_type(
                name, "a CuPy array", "a NumPy array",
                "write cupy.asnumpy: the reference runs on the host",
            )  # fmt: skip
        arrays[name] = _to_canonical(array, pair).astype(dtype)
    q, k, v = arrays.values()
    if options.enable_gqa:
        group_size = q.shape[-3] // max(k.shape[-3], 1)
        k, v = (np.repeat(a, group_size, axis=-3) for a in (k, v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    return np.broadcast_to(q, batch + q.shape[-2:]), k, v


def _scale(options: Options, head_dim: int, dtype: Any) -> Any:
    return dtype(1 / math.sqrt(head_dim) if options.scale is None else options.scale)


def _scores(q: Array, k: Array, options: Options, dtype: Any) -> tuple[Array, ...]:
    """Final scores, -inf where invisible; what is visible; derivatives of softcap and score_mod."""
    batch, (seqlen_q, seqlen_k) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    seen = visible(options, batch, seqlen_q, seqlen_k)
    score = _scale(options, q.shape[-1], dtype) * np.matmul(q, np.swapaxes(k, -1, -2))
    slope = np.ones((), dtype)
    if options.softcap is not None:
        t = np.tanh(score / dtype(options.softcap))
        score, slope = dtype(options.softcap) * t, 1 - t * t
    if options.bias is not None:
        bias = np.asarray(options.bias).astype(dtype)
        score, seen = score + bias, seen & ~np.isneginf(bias)
    if options.alibi_slopes is not None:
        slopes = np.asarray(options.alibi_slopes).astype(dtype)[..., None, None]
        score = score - slopes * _distance(options, score.shape)
    mod_slope = np.ones((), dtype)
    if options.score_mod is not None:
        mod, arrays = options.score_mod, lent(options.score_mod.arrays)
        mod_slope = mod.host_grad(score.copy(), *_places(score.shape), **arrays)
        mod_slope = np.asarray(mod_slope).astype(dtype)
        score = mod.host(score, *_places(score.shape), **arrays)
    return np.where(seen, score, -np.inf).astype(dtype), seen, slope, mod_slope


def _places(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Batch entry, head, query and key of each score: arrays that broadcast to ``shape``."""
    *batch, seqlen_q, seqlen_k = shape
    entries = np.arange(math.prod(batch)).reshape(batch)[..., None, None]
    b, h = np.divmod(entries, max(batch[-1] if batch else 1, 1))
    return b, h, np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]


def _softmax(score: Array, seen: Any, sink: Any) -> tuple[Array, Array]:
    """Probabilities, and the log of the sum of exponentials, over the last axis and the sink."""
    highest = np.maximum(np.max(score, axis=-1, initial=-np.inf), sink)
    highest = np.where(np.isneginf(highest), 0, highest)
    e = np.where(seen, np.exp(score - highest[..., None]), 0)
    total = e.sum(-1) + np.exp(sink - highest)
    p = np.where(seen, e / np.where(total == 0, 1, total)[..., None], 0)
    return p, highest + np.log(total)


def _seen_product(a: Array, b: Array, seen: Array) -> Array:
    """``a @ b`` where ``a`` is 0 outside ``seen``; non-finite ``b`` reaches only rows seeing it."""
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
    """Sum over axes that ``shape`` lacks or has of extent 1."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and gradient.shape[i] != 1)
    return gradient.sum(axes, keepdims=True)


def _to_canonical(array: Array, pair: tuple[int, int]) -> Array:
    return np.moveaxis(array, pair, (-2, -1))


def _to_axes(array: Array, pair: tuple[int, int]) -> Array:
    return np.moveaxis(array, (-2, -1), pair)
