"""Does Hopper's kernel get the parameters, maps and counter that it reads? Needs no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options, _params, _select
from cuflash._problem import Problem, describe

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash import _launch, _launch_sm90, _tensor_map

POINTERS = tuple(range(1 << 20, (1 << 20) + 16 * 10, 16))
STREAM = 77


class Recorder:
    """Stands for the driver: what would have been launched and cleared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Any] = []
        self.cleared: list[tuple[int, int, int, int]] = []
        self.capturing = False
        runtime = SimpleNamespace(
            streamIsCapturing=lambda _: self.capturing,
            memsetAsync=lambda *arguments: self.cleared.append(arguments),
        )
        counter = SimpleNamespace(data=SimpleNamespace(ptr=4096))
        device = SimpleNamespace(
            compute_capability="90",
            attributes={"MultiProcessorCount": 132, "L2CacheSize": 50 << 20},
        )
        monkeypatch.setattr(_launch_sm90, "runtime", runtime)
        monkeypatch.setattr(_launch_sm90, "driver", SimpleNamespace(launchKernel=self.launch))
        cupy = SimpleNamespace(
            empty=lambda *_: counter, cuda=SimpleNamespace(Device=lambda _: device)
        )
        monkeypatch.setattr(_launch_sm90, "cupy", cupy)
        monkeypatch.setattr(_launch, "cupy", cupy)
        monkeypatch.setattr(_tensor_map, "encode", lambda _, address: address.to_bytes(128, "big"))
        monkeypatch.setattr(_tensor_map, "available", lambda: True)
        kernel = SimpleNamespace(pointer=5, num_threads=384, smem_bytes=1 << 16)
        monkeypatch.setattr(_launch, "_smem_limit", lambda _: 227 * 1024)
        monkeypatch.setattr(_launch, "compile_kernel", lambda *_: kernel)

    def launch(self, function: int, grid: int, *rest: Any) -> None:
        """Read the parameters as the driver does."""
        address = ctypes.cast(rest[-2], ctypes.POINTER(ctypes.c_void_p))[0]
        params = ctypes.string_at(address, _params.FORWARD_SM90.itemsize)
        self.launches.append((function, grid, np.frombuffer(params, _params.FORWARD_SM90)[0]))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def problem_of(batch: int, rows: int = 300, keys: int = 400, **options: Any) -> Problem:
    q, k, v = (np.zeros((batch, 4, n, 64), bfloat16) for n in (rows, keys, keys))
    return describe(q, k, v, Options(**options))


def plan(problem: Problem) -> Any:
    config = _select.forward_sm90_config(problem)
    return _launch._plan_forward(problem, 0, POINTERS, None, config)


def test_parameters_arrive_where_the_kernel_reads_them(recorder: Recorder) -> None:
    plan(problem_of(2)).run(POINTERS, STREAM)
    [(function, grid, params)] = recorder.launches
    assert (function, grid) == (5, 16)  # 2 tiles of 192 rows, 8 entries
    names = _params.pointer_names(_params.FORWARD_SM90)
    given = [params["score" if n in _params.SCORE_POINTERS else n] for n in names]
    given = [int(x[n]) if x.dtype.names else int(x) for n, x in zip(names, given, strict=True)]
    assert given == list(POINTERS)
    for name, address in zip(_params.MAPPED, POINTERS, strict=False):
        assert int.from_bytes(params[f"{name}_map"].tobytes(), "big") == address
    assert params["tile_counter"] == 0
    assert tuple(params["grid"]) == (2, 8, 1, 1)
    assert (params["head_dim"], params["score"]["seqlen_k"]) == (64, 400)


def test_more_tiles_than_multiprocessors_are_drawn_from_a_cleared_counter(
    recorder: Recorder,
) -> None:
    launch = plan(problem_of(40, causal=True))
    launch.run(POINTERS, STREAM)
    recorder.capturing = True
    launch.run(POINTERS, STREAM)
    assert recorder.cleared == [(4096, 0, 4, STREAM)]
    assert [grid for _, grid, _ in recorder.launches] == [132, 132]
    assert [int(params["tile_counter"]) for *_, params in recorder.launches] == [4096, 0]


def test_keys_past_one_length_are_past_the_end_of_the_maps(recorder: Recorder) -> None:
    for length, rows in ((30, 30), (0, 1)):
        launch = plan(problem_of(2, kv_lengths=length))
        layouts = dict(zip(_params.MAPPED, launch.maps.layouts, strict=True))
        assert [layouts[n].extents[1] for n in _params.MAPPED] == [300, rows, rows, 300]
        launch.run(POINTERS, STREAM)
        assert recorder.launches[-1][2]["score"]["seqlen_k"] == rows
        assert recorder.launches[-1][2]["score"]["kv_length"] == length


@pytest.mark.parametrize("operand", range(4))
def test_an_address_off_16_bytes_is_refused(recorder: Recorder, operand: int) -> None:
    problem = problem_of(2)
    moved = tuple(p + 8 * (i == operand) for i, p in enumerate(POINTERS))
    config = _select.forward_sm90_config(problem)
    with pytest.raises(ValueError, match="config"):
        _launch._plan_forward(problem, 0, moved, None, config)
    assert not recorder.launches


def test_what_the_driver_refuses_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> bytes:
        raise RuntimeError("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(_tensor_map, "encode", encode)
    with pytest.raises(ValueError, match="config"):
        plan(problem_of(2))


def test_it_runs_on_request_alone(recorder: Recorder) -> None:
    launch = _launch._plan_forward(problem_of(2), 0, POINTERS, None, None)
    assert not isinstance(launch, _launch_sm90.Sm90Launch)
