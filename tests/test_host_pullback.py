"""Are gradients right whose probabilities the forward has kept? (``cuflash/_host/kept.py``)"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import cuflash
from cuflash._host import kept
from cuflash.testing._budget import Budget
from support.problems import Call

RNG = np.random.default_rng(0)
CASES = {
    "full": ((2, 300, 24), (2, 700, 24), {}),
    "causal": ((3, 1100, 8), (3, 1100, 8), {"causal": True}),
    "window": ((2, 600, 8), (2, 900, 8), {"window": (130, 20), "offset": 40}),
    "a scale above 1": ((2, 30, 8), (2, 600, 8), {"scale": 1.5}),
    "mask": ((2, 60, 8), (2, 70, 8), {"mask": RNG.random((2, 60, 70)) < 0.4}),
    "lengths": (
        (3, 60, 8), (3, 1300, 8),
        {"q_lengths": np.array([60, 0, 33]), "kv_lengths": np.array([1300, 700, 0])},
    ),
    "segments": (
        (2, 60, 8), (2, 70, 8),
        {"segment_ids": (np.arange(60) // 16, np.arange(70) // 16)},
    ),
    "bias, slopes and sink": (
        (4, 60, 8), (4, 600, 8),
        {
            "bias": np.where(RNG.random((60, 600)) < 0.2, -np.inf, 1).astype(np.float32),
            "alibi_slopes": np.linspace(0.1, 1, 4), "sink": np.linspace(-1, 1, 4),
        },
    ),
    "groups": ((2, 8, 60, 8), (2, 2, 60, 8), {"enable_gqa": True}),
    "shared keys": ((9, 60, 8), (1, 600, 8), {}),
}  # fmt: skip


def call_of(case, dtype, wrt=("q", "k", "v")):
    shape_q, shape_k, options = CASES[case]
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, *shape_q)).astype(dtype)
    k, v = rng.standard_normal((2, *shape_k)).astype(dtype)
    return Call(q, k, v, dout, options=options, wrt=wrt)


def pulled_back(call, **how):
    (out, lse), pullback = cuflash.attention_vjp(
        call.q, call.k, call.v, return_lse=True, **call.options
    )
    gradients = pullback(call.dout, wrt=call.wrt, **how)
    return out, lse, dict(zip(call.wrt, gradients, strict=True))


@pytest.mark.parametrize("most", [2**16, 2**18, 2**25])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_within_the_budget(case, most, monkeypatch):
    """Whether all probabilities are kept, or those of the last queries, or none."""
    monkeypatch.setattr(kept, "KEPT_BYTES", most)
    for dtype in (np.float16, np.float32, np.float64):
        call = call_of(case, dtype)
        out, lse, gradients = pulled_back(call)
        Budget(call).check_backward(gradients, given=(out, lse))


def test_a_pullback_repeats_its_bits():
    call = call_of("causal", np.float32)
    _, pullback = cuflash.attention_vjp(call.q, call.k, call.v, **call.options)
    one, two = pullback(call.dout), pullback(call.dout)
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("array", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("case", ["causal", "window", "mask", "lengths"])
def test_what_is_not_finite_reaches_the_same_gradients_as_recomputed(case, value, array):
    call = call_of(case, np.float32)
    getattr(call, array)[..., 5, :] = value
    out, lse, found = pulled_back(call)
    again = cuflash.attention_backward(call.dout, call.q, call.k, call.v, out, lse, **call.options)
    for a, b in zip(found.values(), again, strict=True):
        if value > 0 and np.isfinite(value):  # factors of rows come before products, which overflow
            assert np.isfinite(a[np.isfinite(b)]).all()
        else:
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"dropout": 0.2, "seed": 1}])
def test_nothing_is_kept_where_a_derivative_needs_scores(options):
    call = call_of("full", np.float32).but(options=options)
    out, lse, found = pulled_back(call)
    again = cuflash.attention_backward(call.dout, call.q, call.k, call.v, out, lse, **options)
    for a, b in zip(found.values(), again, strict=True):
        assert a.tobytes() == b.tobytes()


def test_gradients_of_options_have_the_bits_of_attention_backward():
    wrt = ("bias", "alibi_slopes", "sink", "scale", "q")
    call = call_of("bias, slopes and sink", np.float32, wrt)
    out, lse, found = pulled_back(call)
    again = cuflash.attention_backward(
        call.dout, call.q, call.k, call.v, out, lse, wrt=wrt, **call.options
    )
    for a, b in zip(found.values(), again, strict=True):
        assert a.tobytes() == b.tobytes()


def test_memory_is_bounded_and_ends_with_the_pullback(monkeypatch):
    taken = []
    empty = np.empty
    monkeypatch.setattr(
        kept.np, "empty", lambda *a, **how: taken.append(empty(*a, **how)) or taken[-1]
    )
    q = np.ones((8, 2048, 16), np.float32)
    _, pullback = cuflash.attention_vjp(q, q, q)
    monkeypatch.undo()
    memory = [array for array in taken if array.dtype == np.uint8 and array.nbytes > 2**24]
    assert [array.nbytes for array in memory] == [2**25]
    alive = weakref.ref(memory[0])
    taken.clear(), memory.clear()
    assert alive() is not None
    del pullback
    gc.collect()
    assert alive() is None
