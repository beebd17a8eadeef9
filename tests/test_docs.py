"""Do the examples in docstrings and documents run, and do documents name files that exist?"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from readme_tables import TABLES, filled

import cuflash

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if p.exists()]
PUBLIC = [name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))]


@pytest.mark.parametrize("name", [*PUBLIC, "Options", "ScoreMod"])
def test_docstring_examples_run(name):
    function = getattr(cuflash, name)
    tests = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert any(test.examples for test in tests), f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name):
    text = inspect.getdoc(getattr(cuflash, name))
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"{section}\n---" in text, f"{name} lacks {section}"
    for parameter in inspect.signature(getattr(cuflash, name)).parameters:
        assert re.search(rf"\b{parameter}\b", text), f"{name} does not describe {parameter}"


BLOCK = re.compile(r"```python(?: needs=(\w+))?\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_of_documents_run(path):
    """Blocks of one document share names; ``needs=`` names a library that a block is about."""
    names: dict[str, object] = {"np": np}
    absent = set()
    for needed, block in BLOCK.findall(path.read_text(encoding="utf-8")):
        if needed and importlib.util.find_spec(needed) is None:
            absent.add(needed)
            continue
        exec(compile(block, path.name, "exec"), names)
    if absent:
        pytest.skip(f"the rest passed; not installed: {', '.join(sorted(absent))}")


def test_the_map_of_the_cuda_sources_is_whole():
    """Every file in a row of its own question, or its folder in one."""
    kernels = ROOT / "kernels_cu"
    text = (kernels / "README.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (.*?) \|", text[: text.index("## Words")], re.MULTILINE))
    named = set(re.findall(r"`([\w/.]+)`", rows)) | {"formulas/"}  # told of with formulas.cuh
    files = {p.relative_to(kernels).as_posix() for p in kernels.rglob("*") if p.is_file()}
    files.remove("README.md")
    folders = {name for name in named if name.endswith("/")}
    assert {f for f in files - named if not f.startswith(tuple(folders))} == set()
    assert named - folders - files == set()


@pytest.mark.parametrize("document", TABLES)
def test_tables_are_fresh(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert filled(document, text) == text, "run python tools/readme_tables.py"


def test_every_option_names_the_tests_that_prove_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| forward and gradient | cuflash |") :].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 19
    for row in rows:
        found = re.fullmatch(r'\[yes\]\((tests/\w+\.py) "([\w, ]+?)(?:: ([\w, ]+))?"\)', row[1])
        assert found, row
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        for name in found[2].split(", "):
            assert f"\ndef {name}(" in source, name
        for case in (found[3] or "").split(", "):
            assert not case or f'"{case}": {{' in source, case


def test_the_readme_tells_of_every_function():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("## The functions") : text.index("## Accuracy")]
    told = set(re.findall(r"`(\w+)", table)) | {"show_config"}  # under Installation
    assert set(PUBLIC) <= told
