"""Does the check of a sweep pass right results, and nothing that is wrong?"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import reference, tuning
from cuflash._ahead import kernels_of
from cuflash._select import hardware as select_hardware
from cuflash._select import measured
from cuflash._timing.clock import Measurement
from cuflash.tuning import _checking, _kernels, _timing
from support.chosen import backward_of, forward_of

WORK = tuning.Workload(2, 4, 2, 4096, 4096, 64, 64, "bfloat16", causal=True)


@pytest.fixture(scope="module")
def forward():
    """Return the small problem, its inputs and definition, and CPU results taken as the shipped."""
    work = _checking.small(WORK)
    (inputs,) = work.inputs(np)
    truth = _checking.definition(work, "forward_sm90", inputs)
    return work, inputs, truth, computed(work, inputs)


def computed(work, inputs, **options):
    q, k, v, _ = inputs
    return cuflash.attention(q, k, v, return_lse=True, **(work.score_options() | options))._asdict()


def verdict(results, forward) -> str:
    work, _, truth, shipped = forward
    own = _checking.errors(results, truth)
    return _checking.complaint(own, _checking.errors(shipped, truth), truth, work.dtype)


def test_the_small_problem_cuts_tiles_and_goes_round_rings():
    full = _checking.small(replace(WORK, causal=False))
    causal = _checking.small(WORK)
    assert (full.heads_q, full.heads_kv, causal.seqlen_k) == (2, 1, causal.seqlen_q)
    for block in (48, 64, 80, 96, 112, 128, 192):
        assert full.seqlen_q % block
        assert full.seqlen_k % block
    assert full.seqlen_k > 8 * 128 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "given",
    [
        {}, {"causal": True}, {"window": (3000, 0)}, {"arrays": ("segment_ids",)},
        {"arrays": ("kv_lengths", "sink")}, {"arrays": ("alibi_slopes",)}, {"dropout": 0.25},
    ],
)  # fmt: skip
def test_the_small_problem_has_the_kernels_and_options_of_the_large_one(dtype, arch, given):
    """The small problem has the large one's kernels and options; its tiles are those checked."""
    hardware = select_hardware.typical(arch)
    rows = ((1, 32, 4), (1, 8, 8), (16, 8, 1), (64, 8, 2), (65, 8, 2), (4096, 16, 16), (4096, 8, 2))
    for seqlen_q, heads_q, heads_kv in rows:
        for head_dim in (64, 256):
            large = tuning.Workload(
                1, heads_q, heads_kv, seqlen_q, 4096, head_dim, head_dim, dtype, **given
            )
            work = _checking.small(large)
            assert work.batch * work.heads_q * work.seqlen_q <= 2 * 2 * 700
            forwards = [forward_of(own.problem(), hardware) for own in (large, work)]
            # Extents decide whether keys or queries are split. A sweep gives that, too.
            if any(getattr(config, "split_keys", False) for config in forwards):
                forwards = [forwards[0]] * 2
            chains = []
            for own, forward in zip((large, work), forwards, strict=True):
                steps = [forward]
                for wanted in ("q", "kv", "qkv"):
                    steps += backward_of(own.problem(), hardware, frozenset(wanted))
                chains.append([without_tile(c) for c in steps if c.kernel != "backward_combine"])
            assert chains[0] == chains[1]


def without_tile(config):
    left_out = (*measured.TILE_FIELDS, "split_queries", "split_rows")
    kept = {n: v for n, v in config.values().items() if n not in left_out}
    return config.kernel, kept


def test_the_shipped_results_pass(forward):
    work, _, truth, shipped = forward
    assert verdict(shipped, forward) == ""
    assert _checking.shipped_complaint(_checking.errors(shipped, truth), truth, work.dtype) == ""


def test_logsumexp_is_swept_as_attention_without_values():
    work = replace(WORK, dtype="float32", head_dim=3, head_dim_v=0, arrays=("key_bias",))
    found = tuning.space(work, arch="sm_90a")
    assert found.kernel == "forward_narrow"
    assert measured.options_of(found.default) == "causal bias narrow 3x0 shared"
    work = _checking.small(work)
    (inputs,) = work.inputs(np)
    options = work.score_options()
    assert options["bias"].shape == (1, work.seqlen_k)
    truth = _checking.definition(work, found.kernel, inputs)
    assert list(truth) == ["lse"]
    lse = cuflash.logsumexp(*inputs[:2], **options)
    np.testing.assert_allclose(lse, truth["lse"], rtol=1e-6, atol=1e-6)
    gradients = _checking.definition(work, "backward_dkv_sm80", inputs)
    assert list(gradients) == ["dk"]


def changed(results, name, index, value):
    copy = {key: array.copy() for key, array in results.items()}
    copy[name][index] = value
    return copy


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("out", (0, 0, 699, 3), np.nan),
        ("out", (1, 1, 350, 0), np.inf),
        ("out", (0, 0, 0), 0.0),
        ("lse", (0, 0, 3), np.nan),
        ("lse", (0, 1, 699), 0.0),
        ("lse", (0, 0, 0), -np.inf),
    ],
)
def test_one_wrong_element_or_row_is_noticed(forward, name, index, value):
    assert verdict(changed(forward[3], name, index, value), forward).startswith(f"{name}: error")


def test_a_wrong_mask_a_wrong_scale_and_a_lost_block_are_noticed(forward):
    work, inputs, _, _ = forward
    q, k, v, dout = inputs
    shifted = computed(work, inputs, offset=1)
    scaled = computed(work, inputs, scale=0.99 / 8)
    emptied = v.copy()
    emptied[..., 640:656, :] = 0
    lost = computed(work, (q, k, emptied, dout))
    for results in (shifted, scaled, lost):
        assert verdict(results, forward)


def test_less_exact_results_are_noticed(forward):
    """Values rounded to one bit less are noticed by the error of all of them alone."""
    _, _, _, shipped = forward
    bits = shipped["out"].view(np.uint16)
    coarse = ((bits + 1) & np.uint16(0xFFFE)).view(shipped["out"].dtype)
    assert verdict({**shipped, "out": coarse}, forward).startswith("out:")


def test_a_default_that_is_wrong_is_noticed(forward):
    work, inputs, truth, _ = forward
    wrong = _checking.errors(computed(work, inputs, causal=False), truth)
    complaint = _checking.shipped_complaint(wrong, truth, work.dtype)
    assert complaint.startswith("out as shipped: rms error")


@pytest.mark.parametrize(
    ("kernel", "wrt"),
    [("backward_dq_sm90", "q"), ("backward_dkv_sm80", "kv"), ("backward_sm90", "qkv")],
)
def test_gradients_are_compared_by_name(kernel, wrt):
    work = replace(_checking.small(WORK), seqlen_q=100, seqlen_k=100)
    (inputs,) = work.inputs(np)
    q, k, v, dout = inputs
    truth = _checking.definition(work, kernel, inputs)
    assert list(truth) == [f"d{name}" for name in wrt]
    options = work.score_options()
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    own = cuflash.attention_backward(dout, q, k, v, out, lse, wrt=tuple(wrt), **options)
    results = {name: getattr(own, name) for name in truth}
    found = _checking.errors(results, truth)
    assert _checking.complaint(found, found, truth, work.dtype) == ""
    doubled = _checking.errors({name: 2 * a for name, a in results.items()}, truth)
    assert _checking.complaint(doubled, found, truth, work.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_dtypes_are_compared_in_wider_ones(dtype):
    work = replace(_checking.small(replace(WORK, dtype=dtype)), seqlen_q=150, seqlen_k=150)
    (inputs,) = work.inputs(np)
    truth = _checking.definition(work, "forward_sm80", inputs)
    results = computed(work, inputs)
    found = _checking.errors(results, truth)
    assert 0 < found["out"].rms < 4 * np.finfo(dtype).eps
    assert _checking.complaint(found, found, truth, dtype) == ""
    assert _checking.shipped_complaint(found, truth, dtype) == ""
    worse = results | {"out": results["out"] * (1 + 64 * np.finfo(dtype).eps)}
    assert _checking.complaint(_checking.errors(worse, truth), found, truth, dtype)


class HostCalls:
    """``_timing.Calls`` on the CPU path; a configuration is the scale of scores."""

    def __init__(self, workload, kernel, copies=1):
        self.inputs = workload.inputs(np, copies)
        self.results = [
            {"out": np.empty_like(dout), "lse": np.empty(q.shape[:-1], np.float32)}
            for q, _, _, dout in self.inputs
        ]

    def of(self, config):
        def call(q, k, v, _, results):
            out = results["out"], results["lse"]
            cuflash.attention(q, k, v, return_lse=True, out=out, scale=config)

        pairs = zip(self.inputs, self.results, strict=True)
        return [functools.partial(call, *arrays, results) for arrays, results in pairs]


class HostClock:
    """A simulated device whose calls are short or long."""

    def __init__(self, ms):
        self.ms, self.stream = ms, SimpleNamespace(synchronize=lambda: None)

    def scope(self):
        return contextlib.nullcontext()

    def measure(self, calls, budget_ms):
        return {name: Measurement(self.ms, "events") for name in calls}

    def copies_to_leave_l2(self, bytes_per_copy):
        return 3


@pytest.mark.parametrize("ms", [0.01, 1.0])
def test_the_timed_problem_is_compared_on_its_own_inputs(monkeypatch, ms):
    """The timed problem is compared on its own inputs; calls short enough for graphs have three."""
    monkeypatch.setattr(_timing, "Calls", HostCalls)
    monkeypatch.setattr(_timing, "DeviceClock", lambda: HostClock(ms))
    monkeypatch.setattr(_timing, "config_from_json", lambda scale: scale)
    monkeypatch.setattr(_timing, "difference", lambda a, b: float(np.abs(a - b).max()))
    work = tuning.Workload(1, 1, 1, 60, 60, 16, 16, "float32")
    request = {"workload": work.as_json(), "kernel": "forward_sm80", "default": 0.25}
    bench = _timing.Bench(request | {"check": False, "budget_ms": 1.0})
    assert (bench.graphs, len(bench.calls.inputs)) == ((True, 3) if ms < 0.2 else (False, 1))
    assert bench.compared(0.25) == ""
    assert bench.compared(0.3).startswith("out of the timed problem differs by")


class UnsteadyCalls(HostCalls):
    """Calls whose last bits differ from call to call."""

    def on_host(self):
        self.last_bit = not getattr(self, "last_bit", False)
        found = {name: array.copy() for name, array in self.results[0].items()}
        found["out"].view(np.uint32)[...] ^= np.uint32(self.last_bit)
        return found


@pytest.mark.parametrize("deterministic", [True, False])
def test_bits_are_compared_where_they_are_promised(monkeypatch, deterministic):
    scale = type("Scale", (float,), {"deterministic": deterministic})
    monkeypatch.setattr(_timing, "Calls", UnsteadyCalls)
    monkeypatch.setattr(_timing, "DeviceClock", lambda: HostClock(1.0))
    monkeypatch.setattr(_timing, "config_from_json", scale)
    monkeypatch.setattr(_timing, "_on_host", lambda array: array)
    monkeypatch.setattr(_checking, "small", lambda workload: workload)
    work = tuning.Workload(1, 1, 1, 60, 60, 16, 16, "float32")
    request = {"workload": work.as_json(), "kernel": "forward_sm80", "default": 0.25}
    bench = _timing.Bench(request | {"check": True, "budget_ms": 1.0})
    wrong = bench.checked(0.25)["wrong"]
    assert wrong == ("out: two runs differ in their bits" if deterministic else "")
    assert bench.checked(0.3)["wrong"].startswith("out: error")


@pytest.mark.gpu
@pytest.mark.not_rehearsed
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads_kv", "softcap", "number"),
    [
        ("bfloat16", 64, 2, None, 0),
        ("bfloat16", 96, 2, 20.0, 1),
        ("bfloat16", 192, 2, 20.0, 1),
        ("bfloat16", 128, 4, None, 1),
        ("float32", 64, 2, None, 0),
        ("float32", 64, 2, None, 2),
        ("float32", 3, 2, None, 0),
        ("float64", 64, 4, None, 0),
        ("float64", 64, 4, None, 1),
        ("float64", 64, 4, None, 2),
        ("bfloat16", 256, 4, None, 1),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "arrays": ("sink",)}])
def test_kernels_are_swept_on_the_device(
    tmp_path, dtype, head_dim, heads_kv, softcap, number, options
):
    """Hopper's kernels, the narrow forward and partners are swept, all short enough for graphs."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": 512, "seqlen_k": 512}
    work = replace(WORK, dtype=dtype, heads_kv=heads_kv, softcap=softcap, **sizes, **options)
    steps = kernels_of(work, select_hardware.present(), backward=True)
    config = [c for c in steps if c.kernel in _kernels.KERNELS][number]
    name, tile = config.kernel, _kernels.tile_of(config)
    tried = {parameter: (value,) for parameter, value in tile.items()}
    ring = "num_stages" if "num_stages" in tile else "blocks_per_sm"
    tried[ring] = tuple(sorted({tile[ring], 1, 2}))
    found = tuning.space(work, name, parameters=tried)
    result = tuning.sweep(
        work, found, file=tmp_path / "rows.jsonl", budget_ms=5.0, processes=2, time_limit=60.0
    )
    assert [row.get("reason", row["status"]) for row in result.rows] == ["ok"] * len(found)
    assert {row["timing"] for row in result.rows} <= {"graph", "events"}
    assert all(0.01 < row["relative"] < 20 for row in result.rows)
    assert result.finals[-1]["default_ms"] > 0


@pytest.mark.gpu
@pytest.mark.not_rehearsed
def test_logsumexp_takes_what_a_sweep_of_it_finds(tmp_path):
    import cupy

    shape = {"head_dim": 3, "head_dim_v": 0, "seqlen_q": 512, "seqlen_k": 512}
    work = replace(WORK, dtype="float32", arrays=("key_bias",), **shape)
    tried = {"num_warps": (4,), "block_m": (128, 256), "block_n": (128,), "blocks_per_sm": (1, 2)}
    found = tuning.space(work, parameters=tried)
    result = tuning.sweep(
        work, found, file=tmp_path / "rows.jsonl", budget_ms=5.0, processes=2, time_limit=60.0
    )
    assert [row.get("reason", row["status"]) for row in result.rows] == ["ok"] * len(found)
    best = found.candidate(result.best["key"]).config
    ((q, k, _, _),) = work.inputs(cupy)
    options = work.score_options(cupy)
    lse = cuflash.logsumexp(q, k, config=best, **options)
    host = {name: a.get() if name == "bias" else a for name, a in options.items()}
    truth = reference.logsumexp(q.get(), k.get(), **host)
    np.testing.assert_allclose(lse.get(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.not_rehearsed
@pytest.mark.parametrize("kernel", ["forward_sm80", "backward_dkv_sm80", "backward_dq_sm80"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_kernel_that_another_replaced_is_swept_on_the_device(tmp_path, dtype, kernel):
    work = replace(WORK, dtype=dtype, heads_kv=4, seqlen_q=300, seqlen_k=300)
    found = tuning.space(work, kernel)
    found.candidates = [found.candidate(found.default_key)]
    result = tuning.sweep(
        work, found, file=tmp_path / "rows.jsonl", budget_ms=5.0, processes=1, time_limit=60.0
    )
    assert [row.get("reason", row["status"]) for row in result.rows] == ["ok"]


@pytest.mark.gpu
@pytest.mark.not_rehearsed
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_gradient_in_any_order_is_swept_on_the_device(tmp_path, head_dim):
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "heads_kv": 4, "deterministic": False}
    work = replace(WORK, seqlen_q=512, seqlen_k=512, **sizes)
    kernel = "backward_sm90" if head_dim < 256 else "backward_pair_sm90"
    found = tuning.space(work, kernel)
    assert not found.default.deterministic
    found.candidates = [found.candidate(found.default_key)]
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", budget_ms=5.0, processes=1)
    assert [row.get("reason", row["status"]) for row in result.rows] == ["ok"]


@pytest.mark.gpu
@pytest.mark.not_rehearsed
def test_calls_that_need_room_are_swept_on_the_device(tmp_path):
    """Short calls that need memory are swept by a graph, in which nothing can be allocated."""
    work = replace(WORK, seqlen_q=300, seqlen_k=300, arrays=("bias", "segment_ids"), dropout=0.25)
    found = tuning.space(work)
    found.candidates = [found.candidate(found.default_key)]
    result = tuning.sweep(work, found, file=tmp_path / "rows.jsonl", budget_ms=5.0, processes=1)
    assert [row.get("reason", row["timing"]) for row in result.rows] == ["graph"]
