"""Public functions: attention over a sequence split among ranks, its gradient, its pullback."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from cuflash._api import arguments
from cuflash._api.arguments import QKV
from cuflash._arrays import Array, NativeT, array_module
from cuflash._launch.one_pass import in_dtype
from cuflash._problem.checks import flag
from cuflash._problem.options import ScoreOptions
from cuflash._results import AttentionResult, Gradients, Pullback
from cuflash.distributed._communicator import Communicator
from cuflash.distributed._run import Asked, Call, run


class RankKeywords(ScoreOptions, total=False):
    """Keywords of all functions that do not change the type of the result, for overloads."""

    layout: str
    method: str
    options: Any
    axes: Any
    precision: str | None
    deterministic: bool


@overload
def attention(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    comm: Communicator, return_lse: Literal[False] = ..., **others: Unpack[RankKeywords],
) -> NativeT: ...  # fmt: skip
@overload
def attention(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    comm: Communicator, return_lse: Literal[True], **others: Unpack[RankKeywords],
) -> AttentionResult[NativeT]: ...  # fmt: skip
@overload
def attention(
    q: Any, k: Any, v: Any, /, *,
    comm: Communicator, return_lse: bool = ..., **others: Unpack[RankKeywords],
) -> Any: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    comm: Communicator,
    layout: str = "zigzag",
    method: str = "auto",
    options: Any = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Attention over a sequence of which each rank holds the rows that :func:`shard` returns.

    Parameters
    ----------
    q : array, batch + (m, d)
        The rank's queries, as in :func:`cuflash.attention`.
    k, v : array, batch + (n, d) and batch + (n, d_v)
        The rank's keys and values.
    comm : communicator
        From :func:`connect`, :func:`from_environment`, :func:`from_mpi`, :func:`from_devices` or
        :func:`simulated`. If it runs several ranks in one process, each array argument and each
        result is a list with one array for each rank. ``options`` may then be a list, too.
    layout : {"zigzag", "contiguous"}
        Which rows a rank holds.
    method : {"auto", "all_gather", "ring", "ulysses", "usp"}
        How keys and queries are exchanged; :func:`explain` tells which method ``"auto"`` chooses.
    options, axes, precision, deterministic, return_lse, **score_options
        As in :func:`cuflash.attention`, for the whole call: lengths, offset, dropout and formulas
        use positions in the whole sequence. ``bias`` and ``mask`` have the rank's own rows and all
        keys in order. ``segment_ids`` has the ids of the rank's own rows and of all keys.

    Returns
    -------
    out : array, batch + (m, d_v)
        The output of the rank's rows.
    lse : array, batch + (m,)
        Only with ``return_lse``, which makes the result a :class:`cuflash.AttentionResult`.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument on this rank, or if ranks make different calls.
    NotImplementedError
        For a method that does not support the call; the message names one that does. Some methods
        do not support dropout on GPUs if ranks have fewer than 32 rows. Also for 8-bit arrays.
    CommunicationError
        If a rank is dead or stuck, has refused the call, or has raised an error during it.
    RuntimeError
        If another thread is in a call of the same communicator, or in a captured stream.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import distributed
    >>> x = np.random.default_rng(0).standard_normal((4, 64, 8))
    >>> comm = distributed.simulated(2)
    >>> parts = distributed.shard(x, comm=comm)
    >>> out = distributed.attention(parts, parts, parts, comm=comm, causal=True)
    >>> whole = distributed.unshard(out, comm=comm)[0]
    >>> np.allclose(whole, cuflash.attention(x, x, x, causal=True))
    True
    """

    def ask() -> Asked:
        flag("return_lse", return_lse)
        return Asked.of("attention", layout, method, axes, precision, deterministic)

    def finished(call: Call, found: tuple[Array, Array]) -> Any:
        out = array_module(found[0]).moveaxis(found[0], (-2, -1), call.asked.axes[3])
        return AttentionResult(out, found[1]) if return_lse else out

    return run(ask, comm, (q, k, v), None, None, options, score_options, finished)


@overload
def attention_backward(
    dout: Any, q: NativeT, k: NativeT, v: NativeT, out: Any, lse: Any, /, *,
    comm: Communicator, dlse: Any = ..., **others: Unpack[RankKeywords],
) -> Gradients[NativeT, None]: ...  # fmt: skip
@overload
def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, /, *,
    comm: Communicator, dlse: Any = ..., wrt: tuple[str, ...] = ..., **others: Unpack[RankKeywords],
) -> Any: ...  # fmt: skip
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    /,
    *,
    comm: Communicator,
    layout: str = "zigzag",
    method: str = "auto",
    dlse: Any = None,
    wrt: tuple[str, ...] = QKV,
    options: Any = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Gradient of :func:`attention`, summed over the ranks' ``dout * out`` and ``dlse * lse``.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, wrt
        As in :func:`cuflash.attention_backward`, for the rank's rows.
    comm, layout, method, options, axes, precision, deterministic, **score_options
        As in :func:`attention`. The method may differ from the forward's.

    Returns
    -------
    cuflash.Gradients
        Gradients of the rank's rows. dbias has the rank's rows, like the bias. The gradients of
        slopes, of sink, of scale and of a bias with one row for all queries are sums over the
        whole call, with the same bits on each rank. If every rank has one query, the row is its
        own.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, CommunicationError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> x, comm = [np.ones((8, 4))] * 2, distributed.simulated(2)
    >>> out = distributed.attention(x, x, x, comm=comm, return_lse=True)
    >>> outs, lses = [o.out for o in out], [o.lse for o in out]
    >>> distributed.attention_backward(x, x, x, x, outs, lses, comm=comm)[1].dv.shape
    (8, 4)
    """

    def ask() -> Asked:
        return Asked.of("attention_backward", layout, method, axes, precision, deterministic)

    def finished(call: Call, found: dict[str, Array]) -> Gradients:
        for name, pair in zip(QKV, call.asked.axes, strict=False):
            if name in found:
                array = in_dtype(call.given[name].dtype, found[name])
                found[name] = array_module(array).moveaxis(array, (-2, -1), pair)
        return arguments.by_field(found, wrt)

    saved = dout, out, lse, dlse
    return run(ask, comm, (q, k, v), saved, wrt, options, score_options, finished)


@overload
def attention_vjp(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    comm: Communicator, return_lse: Literal[False] = ..., **others: Unpack[RankKeywords],
) -> tuple[NativeT, Pullback[NativeT]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: NativeT, k: NativeT, v: NativeT, /, *,
    comm: Communicator, return_lse: Literal[True], **others: Unpack[RankKeywords],
) -> tuple[AttentionResult[NativeT], Pullback[NativeT]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: Any, k: Any, v: Any, /, *,
    comm: Communicator, return_lse: bool = ..., **others: Unpack[RankKeywords],
) -> tuple[Any, Any]: ...  # fmt: skip
def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    comm: Communicator,
    layout: str = "zigzag",
    method: str = "auto",
    options: Any = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    **score_options: Unpack[ScoreOptions],
) -> tuple[Any, Any]:
    """:func:`attention` together with its pullback, which uses the same options.

    Parameters
    ----------
    q, k, v, comm, layout, method, options, axes, precision, deterministic, return_lse, \
**score_options
        As in :func:`attention`.

    Returns
    -------
    result : array or AttentionResult
        What :func:`attention` returns.
    pullback : callable
        ``pullback(dout, *, dlse=None, wrt=("q", "k", "v"))`` returns what
        :func:`attention_backward` returns; all ranks have to call it.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, CommunicationError
        As :func:`attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> x, comm = [np.ones((8, 4))] * 2, distributed.simulated(2)
    >>> out, pullback = distributed.attention_vjp(x, x, x, comm=comm, causal=True)
    >>> pullback(out)[0].dk.shape
    (8, 4)
    """
    common: dict[str, Any] = {
        "comm": comm, "layout": layout, "method": method, "options": options, "axes": axes,
        "precision": precision, "deterministic": deterministic, **score_options,
    }  # fmt: skip
    result = attention(q, k, v, return_lse=True, **common)
    out, lse = zip(*result, strict=True) if comm.in_lists else result

    def pullback(dout: Any, /, *, dlse: Any = None, wrt: tuple[str, ...] = QKV) -> Any:
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **common)

    return (result if return_lse else out), pullback
