"""Do the GPU tests notice the mistakes of `mutants.toml` in the kernels, one at a time?

With ``--host``: do tests without a GPU notice the mistakes of `host_mutants.toml` in the kernels
and in the Python modules?

Every mistake is made in a copy of the project; the tests that the table names must then fail. All
copies compile into one folder. The same tests first run on the unchanged project, where they must
pass; their kernels are reused if a mistake does not change them. Each run is a process of its own,
forked from one that has imported NumPy, CuPy and pytest. The status is 1 if fewer than 95 % of the
mistakes are noticed, or if one survives that the table does not expect to survive.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import gpu_digest
from cuflash._timing.machine import query_driver

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("cuflash", "kernels_cu", "tests", "tools", "pyproject.toml")
CASES = "tests/test_every_kernel.py::test_{}[{}]"
LEAST = 0.95
#: Seconds for a copy to compile and run its kernels; a copy that takes longer hangs. Without a GPU
#: the limit is higher, because compilers may share cores.
TIMEOUTS = {"gpu": 40.0, "host": 240.0}
#: The tables of mistakes, and the folders to which their paths are relative.
TABLES = {"gpu": ("mutants.toml", "kernels_cu"), "host": ("host_mutants.toml", "")}
#: Words in the output of a failed test that show that the mistake does not compile.
NO_PROGRAM = ("CompileError", "CalledProcessError")
#: Modules that take long to import and are the same in all copies.
PRELOADED = ("numpy", "ml_dtypes", "cupy", "cupy_backends.cuda.libs.nvrtc", "pytest")
PROCESSES = multiprocessing.get_context("forkserver")
FAILED, HUNG = 1, 3  # statuses of pytest and of tests/gpu_watchdog.py


@dataclass(frozen=True)
class Mutant:
    """A mistake: the text ``right`` of one file becomes ``wrong``."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    survives: str = ""  # why no test can notice it
    kind: str = "gpu"  # key of TABLES

    @property
    def digest(self) -> str:
        """Digest of the entry in the table: an outcome belongs to what the entry says."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """The file, relative to the root of the project."""
        return Path(TABLES[self.kind][1], self.file)

    def applied(self, text: str) -> str:
        """The file's text with the mistake; ValueError unless ``right`` is in it exactly once."""
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.right)} of {self.right!r}"
            )
        return text.replace(self.right, self.wrong)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant: killed, survived, broken (does not compile) or not run."""

    name: str
    mistake: str  # digest of the mutant
    outcome: str
    seconds: float
    expected: str
    last_line: str
    digest: str = ""  # of the sources on which it was tried


def mutants(kind: str = "gpu") -> tuple[Mutant, ...]:
    """All mistakes of the table of a kind."""
    text = (Path(__file__).parent / TABLES[kind][0]).read_text(encoding="utf-8")
    return tuple(_mutant(kind=kind, **entry) for entry in tomllib.loads(text)["mutant"])


def _mutant(
    *,
    forward: Sequence[str] = (),
    backward: Sequence[str] = (),
    tests: Sequence[str] = (),
    **fields: str,
) -> Mutant:
    cases = [CASES.format("forward", case) for case in forward]
    cases += [CASES.format("backward", case) for case in backward]
    return Mutant(tests=(*cases, *tests), **fields)


def copy_project(folder: Path, mutant: Mutant | None) -> Path:
    """Copy the files that the tests need, and make the mistake there."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    if mutant is not None:
        path = folder / mutant.path
        path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def pytest_in(folder: Path, tests: Sequence[str], kernels: Path, said: Path) -> None:
    """Run pytest in a copy and exit; to be called in a process of its own."""
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if not _leads_to_root(entry))]
    # Modules of the project that this program has imported do not have the mistake.
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "/")
        if not name.startswith("__") and any(path.is_relative_to(ROOT / part) for part in COPIED):
            del sys.modules[name]
    os.environ["CUPY_CACHE_DIR"] = str(kernels)
    import pytest

    arguments = ("-q", "-x", "--tb=line", "-p", "no:cacheprovider", "--gpu-timeout=20")
    status = pytest.main([*arguments, *tests])
    sys.stdout.flush()
    os._exit(status)


def _leads_to_root(entry: str) -> bool:
    return Path(entry or ".").resolve() == ROOT


def run_tests(
    folder: Path, tests: Iterable[str], kernels: Path, timeout: float
) -> tuple[int | None, str]:
    """Status of pytest (None after a timeout) and its output."""
    said = folder / "said.txt"
    process = PROCESSES.Process(target=pytest_in, args=(folder, tuple(tests), kernels, said))
    process.start()
    process.join(timeout)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status, said.read_text(errors="replace") if said.exists() else ""


def judge(mutant: Mutant, kernels: Path, deadline: float) -> Outcome:
    """Try one mistake, unless the deadline has passed."""
    start = time.perf_counter()
    if start > deadline:
        return Outcome(mutant.name, mutant.digest, "not run", 0.0, mutant.survives, "")
    with tempfile.TemporaryDirectory() as name:
        copy = copy_project(Path(name), mutant)
        status, said = run_tests(copy, mutant.tests, kernels, TIMEOUTS[mutant.kind])
    outcome = {0: "survived", FAILED: "killed", HUNG: "killed", None: "killed"}.get(
        status, "broken"
    )
    # A process that raises ends with the same status as failed tests.
    no_test_failed = status == FAILED and " failed" not in said
    if no_test_failed or any(word in said for word in NO_PROGRAM) or " skipped" in said:
        outcome = "broken"
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    took = time.perf_counter() - start
    return Outcome(mutant.name, mutant.digest, outcome, took, mutant.survives, last[:200])


def without_mistake(test: str, kernels: Path, timeout: float) -> str:
    """Why a test fails on the unchanged project; empty if it passes."""
    with tempfile.TemporaryDirectory() as name:
        status, said = run_tests(copy_project(Path(name), None), [test], kernels, timeout)
    passed = status == 0 and " skipped" not in said
    return "" if passed else f"{test}: status {status}\n{said[-800:]}"


def sources(kind: str = "gpu") -> str:
    """Digest of the sources to which outcomes belong; host: of all packages."""
    return gpu_digest.digest() if kind == "gpu" else gpu_digest.digest(apart=())


def outcomes_in(said: dict[str, Any], every: Iterable[Mutant]) -> list[Outcome]:
    """Outcomes in a report, of mutants that have not changed; their sources may be older."""
    now = {(mutant.name, mutant.digest) for mutant in every}
    outcomes = [Outcome(**{"digest": said["digest"], **o}) for o in said.get("outcomes", ())]
    return [
        o for o in outcomes if o.outcome in ("killed", "survived") and (o.name, o.mistake) in now
    ]


def report(outcomes: Sequence[Outcome], seconds: float, kind: str = "gpu") -> dict[str, Any]:
    """The report of outcomes, as values for JSON."""
    killed = sum(o.outcome == "killed" for o in outcomes)
    return {
        "digest": sources(kind),
        "device": next(iter(query_driver("name")), "") if kind == "gpu" else "no GPU",
        "date": dt.date.today().isoformat(),
        "mutants": len(outcomes),
        "killed": killed,
        "share": killed / max(len(outcomes), 1),
        "survived": {o.name: o.expected for o in outcomes if o.outcome == "survived"},
        "broken": [o.name for o in outcomes if o.outcome == "broken"],
        "not run": [o.name for o in outcomes if o.outcome == "not run"],
        "seconds": round(seconds, 1),
        "outcomes": [asdict(o) for o in outcomes],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names (default: all)")
    parser.add_argument(
        "--host", dest="kind", action="store_const", const="host", default="gpu",
        help="try the mistakes of host_mutants.toml, without a GPU",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="where outcomes are kept")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="SECONDS",
        help="begin no run later than this (default: all are run)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    every = mutants(arguments.kind)
    chosen = [m for m in every if not arguments.names or any(n in m.name for n in arguments.names)]
    start = time.perf_counter()
    deadline = start + arguments.within
    said = {}
    if arguments.json and arguments.json.exists():
        said = json.loads(arguments.json.read_text(encoding="utf-8"))
    digest = sources(arguments.kind)
    older = {o.name: o for o in outcomes_in(said, every)}
    known = {name: o for name, o in older.items() if o.digest == digest}
    left = [m for m in chosen if m.name not in known]
    PROCESSES.set_forkserver_preload(list(PRELOADED))
    tests = sorted({test for mutant in left for test in mutant.tests})
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.jobs) as pool:
        kernels = Path(name)
        limit = TIMEOUTS[arguments.kind]
        healthy = pool.map(lambda test: without_mistake(test, kernels, limit), tests)
        found = pool.map(lambda mutant: judge(mutant, kernels, deadline), left)
        known |= {outcome.name: replace(outcome, digest=digest) for outcome in found}
        wrong = {test: text for test, text in zip(tests, healthy, strict=True) if text}
    for mutant in left:  # a test that fails without the mistake does not notice it
        if not wrong.keys().isdisjoint(mutant.tests):
            known[mutant.name] = replace(known[mutant.name], outcome="broken")
    if wrong:
        print("without a mistake\n" + "\n".join(wrong.values()))
    seconds = time.perf_counter() - start + (said.get("seconds", 0.0) if known else 0.0)
    known = older | known
    outcomes = [known[m.name] for m in every if m.name in known]
    result = report(outcomes, seconds, arguments.kind)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for outcome in outcomes:
        if outcome.outcome != "killed":
            print(f"{outcome.outcome}: {outcome.name} ({outcome.expected or outcome.last_line})")
    print(f"{result['killed']} of {len(outcomes)} killed in {result['seconds']} s")
    if wrong:
        return 2
    unexpected = [o for o in outcomes if o.outcome != "killed" and not o.expected]
    return int(bool(unexpected) or result["share"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
