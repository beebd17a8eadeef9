"""How are queries and keys turned by their positions?"""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from cuflash._arrays import (
    Array,
    NativeT,
    allocate,
    native,
    on_own_device,
    refuse_captured,
    same_module,
    write_rounded,
)
from cuflash._errors import wrong_type, wrong_value
from cuflash._host.scores import arithmetic
from cuflash._problem.checks import flag, integers, require_float, require_shape
from cuflash._problem.destinations import check_destination
from cuflash._problem.habits import answering_words


@overload
def rotary(
    x: NativeT,
    positions: Any,
    /,
    *,
    frequencies: Array | None = ...,
    interleaved: bool = ...,
    inverse: bool = ...,
    out: Array | None = ...,
) -> NativeT: ...
@overload
def rotary(
    x: Array,
    positions: Any,
    /,
    *,
    frequencies: Array | None = ...,
    interleaved: bool = ...,
    inverse: bool = ...,
    out: Array | None = ...,
) -> Array: ...
@answering_words
@on_own_device
def rotary(
    x: Array,
    positions: Any,
    /,
    *,
    frequencies: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    out: Array | None = None,
) -> Array:
    """Rotary embedding: turn pairs of features of a row by position times frequency.

    ``(a cos - b sin, a sin + b cos)`` for a pair (a, b) and the angle ``position * frequency``
    (Su et al. 2021, RoFormer, equation 34).

    Parameters
    ----------
    x : array, batch + (n, d)
        Rows, as queries or keys; float16, bfloat16, float32 or float64.
    positions : int, or integer array that broadcasts to batch + (n,)
        The position of each row, any integer: (n,) for all batch entries alike, (batch, 1, n) for
        entries of (batch, heads, n, d).
    frequencies : floating array, (r,), optional
        Radians by which a pair turns from one position to the next; the first ``2 r`` features are
        turned, and the others copied. Default: ``10000 ** (-2 i / d)`` for each pair ``i`` of d/2.
    interleaved : bool
        Whether features ``2 i`` and ``2 i + 1`` are pair ``i``, instead of ``i`` and ``i + r``.
    inverse : bool
        Turn back. That is also the gradient: with ``y = rotary(x, positions)``, the gradient with
        respect to x is ``rotary(dy, positions, inverse=True)``.
    out : array, batch + (n, d), optional
        Where to write, in the dtype of ``x``; memory of its own.

    Returns
    -------
    array, batch + (n, d)
        In the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind or value.
    RuntimeError
        While a CUDA graph is captured.

    Notes
    -----
    Angles are float64, so that far positions lose no digits; products are float32, and float64 for
    float64.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.random.default_rng(0).standard_normal((2, 8, 100, 64))
    >>> turned = cuflash.rotary(x, np.arange(100))
    >>> np.allclose(cuflash.rotary(turned, np.arange(100), inverse=True), x)
    True
    """
    x = native("x", x)
    require_float("x", x)
    if x.ndim < 2 or not x.shape[-1]:
        raise wrong_value("x", f"shape {x.shape}", "rows batch + (n, d), d at least 1")
    positions = integers("positions", positions, optional=False)
    if frequencies is not None:
        frequencies = native("frequencies", frequencies)
        require_float("frequencies", frequencies)
    arrays = {"frequencies": frequencies}
    if not isinstance(positions, int):
        arrays["positions"] = positions
    xp = same_module(x=x, **arrays)
    interleaved, inverse = flag("interleaved", interleaved), flag("inverse", inverse)
    frequencies = _frequencies(xp, x.shape, frequencies)
    refuse_captured(xp, "rotary")
    turned = _positions(xp, x.shape, positions)[..., None]
    if out is not None:
        out = native("out", out)
        require_shape("out", out, x.shape, "x")
        if out.dtype != x.dtype:
            raise wrong_type("out", f"dtype {out.dtype}", f"dtype {x.dtype} as x")
        check_destination("out", out, x=x)
    else:
        out = allocate(xp, "out", x.shape, x.dtype)
    _turn(xp, x, out, turned, -frequencies if inverse else frequencies, interleaved)
    return out


def _frequencies(xp: Any, shape: tuple[int, ...], frequencies: Array | None) -> Array:
    """Radians of each pair, float64."""
    d = shape[-1]
    if frequencies is None:
        if d % 2:
            fix = "or give the frequencies of fewer pairs"
            raise wrong_value("x", f"shape {shape}", "an even number of features", fix)
        return 10000.0 ** -(xp.arange(d // 2, dtype=np.float64) / (d // 2))
    if frequencies.ndim != 1 or 2 * frequencies.size > d:
        expected = f"shape (r,) with 2 r at most the {d} features of x"
        raise wrong_value("frequencies", f"shape {frequencies.shape}", expected)
    return frequencies.astype(np.float64)


def _positions(xp: Any, shape: tuple[int, ...], positions: Any) -> Array:
    """The positions as float64, with an axis for rows."""
    if isinstance(positions, int):
        if abs(positions) >= 2**63:
            raise wrong_value("positions", positions, "an int of 64 bits")
        return xp.full(1, positions, np.float64)
    try:
        fits = np.broadcast_shapes(positions.shape, shape[:-1]) == shape[:-1]
    except ValueError:
        fits = False
    if not fits:
        expected = f"a shape that broadcasts to {shape[:-1]}"
        raise wrong_value("positions", f"shape {positions.shape}", expected)
    return xp.atleast_1d(positions).astype(np.float64)


@np.errstate(all="ignore")
def _turn(
    xp: Any, x: Array, out: Array, positions: Array, frequencies: Array, interleaved: bool
) -> None:
    angles = positions * frequencies
    r, dtype = angles.shape[-1], arithmetic(x.dtype)
    if interleaved:
        first, second = slice(0, 2 * r, 2), slice(1, 2 * r, 2)
    else:
        first, second = slice(0, r), slice(r, 2 * r)
    cos, sin = xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)
    a, b = x[..., first].astype(dtype), x[..., second].astype(dtype)
    out[..., 2 * r :] = x[..., 2 * r :]
    write_rounded(out[..., first], a * cos - b * sin)
    write_rounded(out[..., second], a * sin + b * cos)
