"""Which functions compute attention, its gradient and its pullback?"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV, CallKeywords, Keywords, VjpKeywords
from cuflash._api.dispatch import launch, run_backward, run_forward
from cuflash._arrays import Array, NativeT, Triple, on_device_of
from cuflash._host.kept import Kept
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
@arguments.explain_missing_arguments
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
        Queries: float16, bfloat16, float32, float64 or 8-bit floats (see :func:`quantize`), with
        any strides. NumPy or CuPy arrays, or tensors of other libraries, which are read through
        DLPack without a copy.
    k : array, batch + (n, d)
        Keys.
    v : array, batch + (n, d_v)
        Values. The leading axes of q, k and v broadcast as in :func:`numpy.matmul`. The last of
        them is the heads axis, for options that depend on heads. Dtypes promote as in NumPy.
    options : Options, optional
        Score options. Pass them here or as keywords (``causal=True``), but not both.
    axes : four pairs, optional
        (sequence, feature) axes of q, k, v and the result, as in NumPy's generalised ufuncs.
        ``[(-3, -1)] * 4`` is for arrays (batch, seqlen, heads, head_dim), which are not copied.
    precision : {None, "ieee", "tf32"}
        ``"tf32"`` allows TF32 products of float32 arrays, which keep 11 bits of each factor. Scores
        far from 0, such as 60000, are then wrong. The CPU path ignores this option.
    deterministic : bool
        Give the same bits in every run on one device. The forward does so in any case.
    return_lse : bool
        Return :class:`AttentionResult` instead of the output alone.
    out : array, or (out, lse) with ``return_lse``, optional
        Array to write the result into. It has exactly the result's shape, and any strides with
        which no elements overlap. It has the result's dtype; 16-bit inputs also allow float32, and
        8-bit inputs allow float16, bfloat16 and float32.
    workspace : uint8 array, optional
        Scratch memory of at least :func:`workspace_size` bytes. A call that a CUDA graph captures
        needs ``workspace``, ``out``, and inputs of one dtype. It raises RuntimeError without them.
    config : configuration of a forward kernel, optional
        Kernel and tile to use instead of the library's choice; CuPy arrays only.
    **score_options
        Parameters of :class:`Options`.

    Returns
    -------
    out : array, batch + (m, d_v)
        In the dtype to which q, k and v promote; bfloat16 if all have 8 bits and ``out`` is not
        given. Rows of queries that see no key are 0, and so are rows beyond ``q_lengths``.
    lse : array, batch + (m,)
        Only with ``return_lse``: natural logarithm of each row's sum of exp(score); float32, or
        float64 for float64 inputs. If a query sees no key, lse is its sink, or -inf without a sink.
        In rows beyond ``q_lengths`` lse is -inf.

    Raises
    ------
    TypeError, ValueError
        If an argument has a wrong type or value. The message names the argument, what was passed
        and what was expected. Nothing has been launched or written.
    NotImplementedError
        On a GPU, for a head size above 256, or for a gradient that is summed over more than six
        separate batch axes.

    Notes
    -----
    Causal masks align bottom-right: query ``m`` sees key ``n`` iff ``n <= m + N - M``. With 3
    queries and 5 keys::

        x x x . .
        x x x x .
        x x x x x

    ``causal="top_left"`` aligns at the first key instead. The algorithm is FlashAttention-2
    (Dao 2023, algorithm 1).

    Replays of a captured CUDA graph must not overlap in time: all of them write to one ``out``, and
    may take tiles from one counter. The same holds for two clones or instances of a graph.

    Scores and lse are float32 (float64 for float64 inputs). If all scores of a row are near -1e9,
    lse has no digits left for the logarithm of the number of keys. Scores beyond 2e38 (1.2e308)
    overflow: their row becomes NaN, or its query sees no key.

    A NaN or an infinity in a key or a value makes exactly the rows that see it NaN or infinite.
    Which of the two is not specified. Means of values near the largest finite number are finite.
    Gradients are finite if the products ``dout . v`` are.

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
    return _of_any_dtype(q, k, v, chosen, given, plain=plain)


def _of_any_dtype(q: Array, k: Array, v: Array, *call: Any, **how: Any) -> Any:
    """``_attention``, also of 8-bit arrays."""
    with on_device_of(q):
        if float8.among(call[0], q, k, v):
            return float8.forward(_attention, q, k, v, *call, for_gradient="memory" in how)
        return _attention(q, k, v, *call, **how)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    chosen: Options,
    keywords: Keywords,
    *,
    plain: bool = False,
    memory: Kept | None = None,
) -> Any:
    """Check and run one call. A ``plain`` call is remembered, so that its repetition is cheap."""
    axes, precision, deterministic, return_lse, out, workspace, config = keywords
    xp, given, qkv = arguments.operands(q, k, v)
    arguments.check_common(qkv[0], deterministic, workspace, config)
    config = override.of_forward(config)
    pair = arguments.result_pair(out, return_lse)
    problem = describe(*qkv, chosen, axes=axes, precision=precision, out=pair[0])
    inputs = given | arrays_read(chosen)
    with_lse = return_lse or xp is np
    out, lse = arguments.results(xp, pair, problem, inputs, with_lse=with_lse)
    plan = run_forward(
        problem, qkv, chosen, out, lse, memory=memory, workspace=workspace, config=config
    )
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
@arguments.explain_missing_arguments
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

    This is the gradient of ``sum(dout * out) + sum(dlse * lse)``. Pass the same options as to the
    forward, best as one :class:`Options` for both, or use :func:`attention_vjp`. On Hopper the
    workspace may hold dq in float32: see :func:`workspace_size`.

    Parameters
    ----------
    dout : array, batch + (m, d_v)
        Cotangent of ``out``, with any strides. The kernels read it in the dtype of the inputs. Rows
        of queries that see no key are not read. Rows beyond ``q_lengths`` are not read in any
        array.
    q, k, v : array
        As given to :func:`attention`.
    out : array, batch + (m, d_v)
        Result of :func:`attention`.
    lse : array, batch + (m,)
        The lse that :func:`attention` returned with ``out``. If q, k and v are float8_e4m3fn, their
        scales have to be powers of two; for others use :func:`attention_vjp`.
    dlse : array, batch + (m,), optional
        Cotangent of ``lse``.
    wrt : tuple of {"q", "k", "v", "bias", "alibi_slopes", "sink", "scale"}
        The inputs whose gradients are computed.
    grads_out : Gradients, optional
        Arrays to write the gradients into, with exactly the shapes and dtypes of the inputs. Fields
        that ``wrt`` does not name are not written.
    deterministic : bool
        Give the same bits in every run on one device. ``False`` is faster on some devices: dq of
        16-bit arrays may then differ between runs by two units in the last place of the largest
        element of dq.
    config : configuration of one kernel, or cuflash.tuning.BackwardConfigs, optional
        Kernels and tiles to use instead of the library's choice; CuPy arrays only. With the
        configuration of one kernel, as a sweep finds it, the library still chooses the kernels of
        the other gradients.
    options, axes, precision, workspace, **score_options
        As in :func:`attention`.

    Returns
    -------
    Gradients
        Each has exactly the shape and dtype of its input: it is summed over broadcast axes, and
        over the query heads that share a key/value head. The gradient of an 8-bit input is with
        respect to the dequantised array (elements times their scale), in the dtype of ``out``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Notes
    -----
    A CUDA graph can capture only the gradients of q, k and v, with ``grads_out`` and ``workspace``.
    The other gradients allocate memory for their sums.

    Formulas: FlashAttention (Dao et al. 2022), appendix B, with ``delta = rowsum(dout * out) -
    dlse``. Probabilities are recomputed as ``exp(score - lse)``. If all scores of a row are far
    from 0, as with a bias of -1e9 on the whole row, lse has no digits left for the logarithm of
    the number of keys, and neither has the gradient. ``-inf``, or a mask, hides a row exactly.
    If values have a large common part, delta loses the digits that dq and dk need: subtract that
    part from v. This shifts out by the same part and leaves the gradients unchanged.
    If a row sees one key, its exact gradients of q and k are 0. The computed ones are a rounding
    error of ``dout * v``, because ``delta`` is summed in another order than ``dout @ v.T``.

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
    given = Keywords(axes, precision, deterministic, True, None, workspace, config)
    return _gradient((dout, out, lse, dlse), (q, k, v), wrt, grads_out, chosen, given, plain=plain)


def _gradient(
    saved: tuple[Array, Array, Array, Array | None],
    qkv: Triple,
    wrt: tuple[str, ...],
    grads_out: Gradients | None,
    chosen: Options,
    keywords: Keywords,
    *,
    plain: bool = False,
    memory: Kept | None = None,
) -> Gradients:
    """Check and run one call; ``plain`` as for ``_attention``."""
    axes, precision, deterministic, _, _, workspace, config = keywords
    (dout, out, lse, dlse), (q, k, v) = saved, qkv
    with on_device_of(dout):
        if float8.among(chosen, q, k, v, dout):
            dout, q, k, v, chosen = float8.of_gradient(dout, q, k, v, out, chosen, axes)
        wanted = gradient_names(wrt, chosen)
        xp, given, qkv = arguments.operands(q, k, v)
        arguments.check_common(qkv[0], deterministic, workspace, config)
        config = override.of_backward(config)
        problem = describe(*qkv, chosen, axes=axes, precision=precision)
        arrays = arguments.saved_arrays("attention", problem, given["q"], dout, out, lse, dlse)
        read = given | arrays_read(chosen) | arrays._asdict()
        gradients = arguments.gradient_buffers(xp, wanted, grads_out, read)
        plan = run_backward(
            problem, qkv, chosen, arrays, gradients, memory=memory,
            workspace=workspace, config=config, deterministic=bool(deterministic),
        )  # fmt: skip
        unpromoted = all(a is b for a, b in zip(given.values(), qkv, strict=True))
        if plain and plan is not None and unpromoted and may_be_known(chosen):
            repeat = launch().repeated_backward(plan, problem, qkv, chosen, arrays)
            if repeat is not None:
                remember(repeat, chosen, deterministic, qkv, arrays[:3])
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
@arguments.explain_missing_arguments
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
    """Compute attention and its pullback, a function that returns gradients for the same options.

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
        the arrays of the call and of ``result`` again: do not overwrite them before that. For NumPy
        arrays it also keeps up to 32 MiB of probabilities, unless the call has a softcap, dropout
        or a ``score_mod``. If ``wrt`` names only q, k and v, gradients are then rounded differently
        than those of :func:`attention_backward`, which computes probabilities again.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

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
    given = Keywords(axes, precision, deterministic, True, None, None, None)
    plain = axes is precision is None and deterministic is True
    memory = Kept()
    result = recall(chosen, True, (q, k, v)) if plain else None
    if result is None:
        result = _of_any_dtype(q, k, v, chosen, given, plain=plain, memory=memory)

    def pullback(
        dout: Array, /, *, dlse: Array | None = None, wrt: tuple[str, ...] = QKV
    ) -> Gradients:
        out, lse = result
        if memory.tiles:
            saved = dout, out, lse, dlse
            return _gradient(saved, (q, k, v), wrt, None, chosen, given, memory=memory)
        return attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, options=chosen, axes=axes,
            precision=precision, deterministic=deterministic,
        )  # fmt: skip

    return (result if return_lse else result.out), pullback


def _is_qkv(wrt: Any) -> bool:
    """Whether ``wrt`` is the tuple ("q", "k", "v"); elements that are arrays are not compared."""
    return type(wrt) is tuple and [*map(type, wrt)] == [str] * 3 and wrt == QKV
