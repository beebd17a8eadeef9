"""How do ranks make one call together? They compare it, then run its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV
from cuflash._arrays import Array, array_module, native
from cuflash._errors import not_yet, wrong_type, wrong_value
from cuflash._problem.checks import flag
from cuflash._problem.operand import Axes, checked_axes, core_axes
from cuflash._problem.options import Options, resolve
from cuflash._problem.problem import Problem, describe
from cuflash._results import Saved
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


def run(
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

    def started(rank: int, call: _Call, known: _Known, read: Saved | None) -> Schedule:
        share = Share(
            rank, *call.qkv, call.options, known.held["q"], known.held["k"], known.problem,
            deterministic, known.shared_bias,
        )  # fmt: skip
        return schedule_of(share, known.how, None if read is None else (read, call.wanted))

    calls: dict[int, _Call] = {}
    reads: dict[int, Saved | None] = {}
    found, keys = recalled(comm, key_of)
    if found:
        results = drive(comm, {r: started(r, calls[r], found[r], reads[r]) for r in comm.ranks})
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
        return {"alike": {"method": how.method}}, (known, started(rank, call, known, read))

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


def as_given(comm: Communicator, results: dict[int, Any]) -> Any:
    """One result, or a list of all."""
    return [results[rank] for rank in comm.ranks] if comm.in_lists else results[comm.ranks[0]]
