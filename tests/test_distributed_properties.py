"""Is attention on any number of ranks that of one device, for any legal call?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash
from cuflash import distributed, testing
from cuflash._problem.option_table import FIELDS
from cuflash.distributed._layout import LAYOUTS
from cuflash.testing._budget import Budget
from support.problems import ALL_OPTIONS
from support.shards import Shards, has_rows, in_threads

METHODS = ("all_gather", "ring", "ulysses", "usp")
SIZES = (2, 3, 4, 5, 6, 8, 12, 16)
SEQLENS = (1, 2, 5, 17, 31, 64, 100, 150, 0)  # chunks are empty, odd or multiples of 16
EVERY_OPTION = {
    "seqlens": SEQLENS,
    "gradients": ("bias", "alibi_slopes", "sink", "scale"),
    "mixed_dtypes": False,
}
#: The two methods that exchange heads need a number of heads that ranks share, not broadcast.
HEADS = {"batches": ((4,), (2, 4), (8,), (12,), (16,)), "broadcast": False}
PAIRWISE = {"bias", "mask"}
POSITIONS = cuflash.MaskMod("(2 * q + k) % 5 > 0", host=lambda b, h, q, k: (2 * q + k) % 5 > 0)
WAVE = cuflash.ScoreMod(
    "score + sinf(q - 2 * k + b + h)", grad="1.0f",
    host=lambda score, b, h, q, k: score + np.sin(q - 2 * k + b + h),
    host_grad=lambda score, b, h, q, k: np.ones_like(score),
)  # fmt: skip


def calls(method):
    """Return a strategy of calls that a method supports for some number of ranks."""
    if method in ("ulysses", "usp"):
        names = tuple(n for n in ALL_OPTIONS if n not in PAIRWISE)
        return testing.calls(**EVERY_OPTION, **HEADS, options=names)
    return testing.calls(**EVERY_OPTION)


def of_ranks(call, shards):
    """Return out, lse and gradients of a call on several ranks."""
    results = shards.forward(*call.qkv, **call.options)
    gradients = shards.gradients(call.dout, *call.qkv, results, call.wrt, call.dlse, **call.options)
    out, lse = (shards.whole([r[i] for r in results], axis) for i, axis in ((0, -2), (1, -1)))
    return out, lse, gradients


@st.composite
def of_any_method(draw, sizes):
    """Draw a call, and ranks that support it."""
    method = draw(st.sampled_from(METHODS))
    call, size = draw(calls(method)), draw(st.sampled_from(sizes))
    assume(method != "usp" or size in (4, 6, 8, 12, 16))
    heads, heads_kv = (a.shape[-3] if a.ndim > 2 else 1 for a in (call.q, call.k))
    across = max(n for n in range(1, size) if size % n == 0) if method == "usp" else size
    if method in ("ulysses", "usp"):
        assume(heads % across == 0 and (heads_kv % across == 0 or across % heads_kv == 0))
    return call, Shards(size, draw(st.sampled_from(LAYOUTS)), method)


@given(of_any_method(SIZES))
def test_ranks_keep_the_budget_of_one_device(drawn):
    """Any options, with ragged and empty rows, keep one device's budget, forward and gradient."""
    call, shards = drawn
    out, lse, gradients = of_ranks(call, shards)
    budget = Budget(call)
    budget.check_forward(out, lse)
    budget.check_backward(gradients, given=(out, lse))
    for name, array in gradients.items():
        own = call.array(name)
        assert (array.shape, array.dtype) == (own.shape, own.dtype)


@given(
    drawn=of_any_method((2, 4, 8)),
    formula=st.sampled_from([{"score_mod": WAVE}, {"mask_mod": POSITIONS}]),
)
def test_formulas_see_places_in_the_whole(drawn, formula):
    """Formulas see positions in the whole, beside any options: float64 results of one device."""
    call, shards = drawn
    wide = {n: np.asarray(getattr(call, n), np.float64) for n in ("q", "k", "v", "dout")}
    call = call.but(**wide, options={**call.options, **formula})
    out, lse, gradients = of_ranks(call, shards)
    truth = cuflash.attention(*call.qkv, **call.options, return_lse=True)
    right = cuflash.attention_backward(
        call.dout, *call.qkv, *truth, dlse=call.dlse, wrt=call.wrt, **call.options
    )
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(out, truth.out, **close)
    np.testing.assert_allclose(lse, truth.lse, **close)
    for name, found in gradients.items():
        expected = np.asarray(getattr(right, FIELDS[name]), float)
        np.testing.assert_allclose(found.astype(float), expected, err_msg=name, **close)


def of_processes(call, method, size):
    """Return what :func:`of_ranks` returns, from ranks that are connected by sockets."""
    cutter = Shards(size, "zigzag", method)
    options = cutter.options(call.options)

    def run(comm):
        q, k, v, dout = (cutter.cut(a)[comm.rank] for a in (*call.qkv, call.dout))
        own = {n: a[comm.rank] if isinstance(a, list) else a for n, a in options.items()}
        out, pullback = distributed.attention_vjp(q, k, v, comm=comm, method=method, **own)
        gradients = pullback(dout, wrt=call.wrt)
        return out, {n: getattr(gradients, FIELDS[n]) for n in call.wrt}

    return in_threads(size, run)


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_sockets_bring_the_bits_of_the_simulator(method, size):
    if method == "usp" and size == 2:
        pytest.skip("two ranks are no groups of groups")
    rng = np.random.default_rng(size)
    q, dout = rng.standard_normal((2, 2, 16, 61, 8))
    k, v = rng.standard_normal((2, 2, 8, 53, 8))
    options = {
        "causal": True, "window": (40, None), "softcap": 3.0, "alibi_slopes": rng.random(16),
        "sink": rng.standard_normal(16), "kv_lengths": np.array([[53], [30]]),
        "offset": np.array([[2], [-3]]), "dropout": 0.2, "seed": 3, "enable_gqa": True,
        "segment_ids": (np.arange(61) // 40, np.arange(53) // 40), "score_mod": WAVE,
    }  # fmt: skip
    wrt = ("q", "k", "v", "alibi_slopes", "sink", "scale")
    call = testing.Call(q, k, v, dout, options=options, wrt=wrt)
    shards = Shards(size, "zigzag", method)
    results = shards.forward(*call.qkv, **options)
    gradients = shards.gradients(dout, *call.qkv, results, wrt, **options)
    found = of_processes(call, method, size)
    for (out, _), simulated in zip(found, results, strict=True):
        assert out.tobytes() == simulated.out.tobytes()
    for name in wrt:
        parts = [own[name] for _, own in found]
        whole = shards.whole(parts) if has_rows(gradients[name], -2) else parts[0]
        assert whole.tobytes() == gradients[name].tobytes(), name
