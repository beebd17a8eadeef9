"""How are partial results over disjoint keys combined?"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from cuflash._arrays import (
    Array,
    ScalarT,
    native,
    on_own_device,
    refuse_captured,
    rounded,
    same_module,
)
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._host.scores import arithmetic
from cuflash._problem.checks import integer_value, is_integer, require_float, require_shape
from cuflash._problem.foreign_keywords import explain_unknown_keywords
from cuflash._results import AttentionResult

_MAX_AXES = 64  # of a NumPy or CuPy array


@overload
def merge(
    outs: npt.NDArray[ScalarT] | Sequence[npt.NDArray[ScalarT]], lses: Any, axis: int = ...
) -> AttentionResult[npt.NDArray[ScalarT]]: ...
@overload
def merge(outs: Any, lses: Any, axis: int = ...) -> AttentionResult: ...
@explain_unknown_keywords
@on_own_device
def merge(outs: Any, lses: Any, axis: int = 0) -> AttentionResult:
    """Combine attention over disjoint sets of keys into attention over all of them.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) * out_i``.

    Parameters
    ----------
    outs : array, or sequence of arrays batch + (m, d_v)
        Partial results: a sequence of arrays, or one array with the parts along ``axis``.
    lses : array, or sequence of arrays batch + (m,)
        The lse of each part. A row with -inf has no effect, and its ``out`` is not read.
    axis : int
        The axis of the parts in both arrays, counted from the front; 0 for sequences.

    Returns
    -------
    AttentionResult
        ``out`` in the dtype of ``outs``, ``lse`` in the dtype of ``lses``.

    Raises
    ------
    TypeError, ValueError
        If the parts differ in array library, shape or dtype, or if there are no parts.
    RuntimeError
        While a CUDA graph is captured.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 64, 16))
    >>> parts = [cuflash.attention(q, k[s], v[s], return_lse=True)
    ...          for s in (slice(0, 20), slice(20, 64))]
    >>> whole = cuflash.merge([p.out for p in parts], [p.lse for p in parts])
    >>> np.allclose(whole.out, cuflash.attention(q, k, v))
    True
    """
    xp, outs, lses = _parts(outs, lses, axis)
    out, lse = _merged(xp, outs, lses)
    return AttentionResult(rounded(out, outs.dtype), rounded(lse, lses.dtype))


@overload
def merge_backward(
    dout: Array, outs: npt.NDArray[ScalarT] | Sequence[npt.NDArray[ScalarT]], lses: Any, /, *,
    dlse: Array | None = ..., axis: int = ...,
) -> AttentionResult[npt.NDArray[ScalarT]]: ...  # fmt: skip
@overload
def merge_backward(
    dout: Array, outs: Any, lses: Any, /, *, dlse: Array | None = ..., axis: int = ...
) -> AttentionResult: ...
@explain_unknown_keywords
@on_own_device
def merge_backward(
    dout: Array, outs: Any, lses: Any, /, *, dlse: Array | None = None, axis: int = 0
) -> AttentionResult:
    """Gradient of :func:`merge`.

    With ``w_i = exp(lse_i - lse)``: ``douts_i = w_i * dout`` and ``dlses_i = w_i * (dlse +
    rowsum(dout * (out_i - out)))``.

    Parameters
    ----------
    dout : array, batch + (m, d_v)
        Cotangent of the merged ``out``.
    outs, lses, axis
        As given to :func:`merge`.
    dlse : array, batch + (m,), optional
        Cotangent of the merged ``lse``.

    Returns
    -------
    AttentionResult
        Gradients with respect to ``outs`` and ``lses``, with the parts along ``axis``.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in :func:`merge`, and if a cotangent does not have the shape of its merged array.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs, lses = np.ones((2, 5, 3)), np.zeros((2, 5))
    >>> cuflash.merge_backward(np.ones((5, 3)), outs, lses).out[0, 0]
    array([0.5, 0.5, 0.5])
    """
    xp, outs, lses = _parts(outs, lses, axis)
    whole = _merged(xp, outs, lses)
    dout = native("dout", dout)
    dlse = None if dlse is None else native("dlse", dlse)
    same_module(outs=outs, dout=dout, dlse=dlse)
    for name, cotangent, result in (("dout", dout, "out"), ("dlse", dlse, "lse")):
        if cotangent is not None:
            require_float(name, cotangent)
            require_shape(name, cotangent, getattr(whole, result).shape, f"the merged {result}")
    dtype = xp.promote_types(arithmetic(lses.dtype), arithmetic(outs.dtype))
    with np.errstate(all="ignore"):
        parts, dout = lses.astype(dtype), dout.astype(dtype)
        hidden = xp.isneginf(parts)
        weight = xp.exp(parts - whole.lse.astype(dtype))
        from_mean = outs.astype(dtype) - whole.out
        slope = (dout * from_mean).sum(-1)
        if dlse is not None:
            slope += dlse.astype(dtype)
        douts = xp.where(hidden[..., None], 0, weight[..., None] * dout)
        dlses = xp.where(hidden, 0, weight * slope)
        return AttentionResult(
            xp.moveaxis(rounded(douts, outs.dtype), 0, axis),
            xp.moveaxis(rounded(dlses, lses.dtype), 0, axis),
        )


def _merged(xp: ModuleType, outs: Array, lses: Array) -> AttentionResult:
    """Merge parts along the first axis of both arrays, without rounding to their dtypes."""
    dtype = arithmetic(lses.dtype)
    with np.errstate(all="ignore"):
        parts = lses.astype(dtype)
        highest = parts.max(0)
        shift = xp.where(xp.isneginf(highest), 0, highest)
        weight = xp.exp(parts - shift)
        total = weight.sum(0)
        lse = shift + xp.log(total)
        weight = (weight / total)[..., None]
        scaled = weight * outs.astype(xp.promote_types(dtype, arithmetic(outs.dtype)))
        out = xp.where(xp.isneginf(parts)[..., None], 0, scaled).sum(0)
        return AttentionResult(out, lse)


def _parts(outs: Any, lses: Any, axis: Any) -> tuple[ModuleType, Array, Array]:
    """The array module, and both arrays, checked and with the parts along the first axis."""
    if not is_integer(axis):
        raise wrong_type("axis", shown(axis), "an int")
    axis = integer_value("axis", axis, "an int")
    outs, lses = _stacked("outs", outs, axis), _stacked("lses", lses, axis)
    xp = same_module(outs=outs, lses=lses)
    for name, array in (("outs", outs), ("lses", lses)):
        require_float(name, array)
    if not 0 <= axis < lses.ndim:
        raise wrong_value("axis", shown(axis), f"an axis from 0 to {lses.ndim - 1}")
    require_shape("lses", lses, outs.shape[:-1], "outs without its last axis")
    refuse_captured(xp, "merge")
    if lses.shape[axis] == 0:
        raise wrong_value("outs", "no parts", "at least one part")
    return xp, xp.moveaxis(outs, axis, 0), xp.moveaxis(lses, axis, 0)


def _stacked(name: str, parts: Any, axis: int) -> Array:
    if not isinstance(parts, list | tuple):
        return native(name, parts)
    if axis != 0:
        raise wrong_value("axis", shown(axis), "0 for a list of parts")
    if not parts:
        raise wrong_value(name, "no parts", "at least one part")
    arrays = [native(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    xp = same_module(**{f"{name}[{i}]": array for i, array in enumerate(arrays)})
    for i, array in enumerate(arrays):
        if array.ndim >= _MAX_AXES:
            raise wrong_value(
                f"{name}[{i}]", f"{array.ndim} axes", f"fewer than {_MAX_AXES}",
                "merge some of them with reshape",
            )  # fmt: skip
        require_shape(f"{name}[{i}]", array, arrays[0].shape, f"{name}[0]")
        if array.dtype != arrays[0].dtype:
            raise wrong_type(f"{name}[{i}]", f"dtype {array.dtype}", arrays[0].dtype)
    refuse_captured(xp, "merge")
    return xp.stack(arrays)
