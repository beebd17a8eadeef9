"""How are the results of a sweep stored? One JSON object per line: a crash loses at most one line.

The first line, of kind "sweep", says what was swept and where. A line of kind "config" has the
result of one configuration, a line of kind "final" a comparison of the fastest at the end.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuflash._errors import problem_with, wrong_value
from cuflash._select.measured import parse
from cuflash.tuning._kernels import KERNELS
from cuflash.tuning._workload import Workload

FORMAT = 1
STATES = ("ok", "compile_error", "wrong", "error", "crash", "hang")
#: Entries of the header that must agree to continue a file: they decide times and which rows exist.
_SAME = (
    "workload", "kernel", "parameters", "default", "device", "arch", "source", "nvrtc", "driver",
    "check",
)  # fmt: skip
Row = dict[str, Any]


@dataclass
class Sweep:
    """Results of a sweep, as stored in its file.

    Attributes
    ----------
    header : dict
        Problem, kernel, parameters, device and versions.
    rows : list of dict
        A row for each configuration that was tried: its values, facts and time, or its error.
    finals : list of dict
        Times of each final comparison.

    Examples
    --------
    >>> from cuflash import tuning
    >>> found = tuning.load("h100.jsonl")
    >>> print(found.device, found.kernel, found.workload, sep=", ")
    NVIDIA H100 80GB HBM3, forward_sm90, b2 h16 8192x8192 d128 full
    >>> len(found.done), len(found.timed)  # configurations with a row, and those that are correct
    (250, 250)
    >>> round(found.tflops(found.best)), round(found.steady_ms(found.best), 2)
    (807, 1.36)
    >>> found.best["values"] == found.default_values, found.best_relative
    (True, 1.0)
    """

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
        """Name of the device on which the sweep ran."""
        return str(self.header["device"])

    @property
    def default_values(self) -> dict[str, int]:
        """The shipped tile, with which all others were compared."""
        values = map(int, self.header["default"].split(","))
        return dict(zip(self.header["parameters"], values, strict=True))

    @property
    def done(self) -> set[str]:
        """Keys of the configurations that have a row."""
        return {row["key"] for row in self.rows}

    @property
    def timed(self) -> list[Row]:
        """Rows of correct configurations, fastest first, by time relative to the shipped one."""
        timed = [row for row in self.rows if row["status"] == "ok"]
        return sorted(timed, key=lambda row: (row["relative"], row["key"]))

    def steady_ms(self, row: Row) -> float:
        """Time of a row at the sweep's typical clocks, in milliseconds.

        It is the quotient of the row's time and the interleaved time of the shipped configuration,
        times the median of all shipped times. Changes of the clocks cancel in the quotient.
        """
        shipped = [r["default_ms"] for r in self.rows if r["status"] == "ok" and "default_ms" in r]
        return float(row["relative"] * statistics.median(shipped) if shipped else row["ms"])

    def tflops(self, row: Row) -> float:
        """Speed of a row at the sweep's typical clocks, in TFLOP/s."""
        return self.workload.kernel_flops(self.kernel) / self.steady_ms(row) / 1e9

    @property
    def best(self) -> Row:
        """The fastest of the final comparison, else of all rows; ValueError if there is none.

        A configuration that failed in the final comparison is not taken. The shipped configuration
        takes part if it was swept.
        """
        left_out = self.finals[-1].get("left_out", {}) if self.finals else {}
        timed = {row["key"]: row for row in self.timed if row["key"] not in left_out}
        if not timed:
            got = "none of them correct in the final" if left_out else "none of them timed"
            of_one = [f"{key}: {reason}" for key, reason in left_out.items()]
            of_one += [f"{r['key']}: {r['status']}, {r.get('reason', '')}" for r in self.rows]
            raise problem_with(
                "sweep", ValueError, got=f"{len(self.rows)} rows, {got}",
                expected="at least one configuration that runs and is correct",
                fix=next(iter(of_one), ""),
            )  # fmt: skip
        ms = {key: ms for key, ms in self._final_ms().items() if key in timed}
        return timed[min(ms, key=lambda key: (ms[key], key))] if ms else next(iter(timed.values()))

    @property
    def best_relative(self) -> float:
        """Time of the best row relative to the shipped configuration, by the final comparison."""
        best, ms = self.best, self._final_ms()
        shipped = ms.get(self.header["default"])
        if shipped is not None and best["key"] in ms:
            return ms[best["key"]] / shipped
        return float(best["relative"])

    def _final_ms(self) -> dict[str, float]:
        """Times of the final comparison by key, with the shipped configuration.

        If the shipped one is among the fastest, it was timed twice: the shorter time counts.
        """
        if not self.finals:
            return {}
        final, shipped = self.finals[-1], self.header["default"]
        ms = {key: float(value) for key, value in final["ms"].items()}
        if "default_ms" in final:
            ms[shipped] = min(ms.get(shipped, math.inf), float(final["default_ms"]))
        return ms


def load(path: str | os.PathLike[str]) -> Sweep:
    """Read the file of a sweep. A cut-off last line is ignored, any other damage is an error.

    Examples
    --------
    >>> from cuflash import tuning
    >>> tuning.load("h100.jsonl").best["values"]
    {'block_m': 128, 'block_n': 128, 'num_stages': 2, 'num_q_stages': 2, 'overlap_quarters': 4}
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        whole = enumerate(lines[:-1], start=1)  # text after the last line end is a cut-off line
        return checked((_parsed(*line) for line in whole), "line")
    except UnicodeDecodeError as error:
        got = f"bytes that are no text ({error.reason})"
    except ValueError as error:
        got = str(error)
    raise wrong_value(str(path), got, f"the file of a sweep, format {FORMAT}")


def _parsed(number: int, line: str) -> Any:
    try:
        return parse(line)
    except ValueError:
        raise ValueError(f"line {number}: invalid JSON") from None


def checked(given: Iterable[Any], each: str) -> Sweep:
    """The sweep of these rows, the header first; a ValueError names the first invalid row.

    ``each`` is the word for a row in messages, such as "line".
    """
    found: Sweep | None = None
    for number, row in enumerate(given, start=1):
        place = f"{each} {number}"
        kind = row.get("kind") if isinstance(row, dict) else None
        if found is None:
            if kind != "sweep":
                raise ValueError(f'{place}: not an object of kind "sweep"')
            _check_header(place, row)
            found = Sweep(row)
        elif kind == "config":
            _check_config(place, row, found.header)
            found.rows.append(row)
        elif kind == "final":
            _check_final(place, row)
            found.finals.append(row)
        else:
            raise ValueError(f'{place}: not kind "config" or "final"')
    if found is None:
        raise ValueError(f"no complete {each}")
    return found


_NUMBER = (int, float)
#: Bounds of times: products and quotients of two times are finite.
_LEAST, _MOST = 1e-100, 1e100
_TIMES = ("ms", "relative", "default_ms")
Kinds = Mapping[str, type | tuple[type, ...]]
#: Required entries of each kind of line, of headers for our kernels, and of timed configurations.
_HOLDS: dict[str, Kinds] = {
    "sweep": {
        "format": int, "workload": (dict, type(None)), "kernel": str, "device": str, "arch": str,
        "parameters": dict, "default": str,
    },
    "ours": {"kernels": str, "date": str},
    "config": {"key": str, "values": dict, "status": str},
    "ok": {"ms": _NUMBER, "relative": _NUMBER},
    "final": {"ms": dict},
}  # fmt: skip


def _check_header(place: str, row: Row) -> None:
    require(place, row, _HOLDS["sweep"])
    if row["format"] != FORMAT:
        raise ValueError(f"format {row['format']!r}")
    parameters = row["parameters"]
    if not all(isinstance(values, list) for values in parameters.values()):
        raise _wrong(place, "parameters", parameters)
    if row["workload"] is None:
        return
    require(place, row, _HOLDS["ours"])
    default = row["default"].split(",")
    whole = len(default) == len(parameters)
    if not whole or not all(re.fullmatch("-?[0-9]{1,9}", value) for value in default):
        raise _wrong(place, "default", row["default"])
    try:
        Workload.from_json(row["workload"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: workload ({error})") from None
    count = row.get("multiprocessors", 1)
    if not isinstance(count, int) or count < 1:
        raise _wrong(place, "multiprocessors", count)
    kernel = row["kernel"]
    if kernel in KERNELS and list(parameters) != list(KERNELS[kernel].tunables):
        raise ValueError(f"{place}: parameters {', '.join(parameters)} of {kernel}")


def _check_config(place: str, row: Row, header: Row) -> None:
    """Raise unless a configuration has a value for each parameter; ints for our kernels."""
    require(place, row, _HOLDS["config"])
    if row["status"] not in STATES:
        raise ValueError(f"{place}: status {row['status']!r}")
    if row["status"] == "ok":
        require(place, row, _HOLDS["ok"])
        check_times(place, {name: row[name] for name in _TIMES if name in row})
    values = row["values"]
    kinds = int if header["workload"] is not None else (int, float, str)
    whole = all(isinstance(value, kinds) for value in values.values())
    if list(values) != list(header["parameters"]) or not whole:
        raise _wrong(place, "values", values)


def _check_final(place: str, row: Row) -> None:
    require(place, row, _HOLDS["final"])
    if not isinstance(row.get("left_out", {}), dict):
        raise _wrong(place, "left_out", row["left_out"])
    check_times(place, row["ms"])
    check_times(place, {name: row[name] for name in _TIMES[1:] if name in row})


def require(place: str, row: Any, kinds: Kinds) -> None:
    """Raise unless a row is an object with entries of these names and types."""
    missing = [name for name in kinds if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{place}: no {', '.join(missing)}")
    for name, types in kinds.items():
        if not isinstance(row[name], types):
            raise _wrong(place, name, row[name])


def check_times(place: str, times: Row) -> None:
    """Raise unless all are times, or quotients of times."""
    for name, value in times.items():
        if not isinstance(value, _NUMBER) or not _LEAST < value < _MOST:
            raise _wrong(place, name, value)


def _wrong(place: str, name: str, value: object) -> Exception:
    return ValueError(f"{place}: {name} {short(value)}")


class SweepFile:
    """A file of whole lines; each line is on disk before the next configuration runs."""

    def __init__(self, path: str | os.PathLike[str], header: Row) -> None:
        self.path = Path(path)
        if self.path.exists() and self.path.stat().st_size:
            self.sweep = load(self.path)
            for name in _SAME:
                old, new = self.sweep.header.get(name), header.get(name)
                if old != new:
                    raise problem_with(
                        str(self.path), ValueError, got=f"a sweep with {name} {short(old)}",
                        expected=f"{name} {short(new)}, to continue it", fix="pass another file",
                    )  # fmt: skip
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)  # drops a line that an interruption cut off
        else:
            self.sweep = Sweep(header)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header)

    def append(self, row: Row) -> None:
        """Append a row to the sweep and to the file."""
        (self.sweep.finals if row["kind"] == "final" else self.sweep.rows).append(row)
        self._write(row)

    def _write(self, row: Row) -> None:
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
