"""Does the benchmark of points measure what it says, by an error that it computes itself?"""

from __future__ import annotations

import json

import numpy as np
import pytest

import cuflash
from benchmarks import points


def test_a_run_writes_a_row_for_each_dtype(tmp_path, capsys):
    command = ["--points", "300", "--dtype", "float32,float64", "--device", "cpu"]
    assert points.main([*command, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("cpu-points-*.json")
    result = json.loads(path.read_text())
    ours = [row for row in result["rows"] if row["impl"] == "cuflash"]
    assert [(row["dtype"], row["points"]) for row in ours] == [("float32", 300), ("float64", 300)]
    assert 1e-9 < ours[0]["error"] < 1e-5
    assert ours[1]["error"] < 1e-13
    assert all(row["ms"] > 0 and row["extra_bytes"] is None for row in ours)
    text = capsys.readouterr().out
    assert path.with_suffix(".md").read_text() == points.markdown(result)
    assert text.endswith(points.markdown(result))
    assert "| cuflash | float64 | 300 x 300 |" in text
    assert ("absent: keops" in text) == (len(result["rows"]) == 2)


def test_an_error_is_seen():
    x, y, bias = points.clouds(np, 200, "float64")
    found = cuflash.logsumexp(x, y, scale=points.SCALE, bias=bias)
    found[points.CHECKED_ROWS - 1] += 0.25
    assert points.error(x, y, bias, found) == pytest.approx(0.25)


def test_keops_computes_the_same():
    pytest.importorskip("pykeops")
    x, y, bias = points.clouds(np, 200, "float64")
    assert points.error(x, y, bias, points.keops_call(np, x, y, bias)()) < 1e-12


@pytest.mark.gpu
def test_memory_beside_the_result_is_counted(tmp_path):
    assert points.main(["--points", "20000", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-points-*.json")
    row = json.loads(path.read_text())["rows"][0]
    assert 0 <= row["extra_bytes"] < 64 << 20
    assert row["error"] < 1e-5
