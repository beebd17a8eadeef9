"""Does a sweep survive what configurations do, and lose nothing when it is interrupted?

Processes, pipes, signals and files are real. The device is ``support/simulated_device.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuflash import tuning
from cuflash._jit import source
from cuflash.tuning import _processes, _rows, _sweep
from support import simulated_sweep
from support.simulated_device import milliseconds
from support.simulated_sweep import DEVICE, WORK, space_of

SCRIPT = Path(simulated_sweep.__file__)
#: The simulated device, on which configurations of FINAL_TROUBLE fail in the final only.
FAILS_IN_THE_FINAL = """
import json, os, time
from cuflash.tuning._kernels import config_from_json, tile_of
from support import simulated_device

trouble = json.loads(os.environ["FINAL_TROUBLE"])
serve = simulated_device.serve

def serve_with_trouble(answer):
    def other(request):
        for config in request["configs"][:-1] if request["do"] == "final" else ():
            kind = trouble.get(",".join(map(str, tile_of(config_from_json(config)).values())))
            kind = kind if len(request["configs"]) > 2 or kind != "together" else None
            if kind == "hang":
                time.sleep(3600)
            if kind == "exit":
                os._exit(77)
            if kind:
                return {"status": "crash", "reason": "asked to crash"}
        return answer(request)
    serve(other)

simulated_device.serve = serve_with_trouble
simulated_device.main()
"""


@pytest.fixture
def trouble(monkeypatch, tmp_path):
    """Return a function that sets what goes wrong; ``tmp_path/log`` lists what was timed."""
    monkeypatch.setenv("SIMULATED_LOG", str(tmp_path / "log"))

    def setting(kinds: dict[str, str]) -> None:
        monkeypatch.setenv("SIMULATED_TROUBLE", json.dumps(kinds))

    return setting


def timed(tmp_path: Path) -> list[str]:
    """Return the keys that the device was asked to time, in order."""
    return [line for line in (tmp_path / "log").read_text().split() if line != "open"]


def swept(tmp_path, found=None, name="rows.jsonl", work=WORK, **given):
    given = {"device_command": DEVICE} | given
    return tuning.sweep(work, found or space_of(), file=tmp_path / name, **given)


def fastest(found) -> str:
    named = {c.key: dict(zip(found.parameters, c.values, strict=True)) for c in found}
    return min(named, key=lambda key: milliseconds(named[key]))


def test_every_configuration_has_a_row_and_the_fastest_wins(tmp_path, trouble):
    found = space_of()
    result = swept(tmp_path, found)
    assert [row["key"] for row in result.rows] == [c.key for c in found] == timed(tmp_path)
    assert {row["status"] for row in result.rows} == {"ok"}
    assert result.best["key"] == fastest(found)
    row = result.best
    flops = WORK.kernel_flops("forward_sm90")
    assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)
    assert row["facts"]["registers"] == 168
    assert list(row["values"]) == list(found.parameters)
    assert ",".join(map(str, row["values"].values())) == row["key"]


def test_the_file_says_what_was_measured_where(tmp_path, trouble):
    result = swept(tmp_path)
    read = tuning.load(tmp_path / "rows.jsonl")
    assert (read.header, read.rows, read.finals) == (result.header, result.rows, result.finals)
    header = read.header
    assert (read.device, header["driver"], header["nvrtc"]) == ("simulated", "0", "0")
    assert header["kernels"] == source.digest()
    assert header["source"] == source.digest_of("forward_sm90.cu")
    assert read.workload == WORK
    assert header["default"] == space_of().default_key
    (final,) = read.finals
    assert len(final["ms"]) == 5
    assert final["default_ms"] > min(final["ms"].values())


def test_configurations_that_fail_cost_their_row_alone(tmp_path, trouble):
    found = space_of()
    keys = [c.key for c in found]
    kinds = dict(zip(keys, ("exit", "error", "wrong", "crash", "hang"), strict=False))
    trouble(kinds)
    start = time.monotonic()
    result = swept(tmp_path, found, time_limit=1.0)
    assert time.monotonic() - start < 60
    states = {row["key"]: row["status"] for row in result.rows}
    expected = {key: {"exit": "crash"}.get(kind, kind) for key, kind in kinds.items()}
    assert states == dict.fromkeys(keys, "ok") | expected
    reasons = {row["key"]: row.get("reason", "") for row in result.rows}
    assert "exit status 77" in reasons[keys[0]]
    assert "no answer within 1 s" in reasons[keys[4]]
    assert result.best["status"] == "ok"
    # A new process was opened after the exit, the crash and the hang, and not after the others.
    assert (tmp_path / "log").read_text().split().count("open") == 4


def test_wrong_arguments_are_named_before_a_process_is_started(tmp_path, trouble):
    for given, kind, message in (
        ({"time_limit": 0}, ValueError, "time_limit: got 0, expected a positive"),
        ({"time_limit": -1.0}, ValueError, "time_limit: got -1.0, expected a positive"),
        ({"budget_ms": 0.0}, ValueError, "budget_ms: got 0.0, expected a positive"),
        ({"time_limit": "30"}, ValueError, "time_limit: got '30', expected a positive"),
        ({"seed": "x"}, TypeError, "seed: got 'x', expected an int"),
        ({"budget": 0}, ValueError, "budget: got 0, expected a positive int"),
        ({"found": [1]}, TypeError, "chosen: got list, expected what tuning.space returns"),
        ({"strategy": "best"}, ValueError, "strategy: got 'best', expected one of exhaustive"),
        ({"work": replace(WORK, causal=True)}, ValueError, "chosen: got a space of"),
    ):
        with pytest.raises(kind, match=message):
            swept(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []
    empty = space_of()
    empty.candidates = [c for c in empty.candidates if c.config is None]
    assert tuning.sweep(WORK, empty, file=tmp_path / "a", device_command=DEVICE).rows == []


def test_a_device_that_cannot_run_the_default_ends_the_sweep(tmp_path, trouble):
    trouble({"open": "error"})
    with pytest.raises(RuntimeError, match="as shipped: rms error 1"):
        swept(tmp_path)
    assert tuning.load(tmp_path / "rows.jsonl").rows == []


def in_the_final(tmp_path, monkeypatch, kinds, **given):
    monkeypatch.setenv("FINAL_TROUBLE", json.dumps(kinds))
    device = (sys.executable, "-c", FAILS_IN_THE_FINAL)
    return swept(tmp_path, device_command=device, time_limit=0.5, **given)


@pytest.mark.long
def test_what_fails_in_the_final_is_left_out_of_it(tmp_path, trouble, monkeypatch, capfd):
    keys = [row["key"] for row in swept(tmp_path, progress=False).timed[:5]]
    (tmp_path / "rows.jsonl").unlink()
    kinds = dict(zip(keys, ("hang", "exit", "crash"), strict=False))
    result = in_the_final(tmp_path, monkeypatch, kinds)
    assert {row["status"] for row in result.rows} == {"ok"}
    (final,) = result.finals
    assert list(final["ms"]) == keys[3:]
    states = {key: reason.partition(",")[0] for key, reason in final["left_out"].items()}
    assert states == dict(zip(keys, ("hang", "crash", "crash"), strict=False))
    assert result.best["key"] == keys[3]
    err = capfd.readouterr().err
    assert f"{keys[0]} left out of the final: hang, no answer within" in err
    assert "the fastest 2 compared again" in err
    again = in_the_final(tmp_path, monkeypatch, {})  # what is left out stays left out
    assert again.finals == tuning.load(tmp_path / "rows.jsonl").finals == [final]


@pytest.mark.long
def test_no_final_is_no_end_of_the_sweep(tmp_path, trouble, monkeypatch):
    keys = [row["key"] for row in swept(tmp_path, progress=False).timed[:5]]
    (tmp_path / "rows.jsonl").unlink()
    seen = []
    together = dict.fromkeys(keys, "together")
    result = in_the_final(tmp_path, monkeypatch, together, progress=seen.append)
    assert result.finals == []
    assert result.best["key"] == keys[0]
    assert [now.row["key"] for now in seen if now.stage == "final"] == keys
    result = in_the_final(tmp_path, monkeypatch, dict.fromkeys(keys, "exit"))
    (final,) = result.finals
    assert (final["ms"], list(final["left_out"])) == ({}, keys)
    assert result.best["key"] == result.timed[5]["key"]
    with pytest.raises(ValueError, match=f"none of them correct in the final.*{keys[0]}: crash, "):
        _rows.Sweep(result.header, result.timed[:5], result.finals).best  # noqa: B018


def test_the_file_says_how_it_was_made(tmp_path, trouble):
    made = {"strategy": "random", "budget": 3, "seed": 7, "budget_ms": 20.0}
    result = swept(tmp_path, **made)
    assert made.items() <= result.header.items()
    later = swept(tmp_path, budget_ms=30.0)
    assert later.header == result.header
    assert [final["made"] for final in later.finals] == [
        made, {"strategy": "exhaustive", "budget": None, "seed": 0, "budget_ms": 30.0},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    header, *lines = path.read_text().splitlines(keepends=True)
    old = {name: value for name, value in json.loads(header).items() if name not in made}
    path.write_text(json.dumps(old) + "\n" + "".join(lines))
    assert swept(tmp_path).rows == later.rows


@pytest.mark.parametrize("check", [True, False])
def test_checked_and_unchecked_rows_do_not_mix(tmp_path, trouble, check):
    swept(tmp_path, budget=1, check=check)
    with pytest.raises(ValueError, match=f"got a sweep with check {str(check).lower()}"):
        swept(tmp_path, check=not check)


def test_what_a_file_holds_is_not_measured_again(tmp_path, trouble):
    found = space_of()
    first = swept(tmp_path, found, budget=4)
    assert len(timed(tmp_path)) == len(first.rows) == 4
    result = swept(tmp_path, found)
    assert timed(tmp_path) == [c.key for c in found]
    again = swept(tmp_path, found)
    assert timed(tmp_path) == [c.key for c in found]
    assert again.rows == result.rows
    assert len(again.finals) == len(result.finals) == 2


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path, trouble, cut):
    found = space_of()
    swept(tmp_path, found, budget=3)
    path = tmp_path / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4])[:-cut])
    result = swept(tmp_path, found)
    keys = [c.key for c in found]
    assert sorted(timed(tmp_path)) == sorted([*keys, keys[2]])
    assert [row["key"] for row in result.rows] == keys
    for line in path.read_text().splitlines():
        json.loads(line)


def interrupted(tmp_path, how) -> tuple[subprocess.Popen, str]:
    """Start a sweep, and end it while its fourth configuration is being timed."""
    key = [c.key for c in space_of()][3]
    environment = os.environ | {
        "SIMULATED_TROUBLE": json.dumps({key: "hang"}),
        "SIMULATED_LOG": str(tmp_path / "log"),
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parents[1])]),
    }
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path / "rows.jsonl")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        # Processes in the background of a shell ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for _ in range(600):
        if (tmp_path / "log").exists() and key in timed(tmp_path):
            break
        time.sleep(0.1)
    process.send_signal(how)
    process.communicate(timeout=30)
    return process, key


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_an_interruption_loses_the_configuration_being_timed_alone(tmp_path, monkeypatch, how):
    process, key = interrupted(tmp_path, getattr(signal, how))
    assert process.returncode != 0
    found = space_of()
    keys = [c.key for c in found]
    assert [row["key"] for row in tuning.load(tmp_path / "rows.jsonl").rows] == keys[:3]
    assert gone(tmp_path), "the process that owns the device outlived its parent"
    monkeypatch.setenv("SIMULATED_LOG", str(tmp_path / "log"))
    result = swept(tmp_path, found)
    assert [row["key"] for row in result.rows] == keys
    assert sorted(timed(tmp_path)) == sorted([*keys, key])


def gone(tmp_path) -> bool:
    """Return whether all processes that know this folder end within ten seconds."""
    mark = str(tmp_path / "log").encode()
    for _ in range(100):
        alive = False
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) == os.getpid():
                continue
            try:
                alive = alive or mark in (folder / "environ").read_bytes()
            except OSError:
                continue
        if not alive:
            return True
        time.sleep(0.1)
    return False


def test_random_draws_without_return_and_the_same_with_the_same_seed(tmp_path, trouble):
    found = space_of(num_q_stages=(1, 2))
    given = {"strategy": "random", "budget": 6, "seed": 3}
    first, again = (swept(tmp_path, found, name, **given) for name in "ab")
    keys = [row["key"] for row in first.rows]
    assert len(set(keys)) == 6
    assert [row["key"] for row in again.rows] == keys
    assert keys != [c.key for c in found][:6]


def test_progress_shows_the_best_so_far(tmp_path, trouble):
    seen = []
    swept(tmp_path, progress=seen.append)
    times = [now for now in seen if now.stage == "time"]
    assert [now.done for now in times] == list(range(1, times[-1].total + 1))
    best = [now.best["relative"] for now in times]
    assert best == sorted(best, reverse=True)
    assert seen[-1].stage == "final"


def test_somebody_who_waits_sees_every_configuration(tmp_path, trouble, capfd):
    found = space_of()
    trouble({next(iter(found)).key: "error"})
    swept(tmp_path, found)
    *lines, last = capfd.readouterr().err.splitlines()
    assert [line.split()[3] for line in lines] == [c.key for c in found]
    assert "asked to be error" in lines[0]
    assert f"best {fastest(found)}" in lines[-1]
    assert "compared again" in last
    swept(tmp_path, found, progress=False)
    assert capfd.readouterr().err == ""


def test_a_log_hears_of_thousands_of_kernels_every_few_seconds(capsys, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(_sweep, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    said = _sweep.Compiled()
    for done in range(9):
        said(done, 38900)
    assert capsys.readouterr().err.splitlines() == [
        f"{done} of 38900 compiled" for done in (0, 3, 6)
    ]
    said(38900, 38900)
    assert capsys.readouterr().err == "38900 of 38900 compiled\n"


def test_a_terminal_has_one_line_of_what_is_compiled(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said = _sweep.Compiled()
    for done in range(3):
        said(done, 2)
    assert capsys.readouterr().err == "\r0 of 2 compiled\r1 of 2 compiled\r2 of 2 compiled\n"


def test_a_sweep_goes_where_its_problem_says(tmp_path, trouble, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = space_of()
    result = tuning.sweep(WORK, found, budget=1, device_command=DEVICE)
    (path,) = tmp_path.glob("*.jsonl")
    assert path.name == "simulated-forward-sm90-d128-bfloat16-1024x1024.jsonl"
    assert tuning.load(path).rows == result.rows


VALUES = {
    "block_m": 128, "block_n": 64, "num_stages": 2, "num_q_stages": 1, "overlap_quarters": 1,
}  # fmt: skip
CONFIG = {
    "kind": "config", "key": "1", "status": "ok", "ms": 1, "relative": 1, "values": VALUES,
}  # fmt: skip
FINAL = {"kind": "final", "ms": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", None),
        ("not a sweep\n", "line 1: invalid JSON"),
        ('{"cache": {}}\n', 'line 1: not an object of kind "sweep"'),
        ('{"kind": "sweep", "format": 1}\n', "line 1: no workload, kernel"),
        ({}, 'line 2: not kind "config"'),
        (CONFIG | {"status": "fine"}, "status 'fine'"),
        (CONFIG | {"status": "hang", "values": {"a": 1}}, "values {"),
        (CONFIG | {"ms": 0}, "line 2: ms 0"),
        (CONFIG | {"ms": math.nan}, "line 2: ms NaN"),
        (CONFIG | {"values": VALUES | {"num_stages": "2"}}, "line 2: values {"),
        ({n: CONFIG[n] for n in ("kind", "key", "status", "values")}, "no ms, relative"),
        (CONFIG | {"key": 1}, "line 2: key 1"),
        (CONFIG | {"relative": None}, "line 2: relative null"),
        (FINAL | {"ms": {"1": "fast"}}, 'line 2: 1 "fast"'),
        (FINAL | {"ms": [1]}, "line 2: ms [1]"),
        (FINAL | {"left_out": []}, "line 2: left_out []"),
        (FINAL | {"default_ms": "x"}, 'line 2: default_ms "x"'),
        ("HEADER{oh\nno}\n", "line 2: invalid JSON"),
        ('{"kind": "sw', "no complete line"),
        (b"\xff\xfe\x00", "bytes that are no text"),
    ],
)
def test_corrupt_and_foreign_files_are_refused(tmp_path, trouble, content, message):
    path = tmp_path / "rows.jsonl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        swept(tmp_path, budget=1)
        header = path.read_text().splitlines(keepends=True)[0]
        text = content if isinstance(content, str) else f"HEADER{json.dumps(content)}\n"
        path.write_text(text.replace("HEADER", header))
    before = path.read_bytes()
    if message is None:
        assert len(swept(tmp_path, budget=1).rows) == 1
        return
    with pytest.raises(ValueError, match="expected the file of a sweep") as error:
        swept(tmp_path)
    assert message in str(error.value)
    assert path.read_bytes() == before


def test_a_header_of_other_types_is_refused(tmp_path, trouble):
    path = tmp_path / "rows.jsonl"
    swept(tmp_path, budget=1)
    header = json.loads(path.read_text().splitlines()[0])
    for change in (
        {"default": 5}, {"default": "128"}, {"default": "a,b,c,d,e"}, {"workload": 1},
        {"parameters": ["block_m"]}, {"parameters": {n: [1] for n in "abcde"}}, {"workload": {}},
        {"arch": None}, {"date": 2026}, {"kernels": []},
    ):  # fmt: skip
        path.write_text(json.dumps(header | change) + "\n")
        (name,) = change
        with pytest.raises(ValueError, match=f"line 1: {name} .*expected the file of a sweep"):
            tuning.load(path)
    for name in ("arch", "date", "kernels"):
        path.write_text(json.dumps({n: v for n, v in header.items() if n != name}) + "\n")
        with pytest.raises(ValueError, match=f"line 1: no {name}"):
            tuning.load(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("SIMULATED_NAME", "another", 'device "simulated"'), ("SIMULATED_ARCH", "sm_80", "sm_80")],
)
def test_another_device_does_not_go_on(tmp_path, trouble, monkeypatch, name, value, message):
    swept(tmp_path, budget=1)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="expected") as error:
        swept(tmp_path)
    assert message in str(error.value)


def test_a_space_for_another_device_is_refused(tmp_path, trouble, monkeypatch):
    found = space_of()
    for name, arch in (("another", "sm_90"), ("simulated", "sm_80")):
        monkeypatch.setenv("SIMULATED_NAME", name)
        monkeypatch.setenv("SIMULATED_ARCH", arch)
        with pytest.raises(ValueError, match=rf"simulated \(sm_90\), expected.*{name} \({arch}\)"):
            swept(tmp_path, found)
    assert not (tmp_path / "rows.jsonl").exists()


def test_another_space_does_not_go_on(tmp_path, trouble):
    """A sweep does not continue another space, since times are relative to one default."""
    swept(tmp_path, budget=1)
    with pytest.raises(ValueError, match="got a sweep with parameters"):
        swept(tmp_path, space_of(num_q_stages=(1, 2)))
    other = space_of()
    other.default = next(iter(other)).config
    with pytest.raises(ValueError, match='got a sweep with default "128,128'):
        swept(tmp_path, other)


def test_the_shipped_configuration_is_best_where_it_wins_the_final(tmp_path, trouble):
    result = swept(tmp_path, space_of(num_q_stages=(1, 2), overlap_quarters=(0, 4)))
    (final,) = result.finals
    assert result.best["key"] != result.header["default"]
    final["default_ms"] = min(final["ms"].values()) / 2
    final["ms"].pop(result.header["default"], None)
    assert (result.best["key"], result.best_relative) == (result.header["default"], 1.0)
    final["default_ms"] = 2 * min(final["ms"].values())
    assert result.best_relative == 0.5
    final["ms"][result.header["default"]] = 1.25 * min(final["ms"].values())  # itself, twice
    assert result.best_relative == pytest.approx(0.8)
    assert final["seconds"] > 0


def test_nothing_timed_is_no_best():
    with pytest.raises(ValueError, match="none of them timed"):
        _rows.Sweep({}).best  # noqa: B018
    row = {"key": "128,64", "status": "wrong", "reason": "out: error 1"}
    with pytest.raises(ValueError, match=r"1 rows, none.*; 128,64: wrong, out: error 1"):
        _rows.Sweep({}, [row]).best  # noqa: B018


def test_answers_come_from_several_processes_in_any_order(trouble):
    requests = [{"do": "describe"} for _ in range(5)]
    found = dict(_processes.ask_many(DEVICE, requests, 3, 30.0))
    assert sorted(found) == list(range(5))
    assert {answer["device"] for answer in found.values()} == {"simulated"}
