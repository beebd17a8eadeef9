"""Can what a sweep finds be passed as ``config=``, and what is said of anything else?"""

from __future__ import annotations

import pytest

from cuflash import tuning
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._select import override
from cuflash.tuning import _kernels
from cuflash.tuning._checking import gradients_of
from support.tuned_problems import PROBLEMS


def found_by_a_sweep(kernel):
    space = tuning.space(PROBLEMS[kernel], kernel, arch="sm_90a")
    return space.candidate(next(iter(space)).key).config


@pytest.mark.parametrize("kernel", _kernels.KERNELS)
def test_the_tile_of_every_kernel_is_taken_as_its_own(kernel):
    config = found_by_a_sweep(kernel)
    if kernel.startswith("forward"):
        assert override.of_forward(config) is config
        with pytest.raises(TypeError, match=r"^config: got \w+, .*; pass it to attention$"):
            override.of_backward(config)
        return
    field = "".join(gradients_of(kernel))
    assert override.of_backward(config) == tuning.BackwardConfigs(**{field: config})
    with pytest.raises(TypeError, match=r"^config: got \w+, .*; pass it to attention_backward$"):
        override.of_forward(config)


def test_none_and_several_stay():
    several = tuning.BackwardConfigs(
        q=found_by_a_sweep("backward_dq_sm90"), kv=found_by_a_sweep("backward_dkv_sm80")
    )
    assert override.of_backward(several) is several
    assert override.of_backward(None) is override.of_forward(None) is None


DELTA = DeltaConfig(
    dtype="float32", out_dtype="float32", copy_bytes=16, num_warps=4, head_dim_v=64, block_m=64,
    grad_lse=False,
)  # fmt: skip


@pytest.mark.parametrize("wrong", [{"block_m": 64}, "192,80,3,1,2", (128, 64), DELTA], ids=repr)
@pytest.mark.parametrize("check", [override.of_forward, override.of_backward])
def test_anything_else_is_refused(check, wrong):
    names = "ForwardConfig" if check is override.of_forward else "BackwardQConfig"
    with pytest.raises(TypeError) as error:
        check(wrong)
    text = str(error.value)
    assert text.startswith(f"config: got {type(wrong).__name__}, expected a configuration of a")
    assert names in text
    assert "candidate of cuflash.tuning.space" in text


def test_a_tile_in_the_field_of_other_gradients_is_refused():
    of_q = found_by_a_sweep("backward_dq_sm80")
    with pytest.raises(TypeError, match=r"^config\.qkv: got BackwardQConfig, .*computes dqkv.*$"):
        override.of_backward(tuning.BackwardConfigs(qkv=of_q))
