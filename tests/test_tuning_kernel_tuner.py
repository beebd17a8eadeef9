"""Do we read what kernel-tuner wrote, and does kernel-tuner work on what we wrote?

The files are real: kernel-tuner itself tunes a loop in C on the processor.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cuflash import _cli, tuning
from cuflash.tuning import _strategies
from support.simulated_sweep import DEVICE, WORK, space_of

kernel_tuner = pytest.importorskip("kernel_tuner")
pytestmark = pytest.mark.filterwarnings("default")  # warnings of kernel-tuner and its imports

SWEEPS = Path(__file__).resolve().parents[1] / "benchmarks" / "sweeps"
COMMITTED = sorted(path.relative_to(SWEEPS).as_posix() for path in SWEEPS.rglob("*.jsonl"))
LOOP = (Path(__file__).parent / "support" / "timed_loop.cpp").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run every test in an empty folder: kernel-tuner leaves its sources in the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a sweep of a small space, in which one configuration fails."""
    found = space_of(num_q_stages=(1, 2))
    key = next(iter(found)).key
    monkeypatch.setenv("SIMULATED_TROUBLE", json.dumps({key: "error"}))
    return tuning.sweep(WORK, found, file=tmp_path / "rows.jsonl", device_command=DEVICE)


@pytest.fixture(params=["simulated", *COMMITTED])
def any_sweep(request):
    """Return this small sweep, and every committed one of an H100."""
    if request.param == "simulated":
        return request.getfixturevalue("swept")
    return tuning.load(SWEEPS / request.param)


def simulate(path, found, **given):
    """Let kernel-tuner search our results, as if it measured them."""
    parameters = {name: list(values) for name, values in found.header["parameters"].items()}
    cache = json.loads(path.read_text())
    return kernel_tuner.tune_kernel(
        found.kernel, "", tuple(cache["problem_size"]), [], parameters, lang="CUDA",
        simulation_mode=True, cache=str(path), quiet=True, **given,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"strategy": "genetic_algorithm", "strategy_options": {"max_fevals": 60}},
        {"strategy": "random_sample", "strategy_options": {"fraction": 1.0}},
    ],
)
def test_kernel_tuner_simulates_on_our_sweeps(tmp_path, any_sweep, given):
    path = tmp_path / "cache.json"
    tuning.write_cache(any_sweep, path)
    results, env = simulate(path, any_sweep, **given)
    assert env["device_name"] == any_sweep.device
    measured = {row["key"]: any_sweep.steady_ms(row) for row in any_sweep.timed}
    assert results
    for result in results:
        key = key_of(result, any_sweep)
        if "__error__" in result:
            assert key not in measured
        else:
            assert result["time"] == measured[key]
    if given.get("strategy") != "genetic_algorithm":  # it need not meet all
        assert {key_of(r, any_sweep) for r in results if "__error__" not in r} == set(measured)
        assert key_of(env["best_config"], any_sweep) == any_sweep.timed[0]["key"]


def key_of(result, found):
    return ",".join(str(result[name]) for name in found.header["parameters"])


def drifting(found):
    """Let clocks fall by a tenth from row to row, so that earlier rows have shorter times."""
    for number, row in enumerate(found.timed[::-1]):
        row["ms"] *= 1.1**number
        row["default_ms"] *= 1.1**number
    return found


def test_drift_of_the_clocks_is_not_exported(tmp_path, swept):
    right = swept.timed[0]["key"]
    found = drifting(swept)
    assert min(found.timed, key=lambda row: row["ms"])["key"] != right
    path = tmp_path / "cache.json"
    tuning.write_cache(found, path)
    _, env = simulate(path, found)
    assert key_of(env["best_config"], found) == right
    assert tuning.read_cache(path).rows == found.rows  # as measured


def test_drift_of_the_clocks_does_not_lead_a_search(monkeypatch, swept):
    from kernel_tuner import interface

    answers = []

    class All:
        @staticmethod
        def tune(searchspace, runner, options):
            answers.extend(runner.run(searchspace.list, options))

    monkeypatch.setitem(interface.strategy_map, "all_at_once", All)
    rows = {row["key"]: row for row in drifting(swept).rows}
    chosen = space_of(num_q_stages=(1, 2))
    search = _strategies.search("all_at_once")
    search(chosen, lambda asked: [rows[c.key] for c in asked], None, 0)
    times = {key_of(answer, swept): answer.get("time") for answer in answers}
    assert times == {key: row.get("relative") for key, row in rows.items()}


@pytest.mark.long
@pytest.mark.parametrize("strategy", _strategies.offered())
def test_every_search_that_is_offered_drives_a_sweep(tmp_path, monkeypatch, strategy):
    """Every search drives a sweep in which every third configuration fails, and repeats by seed."""
    found = space_of(block_m=(128, 192), num_q_stages=(1, 2))
    failing = [candidate.key for candidate in found][::3]
    monkeypatch.setenv("SIMULATED_TROUBLE", json.dumps(dict.fromkeys(failing, "error")))
    before = random.getstate()

    def swept_into(name):
        return tuning.sweep(
            WORK, found, file=tmp_path / name, strategy=strategy, budget=24, seed=5, progress=False,
            device_command=DEVICE,
        )  # fmt: skip

    package = _strategies._PACKAGES.get(strategy)
    if package is not None and importlib.util.find_spec(strategy) is None:
        with pytest.raises(ImportError, match=f"pip install {package}"):
            swept_into("first")
        pytest.skip(f"{package} is not installed")
    first, again = swept_into("first"), swept_into("again")
    assert random.getstate() == before
    assert 1 <= len(first.rows) <= 24 < len(found)
    keys = [row["key"] for row in first.rows]
    assert set(keys) <= {candidate.key for candidate in found}
    assert [row["key"] for row in again.rows] == keys


@pytest.mark.parametrize("strategy", _strategies.offered())
@pytest.mark.parametrize(("block_n", "budget"), [((96,), None), ((64, 96, 128), 1)])
def test_searches_end_where_there_is_little_to_search(strategy, block_n, budget):
    if strategy in _strategies._PACKAGES:
        pytest.importorskip(strategy)
    found = space_of(block_m=(64, 128, 192), block_n=block_n, num_q_stages=(1, 2))
    asked = []

    def evaluate(candidates):
        asked.extend(candidates)
        return [
            {"values": dict(zip(found.parameters, c.values, strict=True)), "status": "error"}
            for c in candidates
        ]

    _strategies.search(strategy)(found, evaluate, budget, 0)
    assert {c.key for c in asked} <= {c.key for c in found}
    assert len(asked) == (budget or len(found))


def test_a_search_without_its_package_ends_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _cli.main(["tune", "--list", "--arch", "sm_90a", "--strategy", "skopt"]) == 1
    told = capsys.readouterr()
    assert "scikit-optimize is not installed: pip install scikit-optimize" in told.err
    assert not told.out


@pytest.mark.parametrize("strategy", ["nsga2", "nsga3", "pyatf_strategies", "brute_force"])
def test_searches_that_cannot_serve_are_not_offered(strategy):
    with pytest.raises(ValueError, match=f"strategy: got '{strategy}', expected one of exhaustive"):
        tuning.sweep(WORK, space_of(), strategy=strategy, device_command=DEVICE)


@pytest.mark.long
def test_our_sweep_comes_back_whole(tmp_path, any_sweep):
    path = tmp_path / "cache.json"
    tuning.write_cache(any_sweep, path)
    read = tuning.read_cache(path)
    assert (read.header, read.rows) == (any_sweep.header, any_sweep.rows)
    assert read.finals == any_sweep.finals


def test_entries_have_what_kernel_tuner_gives_its_own(tmp_path, swept):
    theirs = json.loads(tuned(tmp_path, (1, 2)).read_text())
    path = tmp_path / "ours.json"
    for found in (swept, *(tuning.load(SWEEPS / name) for name in COMMITTED)):
        tuning.write_cache(found, path)
        ours = json.loads(path.read_text())
        assert set(theirs) <= set(ours)
        own = next(e for e in ours["cache"].values() if "__error__" not in e)
        for entry in theirs["cache"].values():
            assert set(entry) - {"block_m", "block_n"} <= set(own)
        assert set(found.header["parameters"]) <= set(own)


@pytest.mark.long
def test_the_dashboard_finds_what_it_looks_up(tmp_path, any_sweep):
    """The KTdashboard (6b714cb) finds entries by the objective, where it is a number."""
    path = tmp_path / "cache.json"
    tuning.write_cache(any_sweep, path)
    text = path.read_text()
    assert text.strip().endswith("}\n}")  # else it closes the file itself
    content = json.loads(text)
    objective = content["objective"]
    shown = [e for e in content["cache"].values() if not isinstance(e[objective], str)]
    assert sorted(e[objective] for e in shown) == sorted(
        any_sweep.steady_ms(row) for row in any_sweep.timed
    )
    every = math.prod(len(values) for values in any_sweep.header["parameters"].values())
    assert len(content["cache"]) == every  # entries without a number are not shown
    for name in content["tune_params_keys"]:
        assert {e[name] for e in shown} <= set(content["tune_params"][name])


def tuned(tmp_path, values):
    """Return a cache file that kernel-tuner wrote while measuring."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    path = tmp_path / "theirs.json"
    out = np.zeros(1000, np.float32)
    parameters = {"block_m": list(values), "block_n": [1, 4]}
    kernel_tuner.tune_kernel(
        "add", LOOP, 1000, [out, np.int32(1000)], parameters, lang="C", cache=str(path), quiet=True,
        compiler_options=["-O1"],
    )  # fmt: skip
    return path


def test_files_of_kernel_tuner_are_read(tmp_path):
    path = tuned(tmp_path, (1, 2))
    read = tuning.read_cache(path)
    raw = json.loads(path.read_text())["cache"]
    assert read.kernel == "add"
    assert {row["key"]: row["ms"] for row in read.timed} == {k: e["time"] for k, e in raw.items()}
    assert read.best["key"] == min(raw, key=lambda key: raw[key]["time"])
    assert read.best["relative"] == 1.0
    assert set(read.best["values"]) == {"block_m", "block_n"}
    # A file of another kernel can be written, too.
    again = tmp_path / "again.json"
    tuning.write_cache(read, again)
    assert tuning.read_cache(again).rows == read.rows


def test_a_file_that_an_interruption_left_open_is_read(tmp_path):
    """A file is read that kernel-tuner left open: the third row of tiles does not compile."""
    with pytest.raises(subprocess.CalledProcessError):
        tuned(tmp_path, (1, 2, 3))
    path = tmp_path / "theirs.json"
    with pytest.raises(json.JSONDecodeError):
        json.loads(path.read_text())
    keys = sorted(row["key"] for row in tuning.read_cache(path).rows)
    assert keys == ["1,1", "1,4", "2,1", "2,4"]


@pytest.mark.parametrize("content", ["", "[]", '{"cache": {}}', '{"kind": "sweep"}\n{}\n'])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="expected a cache file of kernel-tuner, with device_name"):
        tuning.read_cache(path)
