"""Do all ranks make the same call? They compare before any data moves, or raise alike."""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from cuflash import __version__
from cuflash._errors import shown
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import OPTION_NAMES, Options
from cuflash.distributed._communicator import CommunicationError, Communicator

T = TypeVar("T")


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


def compare(name: str, values: Mapping[int, Any]) -> None:
    """Raise ValueError unless all ranks have one value."""
    first = values[0]
    for rank, value in values.items():
        if value != first:
            raise ValueError(
                f"{name}: got {shown(value)} on rank {rank}, expected {shown(first)} as on rank 0; "
                "all ranks make the same call"
            )
