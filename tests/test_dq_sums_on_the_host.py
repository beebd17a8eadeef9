"""Are float32 sums of dq read at the right places, and their turns cleared? Run by a C++ compiler.

The layout is written here a second time, from the picture in `kernels_cu/tile/fragment.cuh`.
"""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._jit import source
from cuflash._kernels import fused_backward
from cuflash._kernels import params as kernel_params
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem, describe
from support import chosen

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import plan
from cuflash._select import hardware
from cuflash._select.choose import LaunchStep
from support.host_device import _PTX, COMPILER, SUPPORT, host_device, on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def sums_of(rows: np.ndarray, block_m: int) -> np.ndarray:
    """Return an entry's sums in the order of memory; ``rows`` has whole slices of 16."""
    count, columns = rows.shape
    parts = []
    for block in range(0, count, block_m):
        for first in range(block, min(block + block_m, count), 64):
            group = rows[first : min(first + 64, block + block_m)]
            for column in range(0, columns, 64):
                panel = group[:, column : column + 64]
                # slice, half, row of eight | tile of eight columns, lane of a quad, pair
                split = panel.reshape(len(panel) // 16, 2, 8, panel.shape[1] // 8, 4, 2)
                parts.append(split.transpose(0, 3, 2, 4, 1, 5).ravel())
    return np.concatenate(parts)


def converted(folder: Any, problem: Problem, sums: np.ndarray, dq: np.ndarray) -> list[str]:
    """Run the conversion; return the names of the launched kernels."""
    config = chosen.fused(problem, deterministic=True)
    assert config is not None
    with host_device(folder) as device:
        layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v")}
        layouts["dq"] = layouts["q"]
        step = LaunchStep(BackwardConvertConfig.after(config))
        launch = plan.plan_launch(step, problem, layouts, hardware.of_device(0), 0)
        given = {"dq": dq.ctypes.data, "sums": sums.ctypes.data}
        launch.run(tuple(given.get(name, 0) for name in launch.names), 0)
        return device.launched


@pytest.mark.parametrize("head_dim", sorted({row.head_dims[0] for row in fused_backward.ROWS}))
def test_every_sum_is_scaled_and_rounded(tmp_path: Any, head_dim: int) -> None:
    """Every sum is converted, also in ragged rows; blocks that see no key give 0 in any case."""
    entries, seqlen_q, seqlen_k, scale = 2, 333, 100, 0.37
    q, k = (on_device(np.zeros((entries, n, head_dim), bfloat16)) for n in (seqlen_q, seqlen_k))
    problem = describe(q, k, k, Options(causal=True, scale=scale))
    config = chosen.fused(problem, deterministic=True)
    assert config is not None
    blind = (seqlen_q - seqlen_k) // config.block_m * config.block_m  # whole blocks
    rng = np.random.default_rng(head_dim)
    rows = rng.standard_normal((entries, -(-seqlen_q // 16) * 16, head_dim), np.float32)
    want = (rows * np.float32(scale)).astype(bfloat16)[:, :seqlen_q]
    rows[:, :blind], want[:, :blind] = np.nan, 0
    rows[:, seqlen_q:] = np.nan
    sums = np.stack([sums_of(of_entry, config.block_m) for of_entry in rows])
    dq = np.full((entries, seqlen_q, head_dim), np.nan, bfloat16)
    assert converted(tmp_path, problem, sums, dq) == ["cuflash_backward_convert"]
    np.testing.assert_array_equal(dq.view(np.uint16), want.view(np.uint16))


def test_each_thread_clears_its_own_turns(tmp_path: Any) -> None:
    """Every turn is cleared by one thread of the grid, also of grids of 2^32 threads and more."""
    q = np.zeros((1, 100, 64), bfloat16)
    config = DeltaConfig.of(describe(q, q, q, Options()), q.dtype, 16, grad_lse=False)
    texts = [(f"ptx/{n}.cuh", f'#include "{SUPPORT}/host_ptx.h"\n') for n in _PTX]
    text = source.flatten(str(SUPPORT / "turns_probe.cu"), (*texts, *config.texts()))
    code, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    code.write_text(f'#include "{SUPPORT}/host_kernel.h"\n{text}')
    command = [COMPILER, "-O0", "-std=c++20", "-shared", "-fPIC", "-w", code, "-o", library]
    subprocess.run(command, check=True)
    clear = ctypes.CDLL(str(library)).clear
    for blocks, block, count in (
        (1, 0, 300), (2, 0, 172), (2, 1, 128), (2**25, 2**25 - 1, 0), (2**25 + 1, 0, 128),
        (2**25 + 1, 2, 44), (2**25 + 1, 2**25, 0), (2**25, 0, 128),
    ):  # fmt: skip
        turns = np.ones(300, np.uint32)
        params = np.zeros(1, kernel_params.STRUCTS[config.params])
        params["turns"], params["num_turns"] = turns.ctypes.data, turns.size
        clear(ctypes.c_void_p(params.ctypes.data), ctypes.c_uint(blocks), ctypes.c_uint(block))
        assert (turns == 0).sum() == count, (blocks, block)
