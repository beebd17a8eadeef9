"""Do the example and the benchmark of several ranks run without a GPU?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import train_on_ranks

from benchmarks import projection, scale_out

ROOT = Path(__file__).resolve().parents[1]


def test_training_on_two_processes_follows_the_curve_of_one(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # processes take this checkout
    assert train_on_ranks.main(["--ranks", "2", "--steps", "12", "--tokens", "60"]) == 0
    assert "the curves agree" in capfd.readouterr().out


def test_gradients_of_the_example():
    """Central differences of its loss."""
    task = train_on_ranks.recall(20, seed=3)
    weights = train_on_ranks.initial_weights(task.features.shape[1])

    def found(moved):
        attend = train_on_ranks.attend_whole
        return train_on_ranks.loss_and_gradients(moved, task.features, task.targets, 20, attend)

    _, gradients = found(weights)
    rng = np.random.default_rng(0)
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        ahead, behind = (found(weights | {name: weight + h * direction})[0] for h in (1e-5, -1e-5))
        slope = (ahead - behind) / 2e-5
        assert (gradients[name] * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_curves_that_do_not_agree_are_noticed(capsys):
    falling = [1.0, 0.9, 0.8]
    assert train_on_ranks.show(falling, falling, 2, 1e-9) == 0
    assert train_on_ranks.show(falling, [1.0, 0.9, 0.8001], 2, 1e-9) == 1
    assert train_on_ranks.show([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 2, 1e-9) == 1


def test_scaling_runs_part_by_part(tmp_path, capsys):
    """A run that is over at once leaves what the next one goes on with."""
    file = tmp_path / "found.json"
    common = ["--simulate", "2", "--tokens", "16", "--methods", "ring", "--file", str(file)]
    assert scale_out.main([*common, "--only", "GQA 32/8 causal", "--seconds", "0"]) == 3
    assert not file.exists()
    assert scale_out.main([*common, "--only", "GQA 32/8 causal"]) == 0
    told = capsys.readouterr().out
    state = json.loads(file.read_text())
    assert state["ranks"] == 2
    found = {name.split()[0] for name in state["cells"]}
    assert found == {"weak", "strong", "longest"}
    for cell in state["cells"].values():
        if cell["kind"] == "weak":
            assert cell["efficiency"] == pytest.approx(2 * cell["block_ms"] / cell["ms"])
        elif cell["kind"] == "strong":
            assert cell["speed_up"] == pytest.approx(cell["one_ms"] / cell["ms"])
        else:
            assert cell["tokens"] == 32
    assert told.count("\n") == len(state["cells"])
    assert scale_out.main([*common, "--only", "GQA 32/8 causal"]) == 0  # nothing is left
    assert capsys.readouterr().out == ""


def test_a_projection_says_what_it_is(capsys):
    assert projection.main(["--ranks", "64", "--kept", "0.9", "0.8"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("projected, not measured: 64 GPUs")
    shares = [[float(cell.rstrip("%")) for cell in line.split()[3:5]] for line in lines]
    assert all(0 < forward <= 90 and 0 < gradient <= 80 for forward, gradient in shares)
    assert shares[-1] > [80, 70]  # many tokens hide what moves
