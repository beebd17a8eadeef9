"""Are Hopper's kernels for float32 within the budget, over several tiles, at every kind of layout?

One warpgroup splits the streamed operands. So edges of blocks, columns past the true width and
strides are handled by it, and not by the portable kernels' copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash.testing._budget import Budget
from cuflash.testing._families import FAMILIES
from cuflash.tuning import BackwardConfigs
from support import chosen
from support.chosen import backward_of, forward_of
from support.problems import Call, check_a_query_without_keys, make_call, probe, run

H100 = hardware.typical("sm_90")
BATCH, HEADS, ROWS, KEYS = 2, 4, 300, 410
_RNG = np.random.default_rng(11)
_IDS = tuple(np.sort(_RNG.integers(0, 4, (BATCH, 1, n)), -1) for n in (ROWS, KEYS))
_MASK = _RNG.random((BATCH, 1, ROWS, KEYS)) < 0.7
_MASK[:, :, 17] = False  # a row that sees nothing
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (130, 20), "offset": np.array([[-25], [60]])},
    "lengths": {
        "causal": True,
        "q_lengths": np.array([[233], [ROWS]]),
        "kv_lengths": np.array([[KEYS], [177]]),
    },
    "no keys": {"kv_lengths": np.array([[0], [KEYS]])},
    "sink": {"sink": np.array([0.5, -2.0, 1.0, 3.0], np.float32), "scale": -0.3},
    "groups": {"enable_gqa": True, "causal": True},
    "softcap, slopes": {
        "softcap": 2.0,
        "alibi_slopes": np.array([0.01, 0.3, 0.1, 0.2], np.float32),
    },
    "bias": {"bias": _RNG.standard_normal((HEADS, ROWS, KEYS)).astype(np.float32)},
    "mask": {"mask": _MASK, "window": (None, 40)},
    "mask, dropout": {"mask": _MASK, "dropout": 0.3, "seed": 2**40 + 3},
}
NARROW = {
    "segments": {"segment_ids": _IDS},
    "segments, causal": {"segment_ids": _IDS, "causal": True},
}
CASES = [(d, name) for d in ((64, 64), (128, 128)) for name in OPTIONS]
CASES += [((64, 64), name) for name in NARROW]
OPTIONS |= NARROW
CASES += [(d, name) for d in ((48, 100), (127, 33)) for name in ("plain", "causal")]


def call_of(head_dims: tuple[int, int], options: dict[str, Any]) -> Call:
    (d, d_v), heads_k = head_dims, 2 if "enable_gqa" in options else HEADS
    shapes = (BATCH, HEADS, ROWS, d), (BATCH, heads_k, KEYS, d), (BATCH, heads_k, KEYS, d_v)
    return make_call("normal", 5, np.float32, *shapes, options=options)


@pytest.mark.parametrize(("head_dims", "name"), CASES, ids=str)
def test_they_are_chosen(head_dims: tuple[int, int], name: str) -> None:
    call = call_of(head_dims, OPTIONS[name])
    problem = describe(call.q, call.k, call.v, cuflash.Options(**OPTIONS[name]))
    configs = [forward_of(problem, H100), *backward_of(problem, H100)]
    sources = {config.source for config in configs}
    assert sources == {
        "forward_tf32_sm90.cu", "backward_delta.cu", "backward_dkv_tf32_sm90.cu",
        "backward_dq_tf32_sm90.cu",
    }  # fmt: skip
    assert all(config.smem_bytes <= H100.limits.block_smem for config in configs)


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize(("head_dims", "name"), CASES, ids=str)
def test_within_the_budget(head_dims: tuple[int, int], name: str, tf32: bool) -> None:
    import cupy

    call = call_of(head_dims, OPTIONS[name]).but(tf32=tf32)
    result, budget = run(cupy, call, with_out=True), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_family_of_inputs(head_dim: int, causal: bool, family: str) -> None:
    import cupy

    rows, keys = ((1, 2, n, head_dim) for n in (330, 300))
    call = make_call(family, 8, np.float32, rows, keys, keys, options={"causal": causal})
    result, budget = run(cupy, call, with_out=True), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sums_of_two_thousand_terms(causal: bool, tf32: bool) -> None:
    """Sums of 2000 terms are right; each row sees 300 keys, so that R1 and R2 hold for out."""
    import cupy

    rows, keys = (1, 2000, 64), (1, 2300, 64)
    call = make_call("normal", 9, np.float32, rows, keys, keys, options={"causal": causal})
    call = call.but(tf32=tf32)
    result, budget = run(cupy, call, with_out=True), Budget(call)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_weights_are_exact_one_by_one(head_dim: int, family: str) -> None:
    """Single weights are exact: values of 0 and 1 sum them, and their errors cannot cancel."""
    import cupy

    rows, keys = ((1, 2, n, head_dim) for n in (330, 300))
    call = probe(make_call(family, 8, np.float32, rows, keys, keys, options={"causal": True}))
    Budget(call).check_probe(run(cupy, call, backward=False).out)


@pytest.mark.gpu
def test_keys_that_other_entries_share() -> None:
    """Shared keys and shared queries have right gradients; the latter by the portable kernel."""
    import cupy

    call = make_call("normal", 6, np.float32, (3, 2, 200, 64), (1, 2, 150, 64), (1, 2, 150, 64))
    Budget(call).check_backward(run(cupy, call).gradients)
    call = make_call("normal", 7, np.float32, (1, 2, 200, 64), (3, 2, 150, 64), (3, 2, 150, 64))
    Budget(call).check_backward(run(cupy, call).gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_of_nan_reaches_those_that_see_it_alone(head_dim: int) -> None:
    import cupy

    call = call_of((head_dim, head_dim), OPTIONS["causal"])
    k, v = call.k.copy(), call.v.copy()
    k[:, 1, 200] = np.nan
    v[:, 2, 190] = np.inf
    call = call.but(k=k, v=v)
    result = run(cupy, call)
    truth = reference.attention(call.q, k, v, return_lse=True, causal=True)
    exact = reference.attention_backward(call.dout, call.q, k, v, *truth, causal=True)
    found = {"out": result.out, **result.gradients}
    for name, array in {"out": truth[0], "q": exact.dq, "k": exact.dk, "v": exact.dv}.items():
        assert 0 < np.isfinite(array).mean() < 1
        np.testing.assert_array_equal(np.isfinite(found[name]), np.isfinite(array), name)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_a_row_without_keys_holds_reaches_nothing(head_dim: int) -> None:
    import cupy

    check_a_query_without_keys(cupy, call_of((head_dim, head_dim), OPTIONS["mask"]), 17)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_lies_beyond_lengths_reaches_nothing(head_dim: int) -> None:
    import cupy

    options = OPTIONS["lengths"]
    clean = call_of((head_dim, head_dim), options)
    poisoned = {name: getattr(clean, name).copy() for name in ("q", "k", "v", "dout")}
    for name, array in poisoned.items():
        lengths = options["q_lengths" if name in ("q", "dout") else "kv_lengths"][:, 0]
        for entry, length in enumerate(lengths):
            array[entry, :, length:] = np.nan
    expected, result = run(cupy, clean), run(cupy, clean.but(**poisoned))
    np.testing.assert_array_equal(result.out, expected.out)
    for name in "qkv":
        np.testing.assert_array_equal(result.gradients[name], expected.gradients[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_config_decides_and_bits_repeat(head_dim: int, precision: str) -> None:
    """A config decides which kernels run, and bits repeat; portable kernels differ by roundings."""
    import cupy

    call = call_of((head_dim, head_dim), OPTIONS["causal"])
    q, k, v, dout = (cupy.asarray(call.array(name)) for name in ("q", "k", "v", "dout"))
    options = cuflash.Options(causal=True)
    problem = describe(q, k, v, options, precision=precision)
    smem = H100.limits.block_smem
    of_keys = chosen.portable_kv(problem, smem, 16, frozenset("kv"))[0]
    portable = chosen.portable("forward_sm80", problem, smem, 16), BackwardConfigs(
        q=chosen.portable("backward_dq_sm80", problem, smem, 16), kv=of_keys
    )  # fmt: skip
    found = []
    for forward, backward in ((None, None), (None, None), portable):
        shared = {"causal": True, "precision": precision}
        out, lse = cuflash.attention(q, k, v, return_lse=True, config=forward, **shared)
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, config=backward, **shared)
        found.append((out, grads.dq, grads.dk, grads.dv))
    tolerance = 3e-6 if precision == "ieee" else 3e-3
    for first, again, other in zip(*found, strict=True):
        assert (first == again).all()
        assert cupy.linalg.norm(first - other) < tolerance * cupy.linalg.norm(other)
