"""How are attention over pages and rotary embedding defined?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash.reference._dense import attention
from cuflash.reference._score import NO_AXES, Array, to_axes, to_canonical, without_scales


def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    kv_lengths: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    return_lse: bool = False,
    dtype: Any = np.float64,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Attention over the pages of each sequence put in order, with ``kv_lengths``.

    Key n of sequence s is row ``n % page_size`` of page ``page_table[s, n // page_size]``. Numbers
    below the first page or beyond the last are clamped.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> pages, table = np.ones((2, 1, 4, 8)), np.array([[1, 0]])  # 2 pages of 4 rows, 1 head
    >>> cuflash.reference.attention_paged(np.ones((1, 1, 3, 8)), pages, pages, table, [6]).shape
    (1, 1, 3, 8)
    """
    pairs, options = axes or NO_AXES, resolve(options, score_options)
    (q, k_pages, v_pages), options = without_scales((q, k_pages, v_pages), options, pairs, dtype)
    numbers = np.clip(page_table, 0, len(k_pages) - 1)
    k, v = (_in_order(to_canonical(a, p), numbers) for a, p in ((k_pages, pairs[1]),
                                                               (v_pages, pairs[2])))  # fmt: skip
    q = to_canonical(q, pairs[0])
    lengths = np.asarray(kv_lengths)
    if lengths.ndim:
        lengths = lengths.reshape(-1, *(1 for _ in q.shape[1:-2]))
    options = replace(options, kv_lengths=lengths)
    out, lse = attention(q, k, v, options=options, return_lse=True, dtype=dtype)
    out = to_axes(out, pairs[3])
    return (out, lse) if return_lse else out


def _in_order(pages: Array, numbers: Array) -> Array:
    """Pages, (pages,) + heads + (page_size, d), as rows, (sequences,) + heads + (keys, d)."""
    rows = np.moveaxis(pages[numbers], 1, -3)
    *heads, columns, size, d = rows.shape
    return rows.reshape(*heads, columns * size, d)


def rotary(
    x: Array,
    positions: Array,
    /,
    *,
    frequencies: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    dtype: Any = np.float64,
) -> Array:
    """Multiply each pair of features, as a complex number, by ``exp(i * position * frequency)``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> turned = cuflash.reference.rotary(np.array([[1.0, 0.0]]), np.array([np.pi / 2]))
    >>> np.allclose(turned, [[0, 1]])
    True
    """
    x = np.asarray(x).astype(dtype)
    if frequencies is None:
        frequencies = 10000.0 ** -(np.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
    frequencies = np.asarray(frequencies).astype(dtype)
    width = len(frequencies)
    first = slice(0, 2 * width, 2) if interleaved else slice(0, width)
    second = slice(1, 2 * width, 2) if interleaved else slice(width, 2 * width)
    angle = np.asarray(positions).astype(dtype)[..., None] * frequencies
    turned = (x[..., first] + 1j * x[..., second]) * np.exp((-1j if inverse else 1j) * angle)
    batch = np.broadcast_shapes(x.shape[:-1], angle.shape[:-1])
    out = np.broadcast_to(x, (*batch, x.shape[-1])).copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out
