"""Can every mistake of tools/mutants.toml still be made, and do tables tell of the last run?"""

from __future__ import annotations

import json
import subprocess
import sys

import mutants
import pytest
from readme_tables import MISTAKES, TABLES, filled

ALL, ON_THE_HOST = mutants.mutants(), mutants.mutants("host")


@pytest.mark.parametrize("mutant", [*ALL, *ON_THE_HOST], ids=lambda m: m.name)
def test_it_can_be_made_in_one_place(mutant):
    text = (mutants.ROOT / mutant.path).read_text(encoding="utf-8")
    assert mutant.applied(text) != text


def test_there_are_enough_and_they_differ():
    assert len(ALL) >= 40
    assert len({m.name for m in ALL}) == len(ALL)
    assert len({(m.file, m.right, m.wrong) for m in ALL}) == len(ALL)
    assert sum(bool(m.survives) for m in ALL) <= (1 - mutants.LEAST) * len(ALL)
    files = {m.file for m in ALL}
    for kernel in ("forward_sm80.cu", "backward_dkv_sm80.cu", "backward_dq_sm80.cu",
                   "backward_dscore_sm80.cu", "backward_delta.cu", "sm90/dkv_warpgroup.cuh",
                   "backward_dq_sm90.cu", "backward_sm90.cu", "sm90/consumer.cuh",
                   "sm90/softmax.cuh"):  # fmt: skip
        assert kernel in files


def collected(tests, marks) -> str:
    """Return what pytest lists of tests with these marks; it fails where one does not exist."""
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


@pytest.mark.parametrize("mutant", [ALL[0], ON_THE_HOST[0]], ids=lambda m: m.kind)
def test_a_copy_of_the_project_has_the_mistake(tmp_path, mutant):
    mutants.copy_project(tmp_path, mutant)
    own = (mutants.ROOT / mutant.path).read_text(encoding="utf-8")
    assert (tmp_path / mutant.path).read_text(encoding="utf-8") == mutant.applied(own)


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


@pytest.mark.parametrize("value", [1, 2])
def test_tests_of_a_copy_import_the_copy(tmp_path, value):
    """Not what the program itself has imported of the project."""
    files = {
        "cuflash/__init__.py": f"value = {value}\n",
        "conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--gpu-timeout')\n",
        "tests/test_it.py": "import cuflash\n\n\ndef test_it():\n    assert cuflash.value == 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    status, said = mutants.run_tests(tmp_path, ["tests/test_it.py"], tmp_path / "kernels", 120.0)
    assert status == (0 if value == 1 else mutants.FAILED), said


def test_a_mistake_that_is_in_two_places_is_refused():
    twice = mutants.Mutant("twice", "a.cuh", "x", "y", ("test",))
    assert twice.applied("a x b") == "a y b"
    for text in ("x x", "a"):
        with pytest.raises(ValueError, match=r"twice: a\.cuh has"):
            twice.applied(text)


def test_outcomes_are_counted():
    outcomes = [
        mutants.Outcome("a", "killed", 1.0, "", ""),
        mutants.Outcome("b", "survived", 1.0, "no difference", ""),
        mutants.Outcome("c", "broken", 1.0, "", "error"),
    ]
    found = mutants.report(outcomes, 3.0)
    assert (found["mutants"], found["killed"]) == (3, 1)
    assert found["survived"] == {"b": "no difference"}
    assert found["broken"] == ["c"]


def test_a_run_cut_short_goes_on_where_it_ended(tmp_path, monkeypatch):
    names, fate = [m.name for m in ALL], {}
    asked: list[str] = []

    def judge(mutant, kernels, deadline):
        asked.append(mutant.name)
        return mutants.Outcome(mutant.name, fate.get(mutant.name, "killed"), 0.1, "", "")

    monkeypatch.setattr(mutants, "judge", judge)
    monkeypatch.setattr(mutants, "without_mistake", lambda *_: "")
    path = tmp_path / "outcomes.json"
    fate |= {names[1]: "not run", names[2]: "broken", names[3]: "survived"}
    assert mutants.main(["--json", str(path), "--jobs", "1"]) == 1
    assert asked == names
    asked.clear()
    fate.clear()
    assert mutants.main(["--json", str(path), "--jobs", "1"]) == 1  # one survived unexpectedly
    assert asked == names[1:3]
    found = json.loads(path.read_text())
    assert (found["mutants"], found["killed"]) == (len(ALL), len(ALL) - 1)
    assert [o["name"] for o in found["outcomes"]] == names
    asked.clear()
    monkeypatch.setattr(mutants.gpu_digest, "digest", lambda: "of other sources")
    assert mutants.main(["--json", str(path), "--jobs", "1"]) == 0
    assert asked == names


def test_a_test_that_fails_without_a_mistake_notices_none(tmp_path, monkeypatch):
    chosen = ALL[0]
    monkeypatch.setattr(mutants, "judge", lambda mutant, kernels, deadline: mutants.Outcome(
        mutant.name, "killed", 0.1, "", ""))  # fmt: skip
    monkeypatch.setattr(mutants, "without_mistake", lambda test, *_: f"{test} fails")
    path = tmp_path / "outcomes.json"
    assert mutants.main([chosen.name, "--json", str(path), "--jobs", "1"]) == 2
    assert json.loads(path.read_text())["broken"] == [chosen.name]


@pytest.mark.skipif(not MISTAKES.exists(), reason="no run of all mistakes is recorded")
def test_the_recorded_run_was_complete_and_noticed_enough():
    said = json.loads(MISTAKES.read_text(encoding="utf-8"))
    assert said["share"] >= mutants.LEAST
    assert said["broken"] == said["not run"] == []
    reasons = {m.name: m.survives for m in ALL}
    for name, reason in said["survived"].items():
        assert reason, f"{name} was not noticed, and nothing says why"
        assert reasons[name] == reason
    assert set(reasons) <= {o["name"] for o in said["outcomes"]}


@pytest.mark.parametrize("document", TABLES)
def test_tables_of_documents_are_fresh(document):
    text = (mutants.ROOT / document).read_text(encoding="utf-8")
    assert filled(document, text) == text, "run python tools/readme_tables.py"
