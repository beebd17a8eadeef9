"""How are 8-bit operands computed? By a kernel for them, or dequantised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash._api.arguments import QKV, Keywords, has_8_bit_keys
from cuflash._arrays import (
    Array,
    Triple,
    array_module,
    is_cupy,
    native,
    refuse_capture,
    rounded,
    same_module,
)
from cuflash._errors import NoKernel, wrong_type
from cuflash._host.scores import arithmetic
from cuflash._problem.float8 import (
    E4M3,
    FLOAT8,
    LARGEST,
    SMALLEST,
    checked_scale,
    factor_of_rows,
    result_dtype,
)
from cuflash._problem.operand import checked_axes, core_axes
from cuflash._problem.options import Options
from cuflash._problem.problem import HALVES

_SCALES = tuple(f"{name}_scale" for name in QKV)


class Plain(NamedTuple):
    """Operands of 16 bits or more, and options without scales."""

    q: Array
    k: Array
    v: Array
    options: Options


def among(options: Options, *arrays: Any) -> bool:
    """Whether an operand has 8 bits, or a scale of an operand is given."""
    if any(getattr(array, "dtype", None) in FLOAT8 for array in arrays):
        return True
    return not options.q_scale is options.k_scale is options.v_scale is None


def forward(
    compute: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    keywords: Keywords,
    *,
    names: tuple[str, str, str] = QKV,
    for_gradient: bool = False,
) -> Any:
    """Compute a forward by a kernel that reads 8-bit arrays, else on dequantised arrays.

    ``compute`` takes q, k, v, options and keywords. Scales in its options have one factor for each
    batch entry and head. A gradient dequantises, and needs the lse of the numbers that it reads:
    that of 8-bit arrays only if dequantising rounds nothing. Pages have other ``names`` and no
    gradient.
    """
    in_pages = names != QKV
    axes, out, config = keywords.axes, keywords.out, keywords.config
    arrays, scales = _checked(_native(q, k, v, names), options, axes, names)
    q, k, v = arrays
    out_dtype = getattr(out[0] if isinstance(out, tuple) else out, "dtype", None)
    dtype = result_dtype([a.dtype for a in arrays], out_dtype)
    whole = all(not getattr(s, "shape", ()) or s.shape[-2] == 1 for s in scales)
    by_page = in_pages and any(
        getattr(s, "ndim", 0) == k.ndim and s.shape[0] != 1 for s in scales[1:]
    )
    exact = all(_rounds_nothing(a, s, dtype) for a, s in zip(arrays[:2], scales, strict=False))
    if is_cupy(q) and whole and not by_page and (exact or not for_gradient):
        if all(a.dtype == E4M3 for a in arrays) and getattr(config, "float8", True):
            with suppress(NoKernel):
                return compute(q, k, v, _of_entries(options, scales, q, axes), keywords)
        converts = k.dtype == v.dtype and k.dtype in FLOAT8 and dtype in HALVES
        if config is not None:
            converts = converts and getattr(config, "kv_dtype", "none") == k.dtype.name
        if converts and (exact or in_pages or not keywords.return_lse):
            if q.dtype in FLOAT8:
                q = times(names[0], q, options.q_scale, checked_axes(axes)[0], dtype)
                options, scales = replace(options, q_scale=None), [None, *scales[1:]]
            with suppress(NoKernel):
                return compute(q, k, v, _of_entries(options, scales, q, axes), keywords)
    plain = dequantized(q, k, v, options, axes=axes, out_dtype=out_dtype, names=names)
    return compute(*plain, keywords)


def _rounds_nothing(array: Array, scale: Any, dtype: np.dtype[Any]) -> bool:
    """Whether every element times a scale that the host knows is a number of ``dtype``."""
    if array.dtype not in FLOAT8:
        return True
    factor = 1.0 if scale is None else scale
    if not isinstance(factor, int | float | np.generic) or np.frexp(factor)[0] != 0.5:
        return False
    extremes = np.array([SMALLEST[array.dtype], LARGEST[array.dtype]]) * factor
    with np.errstate(over="ignore"):
        return bool((rounded(extremes, dtype) == extremes).all())


def dequantized(
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    *,
    axes: Any,
    out_dtype: Any = None,
    names: tuple[str, str, str] = QKV,
) -> Plain:
    """The operands with their scales applied, each rounded once to the dtype of the result.

    Errors call the operands by ``names``.
    """
    arrays, scales = _checked(_native(q, k, v, names), options, axes, names)
    dtype = result_dtype([a.dtype for a in arrays], out_dtype)
    found: Any = [
        times(name, a, scale, pair, dtype) if a.dtype in FLOAT8 else a
        for name, a, scale, pair in zip(names, arrays, scales, checked_axes(axes)[:3], strict=True)
    ]
    q, k, v = found
    return Plain(q, k, v, _without_scales(options))


def without_memory(q: Array, k: Array, v: Array, options: Options, axes: Any) -> list[Plain]:
    """Operands with the layouts of dequantised arrays, but without memory for the elements.

    Then the same with k and v as they are, if a kernel may convert them.
    """
    arrays, _ = _checked(_native(q, k, v), options, axes)
    dtype = result_dtype([a.dtype for a in arrays], None)
    found: Any = [_unread(a, dtype) if a.dtype in FLOAT8 else a for a in arrays]
    q, k, v = found
    plain = Plain(q, k, v, _without_scales(options))
    converting = plain._replace(k=arrays[1], v=arrays[2])
    return [plain, converting] if is_cupy(q) and has_8_bit_keys(*converting[:3]) else [plain]


def without_values(
    q: Array, k: Array, options: Options, axes: Any, out_dtype: np.dtype[Any] | None = None
) -> Plain:
    """Dequantised operands of a call without values, for which ``v_scale`` is an error."""
    if options.v_scale is not None:
        raise wrong_type("v_scale", "a scale", "None: this function has no v")
    return dequantized(q, k, k, replace(options, v_scale=options.k_scale), axes=axes,
                       out_dtype=out_dtype)  # fmt: skip


def of_gradient(
    dout: Array, q: Array, k: Array, v: Array, out: Array, options: Options, axes: Any
) -> tuple[Array, Array, Array, Array, Options]:
    """Dequantised dout, q, k and v for a gradient, and options without scales."""
    dout, out = native("dout", dout), native("out", out)
    plain = dequantized(q, k, v, options, axes=axes, out_dtype=out.dtype)
    if dout.dtype in FLOAT8:
        dout = times("dout", dout, None, checked_axes(axes)[3], out.dtype)
    return (dout, *plain)


def times(
    name: str, array: Array, scale: Any, pair: tuple[int, int], dtype: np.dtype[Any]
) -> Array:
    """An 8-bit array times its factors, in ``dtype`` and the same order of axes."""
    core = core_axes(name, array.shape, pair)
    kept = [i for i in range(array.ndim) if i not in core]
    matrices = array.transpose(*kept, *core)
    factor = factor_of_rows(1.0 if scale is None else scale, matrices.shape[-2])
    if is_cupy(array):
        from cuflash._launch import float8

        out = array_module(array).empty(array.shape, dtype)
        float8.dequantized(name, matrices, factor, out.transpose(*kept, *core))
        return out
    out, wide = np.empty(array.shape, dtype), arithmetic(dtype)
    with np.errstate(all="ignore"):
        found = matrices.astype(wide) * np.asarray(factor, wide)
        out.transpose(*kept, *core)[...] = rounded(found, dtype)
    return out


def _unread(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array with the layout of a result of ``times``, but memory for one element only."""
    strides = np.cumprod([dtype.itemsize, *array.shape[:0:-1]])[::-1].tolist()
    xp = array_module(array)
    return xp.lib.stride_tricks.as_strided(xp.empty((), dtype), array.shape, strides)


def _without_scales(options: Options) -> Options:
    return replace(options, q_scale=None, k_scale=None, v_scale=None)


def _native(q: Any, k: Any, v: Any, names: tuple[str, str, str] = QKV) -> Triple:
    q, k, v = (native(name, a) for name, a in zip(names, (q, k, v), strict=True))
    same_module(**dict(zip(names, (q, k, v), strict=True)))
    return q, k, v


def _checked(
    arrays: Triple, options: Options, axes: Any, names: tuple[str, str, str] = QKV
) -> tuple[Triple, list[Any]]:
    """The operands and their scales; raise for scales that do not fit them."""
    scales = [getattr(options, name) for name in _SCALES]
    for name, scale_name, array, scale, pair in zip(
        names, _SCALES, arrays, scales, checked_axes(axes)[:3], strict=True
    ):
        if scale is None:
            continue
        if array.dtype not in FLOAT8:
            expected = f"a scale only for {name} of float8_e4m3fn or float8_e5m2"
            raise wrong_type(scale_name, f"a scale for {name} of {array.dtype}", expected)
        if getattr(scale, "shape", ()):
            same_module(**{name: array, scale_name: scale})
            core = core_axes(name, array.shape, pair)
            batch = tuple(n for i, n in enumerate(array.shape) if i not in core)
            checked_scale(scale_name, scale, batch, array.shape[core[0]])
    return arrays, scales


def _of_entries(options: Options, scales: list[Any], q: Array, axes: Any) -> Options:
    """Options for kernels: one factor for each entry; numbers for q and k go into ``scale``."""
    changes: dict[str, Any] = {}
    factor = 1.0
    for name, scale in zip(_SCALES, scales, strict=True):
        if isinstance(scale, float) and name != "v_scale":
            factor *= scale
            changes[name] = None
        elif isinstance(scale, float):
            refuse_capture(name, "an array on the device")
            changes[name] = array_module(q).full((), scale, np.float32)
        elif scale is not None and scale.shape:
            changes[name] = scale[..., 0, 0]
    if factor != 1.0:
        head_dim = q.shape[core_axes("q", q.shape, checked_axes(axes)[0])[1]]
        own = 1 / np.sqrt(head_dim) if options.scale is None else options.scale
        changes["scale"] = float(own * factor)
    return replace(options, **changes)
