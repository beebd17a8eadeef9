"""How are arrays quantised to 8-bit floats and scales?"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Generic, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from ml_dtypes import float8_e4m3fn

from cuflash._arrays import (
    Array,
    array_module,
    is_cupy,
    native,
    on_own_device,
    refuse_captured,
)
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem import checks
from cuflash._problem.float8 import FLOAT8, LARGEST, divided, factor_of_rows
from cuflash._problem.foreign_keywords import explain_unknown_keywords
from cuflash._problem.operand import core_axes
from cuflash._results import ArrayT

# Scales are powers of two. (D173)
_EXPONENTS = (-100, 126)  # of scales, whose inverses are then normal float32 numbers
_LEAST = 2.0**-126  # GPUs flush smaller float32 numbers to 0
_MOST_ROWS = 1 << 29  # more rows than kernels can index


class Quantized(NamedTuple, Generic[ArrayT]):
    """An array of 8-bit floats, and the scales of its elements: see :func:`quantize`.

    Attributes
    ----------
    array : array, batch + (m, d)
        The quantised elements.
    scale : float32 array, batch + (b, 1)
        What they are multiplied by; b blocks of rows share scales: see :class:`Options`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> made = cuflash.quantize(np.full((3, 8), 1000.0))
    >>> float(made.array[0, 0]), made.scale.item()
    (256.0, 4.0)
    """

    array: ArrayT
    scale: ArrayT


@overload
def quantize(
    x: npt.NDArray[Any], /, *,
    per: str | int = ..., dtype: Any = ..., rotation: int | None = ..., axes: tuple[int, int] = ...,
) -> Quantized[npt.NDArray[Any]]: ...  # fmt: skip
@overload
def quantize(
    x: Array, /, *,
    per: str | int = ..., dtype: Any = ..., rotation: int | None = ..., axes: tuple[int, int] = ...,
) -> Quantized: ...  # fmt: skip
@explain_unknown_keywords
@on_own_device
def quantize(
    x: Array,
    /,
    *,
    per: str | int = "matrix",
    dtype: Any = float8_e4m3fn,
    rotation: int | None = None,
    axes: tuple[int, int] = (-2, -1),
) -> Quantized:
    """Quantise an array to 8-bit floats, with scales that are powers of two.

    Each element is divided by its scale, rounded to nearest even and saturated. A scale is the
    smallest power of two with which the largest magnitude fits: a quantised element times its scale
    is exact in 16 bits. Infinities and NaN become NaN, and do not count as the largest magnitude.

    Parameters
    ----------
    x : array, batch + (m, d)
        float16, bfloat16, float32 or float64; NumPy or CuPy.
    per : {"matrix", "tensor"} or a power of two
        The elements that share a scale: ``"matrix"`` is each (sequence, feature) matrix, which is
        one head of one batch entry, ``"tensor"`` is the whole array, and a number is that many
        consecutive rows of a matrix.
    dtype : {float8_e4m3fn, float8_e5m2}
        Dtype of the result. float8_e4m3fn has 4 significant bits and reaches 448, float8_e5m2 has
        3 and reaches 57344.
    rotation : int, optional
        Seed of a random rotation of the features, which spreads an outlier in one feature over all.
        Rotate q and k with the same seed: the products ``q . k`` stay the same, so nothing has to
        be rotated back. The rotation is random signs times a Hadamard matrix, whose size is the
        largest power of two that divides d (FlashAttention-3, Shah et al. 2024, section 3.3; QuIP,
        Chee et al. 2023).
    axes : pair of ints
        The sequence and the feature axis.

    Returns
    -------
    array : array of ``dtype``, the shape of x
        On a GPU a CuPy array of a dtype that CuPy stores but does not compute with.
    scale : float32 array, batch + (b, 1)
        b is the number of blocks of rows, or 1 for whole matrices. Per tensor the shape is (1, 1).

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value.
    RuntimeError
        While a CUDA graph is captured.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> array, scale = cuflash.quantize(np.array([[1.0, -0.3], [1000.0, 0.0]]))
    >>> scale
    array([[4.]], dtype=float32)
    >>> (array.astype(np.float32) * scale).tolist()
    [[1.0, -0.3125], [1024.0, 0.0]]
    """
    x = native("x", x)
    checks.require_float("x", x)
    dtype = _dtype(dtype)
    rows = _rows(per)
    xp = array_module(x)
    refuse_captured(xp, "quantize")
    core = core_axes("x", x.shape, _pair(axes))
    if max(x.shape) >= _MOST_ROWS:
        raise wrong_value("x", f"shape {x.shape}", "axes shorter than 2^29")
    kept = [i for i in range(x.ndim) if i not in core]
    matrices = x.transpose(*kept, *core)
    signs = (
        None if rotation is None else _signs(checks.seed("rotation", rotation), x.shape[core[1]])
    )
    back = np.argsort((*kept, *core))
    if xp is not np and per != "tensor":
        from cuflash._launch import float8

        if (made := float8.rounded_in_two_passes(matrices, rows, signs, dtype)) is not None:
            return Quantized(made[0].transpose(*back), made[1])
    with np.errstate(all="ignore"):
        if signs is not None:
            matrices = _rotated(matrices, signs, xp)
        scale = _scale(matrices, rows, per == "tensor", LARGEST[dtype], xp)
        found = _divided(matrices, factor_of_rows(scale, matrices.shape[-2]), dtype)
    return Quantized(found.transpose(*back), scale)


def _pair(axes: Any) -> tuple[int, int]:
    """The sequence and the feature axis."""
    expected = "a pair (sequence axis, feature axis)"
    if not isinstance(axes, list | tuple) or not all(map(checks.is_integer, axes)):
        raise wrong_type("axes", shown(axes), expected)
    if len(axes) != 2:
        raise wrong_value("axes", shown(axes), expected)
    sequence, feature = (checks.integer_value("axes", axis, expected) for axis in axes)
    return sequence, feature


def _dtype(dtype: Any) -> np.dtype[Any]:
    """One of the two 8-bit dtypes."""
    expected = "float8_e4m3fn or float8_e5m2"
    found = checks.dtype_of("dtype", dtype, expected)
    if found not in FLOAT8:
        raise wrong_type("dtype", f"dtype {found}", expected)
    return found


def _rows(per: Any) -> int:
    """The number of rows that share a scale; 0 for all rows."""
    expected = '"matrix", "tensor" or a number of rows that is a power of two'
    if isinstance(per, str) and per in ("matrix", "tensor"):
        return 0
    if not checks.is_integer(per):
        raise wrong_type("per", shown(per), expected)
    rows = checks.integer_value("per", per, expected)
    if rows < 1 or rows & (rows - 1):
        raise wrong_value("per", shown(per), expected)
    return rows


def _scale(matrices: Array, rows: int, whole: bool, largest: float, xp: ModuleType) -> Array:
    """The smallest powers of two with which the largest magnitudes fit, batch + (b, 1)."""
    sizes = xp.abs(matrices)
    sizes = xp.where(xp.isfinite(sizes), sizes, 0)
    *batch, m, d = sizes.shape
    blocks = -(-m // rows) if 0 < rows < m else 1
    if not sizes.size:  # CuPy has no maximum of an empty array
        return xp.ones((1, 1) if whole else (*batch, blocks, 1), np.float32)
    if blocks > 1:
        sizes = xp.pad(sizes, [*[(0, 0)] * len(batch), (0, blocks * rows - m), (0, 0)])
        sizes = sizes.reshape(*batch, blocks, rows, d)
        amax = sizes.max(axis=(-2, -1))[..., None]
    elif whole:
        amax = sizes.max().reshape(1, 1)
    else:
        amax = sizes.max(axis=(-2, -1), keepdims=True)
    amax = amax.astype(np.float64)
    mantissa, exponent = xp.frexp(amax / largest)
    exponent = xp.clip(exponent - (mantissa == 0.5), *_EXPONENTS)
    exponent = xp.where(amax < _LEAST, 0, exponent)
    return xp.ldexp(np.float32(1), exponent).astype(np.float32)


def _divided(matrices: Array, factor: Array, dtype: np.dtype[Any]) -> Array:
    if is_cupy(matrices):
        from cuflash._launch import float8

        return float8.quantized(matrices, factor, dtype)
    return divided(matrices, factor, dtype)


def _signs(seed: int, d: int) -> Array:
    """The random signs in a rotation of d features."""
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), d)


def _rotated(matrices: Array, signs: Array, xp: ModuleType) -> Array:
    """Features times random signs, then times Hadamard matrices; in float32."""
    d = matrices.shape[-1]
    width = max(d & -d, 1)  # the largest power of two that divides d
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < width:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    parts = (matrices.astype(np.float32) * xp.asarray(signs)).reshape(
        *matrices.shape[:-1], d // width, width
    )
    turned = parts @ xp.asarray(hadamard / np.float32(np.sqrt(width)))
    return turned.reshape(matrices.shape)
