"""Write results: rows as JSON, tables as Markdown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import IMPLEMENTATIONS, OURS
from cuflash._timing.machine import device_slug
from cuflash.tuning._workload import Workload

#: Units of the cells of a table, by the kind of its rows.
UNITS = {"speed": "TFLOP/s (ms)", "time": "microseconds", "overhead": "microseconds of waiting"}


def shape_text(row: dict[str, Any]) -> str:
    """The shape of a result row as text."""
    return str(workload_of(row))


def workload_of(row: dict[str, Any]) -> Workload:
    """The workload of a result row."""
    fields = {name: row[name] for name in Workload.__dataclass_fields__ if name in row}
    return Workload.from_json(fields)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def markdown(result: dict[str, Any]) -> str:
    """Tables of a result: one row for each shape, one column for each implementation."""
    meta = result["meta"]
    names = ", ".join(f"{key} {meta[key]}" for key in ("driver", "cupy", "nvrtc") if meta[key])
    lines = [
        f"# {meta['device']}, {meta['date']}",
        "",
        f"{names or 'NumPy'}; commit {meta['commit']}; clocks {meta['clocks'] or 'not read'}.",
        f"`{meta['command']}`",
    ]
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        waiting = "overhead" if row["timing"] in ("host", "process") else "time"
        kind = "speed" if row["tflops"] is not None else waiting
        kept = " by TF32" if row.get("precision") == "tf32" else ""
        tables[kind, row["pass"], row["dtype"] + kept].append(row)
    for (kind, pass_, dtype), rows in tables.items():
        unit = UNITS[kind]
        lines += ["", f"## {pass_}, {dtype}: {unit}", "", *table(rows, kind)]
    if result.get("notes"):
        lines += ["", "## Notes", "", *(f"* {note}" for note in result["notes"])]
    return "\n".join(lines) + "\n"


def grid(*rows: Iterable[str]) -> list[str]:
    """The lines of a Markdown table; the first row is its header."""
    header, *lines = (f"| {' | '.join(row)} |" for row in map(list, rows))
    return [header, f"|{'--|' * header.count(' | ')}--|", *lines]


def table(rows: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """One Markdown table; its last columns compare cuflash with the best other implementation."""
    order = [name for name in IMPLEMENTATIONS if any(row["impl"] == name for row in rows)]
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[shape_text(row), row["options"]][row["impl"]] = row
    ours = [name for name in order if name in OURS]
    compared = ours if kind == "speed" and len(order) > len(ours) else []

    def value(row: dict[str, Any]) -> str:
        if kind == "speed":
            return f"{row['tflops']:.3g} ({row['ms']:.3g})"
        return f"{1e3 * row['ms']:.4g}"

    lines = [["shape", "timing", *order, *(f"{name} / best other" for name in compared)]]
    for (shape, options), found in cells.items():
        timing = sorted({row["timing"] for row in found.values()})
        best = min((row["ms"] for name, row in found.items() if name not in OURS), default=None)
        quotients = (best and name in found and best / found[name]["ms"] for name in compared)
        lines.append(
            [
                f"{shape} {options}".strip(), ", ".join(timing),
                *(value(found[name]) if name in found else "" for name in order),
                *(f"{quotient:.2f}" if quotient else "" for quotient in quotients),
            ]
        )  # fmt: skip
    return grid(*lines)


def write_json(result: dict[str, Any], folder: Path, topic: str) -> Path:
    """Write a result, with one line per row; return the path."""
    meta = result["meta"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device_slug(meta['device'])}-{topic}-{meta['date']}.json"
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    held = ",\n".join(json.dumps(row) for row in result.get("memory", ()))
    memory = f'"memory": [\n{held}\n],\n' if held else ""
    path.write_text(
        f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{rows}\n],\n{memory}'
        f'"notes": {json.dumps(result["notes"], indent=1)}}}\n'
    )
    return path


def write(result: dict[str, Any], folder: Path, topic: str) -> Path:
    """Write JSON and Markdown; return the path of the JSON."""
    path = write_json(result, folder, topic)
    path.with_suffix(".md").write_text(markdown(result))
    return path
