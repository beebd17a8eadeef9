"""Would a finding of the sanitizer be noticed, and is every case of its set a legal call?"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import sanitize


@pytest.mark.parametrize("case", sanitize.CASES, ids=lambda case: case.name)
def test_case_is_a_legal_call(case):
    sanitize.run(np, case)


def test_cases_have_names_of_their_own():
    assert len({case.name for case in sanitize.CASES}) == len(sanitize.CASES)


def test_misaligned_case_is_misaligned():
    case = next(case for case in sanitize.CASES if case.lead)
    view = sanitize.placed(np, np.ones((4, 4), np.float16), case)
    assert view.__array_interface__["data"][0] % 4 != 0


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that installs a stand-in for compute-sanitizer."""

    def install(body):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!{sys.executable}\nimport sys\nnames = {NAMES}\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sanitize, "find_sanitizer", lambda: str(path))
        real = sanitize.command

        def command(program, tool, names):
            if tool == "none":
                return [sys.executable, "-c", f"for n in {list(names)!r}: print('ran:', n)"]
            return real(program, tool, names)

        monkeypatch.setattr(sanitize, "command", command)

    return install


NAMES = "sys.argv[sys.argv.index('--inside') + 2:]"
RAN = "[print('ran:', name) for name in names]\n"


def test_clean_run(program, capsys):
    program(RAN + "print('========= ERROR SUMMARY: 0 errors')")
    assert sanitize.main(["--jobs", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.endswith("0 findings: clean") for line in lines)
    total = len(sanitize.CASES)
    assert f"memcheck: {total} of {total} cases ran" in lines[1]


@pytest.mark.parametrize(
    "body",
    [
        RAN + "print('========= ERROR SUMMARY: 2 errors')",
        RAN + "print('========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)')",
        RAN + "sys.exit(86)",
        "[print('ran:', name) for name in names[1:]]",
        "sys.exit('no device')",
    ],
)
def test_findings_failures_and_skipped_cases_are_not_clean(program, capsys, body):
    program(body)
    assert sanitize.main(["--jobs", "2", "--tool", "memcheck"]) == 1
    assert "NOT CLEAN" in capsys.readouterr().out


def test_absent_sanitizer_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2
    assert "not there" in capsys.readouterr().out


def test_unknown_case_is_no_success(capsys):
    assert sanitize.main(["--case", "no such case"]) == 1
