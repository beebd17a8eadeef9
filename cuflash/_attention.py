"""What can a user call? The public functions, thin over problem, host path and launch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, Unpack, overload

import numpy as np

from cuflash import _host, _philox
from cuflash._arrays import Array, array_module, is_cupy, native, same_module
from cuflash._errors import not_yet, problem_with
from cuflash._options import Options, ScoreOptions, probability, resolve, seed_value
from cuflash._problem import (
    HALVES,
    Problem,
    axes_without_values,
    canonical_view,
    check_destination,
    common_dtype,
    describe,
    require_float,
    require_shape,
)
from cuflash._results import AttentionResult, Gradients
from cuflash._scores import Scores, Tile, arithmetic

_WRT = ("q", "k", "v")
#: Score options that the kernels do not know yet.
LATER_ON_A_GPU = ("alibi_slopes", "segment_ids", "sink", "dropout", "seed")
#: Field of Gradients for each input that has a gradient.
_FIELDS = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "bias": "dbias",
    "alibi_slopes": "dslopes",
    "sink": "dsink",
    "scale": "dscale",
}


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = ...,
    axes: Any = ...,
    precision: str | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    out: Array | None = ...,
    workspace: Array | None = ...,
    config: Any = ...,
    **score_options: Unpack[ScoreOptions],
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = ...,
    axes: Any = ...,
    precision: str | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    out: tuple[Array, Array] | None = ...,
    workspace: Array | None = ...,
    config: Any = ...,
    **score_options: Unpack[ScoreOptions],
) -> AttentionResult: ...
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    out: Any = None,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Array | AttentionResult:
    """Compute exact attention, ``softmax(scale * q k^T) v``, in O(M + N) memory.

    Parameters
    ----------
    q : array, batch + (m, d)
        Queries; float16, bfloat16, float32 or float64. Any strides.
    k : array, batch + (n, d)
        Keys.
    v : array, batch + (n, d_v)
        Values. Leading axes of q, k and v broadcast as in :func:`numpy.matmul`; the last of them
        is heads where heads matter. Dtypes promote as in NumPy and decide the result's.
    options : Options, optional
        Score options; or give them as keywords (``causal=True``), not both.
    axes : four pairs, optional
        (sequence, feature) axes of q, k, v and the result, as in NumPy's generalised ufuncs;
        ``[(-3, -1)] * 4`` serves (batch, seqlen, heads, head_dim) without a copy.
    precision : {None, "ieee", "tf32"}
        ``"tf32"`` permits TF32 products for float32; the CPU path ignores the permission.
    deterministic : bool
        Same bits every run on one device. The forward always is.
    return_lse : bool
        Return :class:`AttentionResult` instead of the output alone.
    out : array, or (out, lse) with ``return_lse``, optional
        Where to write: exact shape, the result's dtype, or float32 for 16-bit inputs; any strides
        without overlap.
    workspace : uint8 array, optional
        Scratch memory of at least :func:`workspace_size` bytes.
    config : kernel configuration, optional
        Overrides the choice of tiles; CuPy arrays only.
    **score_options
        Parameters of :class:`Options`.

    Returns
    -------
    out : array, batch + (m, d_v)
        In the dtype of the inputs. A query that sees no key gives 0.
    lse : array, batch + (m,)
        Only with ``return_lse``: natural logarithm of the sum of exp of the scores, float32
        (float64 for float64); -inf for a query that sees no key.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind or value; the message names it, what came and what was
        expected. Nothing has been launched or written.
    NotImplementedError
        For an option that a later version brings.

    Notes
    -----
    Causal masks align bottom-right: query ``m`` sees key ``n`` iff ``n <= m + N - M``. With 3
    queries and 5 keys::

        x x x . .
        x x x x .
        x x x x x

    ``causal="top_left"`` aligns at the first key instead. The algorithm is FlashAttention-2
    (Dao 2023, algorithm 1).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 128, 64), dtype=np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (2, 8, 128, 64)
    """
    chosen = resolve(options, score_options)
    xp, q, k, v = _operands(q, k, v)
    _check_common(xp, deterministic, workspace, config)
    out, lse = _result_pair(out, return_lse)
    problem = describe(q, k, v, chosen, axes=axes, precision=precision, out=out)
    if lse is not None:
        require_shape("lse", lse, problem.lse_shape, "batch + (m,)")
        if lse.dtype != problem.lse_dtype:
            raise problem_with(
                "out", TypeError, got=f"lse of dtype {lse.dtype}", expected=str(problem.lse_dtype)
            )
        check_destination("lse", lse, q=q, k=k, v=v, **chosen.arrays)
    if out is None:
        out = xp.empty(problem.out_shape, problem.dtype)
    if lse is None and (return_lse or xp is np):
        lse = xp.empty(problem.lse_shape, problem.lse_dtype)
    _run_forward(problem, q, k, v, chosen, out, lse, workspace, config)
    return AttentionResult(out, lse) if return_lse else out


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    /,
    *,
    dlse: Array | None = None,
    wrt: tuple[str, ...] = _WRT,
    grads_out: Gradients | None = None,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Gradients:
    """Gradient of :func:`attention`, recomputed from ``lse`` in O(M + N) memory.

    The gradient of ``sum(dout * out) + sum(dlse * lse)``. Pass the same options as forward:
    best one :class:`Options` for both, or use :func:`attention_vjp`.

    Parameters
    ----------
    dout : array, batch + (m, d_v)
        Cotangent of ``out``; any strides, read in the dtype of the inputs. Rows of queries that
        see no key are not read.
    q, k, v : array
        As given to :func:`attention`.
    out : array, batch + (m, d_v)
        Result of :func:`attention`.
    lse : array, batch + (m,)
        Its logarithm of sums.
    dlse : array, batch + (m,), optional
        Cotangent of ``lse``.
    wrt : tuple of {"q", "k", "v", "bias", "alibi_slopes", "sink", "scale"}
        The gradients to compute.
    grads_out : Gradients, optional
        Arrays to write into, of exactly the shape and dtype of the inputs.
    options, axes, precision, deterministic, workspace, config, **score_options
        As in :func:`attention`.

    Returns
    -------
    Gradients
        Each with exactly the shape and dtype of its input: summed over broadcast axes and over
        the query heads that share a key/value head.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Notes
    -----
    Formulas: FlashAttention (Dao et al. 2022), appendix B, with ``delta = rowsum(dout * out) -
    dlse``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 128, 64), dtype=np.float32)
    >>> options = cuflash.Options(causal=True)
    >>> out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
    >>> grads = cuflash.attention_backward(out, q, k, v, out, lse, options=options)
    >>> grads.dk.shape
    (8, 128, 64)
    """
    chosen = resolve(options, score_options)
    wanted = _wanted(wrt, chosen)
    given = {name: native(name, a) for name, a in zip(_WRT, (q, k, v), strict=True)}
    given |= {name: a for name, a in chosen.arrays.items() if name in _FIELDS}
    given["scale"] = np.zeros(())
    xp, q, k, v = _operands(q, k, v)
    dout, out, lse = native("dout", dout), native("out", out), native("lse", lse)
    dlse = None if dlse is None else native("dlse", dlse)
    same_module(q=q, dout=dout, out=out, lse=lse, dlse=dlse)
    _check_common(xp, deterministic, workspace, config)
    problem = describe(q, k, v, chosen, axes=axes, precision=precision)
    for name, array in (("dout", dout), ("out", out)):
        require_float(name, array)
        require_shape(name, array, problem.out_shape, "the result of attention")
    for name, array in (("lse", lse), ("dlse", dlse)):
        if array is not None:
            require_float(name, array)
            require_shape(name, array, problem.lse_shape, "the lse of attention")
    gradients = {}
    for name in wanted:
        buffer = None if grads_out is None else getattr(grads_out, _FIELDS[name])
        if buffer is None:
            buffer = xp.empty(given[name].shape, given[name].dtype)
        else:
            _check_gradient(name, buffer, given, dout=dout, out=out, lse=lse, **chosen.arrays)
        gradients[name] = buffer
    _run_backward(problem, dout, q, k, v, out, lse, dlse, chosen, gradients, workspace, config)
    return Gradients(**{_FIELDS[name]: array for name, array in gradients.items()})


def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    **score_options: Unpack[ScoreOptions],
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention together with its pullback, which cannot be called with other options.

    Parameters
    ----------
    q, k, v, options, axes, precision, deterministic, return_lse, **score_options
        As in :func:`attention`.

    Returns
    -------
    result : array or AttentionResult
        What :func:`attention` returns.
    pullback : callable
        ``pullback(dout, *, dlse=None, wrt=("q", "k", "v"))`` returns :class:`Gradients`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.ones((8, 16, 4)), np.ones((16, 4)), np.ones((16, 4))
    >>> out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
    >>> pullback(np.ones_like(out)).dv.shape
    (16, 4)
    """
    chosen = resolve(options, score_options)
    common: dict[str, Any] = {"options": chosen, "axes": axes, "precision": precision}
    common["deterministic"] = deterministic
    result = attention(q, k, v, return_lse=True, **common)

    def pullback(
        dout: Array, /, *, dlse: Array | None = None, wrt: tuple[str, ...] = _WRT
    ) -> Gradients:
        return attention_backward(
            dout, q, k, v, result.out, result.lse, dlse=dlse, wrt=wrt, **common
        )

    return (result if return_lse else result.out), pullback


def logsumexp(
    q: Array,
    k: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    **score_options: Unpack[ScoreOptions],
) -> Array:
    """Logarithm of each row's sum of exponentials: attention without values.

    Parameters
    ----------
    q, k, options, axes, precision, deterministic, **score_options
        As in :func:`attention`; of ``axes`` the first two pairs are used.

    Returns
    -------
    array, batch + (m,)
        float32 (float64 for float64); -inf for a query that sees no key.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((3, 2))
    >>> np.exp(cuflash.logsumexp(x, x)).round(6)
    array([3., 3., 3.])
    """
    axes, v = _no_values(k, axes)
    common: dict[str, Any] = {"axes": axes, "precision": precision, "deterministic": deterministic}
    chosen = resolve(options, score_options)
    return attention(q, k, v, options=chosen, return_lse=True, **common).lse


def logsumexp_backward(
    dlse: Array,
    q: Array,
    k: Array,
    lse: Array,
    /,
    *,
    wrt: tuple[str, ...] = ("q", "k"),
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
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
        Its result.
    wrt : tuple of {"q", "k", "bias", "alibi_slopes", "sink", "scale"}
        The gradients to compute.
    options, axes, precision, deterministic, **score_options
        As in :func:`logsumexp`.

    Returns
    -------
    Gradients
        Each with exactly the shape and dtype of its input.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((3, 2))
    >>> lse = cuflash.logsumexp(x, x)
    >>> cuflash.logsumexp_backward(np.ones(3), x, x, lse).dq.shape
    (3, 2)
    """
    if "v" in wrt:
        raise problem_with(
            "wrt", ValueError, got=repr(wrt), expected="inputs of the call; v is not one"
        )
    chosen = resolve(options, score_options)
    axes, v = _no_values(k, axes)
    problem = describe(*_operands(q, k, v)[1:], chosen, axes=axes, precision=precision)
    nothing = array_module(v).empty(problem.out_shape, problem.dtype)
    common: dict[str, Any] = {"axes": axes, "precision": precision, "deterministic": deterministic}
    return attention_backward(
        nothing, q, k, v, nothing, lse, dlse=dlse, wrt=wrt, options=chosen, **common
    )


def merge(outs: Any, lses: Any, axis: int = 0) -> AttentionResult:
    """Combine attention over disjoint sets of keys into attention over all of them.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) * out_i``.

    Parameters
    ----------
    outs : array, or sequence of arrays batch + (m, d_v)
        Partial results; for one array, parts lie along ``axis``.
    lses : array, or sequence of arrays batch + (m,)
        Their logarithms of sums; a part with -inf is neutral.
    axis : int
        Where the parts are in both arrays, counted from the front; 0 for sequences.

    Returns
    -------
    AttentionResult
        ``out`` in the dtype of ``outs``, ``lse`` in that of ``lses``.

    Raises
    ------
    TypeError, ValueError
        For parts of different libraries, shapes or dtypes, or for no parts.

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
    outs, lses = _stacked("outs", outs, axis), _stacked("lses", lses, axis)
    xp = same_module(outs=outs, lses=lses)
    for name, array in (("outs", outs), ("lses", lses)):
        require_float(name, array)
    if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < lses.ndim:
        raise problem_with(
            "axis", ValueError, got=repr(axis), expected=f"an axis from 0 to {lses.ndim - 1}"
        )
    require_shape("lses", lses, outs.shape[:-1], "outs without its last axis")
    if lses.shape[axis] == 0:
        raise problem_with("outs", ValueError, got="no parts", expected="at least one part")
    dtype = arithmetic(lses.dtype)
    with np.errstate(all="ignore"):
        parts = xp.moveaxis(lses, axis, 0).astype(dtype)
        highest = parts.max(0)
        shift = xp.where(xp.isneginf(highest), 0, highest)
        weight = xp.exp(parts - shift)
        total = weight.sum(0)
        lse = shift + xp.log(total)
        weight = (weight / xp.where(total == 0, 1, total))[..., None]
        scaled = weight * xp.moveaxis(outs, axis, 0).astype(
            xp.promote_types(dtype, arithmetic(outs.dtype))
        )
        out = xp.where(xp.isneginf(parts)[..., None], 0, scaled).sum(0)
    return AttentionResult(out.astype(outs.dtype), lse.astype(lses.dtype))


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
        Gradients with respect to ``outs`` and ``lses``, parts along ``axis``.

    Raises
    ------
    TypeError, ValueError
        As :func:`merge`, and for cotangents that are not of the merged shapes.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs, lses = np.ones((2, 5, 3)), np.zeros((2, 5))
    >>> cuflash.merge_backward(np.ones((5, 3)), outs, lses).out[0, 0]
    array([0.5, 0.5, 0.5])
    """
    whole = merge(outs, lses, axis)
    outs, lses, dout = (
        _stacked("outs", outs, axis),
        _stacked("lses", lses, axis),
        native("dout", dout),
    )
    xp = same_module(outs=outs, dout=dout, dlse=dlse)
    require_float("dout", dout)
    require_shape("dout", dout, whole.out.shape, "the merged out")
    if dlse is not None:
        require_float("dlse", dlse)
        require_shape("dlse", dlse, whole.lse.shape, "the merged lse")
    dtype = xp.promote_types(arithmetic(lses.dtype), arithmetic(outs.dtype))
    with np.errstate(all="ignore"):
        parts = xp.moveaxis(lses, axis, 0).astype(dtype)
        weight = xp.where(xp.isneginf(parts), 0, xp.exp(parts - whole.lse.astype(dtype)))
        apart = xp.moveaxis(outs, axis, 0).astype(dtype) - whole.out.astype(dtype)
        slope = (dout.astype(dtype) * apart).sum(-1) + (0 if dlse is None else dlse.astype(dtype))
        douts = xp.where(weight[..., None] == 0, 0, weight[..., None] * dout.astype(dtype))
        dlses = xp.where(weight == 0, 0, weight * slope)
    return AttentionResult(
        xp.moveaxis(douts.astype(outs.dtype), 0, axis),
        xp.moveaxis(dlses.astype(lses.dtype), 0, axis),
    )


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
    """Selected attention probabilities, ``exp(score - lse)``.

    Parameters
    ----------
    q, k : array
        As given to :func:`attention`.
    lse : array, batch + (m,)
        Logarithm of sums that :func:`attention` returned.
    rows, cols : slice or 1-D integer array, optional
        Queries and keys to select; ``None`` takes all of one side, but not of both: ask for the
        whole matrix by ``rows=slice(None)``.
    options, axes, **score_options
        As in :func:`attention`; of ``axes`` the first two pairs are used.

    Returns
    -------
    array, batch + (number of rows, number of cols)
        float32 (float64 for float64); 0 where invisible.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = np.eye(4)
    >>> lse = cuflash.attention(q, k, k, return_lse=True).lse
    >>> cuflash.weights(q, k, lse, rows=[0]).round(3)
    array([[0.355, 0.215, 0.215, 0.215]])
    """
    chosen = resolve(options, score_options)
    xp, q, k, _ = _operands(q, k, k)
    lse = native("lse", lse)
    same_module(q=q, lse=lse)
    problem = describe(q, k, k, chosen, axes=axes_without_values(axes))
    require_float("lse", lse)
    require_shape("lse", lse, problem.lse_shape, "the lse of attention")
    if rows is None and cols is None:
        raise problem_with(
            "rows", ValueError, got="neither rows nor cols", expected="a selection",
            fix="rows=slice(None) asks for the whole matrix",
        )  # fmt: skip
    m = xp.arange(problem.seqlen_q)[_selection("rows", rows, xp)]
    n = xp.arange(problem.seqlen_k)[_selection("cols", cols, xp)]
    dtype = arithmetic(problem.dtype)
    scores = Scores(problem, chosen, (), xp)
    tile = Tile(m, n, m[:, None], n[None, :])
    q_rows = canonical_view(q, problem.q)[..., m, :].astype(dtype)
    k_cols = canonical_view(k, problem.k)[..., n, :].astype(dtype)
    with np.errstate(all="ignore"):
        score, _ = scores.logits(q_rows, k_cols, tile)
        lse_rows = lse.reshape(*problem.batch, problem.seqlen_q)[..., m, None].astype(dtype)
        seen = scores.visible(tile) & ~xp.isneginf(lse_rows)
        p = xp.where(seen, xp.exp(score - lse_rows), 0)
    return p.reshape(*problem.batch_shape, m.size, n.size)


def dropout_mask(shape: tuple[int, ...], p: float, seed: int, *, like: Any = None) -> Array:
    """Scores that dropout keeps in a call of :func:`attention`.

    Parameters
    ----------
    shape : tuple of int, batch + (m, n)
        Shape of the scores, heads last in batch.
    p : float
        ``dropout=`` of the call.
    seed : int
        ``seed=`` of the call.
    like : array, optional
        A CuPy array for a CuPy result; the bits are the same.

    Returns
    -------
    bool array, shape
        True where a score is kept.

    Raises
    ------
    TypeError, ValueError
        For a shape without two axes, a probability outside [0, 1] or a seed beyond 64 bits.

    Notes
    -----
    Philox4x32-10; the layout of its counter is described in ``cuflash/_philox.py``.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.dropout_mask((2, 4), 0.5, seed=1)
    array([[False,  True, False,  True],
           [ True,  True, False,  True]])
    """
    if not isinstance(shape, tuple | list) or len(shape) < 2:
        raise problem_with("shape", ValueError, got=repr(shape), expected="a tuple batch + (m, n)")
    xp = np if like is None else same_module(like=native("like", like))
    *batch, seqlen_q, seqlen_k = (operator.index(n) for n in shape)
    entries = xp.arange(math.prod(batch)).reshape(batch)
    rows, cols = slice(0, seqlen_q), slice(0, seqlen_k)
    return _philox.kept(entries, rows, cols, probability("p", p), seed_value(seed), xp)


def workspace_size(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    backward: bool = False,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    **score_options: Unpack[ScoreOptions],
) -> int:
    """Bytes of ``workspace=`` that a call needs; 0 for NumPy arrays.

    Parameters
    ----------
    q, k, v, options, axes, precision, **score_options
        As in :func:`attention`.
    backward : bool
        For :func:`attention_backward` instead of :func:`attention`.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((8, 16, 4))
    >>> cuflash.workspace_size(q, q, q, backward=True)
    0
    """
    chosen = resolve(options, score_options)
    xp, q, k, v = _operands(q, k, v)
    problem = describe(q, k, v, chosen, axes=axes, precision=precision)
    if xp is np:
        return 0
    return int(_launch().workspace_size(problem, backward=backward))


def _operands(q: Any, k: Any, v: Any) -> tuple[ModuleType, Array, Array, Array]:
    """q, k, v as arrays of one library and one dtype."""
    q, k, v = native("q", q), native("k", k), native("v", v)
    xp = same_module(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        dtype = common_dtype({"q": q.dtype, "k": k.dtype, "v": v.dtype})
        q, k, v = (a.astype(dtype, copy=False) for a in (q, k, v))
    return xp, q, k, v


def _no_values(k: Any, axes: Any) -> tuple[Any, Array]:
    """Axes of q, k, v and out, and values of width 0, for a call without values."""
    k = native("k", k)
    pairs = axes_without_values(axes)
    width = [slice(None)] * k.ndim
    if k.ndim:
        width[pairs[1][1] if -k.ndim <= pairs[1][1] < k.ndim else -1] = slice(0)
    return pairs, k[tuple(width)]


def _check_common(xp: ModuleType, deterministic: Any, workspace: Any, config: Any) -> None:
    if not isinstance(deterministic, bool | np.bool_):
        raise problem_with(
            "deterministic", TypeError, got=repr(deterministic), expected="True or False"
        )
    if workspace is not None and getattr(workspace, "dtype", None) != np.uint8:
        got = getattr(workspace, "dtype", type(workspace).__name__)
        raise problem_with(
            "workspace", TypeError, got=got, expected="a uint8 array of workspace_size(...) bytes"
        )
    if xp is np and config is not None:
        raise problem_with(
            "config", TypeError, got=repr(config), expected="None for NumPy arrays",
            fix="it selects the tiles of a GPU kernel",
        )  # fmt: skip


def _result_pair(out: Any, return_lse: bool) -> tuple[Array | None, Array | None]:
    """The destinations of out and lse."""
    if out is None:
        return None, None
    if not return_lse:
        return native("out", out), None
    if not isinstance(out, tuple) or len(out) != 2:
        raise problem_with(
            "out", TypeError, got=type(out).__name__, expected="a pair (out, lse) with return_lse"
        )
    return native("out", out[0]), native("out", out[1])


def _wanted(wrt: Any, options: Options) -> tuple[str, ...]:
    expected = f"a tuple of {', '.join(map(repr, _FIELDS))}"
    if not isinstance(wrt, tuple | list):
        raise problem_with("wrt", TypeError, got=repr(wrt), expected=expected)
    for name in wrt:
        if name not in _FIELDS:
            raise problem_with("wrt", ValueError, got=repr(wrt), expected=expected)
        if name not in (*_WRT, "scale") and name not in options.arrays:
            raise problem_with(
                "wrt", ValueError, got=repr(wrt), expected=f"inputs of the call; {name} is not one"
            )
    return tuple(name for name in _FIELDS if name in wrt)


def _check_gradient(name: str, buffer: Array, inputs: dict[str, Array], **others: Array) -> None:
    argument, like = f"grads_out.{_FIELDS[name]}", inputs[name]
    same_module(**{name: like, argument: buffer})
    require_shape(argument, buffer, like.shape, name)
    if buffer.dtype != like.dtype:
        raise problem_with(
            argument, TypeError, got=f"dtype {buffer.dtype}", expected=f"{like.dtype} as in {name}"
        )
    check_destination(argument, buffer, **{**inputs, **others})


def _run_forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    out: Array,
    lse: Array | None,
    workspace: Array | None,
    config: Any,
) -> None:
    if 0 in (*problem.batch, problem.seqlen_q, problem.seqlen_k):
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
    elif is_cupy(q):
        _require_kernels(problem, options)
        _launch().forward(problem, q, k, v, options, out, lse, workspace=workspace, config=config)
    else:
        _host.forward(problem, q, k, v, options, out, lse)


def _run_backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    options: Options,
    gradients: dict[str, Array],
    workspace: Array | None,
    config: Any,
) -> None:
    if 0 in (*problem.batch, problem.seqlen_q, problem.seqlen_k):
        for gradient in gradients.values():
            gradient.fill(0)
        return
    path: Any = _host
    extra: dict[str, Any] = {}
    if is_cupy(q):
        _require_kernels(problem, options, tuple(gradients))
        path, extra = _launch(), {"workspace": workspace, "config": config}
    path.backward(problem, dout, q, k, v, out, lse, dlse, options, gradients, **extra)


def _require_kernels(problem: Problem, options: Options, wrt: tuple[str, ...] = _WRT) -> None:
    """Refuse what the CPU path serves and the kernels do not yet."""
    instead = "cupy.asnumpy moves the arrays to the CPU path, which serves it"
    if problem.dtype not in HALVES:
        raise not_yet(f"q: {problem.dtype} on a GPU", "the float32 and float64 kernels", instead)
    missing = [name for name in LATER_ON_A_GPU if getattr(options, name) not in (None, 0.0)]
    missing += [f"wrt={name!r}" for name in wrt if name not in _WRT]
    if missing:
        raise not_yet(f"{missing[0]} on a GPU", "the kernels of every score option", instead)


def _launch() -> Any:
    from cuflash import _launch

    return _launch


def _stacked(name: str, parts: Any, axis: int) -> Array:
    if not isinstance(parts, list | tuple):
        return native(name, parts)
    if axis != 0:
        raise problem_with("axis", ValueError, got=repr(axis), expected="0 for a sequence of parts")
    if not parts:
        raise problem_with(name, ValueError, got="no parts", expected="at least one part")
    arrays = [native(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    xp = same_module(**{f"{name}[{i}]": array for i, array in enumerate(arrays)})
    for i, array in enumerate(arrays):
        require_shape(f"{name}[{i}]", array, arrays[0].shape, f"{name}[0]")
        if array.dtype != arrays[0].dtype:
            raise problem_with(
                f"{name}[{i}]", TypeError, got=f"dtype {array.dtype}", expected=arrays[0].dtype
            )
    return xp.stack(arrays)


def _selection(name: str, chosen: Any, xp: ModuleType) -> Any:
    if chosen is None:
        return slice(None)
    if isinstance(chosen, slice):
        return chosen
    array = chosen if hasattr(chosen, "strides") else np.asarray(chosen)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise problem_with(
            name, TypeError, got=repr(chosen), expected="None, a slice or 1-D integers"
        )
    return xp.asarray(array)
