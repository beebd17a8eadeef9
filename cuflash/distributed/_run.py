"""How do ranks make one call together? They compare the call, then run its schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV
from cuflash._arrays import Array, Triple, array_module, is_cupy, native, refuse_captured
from cuflash._errors import not_yet, wrong_value
from cuflash._problem.checks import flag, precision_word
from cuflash._problem.foreign_keywords import ADVICE_FOR_RANKS, refuse_keywords
from cuflash._problem.operand import Axes, checked_axes, core_axes
from cuflash._problem.options import Options, gradient_names, resolve
from cuflash._problem.problem import Problem, describe
from cuflash._results import Saved
from cuflash.distributed import _all_gather, _ring, _ulysses
from cuflash.distributed._communicator import Communicator, Schedule, checked_communicator, drive
from cuflash.distributed._handshake import (
    agreed,
    as_given,
    axis_of_queries,
    checksum,
    compare,
    facts_of_options,
    held_rows,
    layout_of,
    own_of,
    recalled,
    remember,
)
from cuflash.distributed._layout import Chunks, checked_layout, rows_of
from cuflash.distributed._parts import Heads
from cuflash.distributed._share import Share
from cuflash.distributed._traffic import Extents, checked_method, chosen

#: Indexed by min(across, 2): all keys are gathered, the ring, groups that exchange heads.
_METHODS: tuple[tuple[Callable[..., Schedule], Callable[..., Schedule]], ...] = (
    (_all_gather.forward, _all_gather.backward),
    (_ring.forward, _ring.backward),
    (_ulysses.forward, _ulysses.backward),
)


class Asked(NamedTuple):
    """Arguments, except options, that must be equal on all ranks."""

    function: str
    layout: str
    method: str
    axes: Axes
    precision: str | None
    deterministic: bool

    @classmethod
    def of(
        cls, function: str, layout: Any, method: Any, axes: Any, precision: Any, deterministic: Any
    ) -> Asked:
        """Checked arguments."""
        layout, method = checked_layout(layout), checked_method(method)
        axes, precision = checked_axes(axes), precision_word("precision", precision)
        deterministic = flag("deterministic", deterministic)
        return cls(function, layout, method, axes, precision, deterministic)


@dataclass(frozen=True)
class Call:
    """One rank's arguments: q, k, v as given, and converted to one dtype and canonical axes."""

    asked: Asked
    given: dict[str, Array]
    qkv: Triple
    options: Options
    saved: Saved | None  # None for the forward
    wanted: tuple[str, ...]  # names of gradients

    def key(self) -> Any:
        """A key under which agreements on equal calls are remembered; None if there is no such key.

        Calls with the same key differ in the values of q, k and v only.
        """
        if self.options.arrays or self.options.score_mod or self.options.mask_mod:
            return None
        arrays = (*self.given.values(), *self.qkv, *(self.saved or ()))
        layouts = tuple(None if a is None else layout_of(a) for a in arrays)
        return self.asked, self.wanted, self.options, layouts

    def facts(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks ("alike"), and facts of this rank."""
        alike = self.asked._asdict() | {"wrt": self.wanted} | facts_of_options(self.options)
        for name, saved in zip(Saved._fields, self.saved or (), strict=False):
            alike[name] = None if saved is None else str(saved.dtype)
        for name, array in zip(QKV, self.qkv, strict=True):
            shape = (*array.shape[:-2], array.shape[-1])
            alike[f"{name} without rows"] = f"{self.given[name].dtype} {shape}"
        axes = {n: axis_of_queries(n, a) for n, a in self.options.arrays.items()}
        of_options = {n: self.options.arrays[n].shape[i] for n, i in axes.items() if i is not None}
        rows = [a.shape[-2] for a in self.qkv]
        one_row = {n: checksum(self.options.arrays[n]) for n, r in of_options.items() if r == 1}
        return {"alike": alike, "rows": rows, "rows of options": of_options, "one row": one_row}


class _Known(NamedTuple):
    """What all ranks have agreed on for a call."""

    problem: Problem  # this rank's queries and all keys
    queries: tuple[Chunks, ...]  # of each rank
    keys: tuple[Chunks, ...]
    shared: frozenset[str]  # options with one row that all queries of all ranks share
    across: int  # number of ranks that exchange heads; 1: ring; 0: all keys are gathered


def run(
    ask: Callable[[], Asked],
    comm: Communicator,
    qkv: Triple,
    saved: tuple[Any, Any, Any, Any] | None,
    wrt: Any,
    options: Any,
    keywords: Mapping[str, Any],
    finished: Callable[[Call, Any], Any],
) -> Any:
    """Run a call and return ``finished(call, result)`` for own ranks.

    All ranks compare the call before data moves. If ``ask`` raises, the other ranks raise, too.
    """
    checked_communicator(comm)

    def call_of(rank: int) -> Call:
        asked = ask()
        own = {n: native(n, own_of(comm, rank, n, a)) for n, a in zip(QKV, qkv, strict=True)}
        refuse_captured(array_module(own["q"]), f"distributed.{asked.function}")
        chosen_options = _own_options(comm, rank, options, keywords)
        refuse_8_bits(chosen_options, *own.values())
        _, given, promoted = arguments.operands(*own.values())
        comm.check_library("q", given["q"])
        q, k, v = (_canonical(*each) for each in zip(QKV, promoted, asked.axes, strict=False))
        if saved is None:
            return Call(asked, given, (q, k, v), chosen_options, None, ())
        dout, out, lse, dlse = (
            None if a is None else native(n, own_of(comm, rank, n, a))
            for n, a in zip(Saved._fields, saved, strict=True)
        )
        dout, out = (_canonical(n, a, asked.axes[3]) for n, a in (("dout", dout), ("out", out)))
        wanted = gradient_names(wrt, chosen_options)
        return Call(asked, given, (q, k, v), chosen_options, Saved(dout, out, lse, dlse), wanted)

    def schedule(rank: int, call: Call, known: _Known) -> Schedule:
        batch = known.problem.batch_shape
        share = Share(
            rank, *call.qkv, call.options, call.asked.deterministic,
            known.problem, known.queries, known.keys, known.shared,
            Heads(0, batch[-1], batch[-1]) if batch else None, range(comm.size),
        )  # fmt: skip
        forward, backward = _METHODS[min(known.across, 2)]
        groups = (known.across,) if known.across > 1 else ()
        if call.saved is None:
            return forward(share, *groups)
        return backward(share, *groups, call.saved, call.wanted)

    with comm.call():
        calls: dict[int, Call] = {}
        keys: dict[int, Any] = {}
        for rank in comm.ranks:
            with contextlib.suppress(Exception), comm.on(rank):  # agreed() raises it, on all ranks
                calls[rank] = call_of(rank)
                key = calls[rank].key()
                hash(key)  # raises if an argument is not hashable
                keys[rank] = key
        known: dict[int, _Known] = recalled(comm, keys)
        if not known:
            known, calls = _agreed(comm, lambda rank: calls.get(rank) or call_of(rank))
            remember(comm, keys, known)
        results = drive(comm, {r: schedule(r, calls[r], known[r]) for r in comm.ranks})
        for rank, found in results.items():
            with comm.on(rank):
                results[rank] = finished(calls[rank], found)
        return as_given(comm, results)


def _agreed(
    comm: Communicator, call_of: Callable[[int], Call]
) -> tuple[dict[int, _Known], dict[int, Call]]:
    """What all ranks agree on, and the calls of own ranks."""

    def facts_of(rank: int) -> tuple[dict[str, Any], Call]:
        call = call_of(rank)
        return call.facts() | {"memory": comm.free_memory(rank)}, call

    facts, calls = agreed(comm, facts_of)
    asked = calls[comm.ranks[0]].asked
    queries, keys, values = (
        held_rows(name, rows, asked.layout)
        for name, rows in zip(QKV, zip(*(f["rows"] for f in facts), strict=True), strict=True)
    )
    seqlen_q, seqlen_k, seqlen_v = (sum(map(rows_of, held)) for held in (queries, keys, values))
    if seqlen_k != seqlen_v:
        raise wrong_value("v", f"{seqlen_v} values", f"one for each of {seqlen_k} keys")
    shared = _shared_options(facts)
    per_host = ranks_per_host([f["host"] for f in facts])
    memory = min((f["memory"] for f in facts if f["memory"] is not None), default=None)

    def known_of(rank: int) -> tuple[dict[str, Any], _Known]:
        call = calls[rank]
        problem = _problem(call, seqlen_q, seqlen_k, asked.precision)
        if call.saved is not None:
            arguments.saved_arrays("attention", problem, call.given["q"], *call.saved)
        extents = Extents.of(problem, seqlen_q, *(a.shape for a in call.qkv))
        if call.options.dropout and is_cupy(call.qkv[0]):
            extents = replace(extents, drawn=(queries, keys))
        how, _ = chosen(asked.method, extents, comm.size, memory, per_host)
        return {"alike": {"method": how.method}}, _Known(problem, queries, keys, shared, how.across)

    return agreed(comm, known_of)[1], calls


def _shared_options(facts: list[dict[str, Any]]) -> frozenset[str]:
    """Options with one row for all queries; ValueError if that holds on some ranks only."""
    rows = {n: [f["rows of options"][n] for f in facts] for n in facts[0]["rows of options"]}
    queries = [f["rows"][0] for f in facts]
    found = frozenset(
        n for n, r in rows.items() if any(1 == a != m for a, m in zip(r, queries, strict=True))
    )
    for name in found:
        for rank, number in enumerate(rows[name]):
            if number != 1:
                raise wrong_value(
                    name,
                    f"{number} rows on rank {rank}",
                    "one row, as on other ranks",
                    "or its own rows on every rank",
                )
        compare(name, [f["one row"][name] for f in facts])
    return found


def ranks_per_host(hosts: list[str]) -> int | None:
    """Number of neighbouring ranks on each host; None for one host, 1 if that number varies."""
    number = len(set(hosts))
    each, rest = divmod(len(hosts), number)
    even = not rest and all(len(set(hosts[i : i + each])) == 1 for i in range(0, len(hosts), each))
    return each if number > 1 and even else None if number == 1 else 1


def _problem(call: Call, seqlen_q: int, seqlen_k: int, precision: str | None) -> Problem:
    """The problem of local queries and all keys; only the shape of the keys is used.

    ``q_lengths`` count in the whole sequence. They are checked against the whole number of queries,
    without the options that have local rows.
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
    """An array of the same kind with this number of rows, broadcast from one element."""
    xp = array_module(array)
    element = xp.empty((1,) * array.ndim, array.dtype)
    return xp.broadcast_to(element, (*array.shape[:-2], rows, array.shape[-1]))


def _canonical(name: str, array: Any, pair: tuple[int, int]) -> Array:
    """View of an array with rows and features as the last axes."""
    array = native(name, array)
    axes = core_axes(name, array.shape, pair)
    if axes == (array.ndim - 2, array.ndim - 1):
        return array
    return array_module(array).moveaxis(array, axes, (-2, -1))


def refuse_8_bits(options: Options, *qkv: Any) -> None:
    """Raise for 8-bit q, k or v, and for their scales."""
    if float8.among(options, *qkv):
        raise not_yet("8-bit q, k, v on several ranks", "a later version", "dequantize them first")


def _own_options(
    comm: Communicator, rank: int, options: Any, keywords: Mapping[str, Any]
) -> Options:
    """A rank's options; an option that is a list has one value for each rank."""
    refuse_keywords(keywords, ADVICE_FOR_RANKS)
    own: dict[str, Any] = dict(keywords)
    if comm.in_lists:
        if isinstance(options, list):
            options = own_of(comm, rank, "options", options)
        own = {n: own_of(comm, rank, n, a) if isinstance(a, list) else a for n, a in own.items()}
    return resolve(options, own)  # type: ignore[arg-type]
