"""Are the gradients of narrow heads, on CUDA cores, within the budget, with every option?

The kernels run compiled by a C++ compiler, and on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_forward_narrow import NAMES, SIZES, call_of

import cuflash
from cuflash._jit.compilation import compile_static
from cuflash._kernels import portable
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash.testing._budget import Budget
from support import chosen
from support.chosen import backward_of
from support.nvrtc import compiler_of
from support.parts import kernels_of_part
from support.problems import make_call, run

H100 = hardware.typical("sm_90")


def test_they_are_chosen_for_narrow_heads_alone() -> None:
    def sources(dtype: Any, head_dim: int, head_dim_v: int, **options: Any) -> list[str]:
        call = make_call("normal", 1, dtype, (9, head_dim), (7, head_dim), (7, head_dim_v))
        problem = describe(call.q, call.k, call.v, cuflash.Options(**options))
        return [config.kernel for config in backward_of(problem, H100)][1:]

    narrow = ["backward_dkv_narrow", "backward_dq_narrow"]
    portable = ["backward_dkv_sm80", "backward_dq_sm80"]
    assert sources(np.float32, 3, 0) == sources(np.float64, 8, 8, softcap=2.0) == narrow
    assert sources(np.float32, 9, 3) == sources(np.float16, 3, 3) == portable
    assert sources(np.float16, 3, 3, bias=np.zeros((1, 7), np.float32)) == narrow


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_they_compile_without_spills(dtype: Any, arch: str, generation: int) -> None:
    cases = [("key bias", 3, 0), ("key bias, causal", 3, 3), ("key bias, causal", 8, 8)]
    if dtype != np.float16:
        cases += [("window", 2, 7), ("many", 3, 3), ("many", 8, 8)]
        cases += [("plain", 3, 0), ("plain", 8, 8)]
    configs = []
    for name, *head_dims in cases:
        call = call_of(name, dtype, *head_dims)
        problem = describe(call.q, call.k, call.v, cuflash.Options(**call.options))
        for multiprocessors in (1, 10**6):
            given = {"copy_bytes": np.dtype(dtype).itemsize, "num_sms": multiprocessors}
            configs.append(chosen.one("backward_dq_narrow", problem, **given))
            configs += chosen.passes("backward_dkv_narrow", problem, "kv", **given)
    assert None not in configs
    for config in kernels_of_part(configs):
        report = compile_static(config, arch, compiler_of(generation))
        assert (report.spill_bytes, report.warnings) == (0, ()), config


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "key bias"),
        (np.float64, "many"),
        (np.float16, "key bias, causal"),
        (bfloat16, "key bias"),
        (np.float32, "lengths"),
    ],
    ids=["float32", "float64", "float16", "bfloat16", "lengths"],
)
def test_by_a_compiler(dtype: Any, name: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_kernels_on_the_host import check

    from support.host_device import COMPILER, host_device

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    call = call_of(name, dtype, 3, 4)
    with host_device(tmp_path) as device:
        check(call, cuflash.Options(**call.options))
    assert device.launched[-2:] == ["cuflash_backward_dkv_narrow", "cuflash_backward_dq_narrow"]


@pytest.mark.long
def test_rows_of_a_thread_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_kernels_on_the_host import results

    from cuflash._launch import plan_cache
    from support.host_device import COMPILER, host_device

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    call = call_of("key bias, causal", np.float32, 3, 4)
    problem = describe(call.q, call.k, call.v, cuflash.Options(**call.options))
    found, rows = [], []
    with host_device(tmp_path) as device:
        for tiles in (1, 10**6):
            monkeypatch.setattr(portable, "num_tiles", lambda *_, n=tiles, **__: n)
            plan_cache.forget()
            rows.append(chosen.one("backward_dq_narrow", problem).block_m)
            found.append(results(call, cuflash.Options(**call.options))[2])
    assert rows == [128, 256]
    assert device.launched.count("cuflash_backward_dq_narrow") == 2
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(found[1][name], gradient, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "head_dims"), SIZES, ids=str)
def test_on_a_gpu(dtype: str, head_dims: tuple[int, int], name: str) -> None:
    import cupy

    call = call_of(name, dtype, *head_dims)
    result = run(cupy, call)
    Budget(call).check_backward(result.gradients, given=(result.out, result.lse))
