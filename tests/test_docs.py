"""Do the examples in docstrings and documents run, and do documents name files that exist?"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import why_no_gpu

import cuflash

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.exists()]
MAP = ROOT / "kernels_cu" / "README.md"
PUBLIC = [name for name in cuflash.__all__ if inspect.isfunction(getattr(cuflash, name))]


OF_TESTING = [f"testing.{n}" for n in cuflash.testing.__all__ if n != "FAMILIES"]
PACKAGES = (cuflash.distributed, cuflash.reference, cuflash.testing, cuflash.tuning)
SHOWN = [
    f"{module.__name__}.{name}"
    for module in (cuflash, *PACKAGES)
    for name in module.__all__
    if callable(getattr(module, name))
]
#: Examples read it as h100.jsonl, the file that a sweep writes.
SWEEP = ROOT / "benchmarks" / "sweeps" / "h100-forward-sm90-d128.jsonl"


def members(shown: object) -> list[str]:
    """Return the names of a class's own methods and properties, which the site lists."""
    own = vars(shown).items() if inspect.isclass(shown) else ()
    return [
        name
        for name, member in own
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    ]


@pytest.mark.parametrize("path", SHOWN)
def test_docstring_examples_run(path, tmp_path, monkeypatch):
    """A public function or class has examples that run, and those of a class use every member."""
    shown = pkgutil.resolve_name(path)
    tests = doctest.DocTestFinder().find(shown, path, module=False, globs={})
    written = "".join(example.source for test in tests for example in test.examples)
    assert written, f"{path} has no example"
    assert [name for name in members(shown) if f".{name}" not in written] == []
    shutil.copy(SWEEP, tmp_path / "h100.jsonl")
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", [*PUBLIC, *OF_TESTING])
def test_docstrings_are_complete(name):
    found = pkgutil.resolve_name(f"cuflash.{name}")
    text = inspect.getdoc(found)
    sections = ("Parameters", "Returns", "Raises", "Examples")
    if name in OF_TESTING:  # an assertion returns nothing, a strategy raises nothing
        sections = ("Attributes" if inspect.isclass(found) else "Parameters", "Examples")
    for section in sections:
        assert f"{section}\n---" in text, f"{name} lacks {section}"
    for parameter in inspect.signature(found).parameters:
        assert re.search(rf"\b{parameter}\b", text), f"{name} does not describe {parameter}"


BLOCK = re.compile(r"```python(?: needs=([\w.]+))?\n(.*?)```", re.DOTALL)


def can_run(needed: str) -> bool:
    if needed == "gpu":
        return not why_no_gpu()
    package = needed.partition(".")[0]
    return all(importlib.util.find_spec(name) for name in (package, needed))


OF_GPU = [path for path in DOCUMENTS if "needs=gpu" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    "path",
    [
        *DOCUMENTS,
        *(pytest.param(p, marks=pytest.mark.gpu, id=f"{p.name}-gpu") for p in OF_GPU),
    ],
    ids=lambda p: p.name,
)
def test_python_blocks_of_documents_run(path):
    """Python blocks of a document run in one namespace; ``needs=`` names a module, or a GPU."""
    names: dict[str, object] = {}
    absent = set()
    for needed, block in BLOCK.findall(path.read_text(encoding="utf-8")):
        if needed and not can_run(needed):
            absent.add(needed)
            continue
        exec(compile(block, path.name, "exec"), names)
    if absent:
        pytest.skip(f"the rest passed; not installed: {', '.join(sorted(absent))}")


@pytest.mark.parametrize("path", [*DOCUMENTS, MAP], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_names_and_folders_in_documents_exist(path):
    """Dotted cuflash names and folders (a final slash) exist; test_house_rules checks files."""
    text = path.read_text(encoding="utf-8")
    for name in set(re.findall(r"(?<![/\w.])cuflash(?:\.[A-Za-z_]\w*)+", text)):
        pkgutil.resolve_name(name)
    for folder in set(re.findall(r"`(\w[\w/.\-]*/)`", text)):
        assert (ROOT / folder).is_dir() or (path.parent / folder).is_dir(), folder


def unknown_code(text: str, sources: str) -> set[str]:
    """Return backticked words that no source has, except NVIDIA's instructions and functions."""
    others = {"cuLaunchKernelEx", "griddepcontrol"}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    words = {word for span in spans for word in re.findall(r"[A-Za-z_]\w{3,}", span)}
    return {word for word in words - others if not word.isupper() and word not in sources}


@pytest.mark.parametrize("name", ["forward-sm90.md", "backward-sm90.md", "tuning.md"])
def test_code_named_in_documents_exists(name):
    files = [p for folder in ("cuflash", "kernels_cu", "tests", "tools", "benchmarks")
             for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".cu", ".cuh"}]  # fmt: skip
    files.remove(Path(__file__).resolve())
    sources = "\n".join(f"{p.as_posix()}\n{p.read_text(encoding='utf-8')}" for p in files)
    assert unknown_code((ROOT / "docs" / name).read_text(encoding="utf-8"), sources) == set()
    assert unknown_code("the barrier `q_absent`, `R2UR`", sources) == {"q_absent"}


def test_unknown_names_in_documents_are_noticed(tmp_path):
    document = tmp_path / "page.md"
    for text in ("call `cuflash.absent(x)`", "see `cuflash._absent.name`", "in `absent/folder/`"):
        document.write_text(text)
        with pytest.raises((AttributeError, ImportError, AssertionError)):
            test_names_and_folders_in_documents_exist(document)


def test_the_map_of_the_cuda_sources_is_whole():
    """Every file, or its folder, is in one row of the map."""
    kernels = MAP.parent
    text = MAP.read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (.*?) \|", text[: text.index("## Words")], re.MULTILINE))
    named = set(re.findall(r"`([\w/.]+)`", rows)) | {"formulas/"}  # in score/formulas.cuh's row
    files = {p.relative_to(kernels).as_posix() for p in kernels.rglob("*") if p.is_file()}
    files.remove("README.md")
    folders = {name for name in named if name.endswith("/")}
    assert {f for f in files - named if not f.startswith(tuple(folders))} == set()
    assert named - folders - files == set()


def test_every_option_names_the_tests_that_prove_it():
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    table = text[text.index("| forward and gradient | cuflash |") :].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 19
    for row in rows:
        found = re.fullmatch(
            r'\[yes\]\(\.\./(tests/\w+\.py) "([\w, ]+?)(?:: ([\w, ]+))?"\)', row[1]
        )
        assert found, row
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        for name in found[2].split(", "):
            assert f"\ndef {name}(" in source, name
        for case in (found[3] or "").split(", "):
            assert not case or f'"{case}": {{' in source, case


def test_the_reference_lists_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed: dict[str, set[str]] = {}
    for part in text.split(".. currentmodule:: ")[1:]:
        names = re.findall(r"^   (\w+)$", part, re.MULTILINE)
        listed.setdefault(part.split()[0], set()).update(names)
    assert set(listed) == {"cuflash", *(module.__name__ for module in PACKAGES)}
    packages = {module.__name__.partition(".")[2] for module in PACKAGES}
    for module, names in listed.items():
        public = set(pkgutil.resolve_name(module).__all__)
        assert names == public - packages - {"FAMILIES"}, module


def test_the_readme_is_short():
    """The README is at most 6,000 bytes; details belong in docs/."""
    assert len((ROOT / "README.md").read_bytes()) <= 6_000


def test_links_of_the_readme_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) >= 6
    for target in targets:
        assert (ROOT / target).exists(), target


def test_links_of_the_readme_work_on_a_package_index():
    """Links lead to the repository's address, or are plain text where it has none.

    A package index has no files, and shows the picture as text.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for step in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text, changed = re.subn(step["pattern"], step["replacement"], text)
        assert changed, step
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    base = project["project"].get("urls", {}).get("Repository")
    assert len(targets) >= 6 if base else not targets
    assert all(target.startswith(base) for target in targets)
    assert "docs/tutorial.md" in text
    bars = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "█" in line}
    assert bars.keys() >= {"cuflash", "fa2", "cudnn"}
    assert all(round(float(tflops) / len(bar), -1) == 20 for bar, tflops in bars.values())
    assert "![" not in text


def test_each_number_of_the_readme_names_the_file_that_it_comes_from():
    """Each number links to a committed result of its device and day (table: test_mutants.py)."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- numbers") : text.index("<!-- end of numbers")]
    rows = table.splitlines()[3:]
    assert len(rows) == 5
    for row in rows:
        device, day, file = re.search(
            r"\[(\w+), ([\d-]+)\]\((benchmarks/results/.*?)\)", row
        ).groups()
        meta = json.loads((ROOT / file).with_suffix(".json").read_text(encoding="utf-8"))["meta"]
        assert device in meta["device"]
        assert meta["date"] == day
        assert meta["commit"]


def says(function: object, *texts: str) -> None:
    """Check that a docstring states a limit."""
    written = " ".join(str(inspect.getdoc(function)).split())
    for text in texts:
        assert text in written, text


def test_alibi_far_from_the_keys_says_that_it_has_no_digits():
    says(
        cuflash.Options,
        "from 2^24 (2^53) on, neighbouring keys have the same distance",
        "offset of 2^40",
    )
    q = k = np.zeros((1, 2))
    options = {"alibi_slopes": np.ones(()), "kv_lengths": 1}
    for dtype, first in ((np.float32, 2**24), (np.float64, 2**53)):
        far, near = (
            [
                cuflash.logsumexp(q.astype(dtype), k.astype(dtype), offset=n, **options)[0]
                for n in (start, start + 1)
            ]
            for start in (first, first // 2)
        )
        assert far[0] == far[1]
        assert near[0] != near[1]


def test_scores_far_from_0_say_that_lse_has_no_digits():
    says(cuflash.attention, "near -1e9, lse has no digits left", "beyond 2e38 (1.2e308) overflow")
    says(cuflash.Options, "A finite number such as -1e9 does not")
    says(cuflash.attention_backward, "lse has no digits left for the logarithm")
    says(cuflash.weights, "loses log(n), and each weight is 1 instead of 1/n")
    for dtype, bias, weight in ((np.float32, -1e9, 1), (np.float64, -1e9, 0.25)):
        q, k, v = np.zeros((1, 2), dtype), np.zeros((4, 2), dtype), np.eye(4, dtype=dtype)
        options = {"bias": np.full((1, 4), bias, dtype)}
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_allclose(out, 0.25)  # right at any size
        gradients = cuflash.attention_backward(np.ones_like(out), q, k, v, out, lse, **options)
        np.testing.assert_allclose(gradients.dv, weight, rtol=1e-6)
    for dtype, size in ((np.float32, 2e38), (np.float64, 1.2e308)):
        q = k = np.full((2, 1), np.sqrt(size), dtype)
        for factor, finite in ((1.0, True), (2.0, False)):
            out = cuflash.attention(q, k, np.ones((2, 1), dtype), scale=factor)
            assert np.isfinite(out).all() == finite


def test_values_with_a_common_part_say_what_a_gradient_loses():
    says(cuflash.attention_backward, "subtract that part from v")
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 64, 16))
    _, exact = cuflash.attention_vjp(q, k, v)
    q32, k32, v32, moved = (a.astype(np.float32) for a in (q, k, v, v + 1e4))
    errors = []
    for values in (v32, moved):
        pullback = cuflash.attention_vjp(q32, k32, values)[1]
        got = pullback(dout.astype(np.float32)).dq
        errors.append(np.abs(got - exact(dout).dq).max())
    assert errors[1] > 100 * errors[0]
