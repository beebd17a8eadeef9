"""Does Hopper's kernel for operands of 8 bits compile without spills or serialised products?

Needs no GPU. With scales of all three operands, which take registers.
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
from cuflash._kernels.forward_fp8_sm90 import CUT_OFF, ROWS, ForwardFp8Sm90Config
from cuflash._kernels.quantize import WIDTHS, QuantizeConfig
from cuflash._kernels.request import Request
from cuflash._problem.float8 import E4M3

#: Of those that are faster than products of 16 bits.
HEAD_SIZES = [row for row in dict.fromkeys(r.head_dims for r in ROWS) if row[0] > 192]
#: What takes registers of rows that hold two sums, or what no row has.
REFUSED = ("bias", "bias, window, offset and lengths", "all", "all, packed")


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
    for name in by_turns(OPTIONS, generation, whole=whole):
        for head_dims in rows_of(HEAD_SIZES, OPTIONS, name, whole=whole):
            case = {**PLAIN, **OPTIONS[name], **SERVED, "dtype": E4M3, "head_dims": head_dims}
            request = Request(problem_of(case))
            assert (ForwardFp8Sm90Config.eligible(request) != CUT_OFF) == (name in REFUSED), name
            if name not in REFUSED:
                (config,) = ForwardFp8Sm90Config.chosen(request)
                assert (config.head_dim, config.head_dim_v) == head_dims
                configs.add(config)
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_quantising(generation: int) -> None:
    """One width for each dtype: a rotation takes most registers."""
    dtypes = ("float16", "bfloat16", "float32", "float32")
    compile_all(
        {
            QuantizeConfig(
                dtype=dtype, out_dtype=("float8_e4m3fn", "float8_e5m2")[writes],
                head_dim=width, rotates=True, writes=writes,
            )
            for dtype, width in zip(dtypes, WIDTHS, strict=True)
            for writes in (False, True)
        },
        generation,
    )  # fmt: skip
