"""Is every kernel right over several tiles, with every option? A few calls for each, on a GPU.

Rows with "portable" head sizes are not multiples of the 16 bytes that Hopper's copy engine needs.
Hopper's kernels compute the "hopper" calls, and "float32" calls up to head size 128. "wide" head
sizes are larger, and their tiles are split once. Arrays begin at multiples of 16 bytes, except
those of "small". `tools/mutants.py` runs these calls against seeded mistakes in the kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import reference
from cuflash.testing._budget import Budget
from support.memory import Placement
from support.problems import Call, Results, check_a_query_without_keys, make_call, run

pytestmark = pytest.mark.gpu

HEAD_DIMS = {
    "portable": (36, 36), "small": (3, 5), "hopper": (128, 128), "hopper 64": (64, 64),
    "hopper 192": (192, 128), "hopper 256": (256, 256),
    "float32": (90, 76), "float32, narrow": (20, 28), "float32, wide": (180, 140),
}  # fmt: skip
BATCH, HEADS, ROWS, KEYS = 2, 4, 300, 410
PORTABLE = {
    "forward_sm80.cu", "backward_delta.cu", "backward_dkv_sm80.cu", "backward_dq_sm80.cu",
}  # fmt: skip
#: Each row of this mask begins at a multiple of 16 bytes, so that 16 bytes are read at once.
ALIGNED = Placement(tuple(range(4)), (1, 1, 8, 1), (False,) * 4, (False,) * 4, lead=16)


def options_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return the options of a case. Every array differs between heads or between entries."""
    ids = tuple(np.sort(rng.integers(0, 4, (BATCH, 1, n)), -1) for n in (ROWS, KEYS))
    strays = tuple(a.copy() for a in ids)  # these ids meet far from the diagonal
    strays[0][1, 0, 13] = strays[1][1, 0, 385] = 9
    # A block of queries has two ids, and whole blocks of keys have the first of them.
    long = tuple(np.tile(np.arange(n) >= first, (BATCH, 1, 1)).astype(np.int64)
                 for n, first in ((ROWS, 100), (KEYS, 300)))  # fmt: skip
    slopes = rng.uniform(0.01, 0.3, HEADS).astype(np.float32)
    mask = rng.random((BATCH, 1, ROWS, KEYS)) < 0.7
    return {
        "plain": {},
        "steep": {"scale": 1.0},
        "steep window": {"scale": 1.0, "window": (130, 20)},  # each block is masked for some row
        "causal": {"causal": True},
        "window": {"window": (130, 20), "offset": np.array([[-25], [60]])},
        "lengths": {
            "causal": True, "q_lengths": np.array([[233], [ROWS]]),
            "kv_lengths": np.array([[KEYS], [177]]),
        },
        "scores": {
            "softcap": 2.0, "sink": rng.standard_normal(HEADS).astype(np.float32),
            "alibi_slopes": slopes, "scale": -0.3,
        },
        "softcap": {"softcap": 1.5},
        "high softcap": {"softcap": 30.0, "causal": True},
        "slopes": {"alibi_slopes": slopes, "offset": 20},
        "slopes of both signs": {"alibi_slopes": slopes * [1, -1, 10, -3], "window": (200, 40)},
        "bias": {"bias": rng.standard_normal((HEADS, ROWS, KEYS)).astype(np.float32)},
        "key bias": {
            "bias": rng.standard_normal((BATCH, HEADS, 1, KEYS)).astype(np.float16), "causal": True,
        },
        "mask": {"mask": mask, "window": (None, 40)},
        "aligned mask": {"mask": mask, "window": (200, 40)},
        "aligned mask, negative scale": {"mask": mask, "scale": -0.3},  # its tiles are not copied
        "segments": {"segment_ids": strays},
        "long segments": {"segment_ids": long},
        "segments, causal": {"segment_ids": ids, "causal": True, "softcap": 3.0},
        "dropout": {"dropout": 0.3, "seed": 2**40 + 3},
        "more dropout": {"dropout": 0.8, "seed": 5, "causal": True},
        "dropout, scores": {"dropout": 0.6, "seed": 7, "softcap": 2.0, "alibi_slopes": slopes},
        "groups": {"enable_gqa": True, "causal": True},
        "groups, mask, dropout": {"enable_gqa": True, "mask": mask, "dropout": 0.3, "seed": 9},
        "shared": {},
    }[name]  # fmt: skip


NAMES = (
    "plain", "steep", "steep window", "causal", "window", "lengths", "scores", "softcap",
    "high softcap", "slopes", "slopes of both signs", "bias", "key bias", "mask", "aligned mask",
    "aligned mask, negative scale", "segments", "long segments", "segments, causal", "dropout",
    "more dropout", "dropout, scores", "groups", "groups, mask, dropout", "shared",
)  # fmt: skip
CASES = [(kernel, name) for kernel in HEAD_DIMS for name in NAMES]


def call_of(kernel: str, name: str) -> Call:
    dtype = np.float32 if "float32" in kernel else np.float16
    return call_with(HEAD_DIMS[kernel], name, dtype, aligned=kernel != "small")


def call_with(
    head_dims: tuple[int, int], name: str, dtype: Any = np.float16, *, aligned: bool = True
) -> Call:
    d, d_v = head_dims
    heads_k = 2 if "groups" in name else HEADS
    batch_k = 1 if name == "shared" else BATCH
    options = options_of(name, np.random.default_rng(11))
    call = make_call(
        "normal", 5, dtype, (BATCH, HEADS, ROWS, d), (batch_k, heads_k, KEYS, d),
        (batch_k, heads_k, KEYS, d_v), options=options,
    )  # fmt: skip
    dlse = np.random.default_rng(12).standard_normal(call.dout.shape[:-1]).astype(np.float32)
    wrt = ("q", "k", "v", *({"bias", "alibi_slopes", "sink"} & set(options)))
    placements = {"mask": ALIGNED} if name.startswith("aligned mask") else {}
    if aligned:
        operands = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
        placements |= dict.fromkeys(operands, Placement.dense(4, lead=64))
    return call.but(
        wrt=wrt, dlse=dlse if name in ("plain", "groups", "segments") else None,
        placements=placements,
    )  # fmt: skip


@functools.cache
def found(kernel: str, name: str, backward: bool) -> tuple[Call, Results, Budget]:
    import cupy

    from cuflash._launch import plan_cache
    from cuflash._select import hardware
    from support.portable import planned_launchers

    call = call_of(kernel, name)
    plan_cache.forget()
    result = run(cupy, call, backward=backward, with_out=True)
    if hardware.present().hopper:
        backward_too = {"dout"} if backward else set()  # only kernels of gradients have this name
        own = [step for step in planned_launchers() if backward_too <= set(step.names)]
        served = any(step.maps is not None for step in own)
        # At head size 256 a forward with two options that need registers is portable.
        assert served == ("hopper" in kernel) or (kernel == "hopper 256" and not backward)
    return call, result, Budget(call)


@pytest.mark.parametrize(("kernel", "name"), CASES, ids=str)
def test_forward(kernel: str, name: str) -> None:
    _, result, budget = found(kernel, name, False)
    budget.check_forward(result.out, result.lse)


@pytest.mark.parametrize(("kernel", "name"), CASES, ids=str)
def test_backward(kernel: str, name: str) -> None:
    _, result, budget = found(kernel, name, True)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.parametrize("name", ["plain", "causal", "window", "aligned mask"])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("head_dims", [(96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_portable_kernels_that_copy_16_bytes(
    head_dims: tuple[int, int], dtype: Any, name: str
) -> None:
    """Portable kernels that copy 16 bytes, as on most devices, are within the budget."""
    import cupy

    from support.portable import portable_kernels

    call = call_with(head_dims, name, dtype)
    with portable_kernels() as configs:
        result, budget = run(cupy, call, with_out=True), Budget(call)
    assert {config.source for config in configs} == PORTABLE
    assert {config.copy_bytes for config in configs} == {16}
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.parametrize("kernel", HEAD_DIMS)
def test_a_key_of_nan_reaches_those_that_see_it_alone(kernel: str) -> None:
    import cupy

    clean = call_of(kernel, "window")
    k, v = clean.k.copy(), clean.v.copy()
    k[:, 1, 200] = np.nan
    v[:, 2, 100] = np.inf
    call = clean.but(k=k, v=v)
    expected, result = run(cupy, clean), run(cupy, call)
    truth = reference.attention(call.q, k, v, return_lse=True, **call.options)
    exact = reference.attention_backward(call.dout, call.q, k, v, *truth, **call.options)
    for name, array in {"out": truth[0], "q": exact.dq, "k": exact.dk, "v": exact.dv}.items():
        of = (result.out, expected.out) if name == "out" else (
            result.gradients[name], expected.gradients[name]
        )  # fmt: skip
        finite = np.isfinite(array)
        assert 0 < finite.mean() < 1
        np.testing.assert_array_equal(np.isfinite(of[0]), finite, name)
        np.testing.assert_allclose(of[0][finite], of[1][finite], rtol=0, atol=0.02, err_msg=name)


@pytest.mark.parametrize("kernel", HEAD_DIMS)
def test_what_a_query_without_keys_holds_reaches_nothing(kernel: str) -> None:
    import cupy

    clean = call_of(kernel, "mask")
    mask = clean.options["mask"].copy()
    mask[:, :, 17] = False
    clean = clean.but(options=clean.options | {"mask": mask})
    check_a_query_without_keys(cupy, clean, 17)


@pytest.mark.parametrize("kernel", HEAD_DIMS)
def test_bits_are_the_same_every_time(kernel: str) -> None:
    import cupy

    call = call_of(kernel, "causal")
    first = run(cupy, call)
    for _ in range(10):
        again = run(cupy, call)
        assert again.out.tobytes() == first.out.tobytes()
        assert again.lse.tobytes() == first.lse.tobytes()
        for name, gradient in first.gradients.items():
            assert again.gradients[name].tobytes() == gradient.tobytes(), name
