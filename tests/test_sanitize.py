"""Would a finding of the sanitizer be noticed, and is every case of its set a legal call?"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sanitize

import sanitizer_cases
from cuflash import Options
from cuflash._kernels.score_config import score_config
from cuflash._problem.problem import describe
from gpu_digest import digest
from sanitizer_cases import CASES

KERNELS = Path(__file__).resolve().parents[1] / "kernels_cu"
PORTABLE = ("forward_sm80.cu", "backward_dq_sm80.cu", "backward_dkv_sm80.cu")
SUMS = "backward_dscore_sm80.cu"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_a_legal_call(case):
    sanitizer_cases.run(np, case)
    assert [own.name for own in CASES].count(case.name) == 1


def test_misaligned_case_is_misaligned():
    case = next(case for case in CASES if case.lead)
    view = sanitizer_cases.placed(np, np.ones((4, 4), np.float16), case)
    assert view.__array_interface__["data"][0] % 4 != 0


@pytest.fixture(scope="module")
def launched():
    """Return the configurations of the kernels that an H100 would launch for each case."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.recorded_launches import recorded_launches

    found = {}
    for case in CASES:
        with recorded_launches() as (xp, found[case.name]):
            sanitizer_cases.run(xp, case)
    return found


def test_the_cases_reach_every_kernel(launched):
    """Together the cases launch every .cu file, portable ones also on CUDA cores, with all sums."""
    configs = [config for found in launched.values() for config in found]
    every = {path.name for path in KERNELS.glob("*.cu")}
    assert {config.source for config in configs} == every
    assert sum(getattr(config, "kv_dtype", "none") != "none" for config in configs) == 3
    on_cores = [c for case in CASES if case.arch for c in launched[case.name]]
    assert {c.source for c in on_cores if getattr(c, "simt", False)} == {*PORTABLE, SUMS}
    sums = {(c.grad_of, c.sums_to) for c in configs if c.source == SUMS}
    assert sums >= {
        ("bias", "pairs"), ("bias", "keys"), ("alibi_slopes", "queries"), ("scale", "queries"),
    }  # fmt: skip


@pytest.mark.parametrize("source", PORTABLE)
def test_every_score_option_meets_the_portable_kernels(launched, source):
    """Portable kernels meet every option when they copy 16 bytes, as on devices without others."""
    q = np.zeros((2, 129, 64), np.float16)
    plain = score_config(describe(q, q, q, Options()))._asdict()
    plain = {n: value for n, value in plain.items() if n not in ("q_scale", "k_scale", "v_scale")}
    own = {"sink": "none"} if source == "forward_sm80.cu" else {}
    cases = [case for case in CASES if case.portable]
    configs = [c for case in cases for c in launched[case.name] if c.source == source]
    met = {name: {getattr(c, name) for c in configs} for name in plain | own}
    missed = [name for name, value in (plain | own).items() if not met[name] - {value}]
    assert missed == ([] if own else ["heads_in_rows"])  # a field of forwards only
    assert met["bias"] >= {"float16", "float32"}
    assert met["offset"] >= {"value", "lengths", "int64"}


@pytest.mark.parametrize("changes", [{"arch": "sm_90"}, {"portable": True, "lead": 1}], ids=str)
def test_other_kernels_than_those_of_a_case_are_no_success(changes):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.recorded_launches import recorded_launches

    with recorded_launches() as (xp, _), pytest.raises(SystemExit, match="kernels of other"):
        sanitizer_cases.run(xp, replace(sanitizer_cases.PLAIN, **changes))


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that installs a simulated compute-sanitizer."""

    def install(body):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!{sys.executable}\nimport sys\n{VERSION}\nnames = {NAMES}\n{body}\n")
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
VERSION = "if '--version' in sys.argv: sys.exit(print('Version 2026.1.0.0 (build 7)'))"
RAN = "[print('ran:', name) for name in names]\n"
CLEAN = RAN + "print('========= ERROR SUMMARY: 0 errors')"


def test_report_says_what_each_tool_came_to(program, tmp_path):
    path = tmp_path / "report.json"
    program(CLEAN)
    assert sanitize.main(["--jobs", "3", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["digest"], report["sanitizer"]) == (digest(), "2026.1.0.0")
    assert {"device", "driver", "cupy", "nvrtc", "date"} < set(report)
    assert (report["findings"], report["clean"]) == (0, True)
    assert report["names"] == [case.name for case in CASES]
    assert list(report["tools"]) == ["none", *sanitize.TOOLS]
    for said in report["tools"].values():
        assert (said["ran"], said["findings"], said["clean"]) == (len(CASES), 0, True)


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


def test_report_is_continued_by_other_tools_and_not_clean_with_findings(program, tmp_path):
    path = tmp_path / "report.json"

    def report_of(*tools):
        words = [word for tool in tools for word in ("--tool", tool)]
        status = sanitize.main(["--jobs", "2", *words, "--json", str(path)])
        return status, json.loads(path.read_text())

    program(CLEAN)
    status, report = report_of("memcheck")
    assert (status, report["clean"]) == (0, False)  # three tools are missing
    status, report = report_of(*(tool for tool in sanitize.TOOLS if tool != "memcheck"))
    assert (status, report["clean"]) == (0, True)
    for name in ("digest", "cases", "sanitizer"):  # of another state
        path.write_text(json.dumps(report | {name: "another"}))
        assert list(report_of("memcheck")[1]["tools"]) == ["none", "memcheck"]
    for unreadable in ("", "[]", "{}", "null"):
        path.write_text(unreadable)
        assert report_of(*sanitize.TOOLS)[1]["clean"]
    program(RAN + "print('========= ERROR SUMMARY: 2 errors')")
    status, report = report_of("initcheck")
    assert (status, report["findings"], report["clean"]) == (1, 4, False)
    assert [tool for tool, said in report["tools"].items() if not said["clean"]] == ["initcheck"]


def test_what_cannot_run_is_no_success(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):  # a report needs all cases
        sanitize.main(["--case", "bias", "--json", str(tmp_path / "report.json")])
    assert sanitize.main(["--case", "no such case"]) == 1
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2
