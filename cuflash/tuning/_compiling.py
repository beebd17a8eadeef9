"""A process that compiles what it is asked to: the child of ``_facts.py``."""

from __future__ import annotations

import time
from typing import Any

from cuflash import CompileError, _compile, _kernel_store
from cuflash.tuning._kernels import config_from_json
from cuflash.tuning._processes import serve


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Facts of one configuration; its kernel is in the store then."""
    config, arch = config_from_json(request["config"]), request["arch"]
    start = time.perf_counter()
    try:
        report = _compile.compile_ahead(config, arch)
    except CompileError as error:
        return {"error": first_error(error.log)}
    note = {
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "warnings": list(report.warnings),
        "seconds": round(time.perf_counter() - start, 3),
    }
    _kernel_store.save_note(_compile.stored_name(config, arch), note)
    return note


def first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "")


if __name__ == "__main__":
    serve(answer)
