"""Does the GPU report tell the truth, and does a hang end the run with its repro line?"""

from __future__ import annotations

import json
import sys

import pytest

import gpu_report
import gpu_watchdog

pytest_plugins = ["pytester"]

MACHINE = {"device": "A100", "driver": "550", "cupy": "14.2.0", "nvrtc": "12.9"}
TESTS = """
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
def test_right(n): pass
@pytest.mark.gpu
def test_wrong(): assert False
@pytest.mark.gpu
@pytest.mark.skip(reason="no second device")
def test_skipped(): pass
@pytest.mark.gpu
@pytest.mark.xfail(reason="known")
def test_expected(): assert False
@pytest.fixture
def broken(): raise RuntimeError
@pytest.mark.gpu
def test_broken_fixture(broken): pass
@pytest.fixture
def dirty():
    yield
    raise RuntimeError
@pytest.mark.gpu
def test_broken_teardown(dirty): pass
def test_on_the_host(): pass
"""
PLUGINS = ("-p", "gpu_report", "-p", "gpu_watchdog", "-p", "no:cacheprovider")


@pytest.fixture
def project(pytester, monkeypatch):
    """Return a folder of tests that know the markers, and in which the plugins are found."""
    monkeypatch.setenv("PYTHONPATH", ":".join(p for p in sys.path if p))
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    alone\n    slow\n")
    return pytester


def run(project, *arguments):
    """Run pytest in a process of its own; return its result and the report."""
    path = project.path / "report.json"
    result = project.runpytest_subprocess(*PLUGINS, "--gpu-report", str(path), *arguments)
    return result, json.loads(path.read_text()) if path.exists() else None


def test_report_counts_gpu_tests_and_names_each(project):
    project.makepyfile(test_some=TESTS)
    result, report = run(project)
    assert (report["passed"], report["failed"], report["skipped"]) == (2, 3, 2)
    assert report["others"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert gpu_report.sources().items() < report.items()
    assert {"seconds", *gpu_report.MACHINE} < set(report)
    assert report["tests"]["test_some.py::test_right"] == {"passed": ["[1]", "[2]"]}
    assert report["tests"]["test_some.py::test_broken_teardown"] == {"failed": [""]}
    result.stdout.fnmatch_lines(["GPU report: report.json: 2 passed, 3 failed, 2 skipped"])


@pytest.mark.full
def test_shards_are_joined_and_the_latest_result_counts(project):
    project.makepyfile(test_some=TESTS)
    run(project, "-k", "right or wrong")
    _, second = run(project, "-k", "not right")
    assert (second["passed"], second["failed"], second["skipped"]) == (2, 3, 2)
    project.makepyfile(test_some=TESTS.replace("wrong(): assert False", "wrong(): pass"))
    _, third = run(project, "-k", "wrong")
    assert (third["passed"], third["failed"], third["skipped"]) == (3, 2, 2)
    assert third["seconds"] >= second["seconds"]


def test_run_without_a_gpu_leaves_the_evidence_alone(project):
    project.makepyfile(test_some=TESTS)
    path = project.path / "report.json"
    path.write_text("{}")
    result, report = run(project, "-k", "skipped or host")
    assert report == {}
    result.stdout.fnmatch_lines(["GPU report: no GPU test ran*"])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", f'{{"digest": "{"0" * 64}", "passed": 9, "tests": {{"a": {{}}}}}}'],
)
def test_only_a_report_of_these_sources_is_continued(tmp_path, monkeypatch, pytestconfig, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    recorder = gpu_report.Recorder(path, pytestconfig)
    recorder.record("test_a.py::test_b", True, "passed", "call")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_report, "sources", lambda: "changed during the run")
        recorder.finish()
        assert path.read_text() == content
    recorder.finish()
    assert json.loads(path.read_text())["tests"] == {"test_a.py::test_b": {"passed": [""]}}


def shard(tests, **machine):
    """Return one run as `Recorder.report` describes it."""
    run = {"seconds": 2.0, "digest": "d", "ranks_digest": "r", "others": {"passed": 1}}
    return {**MACHINE, **machine, **run, "tests": tests}


def test_a_skip_displaces_no_result_and_every_device_is_named():
    report = gpu_report.joined({}, shard({"a": "passed", "b": "failed", "c": "skipped"}))
    report = gpu_report.joined(report, shard({}, device="H100", driver="580"))
    report = gpu_report.joined(report, shard({"a": "skipped", "b": "skipped", "c": "passed"}))
    assert (report["passed"], report["failed"], report["skipped"]) == (2, 1, 0)
    assert (report["others"]["passed"], report["seconds"]) == (3, 6.0)
    names = report["device"], report["driver"], report["cupy"]
    assert names == ("A100; H100", "550; 580", "14.2.0")


def test_names_survive_the_file():
    tests = {"t.py::f[a[0]-x::y]": "passed", "t.py::f": "failed", "t.py::C::g[1]": "skipped"}
    report = gpu_report.joined({}, shard(tests))
    assert gpu_report.flat(json.loads(gpu_report.formatted(report))["tests"]) == tests


@pytest.mark.full
@pytest.mark.parametrize(("hangs", "seconds"), [("time.sleep(60)", 1), ("compiled('60')", 10)])
def test_hang_is_a_failure_with_its_repro_line(project, hangs, seconds):
    """A hang fails with its repro line; a compile is a hang only after the time of a slow test."""
    project.makepyfile(
        test_hang=f"""
import time, pytest
from cuflash._jit import compilation
compilation._nvrtc = lambda seconds, _: time.sleep(float(seconds))
def compiled(seconds):
    compilation._compiled(None, (seconds, ""))
    time.sleep(0.3)
@pytest.mark.gpu
def test_before():
    compiled("1.3")
    compiled("1.3")
@pytest.mark.gpu
@pytest.mark.parametrize("n", [7])
def test_hangs(n):
    compiled("1.3")
    {hangs}
"""
    )
    result, report = run(project, "--gpu-timeout", "1")
    assert result.ret == gpu_watchdog.EXIT_STATUS
    text = result.stderr.str()
    assert f"HANG after {seconds} s" in text
    assert 'repeat: python -m pytest "test_hang.py::test_hangs[7]"' in text
    assert "in test_hangs" in text  # in the printed stack
    assert (report["passed"], report["failed"]) == (1, 1)
    assert report["tests"]["test_hang.py::test_hangs"] == {"failed": ["[7]"]}


@pytest.mark.full
def test_hang_that_holds_the_interpreter_lock_ends_too(project):
    project.makepyfile(
        test_hang="""
import ctypes, pytest, gpu_watchdog
gpu_watchdog.GRACE = 0.5
@pytest.mark.gpu
def test_hangs():
    ctypes.PyDLL(None).sleep(60)
"""
    )
    result, _ = run(project, "--gpu-timeout", "0.5")
    assert result.ret == 1
    assert "in test_hangs" in result.stderr.str() + result.stdout.str()


@pytest.mark.full
def test_limit_is_per_example_and_per_case(project):
    project.makepyfile(
        test_slow="""
import time, pytest
from hypothesis import given, settings, strategies as st
seen = []
@pytest.mark.gpu
@settings(max_examples=8, deadline=None, database=None)
@given(st.integers(0, 10**9))
def test_property(n):
    seen.append(n)
    time.sleep(0.25)
@pytest.mark.gpu
@pytest.mark.slow
def test_slow():
    assert len(seen) >= 8
    time.sleep(1.5)
def test_host():
    time.sleep(1.2)
"""
    )
    result, report = run(project, "--gpu-timeout", "1")
    assert result.ret == 0
    assert report["passed"] == 2
