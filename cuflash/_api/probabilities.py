"""Which functions return lse, selected probabilities and dropout masks?"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Unpack, overload

import numpy as np
import numpy.typing as npt

from cuflash._api import float8
from cuflash._api.arguments import (
    CallKeywords,
    OptionKeywords,
    explain_missing_arguments,
    operands,
)
from cuflash._api.attention import attention, attention_backward
from cuflash._arrays import (
    Array,
    HostFloats,
    NativeT,
    array_module,
    is_cupy,
    native,
    on_device_of,
    on_own_device,
    refuse_captured,
    same_module,
)
from cuflash._errors import problem_with, shown, wrong_type, wrong_value
from cuflash._host.scores import Scores, Tile, arithmetic
from cuflash._problem import checks, philox
from cuflash._problem.operand import axes_without_values, canonical_view
from cuflash._problem.options import Options, ScoreOptions, gradient_names, resolve
from cuflash._problem.problem import describe
from cuflash._results import Gradients

_MASK_ELEMENTS = 1 << 24  # of a dropout mask, computed at once


@overload
def logsumexp(  # type: ignore[overload-overlap]  # no array has two dtypes
    q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], /, *,
    out: Array | None = ..., **others: Unpack[CallKeywords],
) -> npt.NDArray[np.float64]: ...  # fmt: skip
@overload
def logsumexp(
    q: HostFloats, k: HostFloats, /, *, out: Array | None = ..., **others: Unpack[CallKeywords]
) -> npt.NDArray[np.float32]: ...
@overload
def logsumexp(
    q: Array, k: Array, /, *, out: Array | None = ..., **others: Unpack[CallKeywords]
) -> Array: ...
@on_own_device
@explain_missing_arguments
def logsumexp(
    q: Array,
    k: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    out: Array | None = None,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Array:
    """Logarithm of each row's sum of exponentials: attention without values.

    Parameters
    ----------
    q, k, options, axes, precision, deterministic, workspace, config, **score_options
        As in :func:`attention`. Of ``axes`` only the first two pairs are used.
    out : array, batch + (m,), optional
        Array to write the result into: float32, or float64 for float64 inputs, with any strides
        without overlap.

    Returns
    -------
    array, batch + (m,)
        float32, or float64 for float64 inputs. If a query sees no key, its element is its sink, or
        -inf without a sink. Rows beyond ``q_lengths`` are -inf.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((3, 2))
    >>> np.exp(cuflash.logsumexp(x, x)).round(6)
    array([3., 3., 3.])
    """
    chosen = resolve(options, score_options)
    if float8.among(chosen, q, k):
        q, k, _, chosen = float8.without_values(q, k, chosen, axes_without_values(axes))
    axes, v = _no_values(k, axes)
    common: dict[str, Any] = {"axes": axes, "precision": precision, "deterministic": deterministic}
    common |= {"options": chosen, "workspace": workspace, "config": config}
    pair = None if out is None else (_no_result(q, k, v, **common), out)
    return attention(q, k, v, return_lse=True, out=pair, **common).lse


@overload
def logsumexp_backward(
    dlse: Array, q: NativeT, k: NativeT, lse: Array, /, *,
    grads_out: Gradients | None = ..., **others: Unpack[CallKeywords],
) -> Gradients[NativeT, None]: ...  # fmt: skip
@overload
def logsumexp_backward(
    dlse: Array, q: Array, k: Array, lse: Array, /, *,
    wrt: tuple[str, ...] = ..., grads_out: Gradients | None = ..., **others: Unpack[CallKeywords],
) -> Gradients: ...  # fmt: skip
@on_own_device
@explain_missing_arguments
def logsumexp_backward(
    dlse: Array,
    q: Array,
    k: Array,
    lse: Array,
    /,
    *,
    wrt: tuple[str, ...] = ("q", "k"),
    grads_out: Gradients | None = None,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Gradients:
    """Gradient of ``sum(dlse * logsumexp(q, k))``.

    Parameters
    ----------
    dlse : array, batch + (m,)
        Cotangent of ``lse``.
    q, k : array
        As given to :func:`logsumexp`.
    lse : array, batch + (m,)
        Result of :func:`logsumexp`.
    wrt : tuple of {"q", "k", "bias", "alibi_slopes", "sink", "scale"}
        The inputs whose gradients are computed.
    grads_out, workspace, config
        As in :func:`attention_backward`.
    options, axes, precision, deterministic, **score_options
        As in :func:`logsumexp`.

    Returns
    -------
    Gradients
        Each has exactly the shape and dtype of its input.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((3, 2))
    >>> lse = cuflash.logsumexp(x, x)
    >>> cuflash.logsumexp_backward(np.ones(3), x, x, lse).dq.shape
    (3, 2)
    """
    chosen = resolve(options, score_options)
    if "v" in gradient_names(wrt, chosen):
        raise wrong_value("wrt", shown(wrt), "names of inputs of the call, which has no v")
    dlse = native("dlse", dlse)
    if float8.among(chosen, q, k):
        q, k, _, chosen = float8.without_values(q, k, chosen, axes_without_values(axes))
    axes, v = _no_values(k, axes)
    common: dict[str, Any] = {"axes": axes, "precision": precision, "deterministic": deterministic}
    common |= {"options": chosen, "workspace": workspace, "config": config}
    nothing = _no_result(q, k, v, **common)
    return attention_backward(
        nothing, q, k, v, nothing, lse, dlse=dlse, wrt=wrt, grads_out=grads_out, **common
    )


@overload
def weights(
    q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], lse: Array, /, *,
    rows: Any = ..., cols: Any = ..., **others: Unpack[OptionKeywords],
) -> npt.NDArray[np.float64]: ...  # fmt: skip
@overload
def weights(
    q: HostFloats, k: HostFloats, lse: Array, /, *,
    rows: Any = ..., cols: Any = ..., **others: Unpack[OptionKeywords],
) -> npt.NDArray[np.float32]: ...  # fmt: skip
@overload
def weights(
    q: Array, k: Array, lse: Array, /, *,
    rows: Any = ..., cols: Any = ..., **others: Unpack[OptionKeywords],
) -> Array: ...  # fmt: skip
@on_own_device
@explain_missing_arguments
def weights(
    q: Array,
    k: Array,
    lse: Array,
    /,
    *,
    rows: Any = None,
    cols: Any = None,
    options: Options | None = None,
    axes: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Array:
    """Compute selected attention probabilities, ``exp(score - lse)``.

    Parameters
    ----------
    q, k : array
        As given to :func:`attention`.
    lse : array, batch + (m,)
        The lse that :func:`attention` returned.
    rows, cols : slice or 1-D integer array, optional
        Queries and keys to select. ``None`` selects all, but must not be given for both: write
        ``rows=slice(None)`` for the whole matrix. The host does not read indices on a GPU: the
        result of an index out of bounds is undefined.
    options, axes, **score_options
        As in :func:`attention`. Of ``axes`` only the first two pairs are used.

    Returns
    -------
    array, batch + (number of rows, number of cols)
        float32, or float64 for float64 inputs; 0 where the query does not see the key.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.
    RuntimeError
        While a CUDA graph is captured.

    Notes
    -----
    A float32 ``lse`` has 24 bits. If a finite bias is used as a mask, a row may have n equal scores
    near -1e9 and no others: lse then loses log(n), and each weight is 1 instead of 1/n. A bias of
    -inf, or ``mask``, hides such a row.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = np.eye(4)
    >>> lse = cuflash.attention(q, k, k, return_lse=True).lse
    >>> cuflash.weights(q, k, lse, rows=[0]).round(3)
    array([[0.355, 0.215, 0.215, 0.215]])
    """
    chosen = resolve(options, score_options)
    if float8.among(chosen, q, k):
        axes = axes_without_values(axes)
        q, k, _, chosen = float8.without_values(q, k, chosen, axes, np.dtype(np.float32))
    xp, _, (q, k, _) = operands(q, k, k)
    lse = native("lse", lse)
    same_module(q=q, lse=lse)
    refuse_captured(xp, "weights")
    problem = describe(q, k, k, chosen, axes=axes_without_values(axes))
    checks.require_float("lse", lse)
    checks.require_shape("lse", lse, problem.lse_shape, "the lse of attention")
    if rows is None and cols is None:
        raise wrong_value(
            "rows", "neither rows nor cols", "rows= or cols=",
            "rows=slice(None) computes the whole matrix",
        )  # fmt: skip
    m = xp.arange(problem.seqlen_q)[_selection("rows", rows, problem.seqlen_q, xp)]
    n = xp.arange(problem.seqlen_k)[_selection("cols", cols, problem.seqlen_k, xp)]
    dtype = arithmetic(problem.dtype)
    tile = Tile(m, n, m[:, None], n[None, :])
    q_rows = canonical_view(q, problem.q, keep_summed=True)[..., m, :]
    k_cols = canonical_view(k, problem.k, keep_summed=True)[..., n, :].astype(dtype)
    with np.errstate(all="ignore"):
        scores = Scores(problem, chosen, (), xp)
        score, _, _ = scores.logits(scores.queries(q_rows), k_cols, tile)
        lse_rows = lse.reshape(*problem.batch, problem.seqlen_q)[..., m, None].astype(dtype)
        seen = scores.visible(tile) & ~xp.isneginf(lse_rows)
        p = xp.where(seen, xp.exp(score - lse_rows), 0)
    return p.reshape(*problem.batch_shape, m.size, n.size)


@overload
def dropout_mask(
    shape: tuple[int, ...], p: float, seed: int, *, like: npt.NDArray[Any] | None = ...
) -> npt.NDArray[np.bool_]: ...
@overload
def dropout_mask(shape: tuple[int, ...], p: float, seed: int, *, like: Array) -> Array: ...
def dropout_mask(shape: tuple[int, ...], p: float, seed: int, *, like: Any = None) -> Array:
    """Which scores dropout keeps in a call of :func:`attention`.

    Parameters
    ----------
    shape : tuple of int, batch + (m, n)
        Shape of the scores, with heads as the last axis of batch.
    p : float
        ``dropout=`` of the call.
    seed : int
        ``seed=`` of the call.
    like : array, optional
        Pass a CuPy array to get a CuPy array, with the same bits.

    Returns
    -------
    bool array, shape
        True where a score is kept.

    Raises
    ------
    TypeError, ValueError
        If the shape has fewer than two axes or does not fit into memory, if p is outside [0, 1], or
        if the seed is not an int of 64 bits.
    RuntimeError
        While a CUDA graph is captured.

    Notes
    -----
    Philox4x32-7; the layout of its counter is described in ``cuflash/_problem/philox.py``.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.dropout_mask((2, 4), 0.5, seed=1)
    array([[ True,  True, False, False],
           [ True, False,  True, False]])
    """
    if not isinstance(shape, tuple | list) or len(shape) < 2:
        raise wrong_value("shape", shown(shape), "a tuple batch + (m, n)")
    expected = "extents >= 0"
    if not all(map(checks.is_integer, shape)):
        raise wrong_type("shape", shown(shape), expected)
    extents = tuple(checks.integer_value("shape", extent, expected) for extent in shape)
    if min(extents) < 0:
        raise wrong_value("shape", shown(shape), expected)
    xp = np if like is None else same_module(like=native("like", like))
    refuse_captured(xp, "dropout_mask")
    p, seed = checks.probability("p", p), checks.seed("seed", seed)
    with on_device_of(like):
        try:
            mask = xp.empty(extents, bool)
        except (MemoryError, OverflowError, ValueError) as error:
            expected = f"a shape that fits into memory ({error})"
            raise wrong_value("shape", shown(shape), expected) from None
        if not mask.size:
            return mask
        entries = mask.reshape(-1, *extents[-2:])
        rows, cols = (slice(0, extent) for extent in extents[-2:])
        step = max(1, _MASK_ELEMENTS // entries[0].size)  # temporaries are several times as large
        for first in range(0, len(entries), step):
            part = entries[first : first + step]
            numbers = xp.arange(first, first + len(part))
            part[...] = philox.kept(numbers, rows, cols, p, seed, xp)
        return mask


def _no_values(k: Any, axes: Any) -> tuple[Any, Array]:
    """Axes and values of width 0 for a call without values."""
    k = native("k", k)
    pairs = axes_without_values(axes)
    width = [slice(None)] * k.ndim
    if k.ndim:
        width[pairs[1][1] if -k.ndim <= pairs[1][1] < k.ndim else -1] = slice(0)
    return pairs, k[tuple(width)]


def _no_result(
    q: Any, k: Any, v: Array, *, options: Options, axes: Any, precision: Any, **_: Any
) -> Array:
    """The result of a call without values: an array with the right shape and no elements."""
    problem = describe(*operands(q, k, v)[2], options, axes=axes, precision=precision)
    return array_module(v).empty(problem.out_shape, problem.dtype)


def _selection(name: str, chosen: Any, extent: int, xp: ModuleType) -> Any:
    if chosen is None:
        return slice(None)
    expected = "None, a slice or a 1-D array of integers"
    try:
        if isinstance(chosen, slice):
            chosen.indices(extent)
            return chosen
        array = chosen if is_cupy(chosen) else np.asarray(chosen)
    except Exception as error:  # a ragged list, a step of 0, any error of a caller's object
        kind = ValueError if isinstance(error, ValueError) else TypeError
        got = f"{shown(chosen)} ({error})"
        raise problem_with(name, kind, got=got, expected=expected) from error
    if array.shape == (0,):  # NumPy makes floats of an empty list
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise wrong_type(name, shown(chosen), expected)
    if isinstance(array, np.ndarray) and array.size:  # CuPy wraps indices out of bounds
        low, high = int(array.min()), int(array.max())
        if low < -extent or high >= extent:
            expected = f"indices from {-extent} to {extent - 1}"
            raise wrong_value(name, f"indices from {low} to {high}", expected)
    return xp.asarray(array)
