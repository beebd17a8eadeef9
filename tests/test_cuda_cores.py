"""Do the kernels for devices without the products of sm_80 compile, and compute what they should?

No such device is at hand: a C++ compiler runs them here, and on a GPU the same sources are chosen
as if the device had only CUDA cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._config import KernelConfig, TileConfig
from support import covering, derivatives
from support.nvrtc import compiler_of
from support.problems import make_call, run

pytest.importorskip("cupy", reason="CuPy is not installed")

import test_compile
from test_covering import check

from cuflash import _chosen, _device, _hardware, _launch, _launch_sm90
from support.host_device import COMPILER, host_device

DTYPES = (np.float16, np.float32, np.float64)
#: NVRTC 13 begins with sm_75; 12.9 warns that what comes before will go.
OLD, DEPRECATED = ("sm_50", "sm_60", "sm_70", "sm_75"), "are deprecated"


def chosen(arch: str, case: dict[str, Any]) -> list[KernelConfig]:
    hardware = _hardware.typical(arch)
    problem = test_compile.problem_of(case)
    return [_chosen.forward(problem, hardware), *_chosen.backward(problem, hardware)]


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", OLD)
def test_they_compile_without_spills(arch: str, generation: int) -> None:
    if generation == 13 and arch != "sm_75":
        pytest.skip("no longer an architecture of NVRTC 13")
    plain, every = test_compile.PLAIN, test_compile.ALL
    cases = [plain | {"dtype": dtype, "head_dims": (64, 64)} for dtype in DTYPES]
    cases += [plain | {"dtype": np.float64, "head_dims": (256, 256)}]
    cases += [every | {"dtype": np.float32, "head_dims": (20, 33)}]
    for config in {config for case in cases for config in chosen(arch, case)}:
        report = test_compile.compile_static(config, arch, compiler_of(generation))
        assert not report.spill_bytes, config
        assert all(DEPRECATED in text for text in report.warnings), config
        assert config.smem_bytes <= _hardware.typical(arch).limits.block_smem


def test_they_are_chosen_where_there_is_no_sm_80() -> None:
    for arch in _hardware.ARCHITECTURES:
        configs = chosen(arch, test_compile.PLAIN | {"head_dims": (256, 256)})
        tiled = [config for config in configs if isinstance(config, TileConfig)]
        assert {config.cuda_cores for config in tiled} == {arch in ("sm_61", "sm_52", *OLD)}


def test_operands_take_no_shared_memory() -> None:
    config = chosen("sm_60", test_compile.PLAIN)[0]
    assert isinstance(config, TileConfig)
    assert config.smem_bytes < replace(config, cuda_cores=False).smem_bytes // 10


@pytest.fixture
def only_cuda_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device at hand is taken for an older one."""
    monkeypatch.setattr(_device, "has_only_cuda_cores", lambda _: True)
    monkeypatch.setattr(_launch_sm90, "available", lambda _: False)
    _launch.forget_plans()
    yield
    _launch.forget_plans()


@pytest.mark.gpu
@pytest.mark.usefixtures("only_cuda_cores")
@pytest.mark.parametrize("number", range(0, len(covering.rows()), 12))
def test_row_of_the_covering_array(number: int) -> None:
    import cupy

    row = covering.rows()[number]
    call = covering.call_of(row, number)
    if call.dtype not in DTYPES:
        call = covering.call_of(row | {"dtype": "float16"}, number)
    check(call, run(cupy, call))


@pytest.mark.gpu
@pytest.mark.usefixtures("only_cuda_cores")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dims", [(1, 1), (3, 200), (64, 64), (256, 256)], ids=str)
def test_head_sizes(dtype: Any, head_dims: tuple[int, int]) -> None:
    import cupy

    d, d_v = head_dims
    call = make_call(
        "normal", 3, dtype, (2, 130, d), (2, 170, d), (2, 170, d_v), options={"causal": True}
    )
    check(call, run(cupy, call))


@pytest.mark.gpu
@pytest.mark.usefixtures("only_cuda_cores")
def test_gradients_of_float64_are_derivatives() -> None:
    import cupy
    from test_float64_differences import attend, call_of

    call = call_of("scores", 70, 90, 20, 36)
    gradients = run(cupy, call).gradients
    derivatives.check_gradients(call, lambda moved: attend(cupy, moved), gradients)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["window", "mask"])
def test_by_a_compiler(dtype: Any, name: str, tmp_path: Any) -> None:
    import test_kernels_on_the_host

    rng = np.random.default_rng(0)
    # A mask so sparse that some queries see nothing.
    options = {"window": {"window": (20, 5)}, "mask": {"mask": rng.random((40, 70)) < 0.02}}[name]
    call = make_call("normal", 1, dtype, (40, 20), (70, 20), (70, 36), options=options)
    with host_device(tmp_path, "75") as device:
        test_kernels_on_the_host.check(call, cuflash.Options(**call.options))
    assert "cuflash_forward_sm80" in device.launched
