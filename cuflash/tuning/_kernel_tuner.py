"""How are sweeps written as cache files of the package kernel-tuner, and how are these read?

A cache file of kernel-tuner holds the result of every configuration. With it kernel-tuner can
simulate searches without a device, and its dashboard can show the results.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash._errors import wrong_value
from cuflash._select.measured import parse
from cuflash.tuning._rows import FORMAT, Row, Sweep, check_times, checked, require, short
from cuflash.tuning._space import space

#: kernel-tuner's names of failures.
_UNCOMPILED, _FAILED, _INVALID = "CompilationFailedConfig", "RuntimeFailedConfig", "InvalidConfig"
_REQUIRED = {
    "device_name": str, "kernel_name": str, "tune_params_keys": list, "tune_params": dict,
    "cache": dict,
}  # fmt: skip


def write_cache(found: Sweep, path: str | os.PathLike[str]) -> None:
    """Write a sweep as a cache file of kernel-tuner; the full sweep is stored under "cuflash".

    Times are :meth:`Sweep.steady_ms`: the time relative to the shipped configuration, times the
    shipped configuration's median. Clocks drift by several percent within a sweep, and kernel-tuner
    would call the configuration fastest that was timed at the highest clock. The measured times are
    under "cuflash", from where :func:`read_cache` reads them.

    Illegal combinations are included as invalid ones, as far as the space lists them, because a
    simulation may try any combination of the swept values.

    Examples
    --------
    >>> from cuflash import tuning
    >>> tuning.write_cache(tuning.load("h100.jsonl"), "h100-cache.json")
    """
    work, parameters = found.header["workload"], found.header["parameters"]
    names, entries = list(parameters), {}
    if work:
        arch = found.header["arch"]
        swept = space(found.workload, found.kernel, arch=arch, parameters=parameters)
        for candidate in swept.candidates:
            if candidate.config is None:
                values = dict(zip(names, candidate.values, strict=True))
                entries[candidate.key] = values | {"__error__": _INVALID, "time": _INVALID}
    entries |= {row["key"]: _entry(found, row) for row in found.rows}
    content = {
        "device_name": found.device,
        "kernel_name": found.kernel,
        "problem_size": [work["batch"] * work["heads_q"], work["seqlen_q"]] if work else [],
        "tune_params_keys": names,
        "tune_params": parameters,
        "objective": "time",  # kernel-tuner 1.5 writes a list, which its dashboard rejects (D107)
        "cache": entries,
        "cuflash": {"header": found.header, "finals": found.finals, "rows": found.rows},
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _entry(found: Sweep, row: Row) -> dict[str, Any]:
    """The cache entry of one configuration, with times in milliseconds."""
    compile_ms = 1000 * row.get("facts", {}).get("compile_seconds", 0.0)
    spent = 1000 * row.get("seconds", 0.0)
    unknown = dict.fromkeys(("verification_time", "strategy_time", "framework_time"), 0.0)
    known = {"compile_time": compile_ms, "benchmark_time": spent, "timestamp": ""}
    entry: dict[str, Any] = row["values"] | known | unknown
    if row["status"] != "ok":
        name = _UNCOMPILED if row["status"] == "compile_error" else _FAILED
        return entry | {"__error__": name, "time": name}
    ms, ours = found.steady_ms(row), found.header["workload"] is not None
    return entry | {"time": ms, "times": [ms], "TFLOP/s": found.tflops(row) if ours else None}


def read_cache(path: str | os.PathLike[str]) -> Sweep:
    """Read a cache file of kernel-tuner, for our kernels or any others; it may be cut off.

    Any other file raises a ValueError that names the place.

    Examples
    --------
    >>> from cuflash import tuning
    >>> tuning.write_cache(tuning.load("h100.jsonl"), "h100-cache.json")
    >>> len(tuning.read_cache("h100-cache.json").rows)
    250
    """
    path = Path(path)
    try:
        content = _content(path.read_text(encoding="utf-8"))
        ours = content.get("cuflash")
        if not ours:
            return checked(_foreign_rows(content), "row")
        require("cuflash", ours, {"header": dict, "rows": list, "finals": list})
        return checked([ours["header"], *ours["rows"], *ours["finals"]], "row")
    except ValueError as error:
        got = f"something else ({error})"
        raise wrong_value(
            str(path), got, f"a cache file of kernel-tuner, with {', '.join(_REQUIRED)}"
        ) from None


def _content(text: str) -> dict[str, Any]:
    """The checked content of a file. An interruption may have left its last brackets open."""
    content: Any = None
    for end in ("", "}\n}", "}}"):
        with contextlib.suppress(ValueError):
            content = parse(text.rstrip().rstrip(",") + end if end else text)
            break
    require("the file", content, _REQUIRED)
    return dict(content)


def _foreign_rows(content: dict[str, Any]) -> list[Row]:
    """The rows of a kernel of another library; times are relative to the fastest."""
    names = content["tune_params_keys"]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"tune_params_keys {short(names)}")
    header: Row = {
        "kind": "sweep",
        "format": FORMAT,
        "workload": None,
        "kernel": content["kernel_name"],
        "parameters": {name: content["tune_params"].get(name, []) for name in names},
        "default": "",
        "device": content["device_name"],
        "arch": "",
    }
    found = (_foreign_row(key, entry, names) for key, entry in content["cache"].items())
    rows = [row for row in found if row is not None]
    fastest = min((row["ms"] for row in rows if row["status"] == "ok"), default=0.0)
    for row in rows:
        if row["status"] == "ok":
            row["relative"] = row["ms"] / fastest
    return [header, *rows]


def _foreign_row(key: str, entry: Any, names: Sequence[str]) -> Row | None:
    if not isinstance(entry, dict):
        raise ValueError(f"cache {key!r}: {short(entry)}")
    row: Row = {"kind": "config", "key": key, "values": {name: entry.get(name) for name in names}}
    error = entry.get("__error__")
    time: Any = entry.get("time")
    if error is None and isinstance(time, str):
        error = time
    if error is not None:
        name = str(error)
        if _INVALID in name:
            return None
        return row | {"status": "compile_error" if _UNCOMPILED in name else "error", "reason": name}
    check_times(f"cache {key!r}", {"time": time})
    return row | {"status": "ok", "ms": float(time)}
