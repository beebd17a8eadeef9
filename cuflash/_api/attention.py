"""What can a user call? Attention, its gradient, its pullback."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV, CallKeywords, Keywords, VjpKeywords
from cuflash._api.dispatch import launch, run_backward, run_forward
from cuflash._arrays import Array, NativeT, on_device_of
from cuflash._launch.plan_cache import may_be_known, recall, remember
from cuflash._problem.checks import flag
from cuflash._problem.options import (
    Options,
    ScoreOptions,
    arrays_read,
    gradient_names,
    resolve,
)
from cuflash._problem.problem import describe
from cuflash._results import AttentionResult, Gradients, Pullback
from cuflash._select import override


@overload
def attention(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    return_lse: Literal[False] = ..., out: Array | None = ..., **others: Unpack[CallKeywords],
) -> NativeT: ...  # fmt: skip
@overload
def attention(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    return_lse: Literal[True], out: tuple[Array, Array] | None = ...,
    **others: Unpack[CallKeywords],
) -> AttentionResult[NativeT]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Array, v: Array, /, *,
    return_lse: bool = ..., out: Any = ..., **others: Unpack[CallKeywords],
) -> Any: ...  # fmt: skip
@arguments.answering
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
        Queries; float16, bfloat16, float32 or float64, or 8-bit floats: see :func:`quantize`. Any
        strides. NumPy or CuPy arrays, or tensors that DLPack hands out, which are not copied.
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
        ``"tf32"`` permits TF32 products for float32, which keep 11 bits of each factor: scores far
        from 0, such as 60000, are then wrong. The CPU path ignores the permission.
    deterministic : bool
        Same bits every run on one device. The forward always has them.
    return_lse : bool
        Return :class:`AttentionResult` instead of the output alone.
    out : array, or (out, lse) with ``return_lse``, optional
        Where to write: the exact shape, in the result's dtype, or float32 for 16-bit inputs, or any
        of float16, bfloat16 and float32 for 8-bit inputs; any strides without overlap.
    workspace : uint8 array, optional
        Scratch memory of at least :func:`workspace_size` bytes. A call that a CUDA graph captures
        needs it, ``out``, and arrays of one dtype: otherwise a RuntimeError says so.
    config : configuration of a forward kernel, optional
        Replaces the choice of a kernel and its tile; CuPy arrays only.
    **score_options
        Parameters of :class:`Options`.

    Returns
    -------
    out : array, batch + (m, d_v)
        In the dtype of the inputs; bfloat16 where all have 8 bits and ``out`` says nothing else. A
        query that sees no key gives 0, and so do rows beyond ``q_lengths``.
    lse : array, batch + (m,)
        Only with ``return_lse``: natural logarithm of the sum of exp of the scores, float32
        (float64 for float64). For a query that sees no key -inf, or the sink; -inf in rows beyond
        ``q_lengths``, which are no queries.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind or value; the message names it, what came and what was
        expected. Nothing has been launched or written.
    NotImplementedError
        On a GPU: head sizes above 256, or a gradient that is summed over more than six separate
        batch axes.

    Notes
    -----
    Causal masks align bottom-right: query ``m`` sees key ``n`` iff ``n <= m + N - M``. With 3
    queries and 5 keys::

        x x x . .
        x x x x .
        x x x x x

    ``causal="top_left"`` aligns at the first key instead. The algorithm is FlashAttention-2
    (Dao 2023, algorithm 1).

    Replays of a captured CUDA graph must follow each other: they write to one ``out``, and may draw
    tiles from one counter. Do not replay two clones or instances of a graph at the same time.

    Scores and lse are float32 (float64 for float64): where all scores of a row lie near -1e9, lse
    has no digits left for the logarithm of the number of keys. Scores beyond 2e38 (1.2e308)
    overflow: such a row is NaN or sees nothing.

    A NaN or an infinity in a key or a value makes exactly the rows that see it NaN or infinite; it
    is not specified which. Means of values near the largest number are finite; gradients are finite
    where the products ``dout . v`` are.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 128, 64), dtype=np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (2, 8, 128, 64)
    """
    chosen = resolve(options, score_options)
    return_lse = flag("return_lse", return_lse)
    plain = out is axes is precision is workspace is config is None and deterministic is True
    if plain and (known := recall(chosen, return_lse, (q, k, v))) is not None:
        return known
    given = Keywords(axes, precision, deterministic, return_lse, out, workspace, config)
    with on_device_of(q):
        if float8.among(chosen, q, k, v):
            return float8.forward(_attention, q, k, v, chosen, given)
        return _attention(q, k, v, chosen, given, plain=plain)


def _attention(
    q: Array, k: Array, v: Array, chosen: Options, keywords: Keywords, *, plain: bool = False
) -> Any:
    """Check and run one call; a ``plain`` one is known from then on."""
    axes, precision, deterministic, return_lse, out, workspace, config = keywords
    xp, given, qkv = arguments.operands(q, k, v)
    arguments.check_common(qkv[0], deterministic, workspace, config)
    config = override.of_forward(config)
    pair = arguments.result_pair(out, return_lse)
    problem = describe(*qkv, chosen, axes=axes, precision=precision, out=pair[0])
    inputs = given | arrays_read(chosen)
    with_lse = return_lse or xp is np
    out, lse = arguments.results(xp, pair, problem, inputs, with_lse=with_lse)
    plan = run_forward(problem, qkv, chosen, out, lse, workspace=workspace, config=config)
    if plain and plan is not None and may_be_known(chosen):
        repeat = launch().repeated_forward(plan, problem, qkv[0], chosen, lse)
        remember(repeat, chosen, return_lse, qkv)
    return AttentionResult(out, lse) if return_lse else out


@overload
def attention_backward(
    dout: Array, q: NativeT, k: NativeT, v: NativeT, out: Array, lse: Array, /, *,
    dlse: Array | None = ..., grads_out: Gradients | None = ..., **others: Unpack[CallKeywords],
) -> Gradients[NativeT, None]: ...  # fmt: skip
@overload
def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, /, *,
    dlse: Array | None = ..., wrt: tuple[str, ...] = ..., grads_out: Gradients | None = ...,
    **others: Unpack[CallKeywords],
) -> Gradients: ...  # fmt: skip
@arguments.answering
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
    wrt: tuple[str, ...] = QKV,
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

    On Hopper the workspace may hold dq in float32: see :func:`workspace_size`.

    The gradient of ``sum(dout * out) + sum(dlse * lse)``. Pass the same options as forward:
    best one :class:`Options` for both, or use :func:`attention_vjp`.

    Parameters
    ----------
    dout : array, batch + (m, d_v)
        Cotangent of ``out``; any strides. The kernels read it in the dtype of the inputs. Rows of
        queries that see no key are not read. Rows beyond ``q_lengths`` are not read, in any array.
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
        Arrays to write into, with exactly the shape and dtype of the inputs. Fields that ``wrt``
        does not name are left alone.
    deterministic : bool
        Same bits every run on one device. ``False`` is faster on some devices: dq of 16-bit arrays
        may then differ between runs by two units in the last place of its largest element.
    config : configuration of one kernel, or cuflash.tuning.BackwardConfigs, optional
        Replaces the choice of kernels and their tiles; CuPy arrays only. The configuration of one
        kernel, as a sweep finds it, leaves the choice for the other gradients.
    options, axes, precision, workspace, **score_options
        As in :func:`attention`.

    Returns
    -------
    Gradients
        Each with exactly the shape and dtype of its input: summed over broadcast axes and over
        the query heads that share a key/value head. Of an 8-bit input it is with respect to the
        dequantised array (elements times their scale), in the dtype of ``out``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Notes
    -----
    A CUDA graph captures the gradients of q, k and v only, into ``grads_out`` and with a
    ``workspace``: the other gradients allocate memory for their sums.

    Formulas: FlashAttention (Dao et al. 2022), appendix B, with ``delta = rowsum(dout * out) -
    dlse``. Probabilities are recomputed as ``exp(score - lse)``: where all scores of a row lie far
    from 0, as under a bias of -1e9 on the whole row, lse has no digits left for the logarithm of
    the number of keys, and neither has the gradient. ``-inf``, or a mask, hides a row exactly.
    Values with a large common part cost delta the digits that dq and dk need: subtract that part
    from v, which shifts out by it and leaves the gradients unchanged.
    Where a row sees one key, the gradients of q and k are 0, and the result is a rounding error of
    ``dout * v``: ``delta`` is summed in another order than ``dout @ v.T``.

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
    plain = dlse is grads_out is axes is precision is workspace is config is None
    plain = plain and isinstance(deterministic, bool) and (wrt is QKV or _is_qkv(wrt))
    if plain:
        known: Gradients | None = recall(chosen, deterministic, (q, k, v), (dout, out, lse))
        if known is not None:
            return known
    with on_device_of(dout):
        if float8.among(chosen, q, k, v, dout):
            dout, q, k, v, chosen = float8.of_gradient(dout, q, k, v, out, chosen, axes)
        wanted = gradient_names(wrt, chosen)
        xp, given, qkv = arguments.operands(q, k, v)
        arguments.check_common(qkv[0], deterministic, workspace, config)
        config = override.of_backward(config)
        problem = describe(*qkv, chosen, axes=axes, precision=precision)
        saved = arguments.saved_arrays("attention", problem, given["q"], dout, out, lse, dlse)
        read = given | arrays_read(chosen) | saved._asdict()
        gradients = arguments.gradient_buffers(xp, wanted, grads_out, read)
        plan = run_backward(
            problem, qkv, chosen, saved, gradients,
            workspace=workspace, config=config, deterministic=bool(deterministic),
        )  # fmt: skip
        unpromoted = all(a is b for a, b in zip(given.values(), qkv, strict=True))
        if plain and plan is not None and unpromoted and may_be_known(chosen):
            repeat = launch().repeated_backward(plan, problem, qkv, chosen, saved)
            if repeat is not None:
                remember(repeat, chosen, deterministic, qkv, saved[:3])
        return arguments.by_field(gradients, wrt)


@overload
def attention_vjp(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    return_lse: Literal[False] = ..., **others: Unpack[VjpKeywords],
) -> tuple[NativeT, Pullback[NativeT]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    return_lse: Literal[True], **others: Unpack[VjpKeywords],
) -> tuple[AttentionResult[NativeT], Pullback[NativeT]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: Array, k: Array, v: Array, /, *,
    return_lse: bool = ..., **others: Unpack[VjpKeywords],
) -> tuple[Any, Pullback]: ...  # fmt: skip
@arguments.answering
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
) -> tuple[Any, Pullback]:
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
        ``pullback(dout, *, dlse=None, wrt=("q", "k", "v"))`` returns :class:`Gradients`. It reads
        the arrays of the call and of ``result``: they must not have been overwritten.

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
    return_lse = flag("return_lse", return_lse)
    common: dict[str, Any] = {"options": chosen, "axes": axes, "precision": precision}
    common["deterministic"] = deterministic
    result = attention(q, k, v, return_lse=True, **common)

    def pullback(
        dout: Array, /, *, dlse: Array | None = None, wrt: tuple[str, ...] = QKV
    ) -> Gradients:
        return attention_backward(
            dout, q, k, v, result.out, result.lse, dlse=dlse, wrt=wrt, **common
        )

    return (result if return_lse else result.out), pullback


def _is_qkv(wrt: Any) -> bool:
    """Whether it is the tuple of q, k and v in order; elements that are arrays are not compared."""
    return type(wrt) is tuple and [*map(type, wrt)] == [str] * 3 and wrt == QKV
