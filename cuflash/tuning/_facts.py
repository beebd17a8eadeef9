"""What is known about a configuration without a GPU? Registers, spills, occupancy.

Child processes compile the kernels: a compiler that fails or hangs costs one configuration.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuflash._errors import CompileError, shown, wrong_type, wrong_value
from cuflash._jit import compilation, compiler_id, cubin_cache
from cuflash._kernels.config import KernelConfig
from cuflash._problem.checks import integer_value, is_integer
from cuflash._select.hardware import Hardware, occupancy
from cuflash.tuning._kernels import config_as_json, config_from_json
from cuflash.tuning._processes import Failure, ask_many

_CHILD = "from cuflash.tuning import _facts, _processes; _processes.serve(_facts.compiled)"
#: Seconds for one kernel: the slowest takes ten on a busy core.
TIME_LIMIT = 120.0
_MAX_REGISTERS = 255  # of a thread
_NUMBER = re.compile(r"\bC\d{4}\b")  # number of a ptxas warning, such as C7512
#: Called with the number of kernels that are ready and the number of all kernels.
Counted = Callable[[int, int], None]


@dataclass(frozen=True)
class Facts:
    """Static facts of one configuration, or the error that prevents them.

    Attributes
    ----------
    smem_bytes : int
        Shared memory of a thread block.
    registers, spill_bytes : int
        Registers of a thread, and its bytes that find no register.
    blocks_per_multiprocessor, warps_per_multiprocessor : int
        How many fit on a multiprocessor.
    warnings : tuple of str
        Numbers of ptxas warnings. C75xx: products of Hopper's tensor cores wait for each other.
    compile_seconds : float
        Of the compilation that filled the kernel cache.
    error : str
        Why there are no facts; empty if there are.

    Examples
    --------
    >>> from cuflash import tuning
    >>> row = tuning.load("h100.jsonl").best
    >>> facts = tuning.Facts(**row["facts"])  # or a value of Space.compile()
    >>> facts.registers, facts.spill_bytes, facts.blocks_per_multiprocessor
    (168, 0, 1)
    >>> facts.as_json() == row["facts"]
    True
    """

    smem_bytes: int
    registers: int = 0
    spill_bytes: int = 0
    blocks_per_multiprocessor: int = 0
    warps_per_multiprocessor: int = 0
    warnings: tuple[str, ...] = ()  # C75xx: wgmma is serialised (D105)
    compile_seconds: float = 0.0
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields, as values that JSON supports."""
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
    """Compile the kernels that the kernel cache lacks, on all cores; return the facts of each.

    With a folder ``shared``, everything is compiled anew into it. Without a compiler, raises an
    ImportError that names the extras to install.
    """
    if processes is not None:
        if not is_integer(processes):
            raise wrong_type("processes", shown(processes), "an int")
        processes = integer_value("processes", processes, "an int")
        if processes < 1:
            raise wrong_value("processes", processes, "a positive int")
    compiler_id.version()
    unique = list(dict.fromkeys(configs))
    found: dict[KernelConfig, Facts] = {}
    requests = {}

    def tell() -> None:
        if progress:
            progress(len(found), len(unique))

    tell()
    for config in unique:
        arch = compilation.architecture(config, hardware.capability)
        note = None if shared else _noted(compilation.stored_name(config, arch))
        if note is None:
            folder = str(shared) if shared else None
            requests[config] = {"config": config_as_json(config), "arch": arch, "folder": folder}
        else:
            found[config] = _facts(config, note, hardware)
        tell()  # for every configuration: tens of thousands of lookups take a while
    command, missing = (sys.executable, "-c", _CHILD), list(requests)
    workers = processes or os.cpu_count() or 1
    for number, answer in ask_many(command, list(requests.values()), workers, time_limit):
        note = {"error": str(answer)} if isinstance(answer, Failure) else answer
        found[missing[number]] = _facts(missing[number], note, hardware)
        tell()
    return {config: found[config] for config in unique}


def _noted(name: str) -> dict[str, Any] | None:
    """The note that a compilation saved beside a cached kernel; None if missing or invalid."""
    note = None if cubin_cache.load(name) is None else cubin_cache.load_note(name)
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


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """In the child: compile a request's configuration into the cache and return its note."""
    config, arch = config_from_json(request["config"]), request["arch"]
    shared = Path(request["folder"]) if request["folder"] else None
    start = time.perf_counter()
    try:
        report = compilation.compile_static(config, arch)
        if shared is None:
            name = compilation.stored_name(config, arch)
            cubin_cache.save(name, report.cubin)
        else:
            name = compilation.shared_name(config, arch)
            cubin_cache.save_shared(shared, name, report.cubin)
    except CompileError as error:
        return {"error": first_error(error.log)}
    except OSError as error:
        return {"error": f"{error}"}
    note = {
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "warnings": [(_NUMBER.search(text) or [text])[0] for text in report.warnings],
        "seconds": round(time.perf_counter() - start, 3),
    }
    if shared is None:
        cubin_cache.save_note(name, note)
    return note


def first_error(log: str) -> str:
    """The first line with an error in a compiler's log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")
