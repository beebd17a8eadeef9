"""Which calls multiply in 8 bits on Hopper, and which are dequantised?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import Options
from cuflash._errors import NoKernel
from cuflash._problem.float8 import E4M3
from cuflash._problem.problem import describe
from cuflash._select.choose import choose
from cuflash._select.hardware import typical

#: (batch, heads, queries, keys, head size), options, and whether an H100 multiplies in 8 bits.
CALLS: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any], bool]] = {
    "128": ((2, 16, 4096, 4096, 128), {}, True),
    "112": ((2, 16, 4096, 4096, 112), {"causal": True}, True),
    "window": ((2, 16, 4096, 4096, 128), {"window": (512, 0)}, True),
    "softcap": ((2, 16, 4096, 4096, 128), {"softcap": 30.0}, False),
    "dropout": ((2, 16, 4096, 4096, 128), {"dropout": 0.1, "seed": 1}, False),
    "96": ((2, 16, 4096, 4096, 96), {}, False),
    "64": ((2, 16, 4096, 4096, 64), {"causal": True}, True),
    "64, window": ((2, 16, 4096, 4096, 64), {"window": (512, 0)}, False),
    "256": ((2, 16, 4096, 4096, 256), {}, False),
    "few tiles of many keys": ((1, 8, 1, 8192, 128), {}, False),
    "few tiles of few keys": ((1, 8, 1, 512, 128), {}, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_which_calls_the_kernel_takes(name: str) -> None:
    (batch, heads, m, n, d), options, taken = CALLS[name]
    q, k = (np.zeros((batch, heads, rows, d), E4M3) for rows in (m, n))
    ones = np.ones((batch, heads), np.float32)
    own = replace(Options(**options), q_scale=ones, k_scale=ones, v_scale=ones)
    try:
        (step,) = choose(describe(q, k, k, own), typical("sm_90"))
    except NoKernel:
        assert not taken
    else:
        assert taken
        assert step.config.kernel == "forward_fp8_sm90"
