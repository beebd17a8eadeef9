"""Does every kernel of Hopper for float32 compile without spills or serialised products?

Needs no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_compile import PLAIN, problem_of
from test_compile_sm90 import CAUSAL, LENGTHS, PACKED, WINDOW, by_turns, compile_all

from cuflash._kernels.config import KernelConfig, Precision
from support import chosen

Tile = tuple[tuple[int, int], Precision]
#: The first takes most registers. Every option is compiled with one of these.
TILES: tuple[Tile, ...] = ((128, 128), "ieee"), ((64, 64), "ieee"), ((128, 128), "tf32")
#: Compiled without options only. Sizes between these need fewer registers.
MIXED: tuple[Tile, ...] = ((96, 128), "ieee"), ((128, 40), "ieee")
BOUNDED = {**WINDOW, **LENGTHS, "offset": np.int64}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": CAUSAL,
    "causal, sink": {**CAUSAL, "sink": np.float64},
    "bounded": BOUNDED,
    "bounded, negative scale": {**BOUNDED, "scale": -0.5},
    "bounded, softcap, slopes": {**BOUNDED, "softcap": 20.0, "alibi_slopes": np.float32},
    "bounded, bias, dropout": {**BOUNDED, "bias": np.float64, "dropout": 0.25},
    "mask, softcap": {"mask": True, "softcap": 20.0},
    "bounded, segments": {**BOUNDED, "segment_ids": np.int64},
    "packed window": {**WINDOW, **PACKED},
    "packed, slopes, dropout": {**PACKED, "alibi_slopes": np.float16, "dropout": 0.25},
}


def configs_of(case: dict[str, Any], precision: Precision) -> list[KernelConfig]:
    """Return all kernels of a case; the forward takes no segments with wide heads."""
    problem = replace(problem_of(case), precision=precision)
    forward = chosen.one("forward_tf32_sm90", problem, copy_bytes=16)
    of_queries = chosen.one("backward_dq_tf32_sm90", problem, copy_bytes=16)
    of_keys = chosen.passes("backward_dkv_tf32_sm90", problem, copy_bytes=16, keys=frozenset("kv"))
    wide = max(case["head_dims"]) > 64
    assert (forward is None) == (wide and case["segment_ids"] is not None)
    assert of_queries is not None
    assert of_keys is not None
    return [of_queries, *of_keys, *([] if forward is None else [forward])]


def tiles_of(name: str, generation: int, *, whole: bool) -> tuple[Tile, ...]:
    """Return the tiles of a case that one NVRTC compiles, few enough for minutes."""
    if whole:
        return (*TILES, *MIXED)
    if name == "none":  # by_turns gives it to both NVRTCs
        return (*TILES, *MIXED)[generation % 2 :: 2]
    return (TILES[list(OPTIONS).index(name) % 3],)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_every_kernel(generation: int, pytestconfig: pytest.Config) -> None:
    whole = pytestconfig.getoption("--slow")
    configs: set[KernelConfig] = set()
    for name in by_turns(OPTIONS, generation, whole=whole):
        case = {**PLAIN, **OPTIONS[name], "dtype": np.float32, "out_dtype": None}
        for d, precision in tiles_of(name, generation, whole=whole):
            configs |= set(configs_of({**case, "head_dims": d}, precision))
    compile_all(configs, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_parts_of_keys(generation: int) -> None:
    """Split keys compile, every second case by each NVRTC; wide heads have no options of scores."""
    found = []
    for name, given in OPTIONS.items():
        for head_dims, precision in TILES:
            case = {**PLAIN, **given, "dtype": np.float32, "out_dtype": None}
            problem = problem_of({**case, "head_dims": head_dims})
            if problem.cu_seqlens_q is None:
                many = replace(problem, precision=precision, seqlen_q=100, seqlen_k=4096)
                found.append((name, head_dims, chosen.one("forward_tf32_sm90", many)))
    refused = {name for name, head_dims, config in found if config is None and head_dims[0] > 64}
    assert refused == set(list(OPTIONS)[5:9])
    configs = [config for *_, config in found if config is not None]
    assert all(config.split_keys and config.overlaps for config in configs)
    compile_all(configs[generation % 2 :: 2], generation)
