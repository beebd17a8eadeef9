"""How are the results of a sweep kept? One JSON object a line, so that at most one is lost.

The first line, of kind "sweep", says what was swept and where; lines of kind "config" hold one
configuration each, lines of kind "final" the comparison of the fastest at the end.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuflash._errors import problem_with
from cuflash._timing.workload import Workload
from cuflash.tuning._kernels import KERNELS, PARAMETERS

FORMAT = 1
STATES = ("ok", "compile_error", "wrong", "error", "crash", "hang")
#: What must agree for a file to be continued: what decides times, and which rows have one.
_SAME = (
    "workload", "kernel", "parameters", "default", "device", "arch", "source", "nvrtc", "driver",
    "check",
)  # fmt: skip
Row = dict[str, Any]


@dataclass
class Sweep:
    """Results of a sweep, as they stand in its file."""

    header: Row
    rows: list[Row] = field(default_factory=list)
    finals: list[Row] = field(default_factory=list)

    @property
    def workload(self) -> Workload:
        """The problem that was swept."""
        return Workload.from_json(self.header["workload"])

    @property
    def kernel(self) -> str:
        """The kernel that was swept."""
        return str(self.header["kernel"])

    @property
    def device(self) -> str:
        """Name of the device that was swept on."""
        return str(self.header["device"])

    @property
    def default_values(self) -> dict[str, int]:
        """The tile that all were compared with."""
        values = map(int, self.header["default"].split(","))
        return dict(zip(self.header["parameters"], values, strict=True))

    @property
    def done(self) -> set[str]:
        """Keys of the configurations that have a row."""
        return {row["key"] for row in self.rows}

    @property
    def timed(self) -> list[Row]:
        """Rows of the configurations that compute what the reference says, fastest first.

        By the time relative to the shipped configuration, in turns with which each was timed.
        """
        timed = [row for row in self.rows if row["status"] == "ok"]
        return sorted(timed, key=lambda row: (row["relative"], row["key"]))

    def steady_ms(self, row: Row) -> float:
        """Time of a row at the clocks of the whole sweep.

        Its time relative to the shipped configuration, in turns with which it was timed, by the
        median time of that: what the clocks did meanwhile cancels.
        """
        shipped = [r["default_ms"] for r in self.rows if r["status"] == "ok" and "default_ms" in r]
        return float(row["relative"] * statistics.median(shipped) if shipped else row["ms"])

    def tflops(self, row: Row) -> float:
        """Speed of a row at the clocks of the whole sweep."""
        return self.workload.kernel_flops(self.kernel) / self.steady_ms(row) / 1e9

    @property
    def best(self) -> Row:
        """The fastest of the final comparison, else of all; a ValueError where there is none.

        One that failed in the final comparison is not taken. The shipped configuration, with which
        all are compared, is one of them where it was swept.
        """
        left_out = self.finals[-1].get("left_out", {}) if self.finals else {}
        timed = {row["key"]: row for row in self.timed if row["key"] not in left_out}
        if not timed:
            got = "none of them right in the final" if left_out else "none of them timed"
            of_one = [f"{key}: {reason}" for key, reason in left_out.items()]
            of_one += [f"{r['key']}: {r['status']}, {r.get('reason', '')}" for r in self.rows]
            raise problem_with(
                "sweep", ValueError, got=f"{len(self.rows)} rows, {got}",
                expected="at least one configuration that runs and is right",
                fix=next(iter(of_one), ""),
            )  # fmt: skip
        if self.finals:
            ms = {key: ms for key, ms in self._final_ms().items() if key in timed}
            if ms:
                return timed[min(ms, key=lambda key: (ms[key], key))]
        return next(iter(timed.values()))

    @property
    def best_relative(self) -> float:
        """Time of the best relative to the shipped configuration, by the final comparison."""
        best, ms = self.best, self._final_ms()
        shipped = ms.get(self.header["default"])
        if shipped is not None and best["key"] in ms:
            return ms[best["key"]] / shipped
        return float(best["relative"])

    def _final_ms(self) -> dict[str, float]:
        """Times of the final comparison by key, that of the shipped configuration included.

        Which is timed twice where it is among the fastest: it takes the shorter of both times.
        """
        if not self.finals:
            return {}
        final, shipped = self.finals[-1], self.header["default"]
        ms = {key: float(value) for key, value in final["ms"].items()}
        if "default_ms" in final:
            ms[shipped] = min(ms.get(shipped, math.inf), float(final["default_ms"]))
        return ms


def load(path: str | os.PathLike[str]) -> Sweep:
    """Read the file of a sweep; a cut-off last line is left out, anything else is an error."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _foreign(path, f"bytes that are no text ({error.reason})") from None
    lines = text.split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last end is cut off
        try:
            row = json.loads(line)
        except ValueError:
            raise _foreign(path, f"line {number}: no JSON") from None
        _check(path, number, row)
        if rows and row["kind"] == "config":
            _check_values(path, number, row, rows[0])
        rows.append(row)
    if not rows:
        raise _foreign(path, "no complete line")
    header, *rest = rows
    found = Sweep(header)
    for row in rest:
        (found.finals if row["kind"] == "final" else found.rows).append(row)
    return found


_NUMBER = (int, float)
_TIMES = ("ms", "relative", "default_ms")
#: What a line of each kind, and of a configuration that was timed, holds at least.
_HOLDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "sweep": {
        "format": int, "workload": (dict, type(None)), "kernel": str, "device": str, "arch": str,
        "kernels": str, "date": str, "parameters": dict, "default": str,
    },
    "config": {"key": str, "values": dict, "status": str},
    "ok": {"ms": _NUMBER, "relative": _NUMBER},
    "final": {"ms": dict},
}  # fmt: skip


def _check(path: Path, number: int, row: Any) -> None:
    """Raise unless a line is one of its place, and holds what is read of it."""

    def require(kind: str) -> None:
        missing = [name for name in _HOLDS[kind] if name not in row]
        if missing:
            raise _foreign(path, f"line {number}: no {', '.join(missing)}")
        for name, types in _HOLDS[kind].items():
            if not isinstance(row[name], types):
                raise _foreign(path, f"line {number}: {name} {_short(row[name])}")

    kind = row.get("kind") if isinstance(row, dict) else None
    if (kind == "sweep") != (number == 1) or kind not in ("sweep", "config", "final"):
        what = 'an object of kind "sweep"' if number == 1 else 'kind "config" or "final"'
        raise _foreign(path, f"line {number}: not {what}")
    require(kind)
    if kind == "config" and row["status"] not in STATES:
        raise _foreign(path, f"line {number}: status {row['status']!r}")
    if kind == "config" and row["status"] == "ok":
        require("ok")
        _check_times(path, number, {name: row[name] for name in _TIMES if name in row})
    if kind == "sweep" and row["format"] != FORMAT:
        raise _foreign(path, f"format {row['format']!r}")
    if kind == "sweep" and not _is_tile(row["default"], row["parameters"]):
        raise _foreign(path, f"line {number}: default {_short(row['default'])}")
    if kind == "sweep":
        _check_problem(path, row)
    if kind == "final" and not isinstance(row.get("left_out", {}), dict):
        raise _foreign(path, f"line {number}: left_out {_short(row['left_out'])}")
    if kind == "final":
        _check_times(path, number, row["ms"])
        _check_times(path, number, {n: row[n] for n in ("default_ms",) if n in row})


def _check_times(path: Path, number: int, times: Row) -> None:
    """Raise unless all are times, or quotients of times."""
    for name, value in times.items():
        if not isinstance(value, _NUMBER) or not 0 < value < math.inf:
            raise _foreign(path, f"line {number}: {name} {_short(value)}")


def _check_problem(path: Path, header: Row) -> None:
    """Raise unless the problem is one, and the parameters are those of the kernel."""
    try:
        if header["workload"] is not None:
            Workload.from_json(header["workload"])
    except (TypeError, ValueError) as error:
        raise _foreign(path, f"line 1: workload ({error})") from None
    kernel, names = header["kernel"], list(header["parameters"])
    if kernel in KERNELS and names != list(PARAMETERS[KERNELS[kernel]]):
        raise _foreign(path, f"line 1: parameters {', '.join(names)} of {kernel}")


def _check_values(path: Path, number: int, row: Row, header: Row) -> None:
    """Raise unless a configuration has an int for each parameter of the sweep."""
    values = row["values"]
    whole = all(isinstance(value, int) for value in values.values())
    if list(values) != list(header["parameters"]) or not whole:
        raise _foreign(path, f"line {number}: values {_short(values)}")


def _is_tile(key: str, parameters: Row) -> bool:
    """Whether a key has a number for each parameter."""
    values = key.split(",")
    return len(values) == len(parameters) and all(v.lstrip("-").isdigit() for v in values)


def _foreign(path: Path, got: str) -> Exception:
    return problem_with(
        str(path), ValueError, got=got, expected=f"the file of a sweep, format {FORMAT}"
    )


class SweepFile:
    """A file that grows by whole lines, each on the disk before the next configuration runs."""

    def __init__(self, path: str | os.PathLike[str], header: Row) -> None:
        self.path = Path(path)
        if self.path.exists() and self.path.stat().st_size:
            self.sweep = load(self.path)
            self._refuse_other(header)
            self._cut()
        else:
            self.sweep = Sweep(header)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header)

    def append(self, rows: Iterable[Row]) -> None:
        """Keep rows."""
        for row in rows:
            (self.sweep.finals if row["kind"] == "final" else self.sweep.rows).append(row)
            self._write(row)

    def _refuse_other(self, header: Row) -> None:
        for name in _SAME:
            old, new = self.sweep.header.get(name), header.get(name)
            if old != new:
                raise problem_with(
                    str(self.path), ValueError, got=f"a sweep with {name} {_short(old)}",
                    expected=f"{name} {_short(new)}, to go on with it", fix="name another file",
                )  # fmt: skip

    def _cut(self) -> None:
        """Drop a line that an interruption left without its end."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            os.truncate(self.path, end)

    def _write(self, row: Row) -> None:
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
