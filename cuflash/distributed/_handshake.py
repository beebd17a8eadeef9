"""Do all ranks make the same call? They compare it before data moves; if not, all of them raise."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from cuflash import __version__
from cuflash._arrays import is_cupy, native
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import OPTION_NAMES, Options
from cuflash.distributed._communicator import CommunicationError, Communicator
from cuflash.distributed._layout import Chunks, chunks_of, rows_of

T = TypeVar("T")
_KEPT = 256  # agreements


def facts_of_options(options: Options) -> dict[str, Any]:
    """What must be equal on all ranks: plain values, texts of formulas, layouts of arrays.

    The number of rows may differ. NumPy arrays without a query axis are compared by value.
    """
    facts: dict[str, Any] = {}
    of_arrays = {ARRAYS[name][0].name for name in options.arrays}
    for name in OPTION_NAMES:
        value = getattr(options, name)
        if name in ("score_mod", "mask_mod"):
            texts = getattr(value, "expression", None), getattr(value, "grad", None)
            facts[name] = None if value is None else texts
            arrays = getattr(value, "arrays", {}).items()
            facts[f"{name}.arrays"] = {n: f"{a.dtype} {list(a.shape)}" for n, a in sorted(arrays)}
        elif name not in of_arrays:
            facts[name] = value
    for name, array in options.arrays.items():
        axis = axis_of_queries(name, array)
        shape = [0 if i == axis else n for i, n in enumerate(array.shape, -array.ndim)]
        facts[name] = f"{array.dtype} {shape}"
        facts[name] += checksum(array) if axis is None else ""
    return facts


def checksum(array: Any) -> str:
    """A text that differs for NumPy arrays with other values; "" for arrays on a GPU."""
    if not isinstance(array, np.ndarray):
        return ""
    once = tuple(slice(None) if step else slice(1) for step in array.strides)  # broadcast axes
    return f" {zlib.crc32(array[once].tobytes()):08x}"


def axis_of_queries(name: str, array: Any) -> int | None:
    """The query axis of an option's array, counted from the end; None without one."""
    core = ARRAYS[name][1]
    return core.index("m") - len(core) if "m" in core and array.ndim >= len(core) else None


def agreed(
    communicator: Communicator, facts_of: Callable[[int], tuple[dict[str, Any], T]]
) -> tuple[list[dict[str, Any]], dict[int, T]]:
    """Return the facts of all ranks, and the second result of ``facts_of`` for own ranks.

    ``facts_of(rank)`` returns facts and anything else. The facts under "alike" must be equal on all
    ranks. If it raises, all ranks raise: this rank its own error, the others one that names it.
    """
    own: dict[int, T] = {}
    texts: dict[int, bytes] = {}
    error: Exception | None = None
    for rank in communicator.ranks:
        try:
            with communicator.on(rank):
                facts, own[rank] = facts_of(rank)
                texts[rank] = _text(facts)
        except Exception as raised:
            error = error or raised
            texts[rank] = _text({"error": f"{type(raised).__name__}: {raised}"})
    everyones: list[dict[str, Any]] = [json.loads(t) for t in communicator.agree(texts)]
    if error is not None:
        raise error
    for rank, found in enumerate(everyones):
        if "error" in found:
            raise CommunicationError(f"rank {rank} refused the call: {found['error']}", rank)
    compare("cuflash", [found["version"] for found in everyones])
    for name in dict.fromkeys(name for found in everyones for name in found.get("alike", {})):
        compare(name, [found["alike"].get(name) for found in everyones])
    return everyones, own


def _text(facts: dict[str, Any]) -> bytes:
    own = {"version": __version__, "host": platform.node()}
    return json.dumps(facts | own).encode()


def compare(name: str, values: Sequence[Any]) -> None:
    """Raise ValueError unless all ranks have the same value."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"{name}: got {shown(value)} on rank {rank}, expected {shown(values[0])} as on "
                "rank 0; all ranks make the same call"
            )


def held_rows(name: str, rows: Sequence[int], layout: str) -> tuple[Chunks, ...]:
    """The chunks of each rank. ValueError if a rank's number of rows is not that of the layout."""
    held = chunks_of(sum(rows), len(rows), layout)
    for rank, (got, own) in enumerate(zip(rows, held, strict=True)):
        if got != rows_of(own):
            raise wrong_value(
                name, f"{got} rows on rank {rank}",
                f"{rows_of(own)}, its part of {sum(rows)} rows in the {layout} layout",
                "cuflash.distributed.shard divides a sequence in this way",
            )  # fmt: skip
    return held


def own_of(communicator: Communicator, rank: int, name: str, value: Any) -> Any:
    """A rank's own array of an argument, which is a list if this process runs all ranks."""
    if not communicator.in_lists:
        return value
    if not isinstance(value, list | tuple) or len(value) != communicator.size:
        got = type(value).__name__
        if isinstance(value, list | tuple):
            got = f"a {got} of {len(value)}"
        expected = f"a list of {communicator.size} arrays, one for each rank"
        raise wrong_type(name, got, expected, "this process runs all ranks")
    return value[rank]


def as_given(communicator: Communicator, results: Mapping[int, T]) -> T | list[T]:
    """The result of the own rank, or a list for all ranks: as the arguments were given."""
    if communicator.in_lists:
        return [results[rank] for rank in communicator.ranks]
    return results[communicator.ranks[0]]


def layout_of(array: Any) -> tuple[Any, ...]:
    """Shape, strides, dtype, and device (None for NumPy) of a NumPy or CuPy array."""
    array = native("q", array)
    device = array.data.device_id if is_cupy(array) else None
    return array.shape, array.strides, array.dtype, device


def recalled(communicator: Communicator, keys: Mapping[int, Any]) -> dict[int, T]:
    """Return what ranks agreed on for the calls with these keys, if all ranks repeat those calls.

    A call without a key must be compared every time.
    """
    known = communicator.agreements.known
    found = {r: known.get((r, keys.get(r)), (-1, None)) for r in communicator.ranks}
    everyones = set(communicator.agree({r: b"%d" % number for r, (number, _) in found.items()}))
    if len(everyones) > 1 or b"-1" in everyones:
        return {}
    return {rank: agreement for rank, (_, agreement) in found.items()}


def remember(communicator: Communicator, keys: Mapping[int, Any], known: Mapping[int, Any]) -> None:
    """Keep what all ranks agreed on. All ranks count alike, and forget at the same time."""
    memory = communicator.agreements
    memory.number += 1
    if memory.number % _KEPT == 0:
        memory.known.clear()
    for rank, key in keys.items():
        if key is not None:
            memory.known[rank, key] = memory.number, known[rank]
