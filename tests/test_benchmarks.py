"""Do the benchmarks compare like with like, count as the field does and write what they promise?"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cuflash
from benchmarks import (
    bias_gradients,
    cells,
    command,
    host_clock,
    machine,
    memory,
    option_costs,
    overhead,
    packed,
    peers,
    report,
    shapes,
)
from benchmarks.machine import META_KEYS
from cuflash import _cli, reference, tuning
from cuflash._timing import clock as timing
from cuflash._timing.machine import device_slug

ROOT = Path(__file__).resolve().parents[1]
FOUND = ("impl", "pass", "options", "timing", "ms", "tflops")  # keys of a row beside its workload
TINY = tuning.Workload(2, 4, 4, 33, 33, 16, 16, "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"seqlen_q": 5, "causal": True}, {"seqlen_k": 20, "causal": True}, {"window": (3, 2)},
        {"window": (7, None), "causal": True}, {"window": (None, 4), "seqlen_k": 9},
        {"window": (10**30, 2**63)}, {"window": (3, 10**30), "seqlen_k": 9},
    ],
)  # fmt: skip
def test_pairs_are_those_that_are_visible(changes):
    work = replace(TINY, **changes)
    options = cuflash.Options(causal=work.causal, window=work.window)
    seen = reference.visible(options, (), work.seqlen_q, work.seqlen_k)
    assert work.visible_pairs() == seen.sum()


def test_flops_follow_the_convention_of_publications():
    work = shapes.square(8, 32, 2048, 64, False)
    assert work.flops("fwd") == 4 * 8 * 32 * 2048 * 2048 * 64
    assert work.flops("bwd") == 2.5 * work.flops("fwd")
    assert work.flops("fwd+bwd") == work.flops("fwd") + work.flops("bwd")
    assert replace(work, causal=True).flops("fwd") == work.flops("fwd") / 2
    assert replace(work, head_dim_v=128).flops("fwd") == 1.5 * work.flops("fwd")
    # FlashAttention-2 as PyTorch ships it on an H100, published as 305 TFLOP/s at 0.902 ms.
    assert work.flops("fwd") / 0.902432 / 1e9 == pytest.approx(304.6, abs=0.1)


def test_kernels_compute_two_products_forward_and_five_or_seven_backward():
    work = shapes.square(2, 16, 4096, 64, causal=True)
    product = work.flops("fwd") / 2
    of = work.kernel_flops
    assert of("forward_sm90") == 2 * product
    assert of("backward_sm90") == of("backward_pair_sm90") == work.flops("bwd") == 5 * product
    assert of("backward_dq_sm90") + of("backward_dkv_sm90") == 7 * product


def test_training_shapes_have_16384_tokens_and_width_2048():
    found = shapes.training((64, 128), (2048, 8192))
    assert len(set(found)) == 8
    assert {(w.batch * w.seqlen_q, w.heads_q * w.head_dim) for w in found} == {(16_384, 2048)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("seqlen_k", [33, 50])
def test_unfused_baseline_is_attention(causal, heads_kv, seqlen_k):
    work = replace(TINY, causal=causal, heads_kv=heads_kv, seqlen_k=seqlen_k, dtype="float64")
    ((q, k, v, dout),) = work.inputs(np)
    mask = ~np.tri(33, seqlen_k, seqlen_k - 33, dtype=bool) if causal else None
    out, p = peers.naive_forward(q, k, v, mask, 0.25)
    gradients = peers.naive_backward(dout, q, k, v, p, 0.25)
    options = work.score_options()
    expected = reference.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(out, expected.out, rtol=1e-12, atol=1e-12)
    truth = reference.attention_backward(dout, q, k, v, *expected, **options)
    for ours, theirs in zip(gradients, (truth.dq, truth.dk, truth.dv), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_unfused_baseline_multiplies_no_bfloat16():
    """bfloat16 inputs are multiplied as float32, to the last bit: CuPy multiplies no bfloat16."""
    ((q, k, v, dout),) = replace(TINY, dtype="bfloat16").inputs(np)

    def found(dout, q, k, v):
        out, p = peers.naive_forward(q, k, v, None, 0.25)
        return out, p, *peers.naive_backward(dout, q, k, v, p, 0.25)

    exact = found(*(array.astype(np.float32) for array in (dout, q, k, v)))
    for own, wide in zip(found(dout, q, k, v), exact, strict=True):
        assert own.dtype == np.float32
        assert own.tobytes() == wide.tobytes()


@pytest.mark.parametrize("count", range(1, 8))
def test_each_is_timed_right_behind_each_other(count: int) -> None:
    names, order = "abcdefg"[:count], []
    rounds = count * (1 + count % 2)
    timers = {name: lambda name=name: order.append(name) or float(len(order)) for name in names}
    samples = timing.interleaved(timers, rounds)
    assert {name: [order[int(n) - 1] for n in ns] for name, ns in samples.items()} == {
        name: [name] * rounds for name in names
    }
    orders = [order[start : start + count] for start in range(0, len(order), count)]
    assert all(sorted(own) == list(names) for own in orders)
    for place in range(count):
        assert {sum(own[place] == n for own in orders) for n in names} == {1 + count % 2}
    behind = [pair for own in orders for pair in itertools.pairwise(own)]
    assert all(behind.count(pair) == 1 + count % 2 for pair in itertools.permutations(names, 2))


def test_rounds_stay_within_their_limits():
    assert timing.number_of_rounds(1000.0, 120.0) == 11
    assert timing.number_of_rounds(4.0, 120.0) == 30
    assert timing.number_of_rounds(0.0, 120.0) == 60
    assert f"within {timing.WITHIN_ROUNDS}." in tuning.sweep.__doc__


def test_host_clock_measures_milliseconds():
    found = host_clock.HostClock().measure({"nap": lambda: time.sleep(0.02)}, 1.0)["nap"]
    assert found.timing == "wall"
    assert 20 <= found.ms < 60


@pytest.mark.parametrize(("late", "milliseconds"), [(0, 1.0), (2, 3.0), (9, 4.0)])
def test_samples_that_the_host_launched_late_are_taken_again(late, milliseconds):
    """A late sample is retaken at most four times, with twice as many cache fills each time."""
    written, events = [], itertools.count()

    def event():
        number = next(events)
        return types.SimpleNamespace(
            number=number, record=lambda stream: None, synchronize=lambda: None,
            done=number < 2 * late,  # the first ``late`` pairs of events are done too early
        )  # fmt: skip

    clock = object.__new__(timing.DeviceClock)
    clock.stream, clock._fills = None, 3
    clock._buffer = types.SimpleNamespace(fill=written.append)
    elapsed = types.SimpleNamespace(Event=event, get_elapsed_time=lambda a, z: (a.number + 2) / 2)
    clock.cupy = types.SimpleNamespace(cuda=elapsed)
    called = []
    assert clock.once(lambda: called.append(None)) == milliseconds
    assert len(called) == milliseconds
    assert len(written) == 3 * (2 ** len(called) - 1)


def test_host_time_is_per_call_in_the_quietest_window():
    emptied, durations = [], iter([0.02] * 8 + [0.001] * 6 + [0.02] * 10)
    us = host_clock.host_microseconds(
        [lambda: time.sleep(next(durations))], lambda: emptied.append(None), 2, 3, windows=4,
        warm_up_s=0,
    )  # fmt: skip
    assert 1000 <= us < 15_000
    assert len(emptied) == 13  # before every batch and at the end


@pytest.fixture
def run():
    """Return a run on NumPy arrays with the two implementations that need nothing."""
    chosen = [peers.IMPLEMENTATIONS[name] for name in ("cuflash", "naive")]
    return cells.Run(np, host_clock.HostClock(), chosen, ["float32"], ["fwd", "bwd"], 1.0)


def test_products_of_tf32_are_measured_beside_others(run, monkeypatch):
    monkeypatch.setattr(command, "training", lambda *_: [TINY])
    command.SETS["precise"][1](run)
    kinds = {(row["impl"], row["dtype"], row["precision"]) for row in run.rows}
    both = {
        (name, kind, "ieee") for name in ("cuflash", "naive") for kind in ("float32", "float64")
    }
    assert kinds == both | {("cuflash", "float32", "tf32")}
    assert report.markdown({"meta": dict.fromkeys(META_KEYS), "rows": run.rows}).count("\n## ") == 6


def test_result_file_holds_exactly_the_schema(run, tmp_path, capsys):
    cells.measure_shapes([TINY, replace(TINY, causal=True, heads_kv=2)])(run)
    meta = machine.describe_machine(np, "cpu", "python -m cuflash bench")
    path = report.write({"meta": meta, "rows": run.rows, "notes": run.notes}, tmp_path, "test")
    result = json.loads(path.read_text())
    assert path.name == f"cpu-test-{meta['date']}.json"
    assert set(result["meta"]) == set(META_KEYS)
    assert len(result["rows"]) == 8
    for row in result["rows"]:
        assert set(row) == {*TINY.as_json(), *FOUND}
        flops = 2 * 2 * 4 * 33 * 33 * 32 * (0.5 if row["causal"] else 1)
        flops *= 2.5 if row["pass"] == "bwd" else 1
        assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9)
    table = path.with_suffix(".md").read_text()
    assert table == report.markdown(result)
    assert table.count("| b2 h4 33x33 d16 full |") == 2
    assert table.count("| b2 h4/2 33x33 d16 causal |") == 2
    assert _cli.main(["bench", "--render", str(path)]) == 0
    assert capsys.readouterr().out.endswith(table)


@pytest.mark.parametrize("pass_", ["bwd", "fwd+bwd"])
def test_gradients_alone_and_behind_their_forward_are_the_same(pass_):
    work = replace(TINY, dtype="float64", causal=True)
    inputs = work.inputs(np)
    q, k, v, dout = inputs[0]
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    truth = reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    for name in ("cuflash", "naive"):
        prepared = peers.IMPLEMENTATIONS[name].prepare(work, pass_, inputs)
        for dq in (prepared.result(), prepared.calls[0]()):
            np.testing.assert_allclose(dq, truth.dq, rtol=1e-11, atol=1e-12)


@pytest.fixture
def called(monkeypatch):
    """Return a function that records the calls of a module's functions with their keywords."""

    def record(module, *names):
        seen = []
        for name in names:

            def call(*given, name=name, real=getattr(module, name), **named):  # noqa: B008
                seen.append((name, named))
                return real(*given, **named)

            monkeypatch.setattr(module, name, call)
        return seen

    return record


@pytest.mark.parametrize(
    ("name", "module", "functions"),
    [
        ("naive", peers, ["naive_forward", "naive_backward"]),
        ("cuflash", cuflash, ["attention", "attention_backward"]),
    ],
)
def test_the_forward_is_part_of_both(called, name, module, functions):
    """A call of fwd+bwd runs the forward, too, and not the gradient alone."""
    calls = peers.IMPLEMENTATIONS[name].prepare(TINY, "fwd+bwd", TINY.inputs(np)).calls
    seen = called(module, *functions)
    calls[0]()
    assert [kind for kind, _ in seen] == functions


def test_sums_in_any_order_are_ours_and_have_no_forward(run, called):
    unordered = peers.IMPLEMENTATIONS["cuflash-unordered"]
    assert "needs a GPU" in unordered.absent(np)
    asked = called(cuflash, "attention_backward")
    for name in ("cuflash", "cuflash-unordered"):
        peers.IMPLEMENTATIONS[name].prepare(TINY, "bwd", TINY.inputs(np)).calls[0]()
    assert [named["deterministic"] for _, named in asked] == [True, False]
    run.implementations.append(unordered)
    cells.measure_shapes([TINY, replace(TINY, seqlens=(30, 3))])(run)
    assert {row["impl"] for row in run.rows if row["pass"] == "fwd"} == {"cuflash", "naive"}
    assert any("cuflash-unordered: a forward has one order" in note for note in run.notes)
    rows = {row["impl"]: row for row in run.rows if row["pass"] == "bwd"}
    promised = {name: row["deterministic"] for name, row in rows.items()}
    assert promised == {"cuflash": True, "naive": True, "cuflash-unordered": False}
    for name, ms in (("cuflash", 4.0), ("naive", 8.0), ("cuflash-unordered", 2.0)):
        rows[name]["ms"] = ms
    *_, line = report.table(list(rows.values()), "speed")
    assert line.endswith("| 2.00 | 4.00 |")


def test_packed_sequences(run):
    work = replace(TINY, batch=1, seqlen_q=40, seqlen_k=40, seqlens=(33, 7), causal=True)
    cells.measure_cell(run, work, "fwd")
    row = run.rows[0]
    assert row["tflops"] == pytest.approx(2 * 4 * (33**2 + 7**2) / 2 * 32 / row["ms"] / 1e9)
    assert str(report.workload_of(row)) == "b1 h4 40x40 d16 causal in 2 sequences"
    assert report.workload_of(json.loads(json.dumps(row))).visible_pairs() == work.visible_pairs()
    cells.measure_cell(run, work, "fwd")
    assert sum("naive: no packed sequences" in note for note in run.notes) == 1


def test_as_many_tiles():
    assert packed.tiles(packed.PACKED) == packed.tiles(packed.AS_MANY_TILES) == 16 * 2379
    assert sum(packed.SEQLENS) == packed.PACKED.seqlen_q


@pytest.mark.parametrize(("place", "words"), [(2, "differs"), (0, "out of order")])
def test_what_is_wrong_or_fails_leaves_a_note_and_the_others(run, place, words):
    class Other(peers.Naive):
        """Fails, or returns the result of another call."""

        name = "other"

        def prepare(self, work, pass_, inputs):
            if place == 0:
                raise RuntimeError("out of order")
            return super().prepare(replace(work, causal=not work.causal), pass_, inputs)

    run.implementations.insert(place, Other())
    cells.measure_cell(run, TINY, "bwd")
    assert {row["impl"] for row in run.rows} == {"cuflash", "naive"}
    assert any("other bwd" in note and words in note for note in run.notes)


def test_device_names_become_file_names():
    slugs = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx-4090", "Tesla V100-PCIE-16GB": "v100", "cpu": "cpu",
        "": "unknown",
    }  # fmt: skip
    assert {name: device_slug(name) for name in slugs} == slugs


def test_import_is_measured_in_a_fresh_process(run):
    overhead.measure_first_calls(run)
    (row,) = run.rows
    assert (row["options"], row["timing"], row["tflops"]) == ("import", "process", None)
    assert 0.1 < row["ms"] < 5000


def test_first_calls_are_one_cold_and_seven_warm(run, monkeypatch):
    firsts = iter([1700.0, 31.0, 35.0, 30.0, 49.0, 32.0, 33.0, 34.0])
    monkeypatch.setattr(
        overhead, "fresh_process", lambda *_: {"first": next(firsts), "second": 0.1, "import": 20.0}
    )
    overhead.measure_first_calls(replace(run, xp=types.ModuleType("cupy"), passes=["fwd"]))
    assert {row["options"]: row["ms"] for row in run.rows} == {
        "cold": 1700.0, "warm from disk": 33.0, "warm from disk, slowest of 7": 49.0,
        "second call": 0.1, "import": 20.0,
    }  # fmt: skip


@pytest.mark.full
def test_command_on_a_machine_without_a_gpu(tmp_path):
    """The real command runs in a process of its own."""
    command = [sys.executable, "-m", "cuflash", "bench", "--device", "cpu", "--pass", "fwd"]
    done = subprocess.run(
        [*command, "--set", "cpu", "--impl", "cuflash,fa2", "--topic", "try", "--out", tmp_path,
         "--budget-ms", "1"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert "note: absent: fa2: it needs a GPU" in done.stdout
    assert "| b1 h8 2048x2048 d64 causal |" in done.stdout
    (path,) = tmp_path.glob("cpu-try-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {(row["impl"], row["pass"]) for row in rows} == {("cuflash", "fwd")}


@pytest.fixture
def clock():
    """Return the clock of the GPU."""
    return timing.DeviceClock()


@pytest.mark.gpu
@pytest.mark.alone
def test_device_clock_sees_the_memory_bandwidth(clock):
    """Copying 1 GB takes the same time by events and, 8 times, by a graph.

    Other work on the device may slow one of the two, so they have to agree in one of five tries.
    """
    cupy = clock.cupy
    source = cupy.ones(1 << 28, cupy.float32)
    target = cupy.empty_like(source)

    def copy():
        cupy.negative(source, out=target)  # a kernel: in a graph, copies would run on a copy engine

    with clock.scope():
        replay = clock.capture([copy] * 8)
        for _ in range(5):
            by_events = clock.measure({"copy": copy}, 50.0)["copy"]
            by_graph = clock.measure_graphs({"copy": (replay, 8)}, 50.0)["copy"]
            if by_graph.ms == pytest.approx(by_events.ms, rel=0.2):
                break
    assert (by_events.timing, by_graph.timing) == ("events", "graph")
    assert by_graph.ms == pytest.approx(by_events.ms, rel=0.2)
    bandwidth = 2 * source.nbytes / by_events.ms / 1e6
    assert 100 < bandwidth < 20_000  # GB/s, between the slowest and the fastest device that exists


@pytest.mark.gpu
@pytest.mark.alone
def test_levels_of_memory_differ_as_they_should() -> None:
    """Levels of memory differ as they should, in one of three tries beside other work."""
    for _ in range(3):
        levels = {level.name: level for level in memory.measure()}
        value = {name: level.value for name, level in levels.items()}
        of_device = [levels[f"device memory {way}"] for way in ("read", "write", "copy")]
        if (
            value["device memory read"] < value["L2 read"] < value["shared memory read"]
            and value["L2 read latency"] < value["device memory read latency"]
            and min(level.value for level in of_device) > 100
        ):
            break
    else:
        pytest.fail(memory.table(list(levels.values())))
    assert all(level.sheet is None or level.value < 1.03 * level.sheet for level in of_device)
    assert {level.unit for name, level in levels.items() if "latency" in name} == {"ns"}


@pytest.fixture
def gpu_run(clock):
    """Return a function that makes a run on the GPU, by default of cuflash alone."""
    import cupy

    def make(dtype, passes, names=("cuflash",)):
        chosen = [i for i in map(peers.IMPLEMENTATIONS.get, names) if not i.absent(cupy)]
        return cells.Run(cupy, clock, chosen, [dtype], list(passes), 5.0)

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_peers_read_the_same_arrays_and_agree(gpu_run, pass_, dtype):
    work = replace(TINY, seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=64, dtype=dtype)
    run = gpu_run(dtype, [pass_], peers.IMPLEMENTATIONS)
    for causal in (False, True):
        cells.measure_cell(run, replace(work, causal=causal), pass_)
    assert "cuflash" in {row["impl"] for row in run.rows}
    assert not any("differs" in note for note in run.notes), run.notes


@pytest.mark.gpu
@pytest.mark.alone
def test_cuflash_can_be_timed_by_a_graph_and_from_the_host(gpu_run):
    run = gpu_run("bfloat16", command.PASSES)
    command.SETS["host"][1](run)
    cells.measure_shapes([shapes.square(1, 8, 128, 64, True)])(run)
    assert run.notes == []
    assert [row["timing"] for row in run.rows] == ["host"] * 6 + ["graph"] * 3
    assert all(row["ms"] < 5 for row in run.rows)


@pytest.mark.gpu
@pytest.mark.own_memory
def test_peak_memory_counts_what_lives_at_one_time():
    import cupy

    def call():
        first = cupy.empty(1 << 20, cupy.uint8)
        del first
        return cupy.empty(1 << 21, cupy.uint8)

    assert overhead.peak_bytes(call) == 1 << 21


class Tensor:
    """A torch tensor on NumPy's memory, with the methods that ``arrange`` calls."""

    def __init__(self, array):
        self.array = array

    def transpose(self, a, b):
        return Tensor(self.array.swapaxes(a, b))

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array))


@pytest.mark.parametrize("name", ["cuflash", "fa2", "fa4"])
def test_memory_is_counted_beside_operands_in_the_layout_of_each(name):
    peer = peers.IMPLEMENTATIONS[name]
    (arrays,) = TINY.inputs(np)
    found = peer.laid_out(arrays)
    for own, array in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(own, array)
        assert isinstance(peer, peers.Cuflash) or np.shares_memory(
            peer.arrange(Tensor(own)).array, own
        )
        assert (own is array) == (name != "fa4")


@pytest.mark.gpu
def test_every_option_is_timed_against_none(gpu_run, monkeypatch):
    monkeypatch.setattr(option_costs, "PLAIN", shapes.square(2, 2, 256, 64, False))
    run = gpu_run("bfloat16", ["fwd", "bwd"])
    command.SETS["options"][1](run)
    assert run.notes == []
    assert len(run.rows) == 2 * len(option_costs.CHANGES)
    assert all(row["options"].startswith("takes ") for row in run.rows)


@pytest.mark.gpu
def test_gradients_of_a_bias_are_timed_with_what_agrees(gpu_run, monkeypatch):
    monkeypatch.setattr(bias_gradients, "CASES", (bias_gradients.Case(3, 2, 64, 32, "float32"),))
    run = gpu_run("float32", ["bwd"])
    command.SETS["bias"][1](run)
    ours = [row for row in run.rows if row["impl"] == "cuflash"]
    assert [row["arrays"] for row in ours] == [("bias",)]
