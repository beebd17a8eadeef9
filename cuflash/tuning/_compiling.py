"""A process that compiles what it is asked to: the child of ``_facts.py``."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from cuflash import CompileError
from cuflash._jit import compilation, cubin_cache
from cuflash.tuning._kernels import config_from_json
from cuflash.tuning._processes import serve


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Facts of one configuration; its kernel is in the store then."""
    config, arch = config_from_json(request["config"]), request["arch"]
    shared = Path(request["folder"]) if request.get("folder") else None
    start = time.perf_counter()
    try:
        report = compilation.compile_ahead(config, arch, shared)
    except CompileError as error:
        return {"error": first_error(error.log)}
    except OSError as error:
        return {"error": f"{error}"}
    note = {
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "warnings": [_shortened(text) for text in report.warnings],
        "seconds": round(time.perf_counter() - start, 3),
    }
    if shared is None:
        cubin_cache.save_note(compilation.stored_name(config, arch), note)
    return note


def _shortened(warning: str) -> str:
    """Its number, where ptxas gives one: C7512."""
    number = re.search(r"\bC\d{4}\b", warning)
    return number[0] if number else warning


def first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


if __name__ == "__main__":
    serve(answer)
