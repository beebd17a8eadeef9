"""Do type checkers know the type of what a call returns, and find a user's mistakes?"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CASES = "tests/typing_cases.py"
#: Strict: an unneeded "type: ignore" is an error.
CHECKERS = {"mypy": ("mypy", CASES), "basedpyright": ("basedpyright",)}


def findings(checker: str, folder: Path, text: str) -> tuple[list[int], str]:
    """Return the lines in which a checker found an error, and its output."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed (the extra dev brings it)")
    (folder / "tests").mkdir()
    (folder / CASES).write_text(text, encoding="utf-8")
    (folder / "cuflash").symlink_to(ROOT / "cuflash")
    shutil.copy(ROOT / "pyproject.toml", folder)
    command = [sys.executable, "-m", *CHECKERS[checker]]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    lines = re.findall(r"typing_cases\.py:(\d+):.*error", run.stdout)
    return sorted(set(map(int, lines))), run.stdout


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_code_has_the_types_that_it_says(checker, tmp_path):
    text = (ROOT / CASES).read_text(encoding="utf-8")
    found, written = findings(checker, tmp_path, text)
    assert not found, written


@pytest.mark.full
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_found_in_their_lines(checker, tmp_path):
    text = (ROOT / CASES).read_text(encoding="utf-8")
    expected = [i for i, line in enumerate(text.splitlines(), 1) if line.endswith("# E")]
    assert expected
    found, written = findings(checker, tmp_path, text.replace("# type: ignore # E", "# E"))
    assert found == expected, written
