"""Does Hopper's kernel for operands of 8 bits compile without spills or serialised products?

Needs no GPU. All three operands have scales, which take registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_compile
from test_compile import PLAIN, problem_of
from test_compile_sm90 import OPTIONS, SERVED, by_turns, compile_all, rows_of

from cuflash import Options
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.forward_fp8_sm90 import ROWS
from cuflash._kernels.quantize import WIDTHS, QuantizeConfig, block_rows
from cuflash._problem.float8 import E4M3
from support import chosen

HEAD_SIZES = list(dict.fromkeys(row.head_dims for row in ROWS))
#: head size -> options that the kernel takes: scores are products, between bounds
TAKEN = {
    64: {"none", "causal"},
    128: {
        "none", "causal", "lengths", "causal and lengths", "left", "window",
        "window, offset and lengths", "packed", "packed causal", "packed window",
        "sink, window, offset and lengths",
    },
}  # fmt: skip
SINK = {**OPTIONS["window, offset and lengths"], "sink": np.float32}


def scaled(**options: Any) -> Options:
    ones = np.ones(2, np.float32)
    return replace(Options(**options), q_scale=ones, k_scale=ones, v_scale=ones)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_every_row_of_the_table(
    generation: int, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_compile, "Options", scaled)
    whole = pytestconfig.getoption("--slow")
    configs: set[KernelConfig] = set()
    options = {**OPTIONS, "sink, window, offset and lengths": SINK}
    for name in by_turns(options, generation, whole=whole):
        for head_dims in rows_of(HEAD_SIZES, options, name, whole=whole):
            case = {**PLAIN, **options[name], **SERVED, "dtype": E4M3, "head_dims": head_dims}
            config = chosen.one("forward_fp8_sm90", problem_of(case))
            assert (config is not None) == (name in TAKEN[head_dims[0]]), name
            if config is not None:
                assert (config.head_dim, config.head_dim_v) == head_dims
                configs.add(config)
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_quantising(generation: int) -> None:
    """Quantising compiles at one width for each dtype, with the rotation, which needs registers."""
    dtypes = ("float16", "bfloat16", "float32", "float32")
    compile_all(
        {
            QuantizeConfig(
                dtype=dtype, out_dtype=("float8_e4m3fn", "float8_e5m2")[writes],
                head_dim=width, rotates=True, writes=writes, block_m=block_rows(width, 1 << 20),
            )
            for dtype, width in zip(dtypes, WIDTHS, strict=True)
            for writes in (False, True)
        },
        generation,
    )  # fmt: skip
