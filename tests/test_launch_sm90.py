"""Does Hopper's kernel get the parameters, maps and counters that it reads? Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._kernels import fused_backward, registry
from cuflash._kernels import params as kernel_params
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem, describe
from cuflash._select import hardware, override
from cuflash._select.access import Access
from cuflash._select.choose import Wanted, choose
from cuflash._select.override import BackwardConfigs
from support import chosen

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import (
    kernel_launcher,
    plan_cache,
    run,
    sections,
    tensor_map,
    tile_counters,
)
from cuflash._launch import plan as launch_plan
from cuflash._launch.workspace import Workspace

COUNTERS = 4096  # address of the counters
NAMES = kernel_params.pointer_names(kernel_params.FORWARD_SM90)
POINTERS = tuple(range(1 << 20, (1 << 20) + 16 * len(NAMES), 16))
STREAM = 77


class Recorder:
    """A simulated driver that records launches and cleared memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Any] = []
        self.struct = kernel_params.FORWARD_SM90
        self.cleared: list[tuple[int, int, int, int]] = []
        runtime = SimpleNamespace(memsetAsync=lambda *arguments: self.cleared.append(arguments))
        stream = SimpleNamespace(ptr=STREAM, synchronize=lambda: None)
        simulated = hardware.typical("sm_90")._replace(name="simulated")
        monkeypatch.setattr(hardware, "_assumed", simulated)
        self.streams: dict[int, int] = {}  # handle -> number of the stream that has it now
        monkeypatch.setattr(tile_counters, "_of_device", {})
        monkeypatch.setattr(tile_counters, "_stream_number", lambda s: self.streams.get(s, s))
        monkeypatch.setattr(tile_counters, "runtime", runtime)
        monkeypatch.setattr(kernel_launcher, "driver", SimpleNamespace(launchKernel=self.launch))
        cuda = SimpleNamespace(
            Memory=lambda size: SimpleNamespace(ptr=COUNTERS, size=size),
            Stream=lambda **_: stream,
        )
        cupy = SimpleNamespace(cuda=cuda)
        monkeypatch.setattr(tile_counters, "cupy", cupy)
        monkeypatch.setattr(tensor_map, "encode", lambda *_: bytes(128))
        monkeypatch.setattr(
            tensor_map, "with_addresses",
            lambda _, addresses: b"".join(address.to_bytes(128, "big") for address in addresses),
        )  # fmt: skip
        kernel = SimpleNamespace(pointer=5, num_threads=384, smem_bytes=1 << 16)
        monkeypatch.setattr(launch_plan, "compile_kernel", lambda *_: kernel)

    def launch(self, function: int, grid: int, *rest: Any) -> None:
        """Read the parameters as the driver does."""
        address = ctypes.cast(rest[-2], ctypes.POINTER(ctypes.c_void_p))[0]
        params = ctypes.string_at(address, self.struct.itemsize)
        self.launches.append((function, grid, np.frombuffer(params, self.struct)[0]))

    def counters(self) -> list[int]:
        return [int(params["tile_counter"]) for *_, params in self.launches]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def problem_of(
    batch: int, rows: int = 300, keys: int = 400, head_dim: int = 64, **options: Any
) -> Problem:
    q, k, v = (np.zeros((batch, 4, n, head_dim), bfloat16) for n in (rows, keys, keys))
    return describe(q, k, v, Options(**options))


def plan(problem: Problem) -> Any:
    return plan_forward(problem, chosen.one("forward_sm90", problem))


def plan_forward(problem: Problem, config: Any, pointers: tuple[int, ...] = POINTERS) -> Any:
    addresses = dict(zip(NAMES, pointers, strict=True))
    layouts = run.layouts_of(problem, {"out": problem.out})
    plan_cache.forget()
    found, _ = run._prepared(problem, 0, addresses, lambda: layouts, None, override=config)
    return found.launchers[-1]


def pointers_of(params: Any) -> dict[str, int]:
    """Return every pointer of a launch by its name."""
    names = kernel_params.pointer_names(params.dtype)
    given = [params["score" if n in kernel_params.SCORE_POINTERS else n] for n in names]
    return {n: int(x[n] if x.dtype.names else x) for n, x in zip(names, given, strict=True)}


def test_parameters_arrive_where_the_kernel_reads_them(recorder: Recorder) -> None:
    plan(problem_of(2)).run(POINTERS, STREAM, captured=False)
    [(function, grid, params)] = recorder.launches
    assert (function, grid) == (5, 24)  # 3 tiles of 128 rows, 8 entries
    assert list(pointers_of(params).values()) == list(POINTERS)
    for name, address in zip(kernel_params.MAPPED, POINTERS, strict=False):
        assert int.from_bytes(params[f"{name}_map"].tobytes(), "big") == address
    assert params["tile_counter"] == 0
    assert tuple(params["grid"]) == (3, 8, 1, 1)
    assert (params["head_dim"], params["score"]["seqlen_k"]) == (64, 400)


def test_tiles_are_drawn_where_they_outnumber_blocks_of_threads(recorder: Recorder) -> None:
    launch = plan(problem_of(40, causal=True))
    launch.run(POINTERS, STREAM, captured=True)  # a capture can allocate nothing
    assert not recorder.cleared
    launch.run(POINTERS, STREAM, captured=False)
    assert recorder.cleared == [(COUNTERS, 0, 4 * tile_counters._NUM_COUNTERS, STREAM)]
    launch.run(POINTERS, STREAM, captured=False)
    launch.run(POINTERS, STREAM + 1, captured=False)
    plan(problem_of(50, causal=True)).run(POINTERS, STREAM, captured=False)
    assert [grid for _, grid, _ in recorder.launches] == [132] * 5
    assert recorder.counters() == [0, COUNTERS, COUNTERS, COUNTERS + 4, COUNTERS]
    assert len(recorder.cleared) == 1


def test_more_heads_start_together_where_a_window_bounds_what_they_stream() -> None:
    a = np.broadcast_to(np.zeros((), bfloat16), (16, 16384, 128))

    def side_by_side(**options: Any) -> int:
        problem = describe(a, a, a, Options(**options))
        config = chosen.one("forward_sm90", problem)
        assert config is not None
        num_blocks = -(-16384 // config.block_m)
        return sections._owners_drawn_together(problem, config, num_blocks, 132)

    assert side_by_side(causal=True) == side_by_side(window=(None, 0)) == 8
    assert side_by_side(window=(16000, 0)) == 8
    assert side_by_side(window=(8191, 0)) == side_by_side(window=(1023, 0)) == 16
    assert side_by_side(window=(127, 0)) == 128


def test_every_captured_launch_has_a_counter_of_its_own(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_counters, "_NUM_COUNTERS", 5)
    tile_counters._warn_once.cache_clear()
    launch = plan(problem_of(40))
    launch.run(POINTERS, STREAM, captured=False)
    for _ in range(4):
        launch.run(POINTERS, STREAM, captured=True)
    with pytest.warns(RuntimeWarning, match="all 5 tile counters of a device are in use"):
        launch.run(POINTERS, STREAM, captured=True)
    launch.run(POINTERS, STREAM, captured=True)  # a second warning would be an error
    launch.run(POINTERS, STREAM + 1, captured=False)
    launch.run(POINTERS, STREAM, captured=False)
    first, *captured, last = recorder.counters()
    assert first == last == COUNTERS
    assert captured == [COUNTERS + 4 * i for i in range(1, 5)] + [0, 0, 0]


def test_a_million_launches_can_be_captured(recorder: Recorder) -> None:
    """A million captured launches have counters of their own, so that programs stay as fast."""
    counters = tile_counters.TileCounters()
    found = {counters.for_launch(STREAM, captured=True) for _ in range(10**6)}
    assert len(found) == 10**6
    assert 0 not in found
    ((_, _, cleared, _),) = recorder.cleared
    assert max(found) + 4 <= COUNTERS + cleared


def test_a_stream_that_has_the_handle_of_a_destroyed_one_has_its_own_counter(
    recorder: Recorder,
) -> None:
    """A stream that reuses a handle has its own counter: the old stream may still be at work."""
    launch = plan(problem_of(40))
    for number in (1, 1, 2, 2, 3):
        recorder.streams[STREAM] = number
        launch.run(POINTERS, STREAM, captured=False)
    assert recorder.counters() == [COUNTERS + 4 * i for i in (0, 0, 1, 1, 2)]


def test_what_is_no_stream_has_no_counter(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_counters, "_stream_number", lambda _: None)
    plan(problem_of(40)).run(POINTERS, STREAM, captured=False)
    assert recorder.counters() == [0]


def test_threads_do_not_share_the_counter_of_the_stream_that_each_has(recorder: Recorder) -> None:
    launch = plan(problem_of(40))
    per_thread = 2  # cudaStreamPerThread
    launch.run(POINTERS, per_thread, captured=False)
    other = threading.Thread(target=launch.run, args=(POINTERS, per_thread, False))
    other.start()
    other.join()
    assert recorder.counters() == [COUNTERS, COUNTERS + 4]


def test_keys_past_one_length_are_past_the_end_of_the_maps(recorder: Recorder) -> None:
    for length, rows in ((30, 30), (0, 1)):
        launch = plan(problem_of(2, kv_lengths=length))
        layouts = dict(zip(kernel_params.MAPPED, launch.maps.layouts, strict=True))
        assert [layouts[n].extents[1] for n in kernel_params.MAPPED] == [300, rows, rows, 300]
        launch.run(POINTERS, STREAM, captured=False)
        assert recorder.launches[-1][2]["score"]["seqlen_k"] == rows
        assert recorder.launches[-1][2]["score"]["kv_length"] == length


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("sm_80", {}, "got ForwardSm90Config on simulated (sm_80), expected a device of sm_90"),
        (
            "sm_90",
            {"bias": np.zeros((300, 400)), "softcap": 3.0},
            "where a bias spills registers",
        ),
    ],
)
def test_a_configuration_that_cannot_serve_says_why(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, arch: str,
    options: dict[str, Any], message: str,
) -> None:  # fmt: skip
    wanted = chosen.one("forward_sm90", problem_of(2))
    monkeypatch.setattr(hardware, "_assumed", hardware.typical(arch)._replace(name="simulated"))
    with pytest.raises(ValueError, match="config: ") as error:
        plan_forward(problem_of(2, **options), wanted)
    assert message in str(error.value)


@pytest.mark.parametrize("operand", range(4))
def test_an_address_off_16_bytes_is_refused(recorder: Recorder, operand: int) -> None:
    problem = problem_of(2)
    moved = tuple(p + 8 * (i == operand) for i, p in enumerate(POINTERS))
    config = chosen.one("forward_sm90", problem)
    with pytest.raises(ValueError, match="config"):
        plan_forward(problem, config, moved)
    assert not recorder.launches


def test_what_the_driver_refuses_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> bytes:
        raise RuntimeError("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(tensor_map, "encode", encode)
    with pytest.raises(ValueError, match="config"):
        plan(problem_of(2))


def test_hopper_serves_unless_another_kernel_is_asked_for(recorder: Recorder) -> None:
    problem = problem_of(2)
    assert plan_forward(problem, None).maps is not None
    portable = chosen.portable("forward_sm80", problem, 227 * 1024, 16)
    assert plan_forward(problem, portable).maps is None


def test_the_portable_kernel_serves_what_hopper_does_not(recorder: Recorder) -> None:
    moved = (POINTERS[0] + 8, *POINTERS[1:])
    assert plan_forward(problem_of(2), None, moved).maps is None


GRADIENT_POINTERS = {
    name: 1 << 20 | i << 4
    for i, name in enumerate(
        (*kernel_params.pointer_names(kernel_params.BACKWARD), "out", "lse", "dlse")
    )
}


WORKSPACE = 1 << 30
IN_TWO_PASSES = frozenset(name for name, kind in registry.KERNELS.items() if kind.tunables) - {
    "backward_sm90",
    "backward_pair_sm90",
}


def plan_gradient(
    problem: Problem,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    config: Any = None,
    one_pass: Any = None,
    **moved: int,
) -> list[tuple[dict[str, int], Any]]:
    """Return the launches after that of delta, with their addresses."""
    return gradient_steps(problem, wrt, config, one_pass, **moved)[1:]


def gradient_steps(
    problem: Problem,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    config: Any = None,
    one_pass: Any = None,
    **moved: int,
) -> list[tuple[dict[str, int], Any]]:
    """Return all launches, with their addresses."""
    layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v")}
    layouts |= {name: Layout.of(problem.out) for name in ("dout", "out")}
    layouts |= {f"d{name}": layouts[name] for name in wrt}
    layouts |= {
        n: launch_plan.row_layout(problem, size, None) for n, size in (("lse", 4), ("rows", 8))
    }
    addresses = GRADIENT_POINTERS | moved
    scratch = Workspace.of(problem, backward=True, fused=one_pass)._replace(statistics=0)
    if one_pass is not None:
        addresses |= scratch.addresses(WORKSPACE)
        config = BackwardConfigs(qkv=one_pass)
    mapped = tuple(addresses[name] for name in kernel_params.BACKWARD_MAPPED)
    bits = functools.reduce(int.__or__, mapped) & 15

    def has_maps(problem: Any, layouts: Any, config: Any) -> bool:
        return launch_plan.maps_of(problem, layouts, config, addresses) is not None

    steps = choose(
        problem, hardware.of_device(0), Access(layouts, has_maps, bits, bits),
        wanted=Wanted.of("".join(wrt)), override=config, only=None if one_pass else IN_TWO_PASSES,
        deterministic=one_pass is None or one_pass.deterministic,
    )  # fmt: skip
    own, turns = hardware.of_device(0), scratch.num_turns
    launches = run.plan_steps(steps, problem, layouts, own, 0, addresses, turns)
    return [({n: addresses[n] for n in launch.names}, launch) for launch in launches]


@pytest.mark.parametrize(
    ("rows", "options", "moved", "stores"),
    [
        (300, {}, 0, True),
        (300, {"causal": True}, 0, True),
        (300, {}, 2, False),  # TMA cannot store dq at this address
        (300, {"segment_ids": (np.zeros(300, np.int32), np.zeros(400, np.int32))}, 0, False),
        (20_000, {}, 0, False),  # the last of many tiles would take too long
    ],
    ids=str,
)
def test_the_last_tile_of_short_sequences_stores_dq(
    recorder: Recorder, rows: int, options: dict[str, Any], moved: int, stores: bool
) -> None:
    problem = problem_of(40, 300, max(rows, 400), **options)
    steps = gradient_steps(
        problem, one_pass=chosen.fused(problem, deterministic=True), dq=(1 << 30) + moved
    )
    (launch,) = (launch for _, launch in steps if launch.maps is not None)
    mapped = [launch.names[number] for number in launch.maps.pointers]
    assert mapped == [*kernel_params.BACKWARD_MAPPED, "dq" if stores else "dout"]
    assert (launch.maps.layouts[-1].box_rows == 16) == stores


def test_gradient_parameters_arrive_where_the_kernels_read_them(recorder: Recorder) -> None:
    recorder.struct = kernel_params.BACKWARD_SM90
    steps = plan_gradient(problem_of(2, causal=True))
    for addresses, launch in steps:
        launch.run(tuple(addresses.values()), STREAM)
    assert [grid for _, grid, _ in recorder.launches] == [32, 24]  # tiles of 128 keys, 128 rows
    for (addresses, _), (_, _, params) in zip(steps, recorder.launches, strict=True):
        assert pointers_of(params) == addresses
        for name in kernel_params.BACKWARD_MAPPED:
            assert int.from_bytes(params[f"{name}_map"].tobytes(), "big") == addresses[name]
        assert (params["head_dim"], params["score"]["seqlen_k"]) == (64, 400)
    of_keys, of_queries = (
        dict(zip(kernel_params.BACKWARD_MAPPED, launch.maps.layouts, strict=True))
        for _, launch in steps
    )
    assert of_keys["k"].box_rows == of_queries["q"].box_rows == 128
    assert of_keys["q"].extents[1] == of_queries["dout"].extents[1] == 300


@pytest.mark.parametrize(
    ("width", "causal", "rows", "deterministic", "expected"),
    [(64, True, 512, True, 64), (64, True, 1024, True, 64), (64, True, 2048, True, 32),
     (64, True, 8192, True, 32),
     (64, False, 512, True, 64), (64, False, 1024, True, 32), (64, False, 2048, True, 16),
     (64, True, 1024, False, 8), (128, True, 1024, True, 23), (128, False, 1024, True, 16)],
)  # fmt: skip
def test_owners_that_start_together(
    recorder: Recorder, width: int, causal: bool, rows: int, deterministic: bool, expected: int
) -> None:
    """More short owners start together: tiles of one owner would wait for each other."""
    problem = problem_of(128, rows, rows, width, causal=causal)
    config = chosen.fused(problem, deterministic=deterministic)
    assert config is not None
    streamed = 2 * rows * 2 * width  # bytes of q and dout of one owner
    device = hardware.of_device(0)
    assert sections.owners_per_section(config, problem, 1, 512, streamed, device) == expected


@pytest.mark.parametrize(
    ("causal", "deterministic", "expected"),
    [(True, True, 8), (False, True, 4), (True, False, 4), (False, False, 4)],
)
def test_owners_of_pairs_that_start_together(
    recorder: Recorder, causal: bool, deterministic: bool, expected: int
) -> None:
    """Sixteen pairs share what they stream; eight, where tiles wait and bounds are causal."""
    array = np.zeros((1, 4, 4096, 256), bfloat16)
    problem = describe(array, array, array, Options(causal=causal))
    config = chosen.fused(problem, deterministic=deterministic)
    assert config.kernel == "backward_pair_sm90"
    device = hardware.of_device(0)
    assert sections.owners_per_section(config, problem, 1, 512, 1, device) == expected


def cleared_turns(recorder: Recorder, addresses: dict[str, int], delta: Any) -> tuple[int, int]:
    """Return where the kernel of delta writes zeros and how many; a thread writes one."""
    recorder.struct = kernel_params.DELTA
    delta.run(tuple(addresses.values()), STREAM)
    *_, (_, grid, params) = recorder.launches
    assert params["num_turns"] <= grid * delta.kernel.num_threads
    return int(params["turns"]), int(params["num_turns"])


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_pass(recorder: Recorder, deterministic: bool) -> None:
    problem = problem_of(2, causal=True)
    config = chosen.fused(problem, deterministic=deterministic)
    assert config is not None
    delta, *steps = gradient_steps(problem, one_pass=config)
    scratch = Workspace.of(problem, backward=True, fused=config)
    sums = scratch._replace(statistics=0).addresses(WORKSPACE)["sums"]
    for addresses, launch in steps:
        recorder.struct = (
            kernel_params.BACKWARD_SM90 if launch.maps is not None
            else kernel_params.BACKWARD
        )  # fmt: skip
        launch.run(tuple(addresses.values()), STREAM)
    turns = 1 + 2 * 4 * 3  # three blocks of 128 queries
    size = 4 * 2 * 4 * 304 * 64  # rows in slices of 16
    assert cleared_turns(recorder, *delta) == (WORKSPACE, turns)
    assert sums % 128 == 0
    assert sums >= WORKSPACE + 4 * turns
    assert sums + size <= WORKSPACE + scratch.size - scratch.statistics
    (_, grid, params), (_, rows, converted), _ = recorder.launches
    assert (grid, rows) == (32, 24)  # tiles of 128 keys, blocks of 128 queries
    assert params["turns"] == WORKSPACE
    for of_kernel in (params, converted):
        assert of_kernel["sums"] == sums
        assert of_kernel["sums_layout"]["batch"]["axis"][0] == 304 * 64
    assert int.from_bytes(params["v_map"].tobytes(), "big") == GRADIENT_POINTERS["v"]


def test_one_pass_has_no_more_blocks_of_threads_than_processors(recorder: Recorder) -> None:
    """One pass launches no more thread blocks than SMs, which draw tiles of 128 keys one by one."""
    problem = problem_of(20)
    config = chosen.fused(problem, deterministic=True)
    assert config is not None
    (addresses, gradients), _ = plan_gradient(problem, one_pass=config)
    recorder.struct = kernel_params.BACKWARD_SM90
    gradients.run(tuple(addresses.values()), STREAM)
    ((_, grid, params),) = recorder.launches
    num_blocks, num_owners, *_ = params["grid"]
    assert (grid, num_blocks * num_owners) == (132, 4 * 20 * 4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pair_of_blocks_of_threads_computes_a_tile(
    recorder: Recorder, deterministic: bool
) -> None:
    """A pair of thread blocks computes a tile, 128 keys each, and each has turns of its own."""
    full = np.zeros((2, 4, 300, 256), bfloat16)
    problem = describe(full, full, full, Options())
    config = chosen.fused(problem, deterministic=deterministic)
    assert config.kernel == "backward_pair_sm90"
    delta, (addresses, gradients), _ = gradient_steps(problem, one_pass=config)
    turns = 1 + 2 * 4 * 5 * 2  # blocks of 64 queries
    assert cleared_turns(recorder, *delta) == (WORKSPACE, turns)
    recorder.struct = kernel_params.BACKWARD_SM90
    gradients.run(tuple(addresses.values()), STREAM)
    _, (_, grid, params) = recorder.launches
    num_blocks, num_owners, *_ = params["grid"]
    assert (grid, num_blocks, num_owners) == (2 * 3 * 8, 3, 8)
    boxes = dict(zip(kernel_params.BACKWARD_MAPPED, gradients.maps.layouts, strict=True))
    assert {layout.box_rows for layout in boxes.values()} == {64}


def test_one_pass_serves_and_wins() -> None:
    """One pass is chosen where it was seen to win; elsewhere ``config=`` may choose it."""
    full, group, row = (np.zeros((2, n, 300, 128), bfloat16) for n in (4, 2, 1))
    wide, wide_group = (np.zeros((2, n, 300, 256), bfloat16) for n in (4, 2))
    narrow, middle, between = (np.zeros((2, 4, 300, d), bfloat16) for d in (64, 96, 80))
    latent = np.zeros((2, 4, 300, 192), bfloat16)
    mask = np.ones((300, 300), np.bool_)
    bias, wide_bias = mask.astype(np.float32), np.ones((300, 304), bfloat16)
    even = np.zeros((2, 4, 304, 128), bfloat16)
    segments, dropout = {"segment_ids": (np.zeros(300, int),) * 2}, {"dropout": 0.1, "seed": 1}
    for q, k, v, options, serves, wins in (
        (full, full, full, {}, True, True),
        (full, full, full, {"causal": True}, True, True),
        (narrow, narrow, narrow, {}, True, True),
        (middle, middle, narrow, {"causal": True}, True, True),
        (latent, latent, full, {"causal": True}, True, True),
        (wide, wide, wide, {}, True, True),
        (full, group, group, {"enable_gqa": True}, True, True),
        (wide, wide_group, wide_group, {"enable_gqa": True}, True, True),
        (full, full, full, {"mask": mask}, True, True),
        (full, full, full, {"mask": mask, **dropout}, True, True),
        (full, full, full, {"mask": mask, "softcap": 3.0}, True, False),
        (middle, middle, middle, {"mask": mask, "softcap": 3.0}, True, True),
        (full, full, full, {"softcap": 3.0}, True, True),
        (wide, wide, wide, {"mask": mask}, True, True),
        (full, full, full, {"window": (9, 9)}, True, True),
        (wide, wide, wide, {"window": (9, 9)}, True, True),
        (full, full, full, {"kv_lengths": np.array([[3], [4]])}, True, True),
        (wide, wide, wide, {"kv_lengths": np.array([[3], [4]])}, True, True),
        (full, full, full, {"scale": -1.0}, True, True),
        (wide, wide, wide, {"scale": -1.0}, True, True),
        (wide, wide, wide, {"bias": bias}, True, True),
        (wide, wide, wide, {"bias": bias, "softcap": 3.0}, False, False),
        (wide, wide, wide, {"softcap": 3.0, "mask": mask}, True, True),
        (wide, wide, wide, {"softcap": 3.0, "mask": mask, **dropout}, False, False),
        (wide, wide, wide, segments, True, True),
        (wide, wide, wide, {**segments, "causal": True}, False, False),
        (latent, latent, full, {**segments, "causal": True}, True, True),
        (full, full, full, {"bias": bias.astype(bfloat16)}, False, False),  # 600-byte rows
        (full, full, full, {"bias": bias[:, :1]}, False, False),
        (full, even, even, {"bias": wide_bias}, True, True),
        (full, even, even, {"bias": wide_bias.astype(np.float32)}, False, False),
        (narrow, narrow, narrow, {"bias": bias}, True, True),
        (full, full, full, {"bias": bias, "softcap": 3.0, "mask": mask}, False, False),
        (
            narrow,
            narrow,
            narrow,
            {"bias": bias, "softcap": 3.0, "dropout": 0.1, "seed": 1},
            True,
            True,
        ),
        (row, full, full, {}, False, False),
        (full, row, full, {}, False, False),
        (between, between, between, {}, True, True),
        (narrow, narrow, full, {}, False, False),
    ):
        problem = describe(q, k, v, Options(**options))
        configs = [chosen.fused(problem, deterministic=o) for o in (True, False)]
        assert [c is not None for c in configs] == [serves, serves]
        won = [c is not None and fused_backward.wins(c) for c in configs]
        assert won == [wins, wins], (q.shape, options)


def test_heads_of_a_group_share_an_owner(recorder: Recorder) -> None:
    q, k = (np.zeros((2, heads, 300, 64), bfloat16) for heads in (6, 2))
    problem = describe(q, k, k, Options(enable_gqa=True))
    recorder.struct = kernel_params.BACKWARD_SM90
    for addresses, launch in plan_gradient(problem):
        launch.run(tuple(addresses.values()), STREAM)
    grids = [tuple(params["grid"]) for *_, params in recorder.launches]
    assert grids == [(3, 4, 1, 3), (3, 12, 1, 1)]
    layouts = dict(zip(kernel_params.BACKWARD_MAPPED, launch.maps.layouts, strict=True))
    assert sorted(layouts["k"].extents[2:]) == [1, 1, 4]


@pytest.mark.parametrize("operand", kernel_params.BACKWARD_MAPPED)
def test_gradients_of_an_address_off_16_bytes(recorder: Recorder, operand: str) -> None:
    problem = problem_of(2)
    moved = {operand: GRADIENT_POINTERS[operand] + 8}
    launches = [launch for _, launch in plan_gradient(problem, **moved)]
    assert kinds(launches) == "LL"
    of_queries = chosen.one("backward_dq_sm90", problem)
    of_keys = chosen.passes("backward_dkv_sm90", problem, frozenset("kv"))
    assert of_keys is not None
    for config in ((of_queries, None), (None, of_keys[0])):
        with pytest.raises(ValueError, match="config"):
            plan_gradient(problem, config=BackwardConfigs(*config), **moved)


def test_a_tile_of_one_kernel_decides_about_its_gradients_alone(recorder: Recorder) -> None:
    problem = problem_of(2)
    smem = 227 << 10
    of_q = chosen.portable("backward_dq_sm80", problem, smem, 16)
    [of_keys] = chosen.portable_kv(problem, smem, 16, frozenset("kv"))
    together = chosen.fused(problem, deterministic=True)
    for found, expected in ((of_q, "ML"), (of_keys, "LM"), (together, "ML")):
        config = override.of_backward(found)
        one_pass = together if found is together else None
        launches = [launch for _, launch in plan_gradient(problem, (*"qkv",), config, one_pass)]
        assert kinds(launches) == expected


def kinds(launches: list[Any]) -> str:
    """Return M for each launch with tensor maps and L for each without."""
    return "".join("L" if launch.maps is None else "M" for launch in launches)


def test_gradients_that_the_portable_kernels_serve(recorder: Recorder) -> None:
    full, one = (np.zeros((b, 4, 300, 64), bfloat16) for b in (2, 1))
    bias = np.zeros((300, 300), np.float32)
    double = full.astype(np.float64)
    for q, k, v, options, expected in (
        (full, full, full, {}, "MM"),
        (full, one, one, {}, "MM"),
        (one, full, full, {}, "ML"),  # dq is summed
        (full, one, full, {}, "LLM"),  # dk is summed over entries with different v
        (full, full, full, {"bias": bias}, "MM"),
        (double, double, double, {}, "LL"),
    ):
        launches = [launch for _, launch in plan_gradient(describe(q, k, v, Options(**options)))]
        assert kinds(launches) == expected


def test_gradients_not_asked_for_are_not_computed(recorder: Recorder) -> None:
    for wrt, count in ((("q",), 1), (("k",), 1), (("k", "v"), 1), (("q", "v"), 2)):
        assert len(plan_gradient(problem_of(2), wrt)) == count
