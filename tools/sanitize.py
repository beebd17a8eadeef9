"""Does compute-sanitizer find anything in the kernels, on a covering set of small calls?

    python tools/sanitize.py                                  # all four tools, all cases
    python tools/sanitize.py --tool racecheck --case bias     # cases with a word in their name
    python tools/sanitize.py --list
    python tools/sanitize.py --json FILE                      # what came of all cases

docs/running-the-sanitizer.md says what each tool looks for and how to read a finding.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_digest
import sanitizer_cases
from sanitizer_cases import CASES

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

# initcheck does not see what the copy engine stores: tiles of results (tests/support/memory.py
# poisons them), and the sums of dq that only backward_convert.cu reads (test_graphs of
# tests/test_backward_sm90.py asks for the same bits from a workspace that was used before).
TOOLS = {
    "memcheck": (),
    "initcheck": (
        "--check-api-memory-access", "no", "--kernel-regex-exclude", "kns=backward_convert",
    ),
    "synccheck": (),
    "racecheck": ("--racecheck-report", "all"),
}  # fmt: skip
DEFINED = {"racecheck": ("-DCUFLASH_UNDER_RACECHECK=true",)}  # kernels_cu/sm90/barrier.cuh says why
NO_TOOL = "none"  # compiles the kernels into the cache, and shows failures by themselves
FOUND = 86  # exit status of a run with findings
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
VERSION = re.compile(r"Version (\d[\d.]*)")  # as compute-sanitizer says it


def run_inside(tool: str, names: Iterable[str]) -> None:
    """Run cases in this process, which the sanitizer watches."""
    import cupy

    from cuflash._jit import compilation

    # Each array is an allocation of its own, with borders that memcheck sees.
    cupy.cuda.set_allocator(None)
    compilation.OPTIONS = (*compilation.OPTIONS, "-lineinfo", *DEFINED.get(tool, ()))
    chosen = set(names)
    for case in CASES:
        if case.name in chosen:
            sanitizer_cases.run(cupy, case)
            print(f"ran: {case.name}", flush=True)


class Verdict(NamedTuple):
    """What one process under one tool found."""

    status: int
    log: str

    @property
    def ran(self) -> int:
        """How many cases it ran."""
        return self.log.count("ran: ")

    @property
    def findings(self) -> int:
        """Of all summaries in the log."""
        return sum(int(m[1] or m[2] or 0) for m in SUMMARY.finditer(self.log))


def command(program: str, tool: str, names: Sequence[str]) -> list[str]:
    """The command line of one process."""
    inside = [sys.executable, str(Path(__file__)), "--inside", tool, *names]
    if tool == NO_TOOL:
        return inside
    return [
        program, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND),
        "--print-limit", "20", *inside,
    ]  # fmt: skip


def run_tool(program: str, tool: str, names: Sequence[str], jobs: int) -> list[Verdict]:
    """Divide the cases among processes that run at once."""
    parts = [names[start::jobs] for start in range(jobs)]
    processes = [
        subprocess.Popen(
            command(program, tool, part), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for part in parts
        if part
    ]  # fmt: skip
    logs = [process.communicate()[0] for process in processes]
    return [Verdict(p.returncode, log) for p, log in zip(processes, logs, strict=True)]


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH or in the usual folder of a CUDA toolkit."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


def state() -> dict[str, str]:
    """Which sources and cases, of which options of the tools, findings belong to."""
    files = (Path(module) for module in (__file__, sanitizer_cases.__file__))
    cases = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)
    return {"digest": gpu_digest.digest(), "cases": hashlib.sha256(cases).hexdigest()}


def machine(program: str) -> dict[str, str | None]:
    """The device, and the versions of what compiles and watches; None for what is not there."""
    from gpu_report import describe_machine

    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    version = VERSION.search(said)
    return {**describe_machine(), "sanitizer": version and version[1]}


def kept(path: Path, now: Mapping[str, str | None]) -> dict[str, Any]:
    """What other tools came to, by a report of the same sources, cases and versions."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return said["tools"] if all(said[name] == value for name, value in now.items()) else {}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is of another kind
        return {}


def report(now: Mapping[str, str | None], tools: Mapping[str, Any]) -> dict[str, Any]:
    """What tools came to as JSON; clean if all did, of all cases."""
    ordered = {tool: tools[tool] for tool in (NO_TOOL, *TOOLS) if tool in tools}
    return {
        **now,
        "date": dt.date.today().isoformat(),
        "findings": sum(said["findings"] for said in ordered.values()),
        "clean": len(ordered) == 1 + len(TOOLS) and all(s["clean"] for s in ordered.values()),
        "seconds": round(sum(said["seconds"] for said in ordered.values()), 1),
        "tools": ordered,
        "names": [case.name for case in CASES],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen tools on the chosen cases; 0 only if every case ran and nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all four")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--logs", type=Path, help="folder for the complete logs")
    parser.add_argument("--json", type=Path, help="report of all cases; other tools' part stays")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inside:
        run_inside(arguments.inside[0], arguments.inside[1:])
        return 0
    if arguments.json and arguments.case:
        parser.error("--json is of all cases")
    names = [case.name for case in CASES if arguments.case in case.name]
    if arguments.list or not names:
        print("\n".join(case.name for case in CASES))
        return int(not names)
    program = find_sanitizer()
    if program is None:
        print("sanitize: compute-sanitizer is not there; it comes with the CUDA toolkit")
        return 2
    now = {**state(), **machine(program)} if arguments.json else {}
    tools = kept(arguments.json, now) if arguments.json else {}
    failed = False
    for tool in (NO_TOOL, *(arguments.tool or TOOLS)):
        start = time.perf_counter()
        verdicts = run_tool(program, tool, names, arguments.jobs)
        ran = sum(verdict.ran for verdict in verdicts)
        findings = sum(verdict.findings for verdict in verdicts)
        clean = ran == len(names) and not findings and not any(v.status for v in verdicts)
        failed |= not clean
        if arguments.json:  # as soon as a tool is done: the next may be cut short
            took = round(time.perf_counter() - start, 1)
            tools[tool] = {"ran": ran, "findings": findings, "clean": clean, "seconds": took}
            text = json.dumps(report(now, tools), indent=1) + "\n"
            arguments.json.write_text(text, encoding="utf-8")
        label = "without a tool" if tool == NO_TOOL else tool
        print(
            f"sanitize: {label}: {ran} of {len(names)} cases ran, {findings} findings: "
            f"{'clean' if clean else 'NOT CLEAN'}",
            flush=True,
        )
        for number, verdict in enumerate(verdicts):
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                (arguments.logs / f"{tool}-{number}.txt").write_text(verdict.log)
            if verdict.status or verdict.findings:
                print("\n".join(verdict.log.splitlines()[:60]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
