"""Do all ranks make the same call? They compare before any data moves, or raise alike."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from cuflash import __version__
from cuflash._arrays import is_cupy, native
from cuflash._errors import shown
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import OPTION_NAMES, Options
from cuflash.distributed._communicator import CommunicationError, Communicator

T = TypeVar("T")
_KEPT = 256  # agreements


def facts_of_options(options: Options) -> dict[str, Any]:
    """What of the options has to be alike: plain values, texts of formulas, layouts of arrays.

    Rows are each rank's own. Lengths and offsets that the host can read are compared by value.
    """
    facts: dict[str, Any] = {}
    for name in OPTION_NAMES:
        value = getattr(options, name)
        if name in ("score_mod", "mask_mod"):
            facts[name] = None if value is None else value.expression
        elif not any(array in options.arrays for array in _arrays_of(name)):
            facts[name] = value
    for name, array in options.arrays.items():
        core = ARRAYS[name][1]
        shape = list(array.shape)
        if "m" in core and len(shape) >= len(core):
            shape[len(shape) - len(core)] = 0
        facts[name] = f"{array.dtype} {shape}"
        if ARRAYS[name][0].from_host and isinstance(array, np.ndarray):
            facts[name] += f" {zlib.crc32(array.tobytes()):08x}"
    return facts


def _arrays_of(option: str) -> tuple[str, ...]:
    return tuple(name for name, (own, _) in ARRAYS.items() if own.name == option)


def agreed(
    communicator: Communicator, facts_of: Callable[[int], tuple[dict[str, Any], T]]
) -> tuple[list[dict[str, Any]], dict[int, T]]:
    """Facts of all ranks, and what ``facts_of`` made beside them for own ranks.

    ``facts_of(rank)`` returns facts, of which "alike" have to be so on all ranks. Where it raises,
    all ranks raise: this one its own error, the others one that names the rank.
    """
    own: dict[int, T] = {}
    facts: dict[int, dict[str, Any]] = {}
    error: Exception | None = None
    for rank in communicator.ranks:
        try:
            with communicator.on(rank):
                facts[rank], own[rank] = facts_of(rank)
        except Exception as raised:
            error = error or raised
            facts[rank] = {"error": f"{type(raised).__name__}: {raised}"}
        facts[rank]["version"] = __version__
        facts[rank]["host"] = platform.node()
    texts = {rank: json.dumps(found).encode() for rank, found in facts.items()}
    everyones: list[dict[str, Any]] = [json.loads(t) for t in communicator.agree(texts)]
    if error is not None:
        raise error
    for rank, found in enumerate(everyones):
        if "error" in found:
            raise CommunicationError(f"rank {rank} refused the call: {found['error']}", rank)
    versions = [found["version"] for found in everyones]
    compare("cuflash", dict(enumerate(versions)))
    for name in everyones[0].get("alike", {}):
        compare(name, {r: found["alike"].get(name) for r, found in enumerate(everyones)})
    return everyones, own


def layout_of(array: Any) -> tuple[Any, ...]:
    """Layout, dtype, library and device of a NumPy or CuPy array."""
    array = native("q", array)
    device = array.data.device_id if is_cupy(array) else None
    return array.shape, array.strides, array.dtype, device


def recalled(
    communicator: Communicator, key_of: Callable[[int], Any]
) -> tuple[dict[int, Any], dict[int, Any]]:
    """What ranks have agreed on before for this call, if all make it again; and the keys of calls.

    ``key_of(rank)`` is a key, or None for a call that has to be compared every time. Where it
    raises, the comparison will raise for all.
    """
    keys: dict[int, Any] = {}
    found: dict[int, tuple[int, Any]] = dict.fromkeys(communicator.ranks, (-1, None))
    for rank in communicator.ranks:
        try:
            with communicator.on(rank):
                key = key_of(rank)
            if key is not None:
                found[rank] = communicator.agreements.known.get((rank, key), found[rank])
                keys[rank] = rank, key
        except Exception:
            continue
    numbers = {rank: b"%d" % number for rank, (number, _) in found.items()}
    everyones = set(communicator.agree(numbers))
    if len(everyones) > 1 or b"-1" in everyones:
        return {}, keys
    return {rank: known for rank, (_, known) in found.items()}, keys


def remember(communicator: Communicator, keys: Mapping[int, Any], known: Mapping[int, Any]) -> None:
    """Keep what all ranks agreed on. All number alike, and forget at the same time."""
    memory = communicator.agreements
    memory.number += 1
    if memory.number % _KEPT == 0:
        memory.known.clear()
    for rank, key in keys.items():
        memory.known[key] = memory.number, known[rank]


def compare(name: str, values: Mapping[int, Any]) -> None:
    """Raise ValueError unless all ranks have one value."""
    first = values[0]
    for rank, value in values.items():
        if value != first:
            raise ValueError(
                f"{name}: got {shown(value)} on rank {rank}, expected {shown(first)} as on rank 0; "
                "all ranks make the same call"
            )
