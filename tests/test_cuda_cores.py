"""Do the kernels for devices without the products of sm_80 compile, and compute what they should?

So do kernels of float64: on CUDA cores, where tensor cores are no faster, and with sm_80's
products. No such device is available. Here a C++ compiler runs the kernels. On a GPU the same
sources are chosen by taking the device for another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash._kernels.config import KernelConfig
from cuflash._problem.problem import describe
from support import covering, derivatives
from support.nvrtc import compiler_of
from support.parts import kernels_of_part
from support.problems import make_call, run

pytest.importorskip("cupy", reason="CuPy is not installed")

import test_compile
from test_covering import check

from cuflash._select import hardware as select_hardware
from support.chosen import backward_of, forward_of
from support.host_device import COMPILER, host_device
from support.portable import kernels_of

DTYPES = (np.float16, np.float32, np.float64)
#: NVRTC 13 begins with sm_75. 12.9 warns that older architectures will go.
OLD, DEPRECATED = ("sm_50", "sm_60", "sm_70", "sm_75"), "are deprecated"


#: (architecture, NVRTC, entry) -> why float64 spills registers
SPILLS = {
    ("sm_120", 13, entry): test_compile.Spill(
        size,
        "every option at once (13.5; 12.9: nothing), none with any of them alone; such a device "
        "has a 64th of its float32 in float64, and none was there to time another tile on",
    )
    for entry, size in {"cuflash_backward_dkv_sm80": 968, "cuflash_backward_dq_sm80": 652}.items()
}


def chosen(arch: str, case: dict[str, Any]) -> list[KernelConfig]:
    hardware = select_hardware.typical(arch)
    problem = test_compile.problem_of(case)
    return [forward_of(problem, hardware), *backward_of(problem, hardware)]


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", OLD)
def test_they_compile_without_spills(arch: str, generation: int) -> None:
    if generation == 13 and arch != "sm_75":
        pytest.skip("no longer an architecture of NVRTC 13")
    plain, every = test_compile.PLAIN, test_compile.ALL
    cases = [plain | {"dtype": dtype, "head_dims": (64, 64)} for dtype in DTYPES]
    cases += [plain | {"dtype": np.float64, "head_dims": (256, 256)}]
    cases += [every | {"dtype": np.float32, "head_dims": (20, 33)}]
    for config in kernels_of_part({config for case in cases for config in chosen(arch, case)}):
        report = test_compile.compile_static(config, arch, compiler_of(generation))
        assert not report.spill_bytes, config
        assert all(DEPRECATED in text for text in report.warnings), config
        assert config.smem_bytes <= select_hardware.typical(arch).limits.block_smem


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_narrow_heads_of_16_bits_compile(dtype: Any, generation: int) -> None:
    """Narrow heads, which never use tensor cores, also compile without sm_80's paired rounding."""
    hardware = select_hardware.typical("sm_75")
    q, bias = np.zeros((2, 100, 4), dtype), np.zeros((2, 1, 100), np.float32)
    problem = describe(q, q, q, cuflash.Options(bias=bias))
    configs = [forward_of(problem, hardware), *backward_of(problem, hardware)]
    assert sum("narrow" in config.kernel for config in configs) == 3
    for config in configs:
        report = test_compile.compile_static(config, "sm_75", compiler_of(generation))
        assert not report.spill_bytes, config
        assert not report.warnings, config


@pytest.mark.full
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_float64_compiles_without_spills(arch: str, generation: int) -> None:
    plain, every = (
        {**case, "dtype": np.float64} for case in (test_compile.PLAIN, test_compile.ALL)
    )
    spilled: dict[tuple[str, int, str], int] = {}
    compiled = 0
    for case in (plain, every):
        for head_dims in ((64, 64) if case is plain else (20, 33), (256, 256)):
            for config in chosen(arch, case | {"head_dims": head_dims}):
                if not ("tile" in config.parts and config.simt):
                    continue
                report = test_compile.compile_static(config, arch, compiler_of(generation))
                assert report.warnings == (), config
                compiled += 1
                if report.spill_bytes:
                    assert case is every
                    key = (arch, generation, config.entry)
                    spilled[key] = max(spilled.get(key, 0), report.spill_bytes)
    assert compiled
    assert spilled == {
        key: row.size for key, row in SPILLS.items() if key[:2] == (arch, generation)
    }


def test_they_are_chosen_where_there_is_no_sm_80() -> None:
    for arch in select_hardware.ARCHITECTURES:
        configs = chosen(arch, test_compile.PLAIN | {"head_dims": (256, 256)})
        tiled = [config for config in configs if "tile" in config.parts]
        assert {config.simt for config in tiled} == {arch in ("sm_61", "sm_52", *OLD)}


def test_float64_takes_them_wherever_its_tensor_cores_are_no_faster() -> None:
    case = test_compile.PLAIN | {"dtype": np.float64}
    for arch in select_hardware.ARCHITECTURES:
        tiled = [config for config in chosen(arch, case) if "tile" in config.parts]
        faster = arch in ("sm_80", "sm_90")
        assert {config.simt for config in tiled} == {not faster}


def test_operands_take_no_shared_memory() -> None:
    config = chosen("sm_60", test_compile.PLAIN)[0]
    assert "tile" in config.parts
    assert config.smem_bytes < config.replace(simt=False).smem_bytes // 10


@pytest.fixture
def taken_for(request: Any) -> Iterator[list[KernelConfig]]:
    """Take the device for another one, and yield the planned configurations."""
    with kernels_of(request.param) as planned:
        yield planned


@pytest.mark.gpu
@pytest.mark.usefixtures("taken_for")
@pytest.mark.parametrize("taken_for", ["sm_75"], indirect=True)
@pytest.mark.parametrize("number", range(0, len(covering.rows()), 12))
def test_row_of_the_covering_array(number: int) -> None:
    import cupy

    row = covering.rows()[number]
    call = covering.call_of(row, number)
    if call.dtype not in DTYPES:
        call = covering.call_of(row | {"dtype": "float16"}, number)
    check(call, run(cupy, call))


@pytest.mark.gpu
@pytest.mark.usefixtures("taken_for")
@pytest.mark.parametrize("taken_for", ["sm_75", "sm_86"], indirect=True)
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
@pytest.mark.parametrize("taken_for", ["sm_80"], indirect=True)
@pytest.mark.parametrize("name", ["causal", "mask"])
@pytest.mark.parametrize("head_dims", [(3, 5), (36, 20), (64, 64), (128, 128), (256, 256)], ids=str)
def test_float64_by_products_of_sm_80(
    head_dims: tuple[int, int], name: str, taken_for: list[KernelConfig]
) -> None:
    """float64 is right with the products of sm_80, which have 8 rows; those of sm_90 have 16."""
    import cupy

    d, d_v = head_dims
    mask = np.random.default_rng(0).random((130, 170)) < 0.5
    options = {"causal": {"causal": True}, "mask": {"mask": mask, "softcap": 3.0}}[name]
    shapes = (2, 130, d), (2, 170, d), (2, 170, d_v)
    call = make_call("normal", 3, np.float64, *shapes, options=options)
    check(call, run(cupy, call))
    tiled = [config for config in taken_for if "tile" in config.parts]
    assert not any(config.wide_float64 for config in tiled)
    assert all(config.simt == (d == 256 and "backward" in config.entry) for config in tiled)
    assert tiled


@pytest.mark.gpu
@pytest.mark.usefixtures("taken_for")
@pytest.mark.parametrize("taken_for", ["sm_86"], indirect=True)
def test_gradients_of_float64_are_derivatives() -> None:
    import cupy
    from test_float64_differences import attend, call_of

    call = call_of("scores", 70, 90, 20, 36)
    gradients = run(cupy, call).gradients
    derivatives.check_gradients(call, lambda moved: attend(cupy, moved), gradients)


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["window", "mask"])
def test_by_a_compiler(dtype: Any, name: str, tmp_path: Any) -> None:
    import test_kernels_on_the_host

    rng = np.random.default_rng(0)
    # The mask is so sparse that some queries see nothing.
    options = {"window": {"window": (20, 5)}, "mask": {"mask": rng.random((40, 70)) < 0.02}}[name]
    call = make_call("normal", 1, dtype, (40, 20), (70, 20), (70, 36), options=options)
    with host_device(tmp_path, 75) as device:
        test_kernels_on_the_host.check(call, cuflash.Options(**call.options))
    assert "cuflash_forward_sm80" in device.launched
