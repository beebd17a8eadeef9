"""Do the float64 kernels of partner warps compile without spills, with each option?"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from test_compile import PLAIN, compile_static, problem_of

from cuflash._select import hardware
from support.chosen import backward_of
from support.nvrtc import all_cores, compiler_of
from support.parts import kernels_of_part

BOUNDS = {"window": (7, 3), "q_lengths": np.int32, "kv_lengths": np.int64, "offset": np.int64}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "bias": {"bias": np.float64}, "bias of float32": {"bias": np.float32},
    "mask": {"mask": True}, "slopes": {"alibi_slopes": np.float64}, "dropout": {"dropout": 0.25},
    "softcap": {"softcap": 20.0}, "segments": {"segment_ids": np.int32},
    "packed": {"cu_seqlens": np.int64, "mask": False},
}  # fmt: skip


@pytest.mark.gate
@pytest.mark.nvrtc
def test_each_option(generation: int) -> None:
    """Each option, at one head size alone and at another with bounds, by each NVRTC."""
    sizes = itertools.cycle((64, 96, 128)[generation % 2 :] + (64, 96, 128)[: generation % 2])
    configs = set()
    for own in OPTIONS.values():
        for given, size in ((own, next(sizes)), (own | BOUNDS, next(sizes))):
            case = {**PLAIN, **given, "dtype": np.float64, "head_dims": (size, size)}
            found = backward_of(problem_of(case), hardware.typical("sm_90"))
            configs |= {config for config in found if config.kernel.endswith("_partners")}
    assert len(configs) == 4 * len(OPTIONS)
    with all_cores() as pool:
        reports = pool.map(
            lambda config: compile_static(config, "sm_90", compiler_of(generation)),
            kernels_of_part(configs),
        )
    assert {(report.spill_bytes, report.warnings) for report in reports} == {(0, ())}
