"""Which kernels compute calls of at most 64 queries and keys? Small tiles of the portable ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash._problem.problem import changed
from cuflash._select import hardware as select_hardware
from cuflash._select.choose import Wanted, choose
from cuflash.tuning import Workload

H100 = select_hardware.typical("sm_90")
SHORT = Workload(512, 8, 8, 64, 64, 64, 64, "bfloat16")


def kernels(problem: Any, hardware: Any = H100) -> list[str]:
    steps = choose(problem, hardware) + choose(problem, hardware, wanted=Wanted.of("qkv"))
    return [step.config.kernel for step in steps]


@pytest.mark.parametrize(
    "given", [{}, {"causal": True}, {"head_dim": 16}, {"seqlen_q": 1, "seqlen_k": 49}]
)
def test_small_tiles_are_portable(given):
    names = kernels(replace(SHORT, **given).problem())
    assert [n for n in names if n != "backward_delta"] == [
        "forward_sm80", "backward_dkv_sm80", "backward_dq_sm80",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"seqlen_k": 65}, {"seqlen_q": 65}, {"head_dim": 96}, {"arrays": ("bias",)},
        {"arrays": ("kv_lengths",)}, {"window": (5, 5)}, {"softcap": 3.0},
    ],
)  # fmt: skip
def test_others_are_hoppers(given):
    names = kernels(replace(SHORT, **given).problem())
    assert names[0] == "forward_sm90"
    assert "backward_dq_sm80" not in names


def test_a_result_that_joins_another_is_hoppers():
    """Hopper's forward computes results that join others, as no other forward can."""
    (step,) = choose(changed(SHORT.problem(), merges_partial=True), H100)
    assert step.config.kernel == "forward_sm90"


def test_tiles_are_chosen_where_they_were_measured():
    long = replace(SHORT, seqlen_k=512).problem()
    for arch, same in (("sm_80", True), ("sm_90", False)):
        hardware = select_hardware.wanted(arch)
        own, of_long = (
            choose(p, hardware, only=frozenset(("forward_sm80",)))[0].config
            for p in (SHORT.problem(), long)
        )
        assert (own == of_long) == same
