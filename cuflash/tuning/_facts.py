"""What is known of a configuration without a GPU? Registers, spills, blocks that fit together."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuflash._errors import problem_with, shown
from cuflash._jit import compilation, compiler_id, cubin_cache
from cuflash._kernels.config import KernelConfig
from cuflash._problem.checks import integer_value, is_integer
from cuflash._select.hardware import Hardware, occupancy
from cuflash.tuning._kernels import config_as_json
from cuflash.tuning._processes import Failure, ask_many

_COMMAND = (sys.executable, "-m", "cuflash.tuning._compiling")
#: Seconds for one kernel: the slowest takes ten of a busy core.
TIME_LIMIT = 120.0
_MAX_REGISTERS = 255  # of a thread
#: Called with how many of how many kernels are ready.
Counted = Callable[[int, int], None]


@dataclass(frozen=True)
class Facts:
    """Static facts of one configuration, or why there are none."""

    smem_bytes: int
    registers: int = 0
    spill_bytes: int = 0
    blocks_per_multiprocessor: int = 0
    warps_per_multiprocessor: int = 0
    warnings: tuple[str, ...] = ()  # of ptxas: C75xx says that products are waited for (D105)
    compile_seconds: float = 0.0  # of the compilation that filled the store
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields, in values that JSON knows."""
        return asdict(self) | {"warnings": list(self.warnings)}


def compile_all(
    configs: Iterable[KernelConfig],
    hardware: Hardware,
    *,
    processes: int | None = None,
    time_limit: float = TIME_LIMIT,
    progress: Counted | None = None,
    shared: Path | None = None,
) -> dict[Any, Facts]:
    """Compile on all cores what the store of kernels lacks, and tell the facts of each.

    Into the folder ``shared``, where there is one, everything is compiled anew. An ImportError that
    names the extras where nothing can be compiled.
    """
    if processes is not None:
        if not is_integer(processes):
            raise problem_with("processes", TypeError, got=shown(processes), expected="an int")
        processes = integer_value("processes", processes, "an int")
        if processes < 1:
            raise problem_with("processes", ValueError, got=processes, expected="a positive int")
    compiler_id.version()
    ordered = list(dict.fromkeys(configs))
    found: dict[KernelConfig, Facts] = {}
    missing = []

    def tell() -> None:
        if progress:
            progress(len(found), len(ordered))

    tell()
    for config in ordered:
        arch = compilation.architecture(config, hardware.capability)
        name = None if shared else compilation.stored_name(config, arch)
        note = None if name is None else _noted(name)
        if note is None:
            missing.append((config, arch))
        else:
            found[config] = _facts(config, note, hardware)
        tell()  # also of what is missing: looking up tens of thousands takes a while
    requests = [
        {"config": config_as_json(config), "arch": arch, "folder": str(shared) if shared else None}
        for config, arch in missing
    ]
    workers = processes or os.cpu_count() or 1
    for number, answer in ask_many(_COMMAND, requests, workers, time_limit):
        config = missing[number][0]
        if isinstance(answer, Failure):
            answer = {"error": str(answer)}
        found[config] = _facts(config, answer, hardware)
        tell()
    return {config: found[config] for config in ordered}


def _noted(name: str) -> dict[str, Any] | None:
    """What a compilation noted beside a stored kernel; None where that is not what is there."""
    note = cubin_cache.load_note(name)
    if note is None or set(note) != {"registers", "spill_bytes", "warnings", "seconds"}:
        return None
    registers, spill_bytes, seconds = note["registers"], note["spill_bytes"], note["seconds"]
    warnings = note["warnings"]
    usable = (
        type(registers) is type(spill_bytes) is int
        and 0 < registers <= _MAX_REGISTERS
        and spill_bytes >= 0
        and type(seconds) in (int, float)
        and 0 <= seconds < math.inf
        and isinstance(warnings, list)
        and all(isinstance(warning, str) for warning in warnings)
    )
    return note if usable else None


def _facts(config: KernelConfig, note: dict[str, Any], hardware: Hardware) -> Facts:
    if "error" in note:
        return Facts(config.smem_bytes, error=str(note["error"]))
    registers = int(note["registers"])
    blocks = occupancy(hardware.limits, config.num_threads, config.smem_bytes, registers)
    return Facts(
        smem_bytes=config.smem_bytes,
        registers=registers,
        spill_bytes=int(note["spill_bytes"]),
        blocks_per_multiprocessor=blocks,
        warps_per_multiprocessor=blocks * config.num_warps,
        warnings=tuple(note["warnings"]),
        compile_seconds=float(note["seconds"]),
    )
