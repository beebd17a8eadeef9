"""Does what surrounds the code tell the truth? Citation, workflow, command, sdist, hints."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import cuflash
from cuflash import _errors

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(cuflash.__version__)}$", text, re.MULTILINE)
    assert re.search(rf"^license: {PROJECT['project']['license']}$", text, re.MULTILINE)


def test_the_workflow_runs_the_gate_on_the_versions_that_are_promised():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.search(r"^ +- run: \.ci/run$", text, re.MULTILINE)
    versions = [c.split()[-1] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c]
    tested = re.findall(r'"(3\.\d+)"', text)
    assert tested == [versions[0], versions[-1]]


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_what_a_document_names_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    files = re.findall(r"(?<![\w/])((?:\.ci|tests|tools|docs|kernels_cu)/[\w./\-]+\w)", text)
    assert links or files
    assert [name for name in {*links, *files} if not (ROOT / name).exists()] == []


def test_the_console_script_is_the_command_line(monkeypatch, capsys):
    module, _, name = PROJECT["project"]["scripts"]["cuflash"].partition(":")
    main = getattr(importlib.import_module(module), name)
    for program, called in (("/bin/cuflash", "cuflash"), ("__main__.py", "python -m cuflash")):
        monkeypatch.setattr(sys, "argv", [program, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {called} [-h]")


def test_hints_hold_in_a_checkout_and_of_a_wheel(monkeypatch, tmp_path):
    assert _errors.pip_install("cuda12") == f'pip install -e "{ROOT}[cuda12]"'
    monkeypatch.setattr(_errors, "_ROOT", tmp_path)  # site-packages has no pyproject.toml
    assert _errors.pip_install("cuda12", "cuda13") == (
        'pip install "cuflash[cuda12]" or pip install "cuflash[cuda13]"'
    )


def test_every_hint_names_an_extra():
    extras = set(PROJECT["project"]["optional-dependencies"])
    named = set()
    for path in (ROOT / "cuflash").rglob("*.py"):
        for given in re.findall(r"pip_install\(([^)]*)\)", path.read_text(encoding="utf-8")):
            named |= set(re.findall(r"""["'](\w+)["']""", given))
    assert {"cuda12", "testing"} <= named <= extras


@pytest.mark.full
def test_the_sdist_has_the_sources_and_not_what_was_measured(tmp_path):
    """Its description, which a package index shows, has no link to a file and no picture."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="what builds the sdist is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("cuflash-*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        metadata = sdist.extractfile(f"cuflash-{cuflash.__version__}/PKG-INFO").read().decode()
    assert {"cuflash/__init__.py", "kernels_cu/config.cuh", "tests/conftest.py"} <= names
    assert not [n for n in names if n.startswith(("benchmarks/results/", "benchmarks/sweeps/"))]
    assert "docs/tutorial.md | the library in ten minutes" in metadata
    assert re.findall(r"\]\((?!https://)[^)]*\)|<img|<a ", metadata) == []
