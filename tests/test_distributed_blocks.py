"""Do the blocks of a sharded call hold each visible pair once, and do parts add up to the whole?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import distributed
from cuflash.distributed._blocks import Block, Bounds, blocks_of, lasts_of
from cuflash.distributed._layout import LAYOUTS, chunks_of, joined
from cuflash.distributed._parts import Parts
from cuflash.distributed._sums import Merged, Rows, Summed
from support.shards import poisoned_memory

SIDES = st.none() | st.integers(0, 12) | st.integers(0, 200)


def positions(chunks):
    """Return the positions that the rows of these chunks have in the whole."""
    return np.array([i for chunk in chunks for i in range(*chunk)], int)


def visible(queries, keys, left, right, offset):
    """Return which query sees which key, from their positions."""
    m, n = queries[:, None] + offset, keys
    return ((left is None) | (n >= m - (left or 0))) & ((right is None) | (n <= m + (right or 0)))


@st.composite
def sharded(draw):
    """Draw the query and key chunks of ranks, or of groups of two ranks, and bounds."""
    size, layout = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from(LAYOUTS))
    seqlen_q = draw(st.integers(0, 40) | st.just(64))
    seqlens = seqlen_q, draw(st.just(seqlen_q) | st.integers(0, 40) | st.just(64))
    held = [chunks_of(seqlen, size, layout) for seqlen in seqlens]
    if size % 2 == 0 and draw(st.booleans()):
        held = [
            tuple(joined((*a, *b)) for a, b in zip(own[::2], own[1::2], strict=True))
            for own in held
        ]
    if draw(st.booleans()):
        held[1] = (joined(tuple(c for own in held[1] for c in own)),)  # keys of all ranks
    offset = draw(st.just(0) | st.just(seqlens[1] - seqlens[0]) | st.integers(-50, 50))
    return held, draw(SIDES), draw(st.just(0) | SIDES), offset


#: The second chunk of queries sees all first keys, and some of the keys beside them here.
IN_PART = ([chunks_of(16, 2, "zigzag")] * 2, None, 0, 1)
#: The first chunk of queries has its sink with keys of which the second chunk sees none.
WITHOUT_THE_FIRST = ([chunks_of(16, 2, "zigzag"), chunks_of(20, 2, "zigzag")], 4, None, 4)


@example(drawn=IN_PART, alone=True, known=True, sink=False)
@example(drawn=WITHOUT_THE_FIRST, alone=True, known=True, sink=True)
@given(drawn=sharded(), alone=st.booleans(), known=st.booleans(), sink=st.booleans())
def test_blocks_hold_each_visible_pair_once(drawn, alone, known, sink):
    """Blocks hold each visible pair and each sink once; positions in a block are consecutive."""
    (of_queries, of_keys), left, right, offset = drawn
    known = known or alone  # offsets in an array would count as an option with positions
    bounds = Bounds(left, right, offset if known else None, alone)
    for queries, keys in itertools.product(of_queries, of_keys):
        rows, columns = positions(queries), positions(keys)
        times, sinks = np.zeros((len(rows), len(columns)), int), np.zeros(len(rows), int)
        for block in blocks_of(queries, keys, bounds, sink=sink):
            sinks[block.rows] += block.with_sink
            part = times[block.rows, block.keys]
            m, n = (np.arange(extent) for extent in part.shape)
            moved = offset + block.first_query - block.first_key
            part += visible(m, n, left, right, moved) if block.bounded else 1
            if not alone:
                np.testing.assert_array_equal(rows[block.rows], block.first_query + m)
                np.testing.assert_array_equal(columns[block.keys], block.first_key + n)
        np.testing.assert_array_equal(times, visible(rows, columns, left, right, offset))
        np.testing.assert_array_equal(sinks, int(sink))


@given(sharded())
def test_the_last_block_of_a_row_is_known(drawn):
    (of_queries, of_keys), left, right, offset = drawn
    steps = [blocks_of(of_queries[0], keys, Bounds(left, right, offset, False)) for keys in of_keys]
    blocks, lasts = [block for step in steps for block in step], list(lasts_of(steps))
    assert len(lasts) == len(blocks)
    for number, (block, last) in enumerate(zip(blocks, lasts, strict=True)):
        rows = set(range(block.rows.start, block.rows.stop))
        assert last == all(
            rows.isdisjoint(range(b.rows.start, b.rows.stop)) for b in blocks[number + 1 :]
        )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_zigzag_gives_all_ranks_equal_causal_work(size):
    bounds = Bounds(None, 0, 0, alone=True)

    def work(layout):
        held = chunks_of(64 * size, size, layout)
        return [sum(b.pairs for own in held for b in blocks_of(held[rank], own, bounds))
                for rank in range(size)]  # fmt: skip

    assert len(set(work("zigzag"))) == 1
    contiguous = work("contiguous")
    assert max(contiguous) / np.mean(contiguous) == pytest.approx(2 - 1 / size)
    held = chunks_of(64 * size, size, "zigzag")
    assert all(len(blocks_of(held[0], own, bounds)) == 1 for own in held)  # one launch per step


SLICES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=8)


@given(added=SLICES, among=SLICES)
def test_rows_are_a_set(added, among):
    rows, present = Rows(12), set()
    for low, high in added:
        rows.add(slice(low, high))
        present |= set(range(low, high))
    for low, high in [(0, 12), *among]:
        inside = present & set(range(low, high))
        for wanted, expected in ((True, inside), (False, set(range(low, high)) - inside)):
            runs = rows.runs(present=wanted, among=slice(low, high))
            assert [i for run in runs for i in range(run.start, run.stop)] == sorted(expected)
            assert all(a.stop < b.start for a, b in itertools.pairwise(runs))
        assert rows.any(slice(low, high)) == bool(inside)


@given(slices=SLICES, seed=st.integers(0, 99), dtype=st.sampled_from([np.float32, np.float64]))
def test_parts_are_merged(slices, seed, dtype):
    """Parts are merged by their lse; some parts see no key, and some rows have no part."""
    rng, rows = np.random.default_rng(seed), 12
    outs = rng.standard_normal((len(slices), rows, 2))
    lses = np.full((len(slices), rows), -np.inf)
    for lse, (low, high) in zip(lses, slices, strict=True):
        lse[low:high] = np.where(
            rng.random(high - low) > 0.3, rng.normal(0, 9, high - low), -np.inf
        )
    outs[np.isneginf(lses)] = 0
    weights = np.exp(lses)
    total = weights.sum(0)
    expected = (weights[..., None] * outs).sum(0) / np.where(total == 0, 1, total)[:, None]
    blocks = [Block(slice(*pair), slice(0), 0, 0, False) for pair in slices]
    with poisoned_memory():
        merged = Merged(np, np.empty((rows, 2), dtype), np.dtype(np.float64), (rows,))
        for block, last, out, lse in zip(blocks, lasts_of([blocks]), outs, lses, strict=True):
            own = block.rows
            joins = merged.so_far(own) is not None
            places = merged.part(own) if joins else merged.room(own, last=last)
            for place, values in zip(places, (out[own], lse[own]), strict=True):
                place[...] = values
            if joins:
                merged.merge(own, *places)
        out, lse = merged.finished()
    assert (out.dtype, lse.dtype) == (dtype, np.float64)
    close = {"rtol": 4 * np.finfo(dtype).eps, "atol": 4 * np.finfo(dtype).eps}
    np.testing.assert_allclose(out, expected, **close)
    np.testing.assert_allclose(np.exp(lse), total, rtol=1e-12)


@given(slices=SLICES, others=SLICES)
def test_gradients_are_summed(slices, others):
    """Sums of small integers are exact, and rows of no block have gradients of 0."""
    expected = np.zeros((2, 12, 3))
    with poisoned_memory():
        found = []
        for which, own in enumerate((slices, others)):
            summed = Summed(array := np.empty(expected.shape))
            for number, pair in enumerate(own):
                rows = slice(*pair)
                part, adds = summed.begin(rows)
                part[...] = 10 * which + number
                if adds:
                    summed.add(rows, part)
                expected[:, rows] += 10 * which + number
            found.append((summed, array))
        (_, first), (of_others, _) = found
        found[0][0].finish()
        total = of_others.added_to(first, np.float32)
    assert total.dtype == np.float32
    np.testing.assert_array_equal(total, expected)


@given(spans=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 8)), min_size=1, max_size=4))
def test_gradients_of_some_rows_are_joined(spans):
    """Sums with any rows are joined and added to all rows; each row is summed once."""
    own = np.arange(2 * 20 * 3.0).reshape(2, 20, 3)
    expected, joined = own.copy(), None
    with poisoned_memory():
        for number, (first, rows) in enumerate(spans):
            part = Summed(np.full((2, rows, 3), 100.0**number), first, full=True)
            joined = joined.joined(part) if joined else part
            expected[:, first : first + rows] += 100.0**number
        total = joined.added_to(own, np.float64)
    assert total is own
    np.testing.assert_array_equal(total, expected)


ROW = np.zeros((1, 4))
WITH_POSITIONS = {
    "alibi_slopes": np.ones(1), "bias": ROW, "mask": ROW == 0,
    "segment_ids": (np.arange(4), np.arange(4)), "q_lengths": 3, "kv_lengths": 3,
    "offset": np.array([1]), "dropout": 0.5,
    "score_mod": cuflash.ScoreMod("score", grad="1", host=max, host_grad=max),
    "mask_mod": cuflash.MaskMod("q > k", host=max),
}  # fmt: skip


@pytest.mark.parametrize("name", ["", *WITH_POSITIONS])
def test_an_option_with_positions_keeps_blocks_apart(name):
    options = {"causal": True, "window": (3, 2), "softcap": 2.0, "sink": np.ones(1), "seed": 1}
    if name:
        options |= {name: WITH_POSITIONS[name]}
    bounds = Parts(cuflash.Options(**options), 4, 4, None, True).bounds
    assert bounds.alone == (not name)
    assert (bounds.left, bounds.right) == (3, 0)
    assert bounds.offset == {"offset": None, "q_lengths": 1, "kv_lengths": -1}.get(name, 0)


@pytest.mark.parametrize("of", ["heads", "ranks", "ranks from the last"])
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_gradients_are_rounded_once(method, of):
    """Gradients of two ranks or heads are rounded once: bfloat16 has 1 = 257 - 256, but not 257."""
    comm, zeros = distributed.simulated(2), np.zeros((2, 2, 1), bfloat16)
    dout = np.array([[[258], [256]], [[-256], [-256]]], bfloat16)  # (heads, rows, d_v)
    dout = dout if of == "heads" else dout.swapaxes(0, 1)
    dout = dout[:, ::-1] if of == "ranks from the last" else dout
    cut = {"comm": comm, "layout": "contiguous"}
    how = cut | {"method": method, "enable_gqa": True, "scale": 1.0}
    q, k, dout = (distributed.shard(a, **cut) for a in (zeros, zeros[:1], dout))
    _, pullback = distributed.attention_vjp(q, k, k, **how)
    for gradients in pullback(dout):
        np.testing.assert_array_equal(gradients.dv, 1)
    # A query has two keys, on two ranks: dq = ds (k0 - k1).
    k = np.array([[[129 / 64], [127 / 64]]], bfloat16)
    v = np.array([[[129 / 32], [0]]], bfloat16)
    k, v = (distributed.shard(a, **cut) for a in (k, v))
    _, pullback = distributed.attention_vjp(q, k, v, **how)
    for gradients in pullback([np.ones_like(a) for a in q]):
        np.testing.assert_array_equal(gradients.dq, 129 / 4096)


@pytest.mark.parametrize("dtype", [bfloat16, np.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_gradients_share_memory_with_nothing(method, size, dtype):
    """No gradient shares memory with an argument or another gradient, though few are copies."""
    comm = distributed.simulated(size)
    whole = np.random.default_rng(0).standard_normal((4, 4, 8 * size, 4)).astype(dtype)
    q, k, v, dout = (distributed.shard(a, comm=comm) for a in whole)
    how = {"comm": comm, "method": method, "causal": True}
    results = distributed.attention(q, k, v, return_lse=True, **how)
    outs, lses = zip(*results, strict=True)
    gradients = distributed.attention_backward(dout, q, k, v, list(outs), list(lses), **how)
    found = [a for own in gradients for a in own]
    arguments = [*q, *k, *v, *dout, *outs, *lses]
    assert len(found) == 3 * size
    assert not any(np.shares_memory(a, b) for a in found for b in arguments)
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(found, 2))
