"""Does the accuracy benchmark measure errors, and say where there is nothing to measure?"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from benchmarks import accuracy
from benchmarks import factors as factors_of_float32
from benchmarks.command import open_run
from benchmarks.machine import META_KEYS
from benchmarks.peers import IMPLEMENTATIONS
from benchmarks.shapes import square

ROOT = Path(__file__).resolve().parents[1]


def arrays(dtype: Any, shape: tuple[int, ...] = (1, 2, 33, 16)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(4)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_exact_is_the_definition(dtype: Any) -> None:
    q, k, v, dout = arrays(dtype)
    found = accuracy.exact(q, k, v, dout).values
    wide = np.longdouble if dtype == np.float64 else np.float64
    out = cuflash.reference.attention(q, k, v, dtype=wide)
    grads = cuflash.reference.attention_backward(dout, q, k, v, dtype=wide)
    for name, wanted in {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}.items():
        assert found[name].dtype == wide
        tolerance = 40 * np.finfo(wide).eps
        assert accuracy.norm(found[name] - wanted) <= tolerance * accuracy.norm(wanted)


def test_errors_by_hand() -> None:
    exact = accuracy.Exact({"out": np.array([3.0, 4.0])}, {"out": 5.0})

    def error(*found: float) -> float | str:
        return accuracy.relative_error(np.float32(found), exact, "out", "float32")

    assert error(3, 4.5) == 0.1
    assert error(3, np.inf) == error(np.nan, 4) == accuracy.NOT_FINITE
    q, k, v, dout = arrays(np.float32)
    k[:] = k[..., :1, :]  # all keys equal: the gradient of q is a sum that is exactly 0
    cancelled = accuracy.exact(q, k, v, dout)
    assert accuracy.relative_error(q, cancelled, "dq", "float32") == accuracy.VANISHES
    assert accuracy.relative_error(q, cancelled, "dv", "float32") != accuracy.VANISHES


@pytest.fixture(scope="module")
def result_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    command = ["--device", "cpu", "--longest", "128", "--dtype", "float16,float32"]
    assert accuracy.main([*command, "--impl", "cuflash,naive", "--out", str(folder)]) == 0
    (path,) = folder.glob("cpu-accuracy-*.json")
    return path


def test_rows_of_a_run(result_file: Path) -> None:
    result = json.loads(result_file.read_text())
    assert set(result["meta"]) == set(META_KEYS)
    rows = result["rows"]
    number = len(accuracy.FAMILIES) + 1 + len(accuracy.SCALES_OF_LOGITS) + len(accuracy.HEAD_DIMS)
    assert len(rows) == 2 * 2 * number
    ours = {
        (row["dtype"], row["family"]): row
        for row in rows if row["impl"] == "cuflash" and row["sweep"] == "family"
    }  # fmt: skip
    assert 1e-8 < ours["float32", "normal"]["out"] < 1e-6
    assert 1e-5 < ours["float16", "normal"]["out"] < 1e-3
    # float16 rounds logits near -60000 to multiples of 32.
    unfused = [r for r in rows if r["impl"] == "naive" and r["family"] == "lse_minus_60000"]
    assert any(row["out"] == accuracy.NOT_FINITE or row["out"] > 0.1 for row in unfused)


def test_a_wrong_result_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = IMPLEMENTATIONS["cuflash"].results

    def wrong(*given: Any) -> dict[str, np.ndarray]:
        found = right(*given)
        return found | {"dk": found["dk"] * np.float32(1.001)}

    arguments = accuracy.parser().parse_args(["--device", "cpu", "--impl", "cuflash"])
    run = open_run(arguments)
    monkeypatch.setattr(run.implementations[0], "results", wrong)
    work = square(1, 2, 64, 16, causal=False)
    work = accuracy.replace(work, dtype="float32")
    accuracy.measure(run, work, accuracy.Cell("family", "normal", 64, 1.0, 16))
    (row,) = run.rows
    assert abs(row["dk"] - 1e-3) < 1e-5
    assert row["dq"] < 1e-6


def test_tables_and_picture(result_file: Path, tmp_path: Path) -> None:
    result = json.loads(result_file.read_text())
    shown = accuracy.markdown(result)
    for kind in (*accuracy.FAMILIES, "normal, seqlen 128, head size 128"):
        assert shown.count(f"| {kind.replace('_', ' ')} | ") == 2, kind
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    picture = tmp_path / "accuracy.png"
    assert accuracy.main(["--draw", str(result_file), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_peers_on_the_gpu() -> None:
    names = "cuflash,naive,fa2,cudnn,eff"
    arguments = accuracy.parser().parse_args(["--device", "gpu", "--impl", names])
    run = open_run(arguments)
    work = accuracy.replace(square(1, 2, 256, 64, causal=False), dtype="bfloat16")
    with run.clock.scope():
        accuracy.measure(run, work, accuracy.Cell("family", "normal", 256, 1.0, 64))
    assert {row["impl"] for row in run.rows} == {i.name for i in run.implementations}
    for row in run.rows:
        assert max(row[name] for name in accuracy.TENSORS) < 2e-2, row["impl"]


def test_float32_is_as_exact_as_the_memory_efficient_kernel() -> None:
    """In the committed GPU rows, errors of normal inputs are at most 1.25 times the peer's."""
    results = sorted((ROOT / "benchmarks" / "results").glob("h100-accuracy-*.json"))
    rows: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    found = json.loads(results[-1].read_text(encoding="utf-8"))["rows"]
    for row in accuracy.computed_in(found, "float32", "ieee"):
        if row["family"] == "normal" and row["sweep"] in ("seqlen", "head_dim"):
            rows.setdefault((row["seqlen"], row["head_dim"]), {})[row["impl"]] = row
    beside = [cell for cell in rows.values() if {"cuflash", "eff"} <= cell.keys()]
    assert (2048, 64) in rows
    assert len(beside) > 3
    for cell in beside:
        for name in ("out", "dq", "dk", "dv"):
            assert cell["cuflash"][name] <= 1.25 * cell["eff"][name], (cell["eff"], name)


@functools.cache
def rows_of_widths() -> dict[tuple[int, str], dict[str, dict[str, Any]]]:
    """Return committed errors by head size and family, then by implementation."""
    path = sorted((ROOT / "benchmarks" / "results").glob("h100-widths-*.json"))[-1]
    cells: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        cells.setdefault((row["head_dim"], row["family"]), {})[row["impl"]] = row
    return cells


def above_the_bar(rows: dict[tuple[int, str], dict[str, Any]]) -> set[tuple[int, str, str]]:
    """Return the errors above 1.25 times the peer's and a float32 unit of the largest value."""
    found = set()
    for cell, errors in rows.items():
        peer = rows_of_widths()[cell]["eff"]
        for name in accuracy.TENSORS:
            if peer[name] != accuracy.VANISHES:
                bar = max(1.25 * peer[name], peer["unit"][name])
                found |= {(*cell, name)} if errors[name] > bar else set()
    return found


def test_committed_errors_of_float32_are_below_the_bar() -> None:
    rows = {cell: row["cuflash"] for cell, row in rows_of_widths().items()}
    assert rows.keys() == {(d, family) for d in accuracy.WIDTHS for family in accuracy.FAMILIES}
    assert not above_the_bar(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", accuracy.WIDTHS)
def test_errors_of_float32_are_below_the_bar(head_dim: int) -> None:
    """Errors measured now stay below the bar that the peer's committed errors set."""
    run = open_run(accuracy.parser().parse_args(["--device", "gpu", "--impl", "cuflash"]))
    with run.clock.scope():
        for cell in accuracy.cells_of_widths(512):
            if cell.head_dim == head_dim:
                shape = square(1, cell.heads, cell.seqlen, head_dim, causal=False)
                accuracy.measure(run, accuracy.replace(shape, dtype="float32"), cell)
    rows = {(head_dim, row["family"]): row for row in run.rows}
    assert rows.keys() == {(head_dim, family) for family in accuracy.FAMILIES}
    assert not above_the_bar(rows)


def test_narrower_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors have the errors that docs/accuracy.md gives for them, at a smaller size."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for factors in factors_of_float32.FACTORS:
        left = np.abs(sum(factors.split(x)) - x) / np.abs(x)
        bits = 10 if factors.half and factors.lift == 1 else factors.bits * factors.parts
        assert left.max() <= 2.0**-bits, factors.name
    monkeypatch.setattr(factors_of_float32, "SEQLEN", 256)
    q, k, v = factors_of_float32.families()["normal"]
    off = {name: out for name, (out, _) in factors_of_float32.errors_by_factors(q, k, v).items()}
    assert off["float32"] < 1e-7 < off["two bfloat16"] / 30
    assert off["two TF32"] < 3e-7 < off["one TF32"] / 300
    *_, (q, k, v) = factors_of_float32.families().values()
    apart = {n: out for n, (out, _) in factors_of_float32.errors_by_factors(q, k, v).items()}
    assert abs(apart["two TF32"] / off["two TF32"] - 1) < 1e-6  # powers of 2 change no bit
    assert off["the same, rows scaled to fit"] < 3e-7 < apart["the same, rows scaled to fit"] / 100
    by_exponents = factors_of_float32.errors_by_exponents(q, k, v)
    assert abs(by_exponents["two"] / by_exponents["one multiply-add"] - 1) < 0.05
