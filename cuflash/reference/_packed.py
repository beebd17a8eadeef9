"""How is attention over packed sequences defined? As a padded batch with lengths, packed again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from cuflash._problem.option_table import ARRAYS, FIELDS
from cuflash._problem.options import Options, ScoreOptions, resolve, with_arrays
from cuflash._results import AttentionResult, Gradients
from cuflash.reference._dense import attention, attention_backward
from cuflash.reference._score import NO_AXES, Array, to_axes, to_canonical, without_scales


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

    In formulas ``b`` counts the entries of this batch without heads. If batch has no axis before
    heads, it counts sequences. Without a heads axis ``h`` is 0.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> ends = np.array([0, 2, 5])
    >>> out = cuflash.reference.attention_varlen(q, k, v, ends, ends)
    >>> np.allclose(out[2:], cuflash.attention(q[2:], k[2:], v[2:]))
    True
    """
    pairs = axes or NO_AXES
    options = resolve(options, score_options)
    (q, k, v), options = without_scales((q, k, v), options, pairs, dtype)
    batch = _Batch((q, k, v), cu_seqlens_q, cu_seqlens_k, options, pairs)
    result = attention(*batch.padded, options=batch.options, return_lse=True, dtype=dtype)
    out = to_axes(_packed(result.out, batch.q_slices, batch.total_q), pairs[3])
    rows = _packed(result.lse[..., None], batch.q_slices, batch.total_q, elsewhere=-np.inf)
    return AttentionResult(out, rows[..., 0]) if return_lse else out


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
    """Gradient of :func:`attention_varlen`, through the same padding.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> ends = np.array([0, 2, 5])
    >>> grads = cuflash.reference.attention_varlen_backward(
    ...     np.ones((5, 4)), q, k, v, None, None, ends, ends
    ... )
    >>> grads.dv[2:].sum(axis=0)
    array([3., 3., 3., 3.])
    """
    del out, lse
    pairs, chosen = axes or NO_AXES, resolve(options, score_options)
    (q, k, v), chosen = without_scales((q, k, v), chosen, pairs, dtype)
    batch = _Batch((q, k, v), cu_seqlens_q, cu_seqlens_k, chosen, pairs)
    padded_dout = _padded(to_canonical(dout, pairs[3]), batch.q_slices)
    rows = None if dlse is None else _padded(dlse[..., None], batch.q_slices)[..., 0]
    gradients = attention_backward(
        padded_dout, *batch.padded, dlse=rows, wrt=wrt, options=batch.options, dtype=dtype
    )
    changes = {}
    slices = (batch.q_slices, batch.k_slices, batch.k_slices)
    for name, array, own, pair in zip("qkv", batch.inputs, slices, pairs, strict=False):
        if name in wrt:
            packed = _packed(getattr(gradients, f"d{name}"), own, array.shape[-2])
            changes[f"d{name}"] = to_axes(packed.reshape(array.shape), pair)
    for name in set(FIELDS) & chosen.arrays.keys() & set(wrt):
        part = getattr(gradients, FIELDS[name])
        whole = changes[FIELDS[name]] = np.zeros(chosen.arrays[name].shape, dtype)
        whole[tuple(slice(0, n) for n in part.shape)] = part
    return replace(gradients, **changes)


class _Batch:
    """The padded batch (sequences,) + batch of packed matrices, in canonical order."""

    def __init__(
        self, qkv: Any, cu_seqlens_q: Array, cu_seqlens_k: Array, options: Options, pairs: Any
    ) -> None:
        self.inputs = [to_canonical(a, pair) for a, pair in zip(qkv, pairs, strict=False)]
        self.q_slices, self.k_slices = (
            [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]
            for ends in (cu_seqlens_q, cu_seqlens_k)
        )
        # Leading axes of extent 1, so that the new first axis is the same axis of q, k and v.
        ndim = max(a.ndim for a in self.inputs)
        q, k, v = (a[(None,) * (ndim - a.ndim)] for a in self.inputs)
        self.total_q = q.shape[-2]
        self.options = _padded_options(options, self.q_slices, self.k_slices, ndim - 2)
        self.padded = (
            _padded(q, self.q_slices), _padded(k, self.k_slices), _padded(v, self.k_slices)
        )  # fmt: skip


def _padded(packed: Array, slices: list[slice]) -> Array:
    """Packed batch + (total, d) as (sequences,) + batch + (longest, d), padded with zeros."""
    longest = max((s.stop - s.start for s in slices), default=0)
    shape = (len(slices), *packed.shape[:-2], longest, packed.shape[-1])
    padded = np.zeros(shape, packed.dtype)
    for i, s in enumerate(slices):
        padded[i, ..., : s.stop - s.start, :] = packed[..., s, :]
    return padded


def _packed(padded: Array, slices: list[slice], total: int, elsewhere: float = 0) -> Array:
    """The inverse of `_padded`; rows that belong to no sequence are ``elsewhere``."""
    packed = np.full((*padded.shape[1:-2], total, padded.shape[-1]), elsewhere, padded.dtype)
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
    extents = dict(zip("mn", longest, strict=True))
    cut = {
        name: array[(..., *(slice(extents[axis]) for axis in ARRAYS[name][1]))]
        for name, array in options.arrays.items()
        if ARRAYS[name][1]
    }
    if batch_ndim == 0:
        for name in ("score_mod", "mask_mod"):
            if getattr(options, name) is not None:
                changes[name] = _without_heads(getattr(options, name))
    return replace(with_arrays(options, cut), **changes)


def _without_heads(mod: Any) -> Any:
    """The formula with ``b`` and ``h`` swapped: `_places` takes the axis of sequences for heads."""

    def swapped(formula: Any) -> Any:
        def of_sequence(*args: Array, **arrays: Array) -> Array:
            *score, b, h, m, n = args
            return formula(*score, h, b, m, n, **arrays)

        return of_sequence

    names = ("host", "host_grad") if hasattr(mod, "host_grad") else ("host",)
    return replace(mod, **{name: swapped(getattr(mod, name)) for name in names})
