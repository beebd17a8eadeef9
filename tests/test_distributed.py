"""Is attention of a sharded sequence the attention of the whole, for every method and option?"""

from __future__ import annotations

import doctest
import inspect
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import distributed, reference
from cuflash._problem.option_table import FIELDS
from cuflash.distributed._layout import LAYOUTS, chunks_of, rows_of
from cuflash.distributed._traffic import Extents, candidates
from cuflash.testing._budget import Budget
from support.problems import Call
from support.shards import QKV, Shards

METHODS = ("all_gather", "ring", "ulysses", "usp")
BATCH, HEADS, HEADS_KV, D, D_V = 2, 4, 2, 8, 6


def drawn(seed, seqlen_q, seqlen_k, dtype=np.float64):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((BATCH, HEADS, seqlen_q, D)).astype(dtype)
    k = rng.standard_normal((BATCH, HEADS_KV, seqlen_k, D)).astype(dtype)
    v = rng.standard_normal((BATCH, HEADS_KV, seqlen_k, D_V)).astype(dtype)
    dout = rng.standard_normal((BATCH, HEADS, seqlen_q, D_V)).astype(dtype)
    return rng, q, k, v, dout


def formulas():
    """Return formulas that depend on positions, heads and entries of the whole call."""
    wave = cuflash.ScoreMod(
        "score + amp[h] * sinf(q - 2 * k + b)", grad="1.0f", arrays={"amp": np.arange(4.0)},
        host=lambda score, b, h, q, k, amp: score + amp[h] * np.sin(q - 2 * k + b),
        host_grad=lambda score, b, h, q, k, amp: np.ones_like(score),
    )  # fmt: skip
    stripes = cuflash.MaskMod("(q + k + h) % 3 > 0", host=lambda b, h, q, k: (q + k + h) % 3 > 0)
    return {"score_mod": wave, "mask_mod": stripes}


OPTIONS: dict[str, Any] = {
    "full": lambda rng, m, n: {},
    "causal": lambda rng, m, n: {"causal": True},
    "top left": lambda rng, m, n: {"causal": "top_left", "softcap": 2.0, "scale": 0.3},
    "window": lambda rng, m, n: {"window": (7, 2), "sink": rng.standard_normal(HEADS)},
    "one offset": lambda rng, m, n: {"causal": True, "offset": 3},
    "offsets": lambda rng, m, n: {
        "window": (5, None), "offset": rng.integers(-9, 9, (BATCH, 1)), "causal": True,
        "alibi_slopes": rng.random(HEADS),
    },
    "lengths": lambda rng, m, n: {
        "causal": True, "q_lengths": rng.integers(0, m + 1, (BATCH, 1), np.uint64),
        "kv_lengths": rng.integers(0, n + 1, (BATCH, 1), np.uint8),
        "sink": rng.standard_normal(HEADS),
    },
    "no axes": lambda rng, m, n: {"sink": np.array(0.5), "alibi_slopes": np.array(0.25)},
    "one length": lambda rng, m, n: {"causal": True, "q_lengths": m - 1, "kv_lengths": n // 2},
    "segments": lambda rng, m, n: {
        "segment_ids": (rng.integers(0, 2, (BATCH, 1, m)), rng.integers(0, 2, n)),
    },
    "one segment": lambda rng, m, n: {"segment_ids": (np.array([1]), rng.integers(0, 2, n))},
    "pairs": lambda rng, m, n: {
        "bias": rng.standard_normal((HEADS, m, n)), "mask": rng.random((m, n)) > 0.3,
        "causal": True, "sink": rng.standard_normal(HEADS),
    },
    "row of bias": lambda rng, m, n: {"bias": rng.standard_normal((1, n)), "causal": True},
    "dropout": lambda rng, m, n: {"dropout": 0.3, "seed": 5, "causal": True},
    "formulas": lambda rng, m, n: formulas(),
}  # fmt: skip
EXTENTS = ((13, 22), (3, 5), (150, 140), (40, 40))


def cannot(method, name):
    return method in ("ulysses", "usp") and name in ("pairs", "row of bias")


@pytest.mark.parametrize(
    ("method", "name"), [(m, n) for m in METHODS for n in OPTIONS if not cannot(m, n)]
)
def test_every_option_has_the_meaning_of_one_gpu(method, name):
    """Every option gives one GPU's forward and gradients, with ragged and unequal lengths."""
    for number, (seqlen_q, seqlen_k) in enumerate(EXTENTS):
        rng, q, k, v, dout = drawn(number, seqlen_q, seqlen_k)
        options = OPTIONS[name](rng, seqlen_q, seqlen_k) | {"enable_gqa": True}
        wrt = tuple(n for n in FIELDS if n in (*QKV, "scale", *options))
        dlse = rng.standard_normal(q.shape[:-1])
        truth = reference.attention(q, k, v, return_lse=True, **options)
        right = reference.attention_backward(dout, q, k, v, dlse=dlse, wrt=wrt, **options)
        shards = Shards(4, LAYOUTS[(number // 3 + len(name)) % 2], method)
        results = shards.forward(q, k, v, **options)
        found = shards.gradients(dout, q, k, v, results, wrt, dlse, **options)
        np.testing.assert_allclose(shards.whole([r.out for r in results]), truth.out, atol=1e-12)
        lse = shards.whole([r.lse for r in results], -1)
        np.testing.assert_allclose(lse, truth.lse, atol=1e-12)
        for wanted in wrt:
            expected = getattr(right, FIELDS[wanted])
            np.testing.assert_allclose(found[wanted], expected, atol=1e-10, err_msg=wanted)


@pytest.mark.parametrize("method", METHODS)
def test_segments_of_one_query(method):
    """Segments of one query work: one rank has the query and its segment, other ranks have none."""
    _, q, k, v, dout = drawn(0, 1, 9)
    options = {"segment_ids": (np.array([1]), np.arange(9) % 2), "enable_gqa": True}
    shards = Shards(4, "zigzag", method)
    results = shards.forward(q, k, v, **options)
    truth = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(shards.whole([r.out for r in results]), truth, atol=1e-12)
    found = shards.gradients(dout, q, k, v, results, QKV, **options)
    right = reference.attention_backward(dout, q, k, v, **options)
    for name in QKV:
        np.testing.assert_allclose(found[name], getattr(right, FIELDS[name]), atol=1e-12)


@pytest.mark.parametrize("wrt", [("scale",), ("k",), ("q", "scale"), ()])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_some_inputs(method, wrt):
    """Only the gradients in wrt are returned, with the right values, also where wrt is empty."""
    _, q, k, v, dout = drawn(3, 21, 18)
    shards = Shards(4, "zigzag", method)
    results = shards.forward(q, k, v, enable_gqa=True)
    found = shards.gradients(dout, q, k, v, results, wrt, enable_gqa=True)
    right = reference.attention_backward(dout, q, k, v, wrt=wrt, enable_gqa=True)
    assert set(found) == set(wrt)
    for name, array in found.items():
        np.testing.assert_allclose(array, getattr(right, FIELDS[name]), atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks(layout, method, size):
    """Any number of ranks is right, with a head for each rank; 16 ranks share 8 key/value heads."""
    if method == "usp" and size in (2, 3, 5):
        with pytest.raises(NotImplementedError, match=r"'usp' does not support .* ranks"):
            Shards(size, layout, method).forward(*[np.ones((size, 4, 2))] * 3)
        return
    rng = np.random.default_rng(size)
    rows = 37
    q, dout = rng.standard_normal((2, size, rows, 4))
    k, v = rng.standard_normal((2, size if size < 16 else 8, rows, 4))
    options = {"causal": True, "enable_gqa": True}
    truth = reference.attention(q, k, v, **options)
    right = reference.attention_backward(dout, q, k, v, **options)
    shards = Shards(size, layout, method)
    results = shards.forward(q, k, v, **options)
    found = shards.gradients(dout, q, k, v, results, QKV, **options)
    np.testing.assert_allclose(shards.whole([r.out for r in results]), truth, atol=1e-12)
    for name in QKV:
        np.testing.assert_allclose(found[name], getattr(right, FIELDS[name]), atol=1e-12)


@pytest.mark.parametrize(
    "dtype", [np.float32, bfloat16, np.float16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize(
    ("method", "size"),
    [
        pytest.param(method, size, marks=[pytest.mark.full] if size > 5 else [])
        for method in METHODS
        for size in (2, 3, 4, 5, 8, 16)
        if method != "usp" or size not in (2, 3, 5)
    ],
)
def test_error_budget_and_bits(method, size, dtype):
    """Results are within the budget of one device, and a second run gives the same bits."""
    rng, rows = np.random.default_rng(9), 187  # the ranks' rows differ in number
    q, k = (rng.standard_normal((BATCH, n, rows, D)).astype(dtype) for n in (2 * size, size))
    v, dout = (rng.standard_normal((BATCH, n, rows, D_V)).astype(dtype) for n in (size, 2 * size))
    options = {"causal": True, "enable_gqa": True}
    shards = Shards(size, "zigzag", method)
    results = shards.forward(q, k, v, **options)
    found = shards.gradients(dout, q, k, v, results, QKV, **options)
    out, lse = (shards.whole([r[i] for r in results], axis) for i, axis in ((0, -2), (1, -1)))
    budget = Budget(Call(q, k, v, dout, options=options))
    budget.check_forward(out, lse)
    budget.check_backward(found, given=(out, lse))
    again = shards.forward(q, k, v, **options)
    assert all(a.out.tobytes() == b.out.tobytes() for a, b in zip(results, again, strict=True))
    for name, array in shards.gradients(dout, q, k, v, results, QKV, **options).items():
        assert array.dtype == dtype
        assert array.tobytes() == found[name].tobytes()


@pytest.mark.parametrize("name", distributed.__all__)
def test_docstrings(name):
    """Docstrings describe every parameter and have an example that runs."""
    found = getattr(distributed, name)
    if inspect.isclass(found):
        return
    text = inspect.getdoc(found)
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"{section}\n---" in text
    for parameter in inspect.signature(found).parameters:
        assert re.search(rf"\b{parameter}\b", text), parameter
    tests = doctest.DocTestFinder(recurse=False).find(found, name, globs={})
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert [runner.run(test).failed for test in tests] == [0]


@pytest.mark.parametrize("axes", [[(-3, -1)] * 4, [(-1, -2), (-2, -1), (0, 1), (-3, -1)]])
def test_axes(axes):
    """In any axes order results and gradients are right, and have the order of the caller."""
    rng = np.random.default_rng(1)
    pairs = dict(zip(("q", "k", "v", "out"), axes, strict=True))
    canonical = dict(zip(("q", "k", "v"), rng.standard_normal((3, 3, 4, 20, 6)), strict=True))
    given = {n: np.moveaxis(a, (-2, -1), pairs[n]) for n, a in canonical.items()}
    comm = distributed.simulated(2)
    parts = [distributed.shard(a, comm=comm, axis=pairs[n][0]) for n, a in given.items()]
    out, pullback = distributed.attention_vjp(*parts, comm=comm, axes=axes, causal=True)
    whole = distributed.unshard(out, comm=comm, axis=pairs["out"][0])[0]
    np.testing.assert_allclose(whole, reference.attention(*given.values(), axes=axes, causal=True))
    right = reference.attention_backward(whole, *given.values(), axes=axes, causal=True)
    for name in QKV:
        found = [getattr(g, FIELDS[name]) for g in pullback(out)]
        found = distributed.unshard(found, comm=comm, axis=pairs[name][0])[0]
        np.testing.assert_allclose(found, getattr(right, FIELDS[name]), atol=1e-12)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_shared_keys_and_mixed_dtypes(method):
    """Keys may lack the batch axes of queries; gradients have their inputs' shapes and dtypes."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((3, 2, 24, 4)).astype(bfloat16)
    k, v = rng.standard_normal((2, 2, 30, 4)).astype(np.float32)
    shards = Shards(4, "zigzag", method)
    results = shards.forward(q, k, v)
    out = shards.whole([r.out for r in results])
    np.testing.assert_allclose(out, reference.attention(q, k, v), atol=1e-5)
    found = shards.gradients(out, q, k, v, results, QKV)
    right = reference.attention_backward(out, q, k, v)
    for name, given in (("q", q), ("k", k), ("v", v)):
        assert (found[name].shape, found[name].dtype) == (given.shape, given.dtype)
        tolerance = {"rtol": 1e-2 if name == "q" else 1e-4, "atol": 1e-4}
        expected = getattr(right, FIELDS[name])
        np.testing.assert_allclose(found[name].astype(float), expected, **tolerance)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_queries_that_all_heads_share(method):
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((24, 4)), *rng.standard_normal((2, 3, 24, 4))
    shards = Shards(4, "zigzag", method)
    results = shards.forward(q, k, v, causal=True)
    out = shards.whole([r.out for r in results])
    np.testing.assert_allclose(out, reference.attention(q, k, v, causal=True), atol=1e-12)
    found = shards.gradients(out, q, k, v, results, QKV, causal=True)
    right = reference.attention_backward(out, q, k, v, causal=True)
    for name in QKV:
        np.testing.assert_allclose(found[name], getattr(right, FIELDS[name]), atol=1e-12)


@pytest.mark.parametrize("rows", [5, 6])
def test_a_bias_with_one_row_is_shared_unless_each_rank_has_one_query(rows):
    rng = np.random.default_rng(4)
    q, k, v, dout = rng.standard_normal((4, 2, rows, 4))
    bias = rng.standard_normal((1, rows))
    shards = Shards(5, "contiguous", "ring")
    results = shards.forward(q, k, v, bias=bias)
    found = shards.gradients(dout, q, k, v, results, ("bias",), bias=bias)
    right = reference.attention_backward(dout, q, k, v, wrt=("bias",), bias=bias)
    np.testing.assert_allclose(found["bias"], right.dbias, atol=1e-12)


@pytest.mark.parametrize(("layout", "sent_back"), [("zigzag", 0.75), ("contiguous", 0.5)])
def test_the_ring_sends_no_gradients_of_keys_that_a_rank_does_not_see(layout, sent_back):
    """Zigzag: later ranks see half of a rank's keys, earlier ones all. In order: all or none."""
    x = np.random.default_rng(3).standard_normal((2, 128, 4))
    shards = Shards(4, layout, "ring")
    results = shards.forward(x, x, x, causal=True)
    forward, cut = sum(shards.comm.sent.values()), shards.cut(x)
    outs, lses = [r.out for r in results], [r.lse for r in results]
    shards.comm.sent.clear()
    distributed.attention_backward(outs, cut, cut, cut, outs, lses, causal=True, **shards.how)
    assert sum(shards.comm.sent.values()) == forward * (1 + sent_back)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [4, 8])
def test_bytes_are_those_of_the_formulae(method, size):
    """A call sends as many bytes as `explain` and the formulae in the module's docstring say."""
    heads, heads_kv, rows = 16, 8, 16
    rng = np.random.default_rng(0)
    q = rng.standard_normal((heads, size * rows, D)).astype(np.float32)
    k, v = rng.standard_normal((2, heads_kv, size * rows, D)).astype(np.float32)
    extents = Extents(
        size * rows, size * rows, (heads, D), (heads_kv, D), (heads_kv, D), (heads, D), q.dtype
    )
    own = next(c for c in candidates(extents, size) if c.method == method)
    shards = Shards(size, "zigzag", method)
    results = shards.forward(q, k, v, enable_gqa=True)
    forward = sum(shards.comm.sent.values())
    cut = [shards.cut(a) for a in (q, k, v)]
    outs, lses = [r.out for r in results], [r.lse for r in results]
    shards.comm.sent.clear()
    distributed.attention_backward(outs, *cut, outs, lses, enable_gqa=True, **shards.how)
    gradient = sum(shards.comm.sent.values())
    assert (forward, gradient) == (own.forward.sent, own.backward.sent)
    keys = 2 * rows * heads_kv * D * 4  # bytes of one rank, in float32 like the gradients
    if method in ("all_gather", "ring"):
        assert forward == size * (size - 1) * keys
        assert gradient == 2 * forward
    if method == "ulysses":
        sent = rows * D * 4 * (2 * heads + 2 * heads_kv) + rows * heads * 4
        assert forward == (size - 1) * sent


def test_a_call_that_all_ranks_made_before_is_known_by_a_number(monkeypatch):
    """A repeated call is known by a number, unless a rank differs or options have arrays."""
    comm, told = distributed.simulated(2), []
    agree = comm.agree
    monkeypatch.setattr(comm, "agree", lambda facts: told.append(facts) or agree(facts))
    x, y = [np.ones((8, 4))] * 2, [np.ones((8, 4)), np.ones((8, 4), np.float32)]
    counts = []
    for _ in range(3):
        out = distributed.attention(x, x, x, comm=comm, causal=True, return_lse=True)
        counts.append(len(told))
    assert counts == [3, 4, 5]
    assert told[-1] == {0: b"1", 1: b"1"}
    outs, lses = [o.out for o in out], [o.lse for o in out]
    for _ in range(2):
        found = distributed.attention_backward(x, x, x, x, outs, lses, comm=comm, causal=True)
    assert len(told) == 9
    assert told[-1] == {0: b"2", 1: b"2"}
    assert found[0].dv.sum() > found[1].dv.sum() > 0  # rank 0 has the first and the last rows
    with pytest.raises(ValueError, match="q without rows: got 'float32"):
        distributed.attention(y, x, x, comm=comm, causal=True)
    for _ in range(2):
        before = len(told)
        distributed.attention(x, x, x, comm=comm, kv_lengths=[np.array(3), np.array(3)])
        assert len(told) == before + 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 5, 64, 100, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_layouts_cover_every_row_once(size, length, layout):
    held = chunks_of(length, size, layout)
    found = np.concatenate(
        [distributed.positions(length, rank, size, layout=layout) for rank in range(size)]
    )
    np.testing.assert_array_equal(np.sort(found), np.arange(length))
    assert [rows_of(own) for own in held] == [
        len(distributed.positions(length, rank, size, layout=layout)) for rank in range(size)
    ]
    if length >= 32 * size:
        assert all(c.start % 16 == 0 for own in held for c in own)
    x = np.random.default_rng(0).standard_normal((2, length))
    comm = distributed.simulated(size)
    parts = distributed.shard(x, comm=comm, layout=layout, axis=1)
    for whole in distributed.unshard(parts, comm=comm, layout=layout, axis=1):
        np.testing.assert_array_equal(whole, x)


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ulysses", "usp"])
def test_what_a_method_cannot_do_names_one_that_can(method):
    rng, q, k, v, _ = drawn(0, 16, 16)
    for name in ("pairs", "row of bias"):
        options = OPTIONS[name](rng, 16, 16)
        with pytest.raises(NotImplementedError, match="use 'all_gather' or 'ring' or 'auto'"):
            Shards(4, "zigzag", method).forward(q, k, v, enable_gqa=True, **options)
    three = rng.standard_normal((3, 3, 16, 4))
    with pytest.raises(NotImplementedError, match="3 query heads, which"):
        Shards(4, "zigzag", method).forward(*three)


def test_heads_that_ranks_cannot_share():
    """Six ranks cannot share 4 key/value heads: with 12 query heads, rank 2 needs heads 1 and 2."""
    q, kv = np.ones((12, 16, 4)), np.ones((4, 16, 4))
    with pytest.raises(NotImplementedError, match="4 key/value heads, which 6 ranks cannot share"):
        Shards(6, "zigzag", "ulysses").forward(q, kv, kv, enable_gqa=True)
    with pytest.raises(NotImplementedError, match="1 query heads"):
        Shards(2, "zigzag", "ulysses").forward(*[np.ones((16, 4))] * 3)


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_no_heads(method):
    shards, x = Shards(4, "zigzag", method), np.ones((0, 16, 4))
    results = shards.forward(x, x, x)
    assert shards.whole([r.out for r in results]).shape == x.shape
    assert shards.gradients(x, x, x, x, results, ("k",))["k"].shape == x.shape


def test_ranks_that_make_different_calls():
    comm, x = distributed.simulated(2), [np.ones((8, 4))] * 2
    wrong = [np.ones((9, 4)), np.ones((7, 4))]
    for call, message in (
        (
            {"options": [cuflash.Options(causal=True), cuflash.Options()]},
            "causal: got False on rank 1",
        ),
        ({"scale": [0.5, 0.25]}, "scale: got 0.25 on rank 1, expected 0.5 as on rank 0"),
        ({"kv_lengths": [np.array(3), np.array(4)]}, "kv_lengths: got"),
        ({"layout": "striped"}, "layout: got 'striped', expected 'contiguous' or 'zigzag'"),
        ({"method": 1}, "method: got 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            distributed.attention(x, x, x, comm=comm, **call)
    with pytest.raises(
        ValueError, match="q: got 9 rows on rank 0, expected 8, its part of 16 rows"
    ):
        distributed.attention(wrong, x, x, comm=comm)
    with pytest.raises(TypeError, match="k: got ndarray, expected a list of 2 arrays"):
        distributed.attention(x, np.ones((8, 4)), x, comm=comm)
    with pytest.raises(TypeError, match="v: got a list of 1, expected a list of 2 arrays"):
        distributed.attention(x, x, x[:1], comm=comm)
    with pytest.raises(ValueError, match="axis: got -2, expected an axis from -1 to 0"):
        distributed.shard(np.arange(3), comm=comm)
    with pytest.raises(ValueError, match="q_lengths: got 17, expected a length from 0 to 16"):
        distributed.attention(x, x, x, comm=comm, q_lengths=17)
    for not_one in (3, None):
        with pytest.raises(TypeError, match=r"comm: got .*, expected a communicator"):
            distributed.attention(x, x, x, comm=not_one)
        with pytest.raises(TypeError, match="comm: got"):
            distributed.shard(x[0], comm=not_one)
    with pytest.raises(TypeError, match="mpi: got None, expected a communicator of mpi4py"):
        distributed.from_mpi(None)
    assert comm.sent == Counter()
