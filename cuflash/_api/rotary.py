"""How are queries and keys turned by their positions?"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import numpy as np

from cuflash._api.dispatch import cache_steps
from cuflash._arrays import (
    Array,
    NativeT,
    allocate,
    contiguous,
    is_cupy,
    native,
    on_own_device,
    refuse_capture,
    same_module,
    to_int64,
)
from cuflash._errors import wrong_type, wrong_value
from cuflash._problem.checks import flag, integers, require_float, require_shape
from cuflash._problem.destinations import check_destination
from cuflash._problem.foreign_keywords import explain_unknown_keywords


@overload
def rotary(
    x: NativeT, positions: Any, /, *,
    frequencies: Array | None = ..., interleaved: bool = ..., inverse: bool = ...,
    out: Array | None = ...,
) -> NativeT: ...  # fmt: skip
@overload
def rotary(
    x: Array, positions: Any, /, *,
    frequencies: Array | None = ..., interleaved: bool = ..., inverse: bool = ...,
    out: Array | None = ...,
) -> Array: ...  # fmt: skip
@explain_unknown_keywords
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
    """Apply rotary embedding: turn pairs of features by the angle ``position * frequency``.

    A pair (a, b) becomes ``(a cos - b sin, a sin + b cos)``, with the cosine and sine of its angle
    (Su et al. 2021, RoFormer, equation 34).

    Parameters
    ----------
    x : array, batch + (n, d)
        Rows of queries or keys: float16, bfloat16, float32 or float64.
    positions : int, or integer array that broadcasts to batch + (n,)
        The position of each row, which can be any integer. Shape (n,) gives all batch entries the
        same positions. If x is (batch, heads, n, d), shape (batch, 1, n) gives each entry its own.
    frequencies : floating array, (r,), optional
        Angle in radians by which each pair turns from one position to the next. The first ``2 r``
        features are turned, and the others are copied. Default: ``10000 ** (-2 i / d)`` for pair
        ``i`` of the d/2 pairs.
    interleaved : bool
        Pair ``i`` is features ``2 i`` and ``2 i + 1``, instead of features ``i`` and ``i + r``.
    inverse : bool
        Turn in the opposite direction. This also gives the gradient with respect to x:
        ``dx = rotary(dy, positions, inverse=True)`` for ``y = rotary(x, positions)``.
    out : array, batch + (n, d), optional
        Array to write the result into, in the dtype of ``x`` and with memory of its own.

    Returns
    -------
    array, batch + (n, d)
        In the dtype of ``x``.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value.
    RuntimeError
        If a call that a CUDA graph captures would allocate memory. Such a call needs ``out``,
        positions as an int or an int32 or int64 array, and contiguous float64 frequencies.

    Notes
    -----
    Angles are float64, so that large positions lose no digits. Products are float32, or float64 for
    float64 arrays.

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
    arrays = {} if isinstance(positions, int) else {"positions": positions}
    xp = same_module(x=x, **arrays)
    pairs = RotaryPairs.of("x", x, frequencies, interleaved)
    inverse = flag("inverse", inverse)
    _check_positions(x.shape, positions)
    if out is not None:
        out = native("out", out)
        require_shape("out", out, x.shape, "x")
        if out.dtype != x.dtype:
            raise wrong_type("out", f"dtype {out.dtype}", f"dtype {x.dtype} as in x")
        if frequencies is not None:
            arrays["frequencies"] = native("frequencies", frequencies)
        check_destination("out", out, x=x, **arrays)
    else:
        out = allocate(xp, "out", x.shape, x.dtype)
    if not x.size:
        return out
    if is_cupy(positions) and positions.dtype not in (np.int32, np.int64):
        refuse_capture("positions", "an int32 or int64 array")
        positions = to_int64(positions)
    cache_steps(x).turn(x, out, positions, *pairs, inverse=inverse)
    return out


class RotaryPairs(NamedTuple):
    """Which pairs of features turn, and by which angles."""

    frequencies: Array | None  # float64, contiguous on a GPU; None: the default
    num_pairs: int
    rotation: str  # name of the order of pairs in kernels

    @classmethod
    def of(cls, name: str, x: Array, frequencies: Any, interleaved: Any) -> RotaryPairs:
        """Check the frequencies against the rows ``x``, which are the argument ``name``."""
        d, shape = x.shape[-1], x.shape
        rotation = "neighbours" if flag("interleaved", interleaved) else "halves"
        if frequencies is None:
            if d % 2:
                fix = "or pass frequencies= for fewer pairs"
                raise wrong_value(name, f"shape {shape}", "an even number of features", fix)
            return cls(None, d // 2, rotation)
        frequencies = native("frequencies", frequencies)
        require_float("frequencies", frequencies)
        same_module(**{name: x, "frequencies": frequencies})
        if frequencies.ndim != 1 or 2 * frequencies.size > d:
            expected = f"shape (r,) where 2 r is at most {d}, the features of {name}"
            raise wrong_value("frequencies", f"shape {frequencies.shape}", expected)
        if is_cupy(frequencies):
            frequencies = contiguous("frequencies", frequencies, np.float64)
        else:
            frequencies = frequencies.astype(np.float64)
        return cls(frequencies, frequencies.size, rotation)


NO_ROTARY_PAIRS = RotaryPairs(None, 0, "none")


def _check_positions(shape: tuple[int, ...], positions: Any) -> None:
    """Raise unless there is a position for each row."""
    if isinstance(positions, int):
        if not -(2**63) <= positions < 2**63:
            raise wrong_value("positions", positions, "an int that fits into 64 bits")
        return
    try:
        fits = np.broadcast_shapes(positions.shape, shape[:-1]) == shape[:-1]
    except ValueError:
        fits = False
    if not fits:
        expected = f"a shape that broadcasts to {shape[:-1]}"
        raise wrong_value("positions", f"shape {positions.shape}", expected)
