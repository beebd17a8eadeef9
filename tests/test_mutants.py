"""Does every mistake of tools/mutants.toml still apply, and do tables show the last run?"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import mutants
import pytest
from mutants import Outcome, replace
from readme_tables import MISTAKES, TABLES, filled

ALL, ON_THE_HOST = mutants.mutants(), mutants.mutants("host")


def test_each_can_be_made_in_one_place():  # one test, of which no part runs only a share
    for mutant in (*ALL, *ON_THE_HOST):
        text = (mutants.ROOT / mutant.path).read_text(encoding="utf-8")
        assert mutant.applied(text) != text


def test_there_are_enough_and_they_differ():
    assert len({m.name for m in ALL}) == len(ALL) >= 40
    assert len({(m.file, m.right, m.wrong) for m in ALL}) == len(ALL)
    assert sum(bool(m.survives) for m in ALL) <= (1 - mutants.LEAST) * len(ALL)
    files = {m.file for m in ALL}
    for kernel in ("forward_sm80.cu", "backward_dkv_sm80.cu", "backward_dq_sm80.cu",
                   "backward_dscore_sm80.cu", "backward_delta.cu", "sm90/dkv_warpgroup.cuh",
                   "backward_dq_sm90.cu", "backward_sm90.cu", "sm90/out_warpgroup.cuh",
                   "sm90/softmax.cuh"):  # fmt: skip
        assert kernel in files


def collected(tests, marks) -> str:
    """Return pytest's list of tests with these marks, and fail if a test does not exist."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", marks, *sorted(tests)], cwd=mutants.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize(("every", "marks"), [(ALL, "gpu"), (ON_THE_HOST, "not gpu")], ids=len)
def test_their_tests_exist_on_a_gpu_or_without(every, marks):
    tests = {test for mutant in every for test in mutant.tests}
    listed = collected(tests, marks)
    assert all(mutant.tests for mutant in every)
    assert not [test for test in tests if f"{test}\n" not in listed and f"{test}[" not in listed]


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "1 passed", "survived"), (1, "1 failed", "killed"), (None, "", "killed"),
        (2, "1 error", "broken"), (1, "subprocess.CalledProcessError: g++", "broken"),
        (0, "1 skipped", "broken"), (1, "SyntaxError: invalid syntax", "broken"),
    ],
)  # fmt: skip
def test_what_became_of_a_mistake_on_the_host(monkeypatch, tmp_path, status, said, outcome):
    monkeypatch.setattr(mutants, "copy_project", lambda folder, _: folder)
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (status, said))
    found = mutants.judge(ON_THE_HOST[0], tmp_path, float("inf"))
    assert (found.name, found.outcome) == (ON_THE_HOST[0].name, outcome)


def test_tests_of_a_copy_notice_the_mistake_of_the_copy(tmp_path):
    """Tests in a copy of the project notice its mistake: they import the copy and nothing else."""
    mutant = ON_THE_HOST[0]
    mutants.copy_project(tmp_path, mutant)
    module, right = mutant.path.as_posix(), (mutants.ROOT / mutant.path).read_text("utf-8")
    assert (tmp_path / module).read_text("utf-8") == mutant.applied(right)
    name = module.removesuffix(".py").replace("/", ".")
    (tmp_path / "tests" / "test_it.py").write_text(
        f"from pathlib import Path\n\nimport {name}\n\n\ndef test_it():\n"
        f"    assert len(Path({name}.__file__).read_text()) == {len(right)}\n"
    )
    status, said = mutants.run_tests(tmp_path, ["tests/test_it.py"], tmp_path / "kernels", 120.0)
    assert status == mutants.FAILED, said


def test_a_mistake_that_is_in_two_places_is_refused():
    twice = mutants.Mutant("twice", "a.cuh", "x", "y", ("test",))
    assert twice.applied("a x b") == "a y b"
    for text in ("x x", "a"):
        with pytest.raises(ValueError, match=r"twice: a\.cuh has"):
            twice.applied(text)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run all mistakes: ``fates`` gives outcomes, ``failing`` tests that fail without a mistake."""
    path, asked, fates, failing = tmp_path / "outcomes.json", [], {}, {}

    def judge(mutant, kernels, deadline):
        asked.append(mutant.name)
        return Outcome(mutant.name, mutant.digest, fates.get(mutant.name, "killed"), 0.1, "", "")

    def main(*names):
        asked.clear()
        status = mutants.main(["--json", str(path), "--jobs", "1", *names])
        return status, list(asked), json.loads(path.read_text())

    monkeypatch.setattr(mutants, "judge", judge)
    monkeypatch.setattr(mutants, "without_mistake", lambda test, *_: failing.get(test, ""))
    return SimpleNamespace(main=main, fates=fates, failing=failing)


def test_a_run_cut_short_goes_on_where_it_ended(run, monkeypatch):
    names = [m.name for m in ALL]
    run.fates |= {names[1]: "not run", names[2]: "broken", names[3]: "survived"}
    status, asked, found = run.main()
    assert (status, asked, found["broken"], found["not run"]) == (1, names, names[2:3], names[1:2])
    run.fates.clear()
    status, asked, found = run.main()
    assert (status, asked) == (1, names[1:3])  # one survived without a reason
    assert (found["killed"], found["survived"]) == (len(ALL) - 1, {names[3]: ""})
    monkeypatch.setattr(mutants, "mutants", lambda _: (replace(ALL[0], wrong=""), *ALL[1:]))
    assert run.main()[1] == names[:1]
    monkeypatch.setattr(mutants.gpu_digest, "digest", lambda: "of other sources")
    newer = {o["name"]: "other" in o["digest"] for o in run.main(names[0])[2]["outcomes"]}
    assert [*newer.items()] == [(name, name == names[0]) for name in names]
    assert run.main()[:2] == (0, names[1:])


def test_a_test_that_fails_without_a_mistake_notices_none(run):
    test = ALL[0].tests[0]
    run.failing[test] = "it fails"
    status, _, found = run.main()
    assert (status, found["broken"]) == (2, [m.name for m in ALL if test in m.tests])


@pytest.mark.skipif(not MISTAKES.exists(), reason="no run of all mistakes is recorded")
def test_the_recorded_run_was_complete_and_noticed_enough():
    said = json.loads(MISTAKES.read_text(encoding="utf-8"))
    assert said["share"] >= mutants.LEAST
    assert said["broken"] == said["not run"] == []
    reasons = {m.name: m.survives for m in ALL}
    for name, reason in said["survived"].items():
        assert reasons[name] == reason != "", f"{name} was not noticed, and nothing says why"
    assert {m.digest for m in ALL} <= {o["mistake"] for o in said["outcomes"]}


@pytest.mark.parametrize("document", TABLES)
def test_tables_of_documents_are_fresh(document):
    text = (mutants.ROOT / document).read_text(encoding="utf-8")
    assert filled(document, text) == text, "run python tools/readme_tables.py"
