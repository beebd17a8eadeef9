"""What can a user call? Attention over sequences that ranks share, its gradient, its pullback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV
from cuflash._arrays import Array, array_module, native, rounded
from cuflash._errors import not_yet, wrong_type, wrong_value
from cuflash._problem.checks import flag
from cuflash._problem.operand import Axes, checked_axes, core_axes
from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash._problem.problem import Problem, describe
from cuflash._results import AttentionResult, Gradients, Saved
from cuflash.distributed import _all_gather, _two_level
from cuflash.distributed._communicator import (
    Communicator,
    Schedule,
    checked_communicator,
    drive,
)
from cuflash.distributed._handshake import (
    agreed,
    facts_of_options,
    layout_of,
    recalled,
    remember,
)
from cuflash.distributed._layout import Chunks, checked_layout, chunks_of, rows_of
from cuflash.distributed._share import Share
from cuflash.distributed._traffic import Candidate, Extents, checked_method, chosen


@dataclass(frozen=True)
class _Call:
    """One rank's arguments: q, k, v as they came, and in one dtype and canonical order."""

    given: dict[str, Array]
    qkv: tuple[Array, Array, Array]
    options: Options
    wanted: tuple[str, ...] | None  # gradients, None for the forward


class _Known(NamedTuple):
    """What all ranks have agreed on for a call."""

    held: dict[str, tuple[Chunks, ...]]
    shared_bias: bool
    problem: Problem
    how: Candidate


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
    """Attention over sequences of which each rank holds the rows that :func:`shard` gives it.

    Parameters
    ----------
    q : array, batch + (m, d)
        The rank's queries; all as in :func:`cuflash.attention`.
    k, v : array, batch + (n, d) and batch + (n, d_v)
        The rank's keys and values.
    comm : communicator
        Of :func:`connect`, :func:`from_environment`, :func:`from_mpi`, :func:`from_devices` or
        :func:`simulated`. Where it runs several ranks in one process, each array argument and
        result is a list with one array for each rank, and ``options`` may be a list, too.
    layout : {"zigzag", "contiguous"}
        Which rows a rank holds.
    method : {"auto", "all_gather", "ring", "ulysses", "usp"}
        How keys and queries meet; :func:`explain` tells what ``"auto"`` takes.
    options, axes, precision, deterministic, return_lse, **score_options
        As in :func:`cuflash.attention`, of the whole call: lengths, offset, dropout and formulas
        speak of positions in the whole sequence. ``bias`` and ``mask`` have the rank's own rows and
        all keys in order, ``segment_ids`` are of its own rows and of all keys.

    Returns
    -------
    out : array, batch + (m, d_v)
        Of the rank's rows.
    lse : array, batch + (m,)
        Only with ``return_lse``, which makes the result a :class:`cuflash.AttentionResult`.

    Raises
    ------
    TypeError, ValueError
        For a wrong argument of this rank, or where ranks make different calls.
    NotImplementedError
        For a method that cannot serve the call; the message names one that can. On GPUs also for
        dropout where ranks have fewer than 32 rows.
    CommunicationError
        Where a rank is dead or stuck, or has refused the call.

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
    return_lse = flag("return_lse", return_lse)

    def schedule(share: Share, how: Candidate, _: None) -> Schedule:
        return _two_level.forward(share, how.across) if how.across else _all_gather.forward(share)

    found, pairs = _run(
        "attention", comm, layout, method, (q, k, v), None, None, schedule,
        options=options, axes=axes, precision=precision, deterministic=deterministic,
        score_options=score_options,
    )  # fmt: skip
    results = {}
    for rank, (_, (out, lse)) in found.items():
        out = array_module(out).moveaxis(out, (-2, -1), pairs[3])
        results[rank] = AttentionResult(out, lse) if return_lse else out
    return _as_given(comm, results)


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
        As in :func:`cuflash.attention_backward`, of the rank's rows.
    comm, layout, method, options, axes, precision, deterministic, **score_options
        As in :func:`attention`. The method may be another one.

    Returns
    -------
    cuflash.Gradients
        Of the rank's rows. dbias has the rank's rows as its bias; the gradients of slopes, sink,
        scale and of a bias of one row for all queries are of the whole call, the same bits on
        each rank.

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

    def schedule(share: Share, how: Candidate, extra: Any) -> Schedule:
        saved, wanted = extra
        if how.across:
            return _two_level.backward(share, how.across, saved, wanted)
        return _all_gather.backward(share, saved, wanted)

    found, pairs = _run(
        "attention_backward", comm, layout, method, (q, k, v), (dout, out, lse, dlse), wrt,
        schedule, options=options, axes=axes, precision=precision, deterministic=deterministic,
        score_options=score_options,
    )  # fmt: skip
    results = {}
    for rank, (call, gradients) in found.items():
        for i, name in enumerate(QKV):
            if name in gradients:
                array = rounded(gradients[name], call.given[name].dtype)
                gradients[name] = array_module(array).moveaxis(array, (-2, -1), pairs[i])
        results[rank] = arguments.by_field(gradients, wrt)
    return _as_given(comm, results)


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
) -> tuple[Any, Callable[..., Gradients]]:
    """:func:`attention` together with its pullback, which cannot be called with other options.

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
    common: dict[str, Any] = {"comm": comm, "layout": layout, "method": method, "axes": axes}
    common |= {"options": options, "precision": precision, "deterministic": deterministic}
    common |= score_options
    result = attention(q, k, v, return_lse=True, **common)
    several = comm.in_lists
    out = [r.out for r in result] if several else result.out
    lse = [r.lse for r in result] if several else result.lse

    def pullback(dout: Any, /, *, dlse: Any = None, wrt: tuple[str, ...] = QKV) -> Any:
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **common)

    return (result if return_lse else out), pullback


def _run(
    function: str,
    comm: Communicator,
    layout: str,
    method: str,
    qkv: tuple[Any, Any, Any],
    saved: tuple[Any, Any, Any, Any] | None,
    wrt: Any,
    schedule_of: Callable[[Share, Candidate, Any], Schedule],
    *,
    options: Any,
    axes: Any,
    precision: str | None,
    deterministic: bool,
    score_options: Mapping[str, Any],
) -> tuple[dict[int, tuple[_Call, Any]], Axes]:
    """The calls and results of own ranks, and the axes. All ranks compare before data moves."""
    checked_communicator(comm)
    layout, method, pairs = checked_layout(layout), checked_method(method), checked_axes(axes)
    deterministic = flag("deterministic", deterministic)
    alike: dict[str, Any] = {"function": function, "layout": layout, "method": method}
    alike["axes"] = pairs
    alike |= {"precision": precision, "deterministic": deterministic}

    def call_of(rank: int) -> _Call:
        given = {n: _own(comm, rank, n, a) for n, a in zip(QKV, qkv, strict=True)}
        _, arrays, promoted = arguments.operands(*given.values())
        canonical = tuple(
            _canonical(n, a, p) for n, a, p in zip(QKV, promoted, pairs, strict=False)
        )
        chosen_options = _own_options(comm, rank, options, score_options)
        if float8.among(chosen_options, *given.values()):
            raise not_yet(
                "q, k, v of 8 bits on several ranks", "a later one", "multiply by scales first"
            )
        wanted = None if wrt is None else arguments.gradient_names(wrt, chosen_options)
        return _Call(arrays, canonical, chosen_options, wanted)

    def saved_of(rank: int) -> Saved | None:
        if saved is None:
            return None
        dout, out, lse, dlse = (
            None if a is None else _own(comm, rank, n, a)
            for n, a in zip(("dout", "out", "lse", "dlse"), saved, strict=True)
        )
        dout, out = (_canonical(n, a, pairs[3]) for n, a in (("dout", dout), ("out", out)))
        lse, dlse = (None if a is None else native(n, a) for n, a in (("lse", lse), ("dlse", dlse)))
        return Saved(dout, out, lse, dlse)

    def key_of(rank: int) -> Any:
        """What the call is known by where only arrays of these layouts differ, or None."""
        call, read = calls[rank], reads[rank] = call_of(rank), saved_of(rank)
        if call.options.arrays or call.options.score_mod or call.options.mask_mod:
            return None
        arrays = (*call.given.values(), *call.qkv, *(read or ()))
        layouts = tuple(None if a is None else layout_of(a) for a in arrays)
        return (*alike.values(), call.wanted, call.options, layouts)

    def run(rank: int, call: _Call, known: _Known, read: Saved | None) -> Schedule:
        share = Share(
            rank, *call.qkv, call.options, known.held["q"], known.held["k"], known.problem,
            deterministic, known.shared_bias,
        )  # fmt: skip
        return schedule_of(share, known.how, None if read is None else (read, call.wanted))

    calls: dict[int, _Call] = {}
    reads: dict[int, Saved | None] = {}
    found, keys = recalled(comm, key_of)
    if found:
        results = drive(comm, {r: run(r, calls[r], found[r], reads[r]) for r in comm.ranks})
        return {rank: (calls[rank], result) for rank, result in results.items()}, pairs

    def facts_of(rank: int) -> tuple[dict[str, Any], _Call]:
        call = call_of(rank)
        facts: dict[str, Any] = {"alike": {**alike, "wrt": call.wanted}}
        for name, array in zip(QKV, call.qkv, strict=True):
            shape = (*array.shape[:-2], array.shape[-1])
            facts["alike"][f"{name} without rows"] = f"{call.given[name].dtype} {shape}"
        facts["alike"] |= facts_of_options(call.options)
        facts["rows"] = [a.shape[-2] for a in call.qkv]
        facts["memory"] = comm.free_memory(rank)
        bias = call.options.arrays.get("bias")
        facts["bias_rows"] = bias.shape[-2] if bias is not None and bias.ndim > 1 else None
        return facts, call

    facts, calls = agreed(comm, facts_of)
    held = _checked_rows(facts, layout)
    shared_bias = any(f["bias_rows"] == 1 != f["rows"][0] for f in facts)
    hosts = [f["host"] for f in facts]

    def ready(rank: int) -> tuple[dict[str, Any], tuple[_Known, Schedule]]:
        call = calls[rank]
        seqlen_q, seqlen_k = (sum(map(rows_of, held[n])) for n in ("q", "k"))
        problem = _problem(call, seqlen_q, seqlen_k, precision)
        read = saved_of(rank)
        if read is not None:
            read = arguments.saved_arrays("attention", problem, call.given["q"], *read)
        extents = Extents.of(problem, seqlen_q, *(a.shape for a in call.qkv))
        budgets = [f["memory"] for f in facts if f["memory"] is not None]
        how, _ = chosen(
            method, extents, len(hosts), min(budgets, default=None), ranks_per_host(hosts)
        )
        known = _Known(held, shared_bias, problem, how)
        return {"alike": {"method": how.method}}, (known, run(rank, call, known, read))

    _, made = agreed(comm, ready)
    remember(comm, keys, {rank: known for rank, (known, _) in made.items()})
    results = drive(comm, {rank: schedule for rank, (_, schedule) in made.items()})
    return {rank: (calls[rank], result) for rank, result in results.items()}, pairs


def ranks_per_host(hosts: list[str]) -> int | None:
    """How many neighbours share a host; None where all do, or where it is no even number."""
    number = len(set(hosts))
    each, rest = divmod(len(hosts), number)
    even = not rest and all(len(set(hosts[i : i + each])) == 1 for i in range(0, len(hosts), each))
    return each if number > 1 and even else None if number == 1 else 1


def _problem(call: _Call, seqlen_q: int, seqlen_k: int, precision: str | None) -> Problem:
    """The problem of local queries and all keys, of which only the extents are there.

    Lengths of queries are of the whole call: they are checked with all queries, and without the
    options that have local rows.
    """
    options = without_rows = call.options
    if options.arrays.keys() & {"bias", "mask", "segment_ids_q"}:
        without_rows = replace(options, bias=None, mask=None, segment_ids=None)
    if options.q_lengths is not None:
        options = replace(options, q_lengths=None)
    q, k, v = (
        _extended(a, n) for a, n in zip(call.qkv, (seqlen_q, seqlen_k, seqlen_k), strict=True)
    )
    describe(q, k, v, without_rows, precision=precision)
    return describe(call.qkv[0], k, v, options, precision=precision)


def _extended(array: Array, rows: int) -> Array:
    """As an array of so many rows would look; it has one element."""
    xp = array_module(array)
    element = xp.empty((1,) * array.ndim, array.dtype)
    return xp.broadcast_to(element, (*array.shape[:-2], rows, array.shape[-1]))


def _checked_rows(facts: list[dict[str, Any]], layout: str) -> dict[str, tuple[Chunks, ...]]:
    """Who holds which queries and keys; a ValueError on all ranks where one has other rows."""
    held = {}
    for i, name in enumerate(QKV):
        rows = [f["rows"][i] for f in facts]
        chunks = chunks_of(sum(rows), len(rows), layout)
        expected = [rows_of(own) for own in chunks]
        for rank, (got, right) in enumerate(zip(rows, expected, strict=True)):
            if got != right:
                raise wrong_value(
                    name, f"{got} rows on rank {rank}",
                    f"{right}, its part of {sum(rows)} rows in the {layout} layout",
                    "cuflash.distributed.shard cuts like this",
                )  # fmt: skip
        held[name] = chunks
    if held["k"] != held["v"]:
        total = sum(map(rows_of, held["k"]))
        raise wrong_value(
            "v", f"{sum(map(rows_of, held['v']))} values", f"one for each of {total} keys"
        )
    return held


def _canonical(name: str, array: Any, pair: tuple[int, int]) -> Array:
    array = native(name, array)
    axes = core_axes(name, array.shape, pair)
    if axes == (array.ndim - 2, array.ndim - 1):
        return array
    return array_module(array).moveaxis(array, axes, (-2, -1))


def _own(comm: Communicator, rank: int, name: str, value: Any) -> Any:
    """A rank's own part of an argument."""
    if not comm.in_lists:
        return value
    if not isinstance(value, list | tuple) or len(value) != comm.size:
        expected = f"a list of {comm.size} arrays, one for each rank"
        raise wrong_type(name, type(value).__name__, expected, "this process runs all ranks")
    return value[rank]


def _own_options(
    comm: Communicator, rank: int, options: Any, keywords: Mapping[str, Any]
) -> Options:
    """A rank's options; in a list, each rank has its own."""
    own: dict[str, Any] = dict(keywords)
    if comm.in_lists:
        if isinstance(options, list):
            options = _own(comm, rank, "options", options)
        own = {n: _own(comm, rank, n, a) if isinstance(a, list) else a for n, a in own.items()}
    return resolve(options, own)  # type: ignore[arg-type]


def _as_given(comm: Communicator, results: dict[int, Any]) -> Any:
    """One result, or a list of all."""
    return [results[rank] for rank in comm.ranks] if comm.in_lists else results[comm.ranks[0]]
