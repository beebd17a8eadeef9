"""Do the example and the benchmark of several ranks run without a GPU?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import train_on_ranks

from benchmarks import dead_rank, projection, rank_timeline, ring_peer, scale_out
from cuflash import distributed, reference

ROOT = Path(__file__).resolve().parents[1]


def test_training_on_two_processes_follows_the_curve_of_one(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # processes import this checkout
    assert train_on_ranks.main(["--ranks", "2", "--steps", "12", "--tokens", "60"]) == 0
    assert "the curves agree" in capfd.readouterr().out


def test_gradients_of_the_example():
    """Gradients of the example agree with central differences of its loss."""
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
    """A run that is over at once leaves its work to the next one."""
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
    assert scale_out.main([*common, "--only", "GQA 32/8 causal"]) == 0  # nothing is left to run
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_part_of_scaling_runs(ranks, tmp_path):
    """Weak and strong cells and the longest sequence run, by our methods and the peer's."""
    file = tmp_path / "found.json"
    methods = ["ring", "ulysses", ring_peer.METHOD]
    common = ["--simulate", str(ranks), "--tokens", "4", "--file", str(file), "--split"]
    for part in ("weak GQA 32/8 causal", "strong", "longest GQA 32/8"):
        assert scale_out.main([*common, "--methods", *methods, "--only", part]) == 0
    cells = json.loads(file.read_text())["cells"]
    assert len(cells) == 2 * 3 + 2 * 3 + 2 * 2
    split = {"compute_ms", "exchange_ms", "host_ms", "agree_ms"}
    for cell in cells.values():
        assert ("pool_bytes" in cell, "refused" in cell) == (cell["kind"] == "longest", False)
        whole = cell["kind"] == "weak" and cell["method"] != ring_peer.METHOD
        assert (split & cell.keys() == split) == whole
        assert all(cell[name] > 0 for name in split & cell.keys())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_schedule_of_a_peer_is_attention(size, causal):
    rng = np.random.default_rng(0)
    comm = distributed.simulated(size)
    q, dout = rng.standard_normal((2, 4, 12 * size, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 12 * size, 8)).astype(np.float32)
    cut = [distributed.shard(a, comm=comm) for a in (q, k, v)]
    out, lse = map(list, zip(*ring_peer.attention(comm, *cut, causal=causal), strict=True))
    shards = distributed.shard(dout, comm=comm)
    gradients = zip(
        *ring_peer.attention_backward(comm, shards, *cut, out, lse, causal=causal), strict=True
    )
    options = {"causal": causal, "enable_gqa": True}
    truth = reference.attention(q, k, v, return_lse=True, **options)
    right = reference.attention_backward(dout, q, k, v, **options)
    found = [distributed.unshard(list(a), comm=comm)[0] for a in (out, *gradients)]
    for array, expected in zip(found, (truth.out, right.dq, right.dk, right.dv), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    whole = distributed.unshard(lse, comm=comm, axis=-1)[0]
    np.testing.assert_allclose(whole, truth.lse, rtol=1e-5)


def test_survivors_of_a_dead_rank_are_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "found.json"
    file.write_text('{"cells": {"kept": {}}}')
    asked = ["--ranks", "4", "--transport", "host", "--tokens", "16", "--file", str(file)]
    assert dead_rank.main(asked) == 0
    cells = json.loads(file.read_text())["cells"]
    assert list(cells) == ["kept", "dead 4 host"]
    found = cells["dead 4 host"]
    assert found["named"] == [3, 3, 3]
    assert 0 < found["seconds"] < 10


def test_a_timeline_is_that_of_the_schedule():
    """A fast link hides every exchange behind computation, and a slow link is waited for."""
    how = {"causal": True, "gradient": False, "method": "ring"}
    fast, slow = (
        rank_timeline.timeline(4, 8192, (32, 8), speeds=rank_timeline.Speeds(link=b), **how)
        for b in (1e15, 1e9)
    )
    pairs = 4 * 8192**2 / 2  # pairs of a rank: a quarter of half of all pairs
    for line in fast:
        expected = 4 * 32 * 128 * pairs / rank_timeline.Speeds().forward
        assert line.computed == pytest.approx(expected, rel=0.1)
        assert line.waited < 1e-3 * line.computed
        assert (line.exchanges, line.bytes_sent) == (3, 3 * 2 * 2 * 8192 * 8 * 128)
    assert min(line.waited for line in slow) > 10 * fast[0].computed


def test_the_projection_of_the_docs(capsys):
    assert projection.main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    share = {(int(n), heads, method): kept for n, heads, method, kept, *_ in lines}
    text = " ".join((ROOT / "docs" / "distributed.md").read_text("utf-8").split())
    text = text.replace(" %", "%")
    few, many = share[1 << 20, "32/8", "usp"], share[1 << 22, "32/8", "usp"]
    ring = share[1 << 22, "32/8", "ring"]
    assert f"{few} of the speed of single GPUs with `usp` at 2^20 tokens and {many} from" in text
    assert f"where `ring` alone keeps {ring}" in text


def test_a_projection_says_what_it_is(capsys):
    assert projection.main(["--ranks", "64", "--kept", "0.9", "0.8"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("projected, not measured: 64 GPUs")
    shares = [[float(cell.rstrip("%")) for cell in line.split()[3:5]] for line in lines]
    assert all(0 < forward <= 90 and 0 < gradient <= 80 for forward, gradient in shares)
    assert shares[-1] > [80, 70]  # with many tokens the exchanges are hidden
