"""Does the tool that gathers evidence on a GPU end what hangs, and put results in their places?"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import gpu_evidence
import pytest

import gpu_digest
import gpu_report
from cuflash import _cli

FORKS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9); open({0!r}, 'w')"])
open({1!r}, "w")
time.sleep(60)
"""
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
META = dict.fromkeys(("driver", "cupy", "nvrtc", "clocks"), "1") | {
    "device": "NVIDIA H100", "commit": "0" * 40, "date": "2026-01-01",
}  # fmt: skip


@pytest.fixture
def parts(monkeypatch):
    """Return an empty table of parts."""
    monkeypatch.setattr(gpu_evidence, "PARTS", {})
    return gpu_evidence.PARTS


def test_a_part_that_fails_or_hangs_hinders_no_other(parts, tmp_path, capsys):
    parts["fails"] = 60, "-c 'raise SystemExit(2)'"
    parts["hangs"] = 1, "-c 'import time; time.sleep(60)'"
    parts["runs"] = 60, """-c 'open("{out}/made", "w").write("{jobs}")'"""
    assert gpu_evidence.run(parts, tmp_path, jobs=3) == 1
    verdicts = [line.partition(" [")[0] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["fails: FAILED", "hangs: FAILED", "runs: ran"]
    assert (tmp_path / "made").read_text() == "3"
    assert gpu_evidence.run(["runs"], tmp_path, jobs=3) == 0


@pytest.mark.full
def test_what_a_part_started_ends_with_it(parts, tmp_path):
    late, began = tmp_path / "late", tmp_path / "began"
    parts["hangs"] = 8, f"-c {shlex.quote(FORKS.format(str(late), str(began)))}"
    parts["waits"] = 60, "-c 'import time; time.sleep(4)'"
    gpu_evidence.run(parts, tmp_path, jobs=1)
    assert began.exists()
    assert not late.exists()


@pytest.mark.parametrize("count", [0, 1, 7, 17, 64, 2049])
def test_every_test_is_in_one_shard(count):
    tests = [f"tests/test_a.py::test_{i}" for i in range(count)]
    tests[3:3] = alone = [
        f"{path}::test_row[{i}]" for path in gpu_evidence.ON_THEIR_OWN for i in "12"
    ]
    shards = gpu_evidence.shards(tests, 16)
    assert sorted(test for shard in shards for test in shard) == sorted(tests)
    assert shards[: len(alone)] == [[test] for test in alone]
    sizes = list(map(len, shards[len(alone) :]))
    assert max(sizes, default=0) <= gpu_evidence.SHARD_TESTS
    assert len(sizes) >= min(count, 8), "processes stand idle"


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """Simulate a suite of four tests; return what ran on which devices, and what shall fail."""
    listed = {"not alone": ["t.py::a", "t.py::b", "t.py::c"], "alone": ["t.py::clock"]}
    ran, broken = [], set()

    def run_program(arguments, _log, _seconds, devices):
        report, tests = Path(arguments[5]), arguments[6:]
        ran.append((list(tests), devices))
        outcomes = {test: "failed" if test in broken else "passed" for test in tests}
        run = dict.fromkeys(gpu_report.MACHINE, "1")
        run |= {"seconds": 1.0, **gpu_digest.sources(), "others": {}, "tests": outcomes}
        report.write_text(gpu_report.formatted(gpu_report.joined({}, run)))
        return not broken & set(tests)

    monkeypatch.setattr(gpu_digest, "digest", lambda: "of now")
    monkeypatch.setattr(gpu_report, "OF_RANKS", {"t.py::c"})
    monkeypatch.setattr(gpu_evidence, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_evidence, "gpu_tests", listed.get)
    monkeypatch.setattr(gpu_evidence, "run_program", run_program)
    return ran, broken


def test_a_suite_is_continued(suite, monkeypatch, tmp_path):
    """A suite runs again what failed or ran out of time, but nothing that passed on its sources."""
    ran, broken = suite
    broken.add("t.py::b")
    assert not gpu_evidence.run_suite(tmp_path, 2, seconds=-1)
    assert ran == []
    assert not gpu_evidence.run_suite(tmp_path, 2)
    first = [tests for tests, _ in ran]
    assert sorted(first[:2]) == [["t.py::a", "t.py::b"], ["t.py::c"]]
    assert first[2:] == [["t.py::clock"]]
    broken.clear()
    assert gpu_evidence.run_suite(tmp_path, 2)
    assert [tests for tests, _ in ran[3:]] == [["t.py::b"]]
    report = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [report[outcome] for outcome in gpu_report.OUTCOMES] == [4, 0, 0]
    assert report["seconds"] < 3  # of both runs; each process reports 1
    assert gpu_evidence.run_suite(tmp_path, 2)
    assert len(ran) == 4
    assert gpu_evidence.run_suite(tmp_path, 2, again=True)
    assert sorted(tests for tests, _ in ran[4:]) == sorted(first)
    monkeypatch.setattr(gpu_digest, "ranks_digest", lambda: "another")
    assert all(gpu_evidence.run_suite(tmp_path, 2) for _ in range(2))
    assert [tests for tests, _ in ran[7:]] == [["t.py::c"]]
    monkeypatch.setattr(gpu_evidence, "gpu_tests", {"not alone": ["t.py::a"], "alone": []}.get)
    assert gpu_evidence.run_suite(tmp_path, 2)  # tests that no longer exist are dropped
    assert json.loads((tmp_path / "gpu_report.json").read_text())["passed"] == 1


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("4,7", {"a": ["4", "7"], "b": ["7", "4"], "c": ["4", "7"], "clock": ["4", "7"]}),
        ("5", {"a": ["5"], "b": ["5"], "c": ["5"], "clock": ["5"]}),
    ],
)
def test_processes_are_dealt_out_to_devices(suite, monkeypatch, tmp_path, visible, devices):
    """Each process has another first device; tests that time a device run on the first of all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_evidence.run_suite(tmp_path, 3)
    assert {tests[0].removeprefix("t.py::"): own for tests, own in suite[0]} == devices


def test_a_program_is_given_its_devices(tmp_path):
    told = "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '1,0'"
    assert gpu_evidence.run_program(["-c", told], tmp_path / "log", 60, ["1", "0"])


@pytest.fixture
def folders(tmp_path):
    """Return a folder of results and a checkout."""
    out, root = tmp_path / "out", tmp_path / "root"
    for folder in (out, root / "tests", root / "benchmarks" / "results"):
        folder.mkdir(parents=True)
    return out, root


@pytest.mark.parametrize("commit", [None, "f" * 40])
def test_results_know_their_commit_and_not_their_folder(folders, commit):
    out, root = folders
    command = "python -m cuflash bench --out /somewhere/out --set short"
    result = {"meta": META | {"command": command}, "rows": [], "notes": []}
    (out / "h100-short.json").write_text(json.dumps(result))
    (out / "h100-short.md").write_text("as it was")
    (out / "other.json").write_text("{}")
    assert gpu_evidence.take_results(out, root, commit) == ["h100-short.json"]
    kept = root / "benchmarks" / "results" / "h100-short.json"
    meta, text = json.loads(kept.read_text())["meta"], kept.with_suffix(".md").read_text()
    assert meta["command"] == "python -m cuflash bench --set short"
    assert meta["commit"] == (commit or META["commit"])
    assert meta["commit"] in text
    assert "somewhere" not in text


def test_times_of_letters_lie_beside_the_example(folders):
    out, root = folders
    curves = root / "examples" / "curves"
    curves.mkdir(parents=True)
    assert gpu_evidence.take_generation(out, root) == []
    runs = [{"device": "NVIDIA H100 80GB HBM3, CuPy 14.2.0", "date": "2026-01-01", "batch": 1}]
    (out / gpu_evidence.GENERATION).write_text(json.dumps(runs))
    assert gpu_evidence.take_generation(out, root) == ["h100-generation-2026-01-01.json"]
    assert json.loads((curves / "h100-generation-2026-01-01.json").read_text()) == runs
    assert gpu_evidence.take_results(out, root) == []  # they are not results of benchmarks


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_committed_tables_are_those_of_their_rows(path):
    result = json.loads(path.with_suffix(".json").read_text())
    assert path.read_text() == gpu_evidence.tables_of(result)


@pytest.mark.parametrize("name", gpu_evidence.REPORTS)
@pytest.mark.parametrize("digest", [gpu_digest.digest(), "another"])
def test_a_report_of_other_sources_stays(folders, digest, name):
    out, root = folders
    (out / name).write_text(json.dumps({"digest": digest}))
    expected = [name] if digest == gpu_digest.digest() else []
    assert gpu_evidence.take_reports(out, root) == expected
    assert (root / "tests" / name).exists() == bool(expected)
    assert gpu_evidence.take_results(out, root) == []


def test_parts_ask_for_what_there_is_and_write_the_reports_that_are_taken():
    for _, program in gpu_evidence.PARTS.values():
        _, found, words = program.partition("-m cuflash ")
        if found:
            _cli.parser().parse_args(words.split())
    programs = " ".join(program for _, program in gpu_evidence.PARTS.values())
    written = [name for name in gpu_evidence.REPORTS if f"{{out}}/{name}" in programs]
    assert written == ["mutants_report.json", "sanitizer_report.json"]
