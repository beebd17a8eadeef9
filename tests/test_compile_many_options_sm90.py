"""Do Hopper's kernels for 16 bits spill nothing where many options meet?

These combinations spilled in wider tiles, by NVRTC 12.9 or 13.5. Needs no GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_compile import PLAIN, problem_of
from test_compile_sm90 import CAUSAL, LENGTHS, SERVED, WINDOW, compile_all

from cuflash import MaskMod, Options, ScoreMod
from cuflash._kernels.config import KernelConfig
from cuflash._problem.formulas import formulas_of
from support import chosen

FORMULAS = formulas_of(
    Options(
        score_mod=ScoreMod("score - 0.1f * (q - k)", grad="1.0f", host=min, host_grad=min),
        mask_mod=MaskMod("(q + k) % 3 != 0", host=min),
    )
)
FIVE = {
    "mask": True, "segment_ids": np.int64, "softcap": 20.0, "alibi_slopes": np.float32,
    "dropout": 0.25,
}  # fmt: skip
OFFSET = {"offset": np.int64}
PACKED = {"cu_seqlens": np.int64}
#: (head sizes, options) of each kernel. Here ``formulas`` is an option, too.
OF_FORWARD: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((128, 128), {**FIVE, **OFFSET}),
    ((128, 128), {**FIVE, **LENGTHS}),
    ((128, 128), {**FIVE, **CAUSAL, **OFFSET}),
    ((256, 256), {**CAUSAL, **PACKED, **OFFSET, "softcap": 20.0, "q_lengths": np.int32}),
]
OF_QUERIES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((64, 64), {**FIVE, "window": (7, None), "softcap": None, "formulas": FORMULAS}),
    ((64, 64), {**WINDOW, "bias": np.float64, "softcap": 20.0, "kv_lengths": np.int64}),
    ((96, 96), {**FIVE, **WINDOW, **LENGTHS, **PACKED, "bias": np.float32, "softcap": None,
                "formulas": FORMULAS}),
    ((128, 128), {**WINDOW, "mask": True, "segment_ids": np.int64, "bias": np.float64}),
    ((192, 128), {**LENGTHS, **OFFSET, "segment_ids": np.int32, "softcap": 20.0,
                  "alibi_slopes": np.float32, "bias": np.float64, "formulas": FORMULAS}),
    ((192, 128), {**CAUSAL, "mask": True, "alibi_slopes": np.float32, "bias": np.float64,
                  "dropout": 0.25, "formulas": FORMULAS}),
    ((192, 128), {**OFFSET, "window": (7, None), "segment_ids": np.int64}),
    ((192, 128), {"segment_ids": np.int64, "softcap": 20.0, "alibi_slopes": np.float32,
                  "bias": bfloat16, "offset": np.int32}),
]  # fmt: skip


def one(kernel: str, head_dims: tuple[int, int], options: dict[str, Any], **given: Any) -> Any:
    """Return the configuration of a kernel with these options."""
    own = dict(options)
    formulas = own.pop("formulas", None)
    problem = problem_of({**PLAIN, **SERVED, **own, "head_dims": head_dims, "dtype": bfloat16})
    found = chosen.one(kernel, replace(problem, formulas=formulas), **given)
    assert found is not None, options
    return found


@pytest.mark.gate
@pytest.mark.nvrtc
def test_the_forward(generation: int) -> None:
    compile_all({one("forward_sm90", *case) for case in OF_FORWARD}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_a_bias_of_float16_and_parts_of_the_keys(generation: int) -> None:
    problem = problem_of({**PLAIN, **SERVED, "bias": np.float16, "head_dims": (128, 128)})
    many = replace(problem, seqlen_q=100, seqlen_k=4096)
    config = chosen.one("forward_sm90", many, num_sms=132)
    assert config.split_keys
    compile_all({config}, generation)


@pytest.mark.gate
@pytest.mark.nvrtc
def test_the_gradient_of_queries(generation: int) -> None:
    configs: set[KernelConfig] = {one("backward_dq_sm90", *case) for case in OF_QUERIES}
    assert len(configs) == len(OF_QUERIES)
    compile_all(configs, generation)
