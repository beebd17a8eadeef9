"""Run everything that a change needs on a GPU, and copy the results to their places.

    python tools/gpu_evidence.py run OUT                     # on the machine with the GPU
    python tools/gpu_evidence.py run OUT --part suite,sanitizer --jobs 15
    python tools/gpu_evidence.py run OUT --part suite --seconds 500      # the rest another time
    python tools/gpu_evidence.py take OUT                    # in a checkout: copy the results

Parts run one after the other, and the results of a part are in OUT as soon as it ends: an aborted
run loses the running part, or the running tests of the suite. A part that exceeds its time is
killed with every process that it started. If a part fails the status is 1; the others still run.

The suite is continued: tests that have passed on these sources, by tests/gpu_report.json or by the
reports in OUT, do not run again. Give --again if tests have changed. The report leaves out tests
that no longer exist. If only cuflash/distributed has changed, only the tests of several ranks run
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_digest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

BENCH = "-m cuflash bench --out {out}"
PEERS, ALL_PEERS = "cuflash,fa2,cudnn,fa4", "cuflash,cuflash-unordered,fa2,cudnn,fa4"
GENERATION = "generation.json"  # times of each letter, from runs of the example
#: Seconds that a part may take, and its program. {out}: the folder; {jobs}: number of processes.
PARTS: dict[str, tuple[int, str]] = {
    "sanitizer": (500, "tools/sanitize.py --jobs {jobs} --json {out}/sanitizer_report.json"),
    "mutants": (500, "tools/mutants.py --json {out}/mutants_report.json"),
    "forward": (
        300,
        f"{BENCH} --topic forward --set training,shapes,short,window,packed --dtype bfloat16 "
        f"--pass fwd --impl {PEERS} --budget-ms 8",
    ),
    "float16": (
        200,
        f"{BENCH} --topic float16 --set training --dtype float16 "
        f"--pass fwd,bwd --impl {ALL_PEERS} --budget-ms 8",
    ),
    "backward": (
        300,
        f"{BENCH} --topic backward --set training,shapes --dtype bfloat16 --pass bwd,fwd+bwd "
        f"--impl {ALL_PEERS} --budget-ms 12",
    ),
    "everyday": (
        300,
        f"{BENCH} --topic everyday --set everyday,bias --dtype bfloat16 --pass fwd,bwd "
        "--impl cuflash,cuflash-unordered,fa2,cudnn,eff,fa4 --budget-ms 8",
    ),
    "portable": (
        120,
        f"{BENCH} --topic portable --set portable --portable --dtype bfloat16 --impl cuflash,fa2 "
        "--budget-ms 10",
    ),
    "overhead": (
        120,
        f"{BENCH} --topic overhead --set host,compile --dtype bfloat16 --impl cuflash",
    ),
    "options": (
        120,
        f"{BENCH} --topic options --set options --dtype bfloat16 --impl cuflash --budget-ms 60",
    ),
    "precise": (
        300,
        f"{BENCH} --topic precise --set precise --impl cuflash,eff,math --budget-ms 15",
    ),
    "naive": (
        200,
        f"{BENCH} --topic naive --set naive --dtype float16 --impl cuflash,naive --budget-ms 10",
    ),
    "decode": (
        400,
        f"{BENCH} --topic decode --set decode --dtype bfloat16 --pass fwd --impl {PEERS} "
        "--budget-ms 20",
    ),
    "generation": (
        300,
        "examples/generate_text.py --device gpu --batch 1 64 --letters 1000 "
        f"--json {{out}}/{GENERATION}",
    ),
    "points": (120, "benchmarks/points.py --dtype float32,float64 --out {out}"),
    "accuracy": (
        200,
        "benchmarks/accuracy.py --device gpu --longest 4096 --impl cuflash,naive,fa2,cudnn,eff "
        "--out {out}",
    ),
    "memory": (120, f"{BENCH} --memory"),
    "allocations": (
        200,
        f"{BENCH} --topic allocations --set memory --dtype bfloat16 "
        "--impl cuflash,naive,fa2,cudnn,fa4",
    ),
    "io": (500, f"{BENCH} --io"),
}
SUITE_SECONDS = 3600.0
SHARD_TESTS = 12  # most tests of one process
#: Files of tests that compile many kernels which no other test uses.
ON_THEIR_OWN = ("tests/test_properties.py", "tests/test_covering.py")
ALL = ("suite", *PARTS)
REPORTS = ("gpu_report.json", "mutants_report.json", "sanitizer_report.json")


def run_program(
    arguments: Sequence[str], log: Path, seconds: float, devices: Sequence[str] = ()
) -> bool:
    """Run a Python program; return whether it ended with status 0 within its time.

    After a timeout all processes that it started are killed. The program sees ``devices``, and uses
    the first one by default.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each core has a process (D114)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            file.write(f"ended after {seconds:.0f} s\n")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False


def run_part(name: str, out: Path, jobs: int) -> bool:
    """Run the program of a part, with its output in a file beside its results."""
    seconds, program = PARTS[name]
    arguments = [word.format(out=out, jobs=jobs) for word in shlex.split(program)]
    return run_program(arguments, out / f"{name}.log", seconds)


def visible_devices() -> list[str]:
    """Name the devices that programs may use; empty if there is no driver."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    program = shutil.which("nvidia-smi")
    command = [program or "", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True) if program else None
    return done.stdout.split() if done and done.returncode == 0 else []


def gpu_tests(marks: str) -> list[str]:
    """Node ids of tests that run a kernel and have these marks, also of slow ones."""
    command = ["-m", "pytest", "--collect-only", "-q", "-m", f"gpu and {marks}", "--slow"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 5):  # 5: no such test
        raise RuntimeError(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def shards(tests: Sequence[str], jobs: int) -> list[list[str]]:
    """Distribute tests to processes; neighbouring tests, which share kernels, stay together.

    Each test of `ON_THEIR_OWN` has a process of its own; these come first. If few tests are left,
    as in a continued suite, each of the ``jobs`` gets some of them.
    """
    first = [[test] for test in tests if test.startswith(ON_THEIR_OWN)]
    rest = [test for test in tests if not test.startswith(ON_THEIR_OWN)]
    size = max(1, min(SHARD_TESTS, math.ceil(len(rest) / jobs)))
    return first + [rest[start : start + size] for start in range(0, len(rest), size)]


def report_of(paths: Iterable[Path], tests: Collection[str] | None = None) -> dict[str, Any]:
    """Join those reports among ``paths`` that belong to these sources, for all or some tests."""
    from gpu_report import joined, still_valid

    report: dict[str, Any] = {}
    now = gpu_digest.sources()
    for path in paths:
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("digest") == now["digest"]:
            valid = still_valid(found, now)
            own = {test: valid[test] for test in valid if tests is None or test in tests}
            report = joined(report, found | now | {"tests": own})
    return report


def run_suite(out: Path, jobs: int, seconds: float = SUITE_SECONDS, *, again: bool = False) -> bool:
    """Run all GPU tests in several processes; tests that need the device alone run last.

    Each process has another default device, and sees the other devices after it.
    """
    from gpu_report import flat, formatted

    start = time.perf_counter()
    folder = out / "shards"
    folder.mkdir(exist_ok=True)
    whole = () if again else (out / "gpu_report.json", ROOT / "tests" / "gpu_report.json")
    spent = next((found["seconds"] for path in whole if (found := report_of([path]))), 0.0)
    before = [] if again else [*whole, *sorted(folder.glob("*.json"))]
    known = flat(report_of(before).get("tests", {}))

    devices = visible_devices()

    def run_shard(number: int, tests: list[str], first: int) -> bool:
        name = f"{time.time_ns()}-{number}"
        left = start + seconds - time.perf_counter()
        command = ["-m", "pytest", "-q", "--slow", "--gpu-report", str(folder / f"{name}.json")]
        own = [*devices[first:], *devices[:first]]
        return left > 0 and run_program([*command, *tests], folder / f"{name}.log", left, own)

    with ThreadPoolExecutor(jobs) as pool:
        listed = list(pool.map(gpu_tests, ("not alone", "alone")))  # D115
        together, alone = ([t for t in tests if known.get(t) != "passed"] for tests in listed)
        first = itertools.cycle(range(max(1, len(devices))))
        passed = list(pool.map(run_shard, itertools.count(), shards(together, jobs), first))
    passed += [run_shard(len(passed), alone, 0)] if alone else []
    ours = [path for path in sorted(folder.glob("*.json")) if path not in before]
    every = {*itertools.chain(*listed)}
    if report := report_of([*before, *ours], every):
        took = time.perf_counter() - start  # processes run side by side
        report["seconds"] = round(spent + took, 1)
        report["not run"] = len(every - flat(report["tests"]).keys())
        (out / "gpu_report.json").write_text(formatted(report))
    return all(passed)


def run(
    names: Iterable[str],
    out: Path,
    jobs: int,
    seconds: float = SUITE_SECONDS,
    *,
    again: bool = False,
) -> int:
    """Run parts one after the other, printing a line for each.

    ``seconds`` and ``again`` are for the suite.
    """
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in names:
        start = time.perf_counter()
        if name == "suite":
            good = run_suite(out, jobs, seconds, again=again)
        else:
            good = run_part(name, out, jobs)
        failed |= not good
        took = time.perf_counter() - start
        print(f"{name}: {'ran' if good else 'FAILED'} [{took:.0f} s]", flush=True)
    return int(failed)


def take_reports(out: Path, root: Path) -> list[str]:
    """Copy the reports of tests, mutants and sanitizer to tests/, unless of other sources."""
    taken = []
    for name in REPORTS:
        if not (out / name).exists():
            continue
        text = (out / name).read_text()
        if json.loads(text).get("digest", gpu_digest.digest()) == gpu_digest.digest():
            (root / "tests" / name).write_text(text)
            taken.append(name)
        else:
            print(f"{name}: of other sources, left")
    return taken


def take_results(out: Path, root: Path, commit: str | None = None) -> list[str]:
    """Copy measurements to benchmarks/results, without the ``--out`` folder in their commands.

    ``commit`` is the measured commit, for a machine on which git could not tell it.
    """
    taken = []
    for path in sorted(out.glob("*.json")):
        text = path.read_text()
        result = json.loads(text)
        if "meta" not in result:
            continue
        text = re.sub(r" --out \S+?(?=[\" ])", "", text)
        if commit is not None:
            text = text.replace(json.dumps(result["meta"]["commit"]), json.dumps(commit))
        to = root / "benchmarks" / "results" / path.name
        to.write_text(text)
        taken.append(path.name)
        if path.with_suffix(".md").exists():
            to.with_suffix(".md").write_text(tables_of(json.loads(text)))
    return taken


def take_generation(out: Path, root: Path) -> list[str]:
    """Copy the times of letters to the example's folder, named by device and day."""
    from cuflash._timing.machine import device_slug

    if not (out / GENERATION).exists():
        return []
    first, *_ = json.loads(text := (out / GENERATION).read_text())
    device = device_slug(first["device"].partition(",")[0])
    name = f"{device}-generation-{first['date']}.json"
    (root / "examples" / "curves" / name).write_text(text)
    return [name]


def tables_of(result: dict[str, Any]) -> str:
    """A result as Markdown; results of points in space have another kind of rows."""
    from benchmarks import points, report

    of_points = any("points" in row for row in result["rows"])
    return (points if of_points else report).markdown(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, or copy their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("do", choices=("run", "take"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", default=",".join(ALL), help=f"some of {', '.join(ALL)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=SUITE_SECONDS, help="that the suite may take"
    )
    parser.add_argument("--again", action="store_true", help="also run tests that have passed")
    parser.add_argument("--commit", help="what was measured, where git could not say it (take)")
    arguments = parser.parse_args(argv)
    names = arguments.part.split(",")
    if unknown := sorted(set(names) - set(ALL)):
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(ALL)}")
    if arguments.do == "run":
        out, jobs = arguments.out.absolute(), arguments.jobs
        return run(names, out, jobs, arguments.seconds, again=arguments.again)
    commit = arguments.commit
    if commit is not None:
        git = ["git", "-C", str(ROOT), "rev-parse", commit]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    taken = [*take_reports(arguments.out, ROOT), *take_results(arguments.out, ROOT, commit)]
    taken += take_generation(arguments.out, ROOT)
    print("\n".join(f"{name}: taken" for name in taken) or "nothing to take")
    return 0 if taken else 1


if __name__ == "__main__":
    sys.exit(main())
