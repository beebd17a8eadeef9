"""Do kernels that read pages, of caches and of rotary embedding compile without spills?

So do the portable kernels for rows of several heads, and for keys of 8 bits. Needs no GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from test_compile import (
    ARITHMETICS,
    FULL,
    LIMITS,
    PLAIN,
    capability_of,
    complaints,
    dtype_of,
    problem_of,
    reports,
    rows,
    turn_of,
)
from test_covering_forward_sm90 import ROWS
from test_covering_forward_sm90 import chosen as chosen_of

from cuflash._kernels.cache_grow import CacheGrowConfig
from cuflash._kernels.cache_take import CacheTakeConfig
from cuflash._kernels.cache_write import CacheWriteConfig
from cuflash._kernels.config import Dtype, KernelConfig
from cuflash._kernels.request import needs_simt
from cuflash._kernels.rotary import RotaryConfig
from cuflash._problem.options import signature
from cuflash._problem.problem import in_pages
from support import chosen

#: Options that rows of several heads may have.
BOUND = {"window": (7, 3), "offset": np.int64, "kv_lengths": np.int64, "softcap": 20.0}


def configs_of(arch: str, generation: int) -> list[KernelConfig]:
    """Return the small kernels, and each row of the forward's table.

    One NVRTC compiles a row with pages, the other with queries of several heads.
    """
    found: list[KernelConfig] = [CacheGrowConfig.of(1000), CacheGrowConfig.of(1 << 18)]
    found.append(CacheTakeConfig())
    for dtype in get_args(Dtype):
        found.append(CacheWriteConfig(dtype=dtype, rotation="none"))
    for dtype, rotation in itertools.product(
        ("float16", "bfloat16", "float32", "float64"), ("halves", "neighbours")
    ):
        found.append(CacheWriteConfig(dtype=dtype, rotation=rotation))
        if dtype != "float64":
            found += [
                CacheWriteConfig(dtype=dtype, rotation=rotation, pages_dtype=pages)
                for pages in ("float8_e4m3fn", "float8_e5m2")
            ]
        found.append(RotaryConfig(dtype=dtype, rotation=rotation, positions="int32"))
    tables = [row for arithmetic in ARITHMETICS for row in rows(arithmetic)]
    capability = capability_of(arch)
    for turn, row in enumerate(tables, turn_of(arch, generation)):
        if turn % 2:
            if row["dtype"] == np.float32 and row["head_dims"][0] > 128:
                continue  # too few registers
            own = {name: row[name] for name in ("dtype", "head_dims")}
            problem = replace(problem_of({**PLAIN, **BOUND, **own}), num_queries=2)
        else:
            k_pages, v_pages = (np.zeros((2, 2, 16, d), dtype_of(row)) for d in row["head_dims"])
            table = np.zeros((2, 2), np.int32)
            problem = in_pages(problem_of(row), *map(signature, (k_pages, v_pages, table)))
        simt = needs_simt(problem, capability)
        config = chosen.portable(
            "forward_sm80", problem, LIMITS[arch], 16, simt=simt, capability=capability
        )
        assert (config.paged, config.heads_in_rows) == (not turn % 2, bool(turn % 2))
        found.append(config)
    return found


@pytest.mark.gate
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", FULL)
def test_kernels_of_pages_compile_cleanly(arch: str, generation: int) -> None:
    configs = configs_of(arch, generation)
    found = [complaints(c, arch, r) for c, r in reports(configs, arch, generation).items()]
    if any(found):
        pytest.fail("\n".join(itertools.chain(*found)), pytrace=False)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_kernels_of_8_bit_keys_compile_cleanly(generation: int) -> None:
    configs = {chosen_of("forward_sm80", row) for row in ("", *ROWS["forward_sm80"])}
    found = [complaints(c, "sm_90", r) for c, r in reports(configs, "sm_90", generation).items()]
    assert not [line for lines in found for line in lines]
