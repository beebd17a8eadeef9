"""Are the parts of the tests nested, does full hold everything, and is the rest reported?"""

from __future__ import annotations

import itertools
import sys

import pytest

from support import parts
from support.parts import FULL, PARTS, QUICK, USUAL, Run, kernels_of_part, node_ids_of, sample

pytest_plugins = ["pytester"]

TESTS = """
import pytest

from support.parts import kernels_of_part

@pytest.mark.parametrize("n", range(40))
def test_short(n): pass

@pytest.mark.long
@pytest.mark.parametrize("n", range(40))
def test_long(n): pass

@pytest.mark.full
def test_full(): pass

@pytest.mark.gate
@pytest.mark.parametrize("n", range(5))
def test_gate(n): assert len(kernels_of_part(range(100))) in (2, 100)

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(40))
def test_on_a_gpu(n): pass
"""
USUAL_LEAVES_OUT = 35 + 38 + 4 + 35 + 1  # tests of TESTS
PROPERTY = """
from hypothesis import given, strategies

EXAMPLES = []

@given(strategies.integers())
def test_property(value): EXAMPLES.append(value)

def teardown_module(): print(f"<{len(EXAMPLES)} examples>")
"""


def test_each_part_holds_the_part_before_it():
    """Each part holds the part before it, among all tests that this run collected."""
    quick, usual, of_files, full = (node_ids_of(parts.RUN.collected, part) for part in PARTS)
    assert quick <= usual <= of_files <= full
    assert full == {item.nodeid for item in parts.RUN.collected}


def test_every_file_has_a_test_in_the_usual_part():
    """The usual part has a test of every file that needs no GPU, if the file has any."""
    usual = node_ids_of(parts.RUN.collected, USUAL)
    files = itertools.groupby(parts.RUN.collected, key=lambda item: item.path)
    for path, items in files:
        runnable = [item for item in items if not item.get_closest_marker("gpu")]
        assert not runnable or any(item.nodeid in usual for item in runnable), path


def test_a_larger_share_holds_a_smaller_one():
    names = [f"test_a.py::test[{n}]" for n in range(57)]
    shares = (0.0, 0.01, 0.1, 0.5, 1.0)
    samples = [sample(names, share, str) for share in shares]
    assert [len(kept) for kept in samples] == [0, 1, 6, 29, 57]
    for small, large in itertools.pairwise(samples):
        assert large[: len(small)] == small
    assert sample(reversed(names), 0.1, str) == samples[2]
    assert sorted(samples[-1]) == sorted(names)


def test_a_share_of_each_gate_is_compiled(monkeypatch):
    run = Run(part=USUAL)
    monkeypatch.setattr(parts, "RUN", run)
    assert len(kernels_of_part(range(1000))) == round(1000 * USUAL.kernels)
    assert len(kernels_of_part(["one"])) == 1
    assert run.kernels == 1000 - round(1000 * USUAL.kernels)
    run.part = FULL
    assert sorted(kernels_of_part(range(1000))) == list(range(1000))


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a folder with tests of every kind."""
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    full\n    gate\n    long\n    slow\n")
    pytester.makepyfile(test_some=TESTS, test_property=PROPERTY)
    return pytester


def run(project, *arguments):
    plugins = ("-p", "support.parts", "-p", "no:cacheprovider")
    return project.runpytest_subprocess(*plugins, "-s", *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "left_out", "kernels", "examples"),
    [
        (["--quick"], 39 + 40 + 5 + 39 + 1, 0, QUICK.examples),
        ([], USUAL_LEAVES_OUT, 98, USUAL.examples),
        (["test_some.py", "test_property.py"], 38 + 4 + 1, 98, USUAL.examples),
        (["--full"], 0, 0, FULL.examples),
        (["--slow"], 0, 0, FULL.examples),
        (["--hypothesis-profile=three"], USUAL_LEAVES_OUT, 98, 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_left_out_is_said(project, arguments, left_out, kernels, examples):
    project.makeconftest(
        "from hypothesis import settings\nsettings.register_profile('three', max_examples=3)"
    )
    result = run(project, *arguments)
    result.assert_outcomes(passed=127 - left_out, deselected=left_out)
    said = f"left out: {left_out} tests, {kernels} kernels of compile gates; --full runs them"
    assert (said in result.outlines) == bool(left_out)
    result.stdout.fnmatch_lines([f"*<{examples} examples>*"])


@pytest.mark.long
def test_processes_side_by_side_say_it_together(project):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    said = f"left out: {USUAL_LEAVES_OUT} tests, {98} kernels of compile gates; --full runs them"
    assert said in run(project, "-n", "2").outlines


@pytest.mark.long
def test_a_test_that_is_named_runs(project):
    tests = [f"test_some.py::test_long[{n}]" for n in range(40)]
    run(project, "--quick", *tests).assert_outcomes(passed=len(tests))


@pytest.mark.long
def test_two_parts_at_once_are_refused(project):
    result = run(project, "--quick", "--full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--quick and --full exclude each other*"])
