"""How are scores defined, and which keys does a query see? The steps of a score in order, dense."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash._arrays import native
from cuflash._errors import wrong_type
from cuflash._problem import philox
from cuflash._problem.float8 import factor_of_rows
from cuflash._problem.options import Options
from cuflash._problem.score_mod import lent

Array = Any
NO_AXES = ((-2, -1),) * 4


def visible(options: Options, batch: tuple[int, ...], seqlen_q: int, seqlen_k: int) -> Array:
    """Which keys each query sees by lengths, causality, window, masks and ids: batch + (m, n).

    Examples
    --------
    >>> import cuflash
    >>> options = cuflash.Options(causal=True, window=(1, None))
    >>> cuflash.reference.visible(options, (), 2, 4).astype(int)
    array([[0, 1, 1, 0],
           [0, 0, 1, 1]])
    """
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


def distance(options: Options, shape: tuple[int, ...]) -> Array:
    """|m + offset - n|: batch + (m, n)."""
    *batch, seqlen_q, seqlen_k = shape
    m, n = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    return np.abs(m + _offset(options, tuple(batch), seqlen_q, seqlen_k) - n)


def dropout_mask(shape: tuple[int, ...], p: float, seed: Any) -> Array:
    """Which scores dropout keeps, batch + (m, n), by the bits of `cuflash._problem.philox`.

    Examples
    --------
    >>> import cuflash
    >>> kept = cuflash.reference.dropout_mask((4, 50, 50), 0.1, seed=7)
    >>> f"{kept.mean():.1f}"
    '0.9'
    """
    *batch, seqlen_q, seqlen_k = shape
    entries = np.arange(math.prod(batch)).reshape(batch)
    return philox.kept(entries, slice(0, seqlen_q), slice(0, seqlen_k), p, seed, np)


def kept_factor(options: Options, shape: tuple[int, ...], dtype: Any) -> Array:
    """Factor of each probability: 1 / (1 - p) where dropout keeps it, 0 where not."""
    if not philox.threshold(options.dropout):
        return np.ones((), dtype)
    mask = dropout_mask(shape, options.dropout, options.seed)
    return mask * dtype(philox.kept_scale(options.dropout))


def sink_of_rows(options: Options, score: Array, dtype: Any) -> Array:
    """The sink of each row, batch + (m,); -inf without a sink and in rows beyond ``q_lengths``."""
    sink = np.asarray(-np.inf if options.sink is None else options.sink).astype(dtype)
    *batch, seqlen_q, _ = score.shape
    lengths = _per_entry(options.q_lengths, seqlen_q, tuple(batch))[..., 0]
    return np.where(np.arange(seqlen_q) < lengths, sink[..., None], -np.inf)


def operands(
    q: Array, k: Array, v: Array, options: Options, axes: Any, dtype: Any
) -> tuple[Array, Array, Array]:
    """q, k and v in canonical order and one dtype; q has all batch axes, GQA repeats k and v."""
    arrays = {}
    for (name, array), pair in zip({"q": q, "k": k, "v": v}.items(), axes or NO_AXES, strict=False):
        if not isinstance(native(name, array), np.ndarray):
            raise wrong_type(
                name, "a CuPy array", "a NumPy array",
                f"write cupy.asnumpy({name}): the reference runs on the host",
            )  # fmt: skip
        arrays[name] = dequantized(array, getattr(options, f"{name}_scale"), pair, dtype)
    q, k, v = arrays.values()
    if options.enable_gqa:
        group_size = q.shape[-3] // max(k.shape[-3], 1)
        k, v = (np.repeat(a, group_size, axis=-3) for a in (k, v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    return np.broadcast_to(q, batch + q.shape[-2:]), k, v


def dequantized(array: Array, scale: Any, pair: tuple[int, int], dtype: Any) -> Array:
    """The array in canonical order, times its scale if it has one."""
    rows = to_canonical(array, pair).astype(dtype)
    if scale is None:
        return rows
    return rows * np.asarray(factor_of_rows(scale, rows.shape[-2])).astype(dtype)


def without_scales(
    arrays: tuple[Array, ...], options: Options, axes: Any, dtype: Any
) -> tuple[tuple[Array, ...], Options]:
    """Dequantised q, k and v in their own order of axes, and the options without scales."""
    scales = (options.q_scale, options.k_scale, options.v_scale)
    if all(scale is None for scale in scales):
        return arrays, options
    found = tuple(
        to_axes(dequantized(array, scale, pair, dtype), pair)
        for array, scale, pair in zip(arrays, scales, axes, strict=False)
    )
    return found, replace(options, q_scale=None, k_scale=None, v_scale=None)


def scale_of(options: Options, head_dim: int, dtype: Any) -> Any:
    return dtype(1 / math.sqrt(head_dim) if options.scale is None else options.scale)


def score_and_slopes(q: Array, k: Array, options: Options, dtype: Any) -> tuple[Array, ...]:
    """Final scores (-inf if invisible), visibility, and derivatives of softcap and score_mod."""
    batch, (seqlen_q, seqlen_k) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    seen = visible(options, batch, seqlen_q, seqlen_k)
    score = scale_of(options, q.shape[-1], dtype) * np.matmul(q, np.swapaxes(k, -1, -2))
    slope = np.ones((), dtype)
    if options.softcap is not None:
        t = np.tanh(score / dtype(options.softcap))
        score, slope = dtype(options.softcap) * t, 1 - t * t
    if options.bias is not None:
        bias = np.asarray(options.bias).astype(dtype)
        score, seen = score + bias, seen & ~np.isneginf(bias)
    if options.alibi_slopes is not None:
        slopes = np.asarray(options.alibi_slopes).astype(dtype)[..., None, None]
        score = score - slopes * distance(options, score.shape)
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


def softmax(score: Array, seen: Any, sink: Any) -> tuple[Array, Array]:
    """Probabilities, and the log of the sum of exponentials, over the last axis and the sink."""
    highest = np.maximum(np.max(score, axis=-1, initial=-np.inf), sink)
    highest = np.where(np.isneginf(highest), 0, highest)
    e = np.where(seen, np.exp(score - highest[..., None]), 0)
    total = e.sum(-1) + np.exp(sink - highest)
    p = np.where(seen, e / np.where(total == 0, 1, total)[..., None], 0)
    return p, highest + np.log(total)


def to_canonical(array: Array, pair: tuple[int, int]) -> Array:
    return np.moveaxis(array, pair, (-2, -1))


def to_axes(array: Array, pair: tuple[int, int]) -> Array:
    return np.moveaxis(array, (-2, -1), pair)
