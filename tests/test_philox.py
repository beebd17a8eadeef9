"""Are the bits of dropout those that are documented, independent of tiles, and fair?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash._api import dispatch, probabilities
from cuflash._problem import philox
from cuflash._problem.philox import Origin
from cuflash._problem.problem import describe
from support import memory

# Known answers for philox4x32-7 from its authors' library Random123: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def words(counter, key):
    """Compute Philox4x32-7 in Python integers, as in the paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return tuple(c)


def bits(entry, q, k, seed):
    """Return the 16 bits of one score in the documented layout."""
    counter = (4 * (k // 16) + k % 8 // 2, 8 * (q // 16) + q % 8, entry % 2**32, entry // 2**32)
    number = 4 * (q // 8 % 2) + 2 * (k // 8 % 2) + k % 2
    word = words(counter, (seed % 2**32, seed // 2**32))[number // 2]
    return word >> 16 * (number % 2) & 0xFFFF


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert words(counter, key) == expected
    arrays = [np.asarray(c, np.uint64) for c in counter]
    assert tuple(int(w) for w in philox._philox(arrays, key, np)) == expected


@given(
    entry=st.integers(0, 2**40),
    first=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    extent=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    seed=st.integers(0, 2**64 - 1),
    p=st.floats(0, 1),
)
def test_a_tile_holds_the_documented_bits(entry, first, extent, seed, p):
    rows, cols = (slice(f, f + n) for f, n in zip(first, extent, strict=True))
    kept = philox.kept(np.array([entry]), rows, cols, p, seed, np)[0]
    assert kept.shape == extent
    for i, q in enumerate(range(rows.start, rows.stop)):
        for j, k in enumerate(range(cols.start, cols.stop)):
            assert kept[i, j] == (bits(entry, q, k, seed) >= round(65536 * p))
    if kept.size:  # no p that is drawn above is equal to a score's bits
        edge = bits(entry, rows.start, cols.start, seed)
        on_the_edge, beyond = (
            philox.kept(np.array([entry]), rows, cols, n / 65536, seed, np)[0, 0, 0]
            for n in (edge, edge + 1)
        )
        assert on_the_edge
        assert not beyond


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_scores_are_kept_at_the_rounded_rate(p):
    """The rate of kept scores is the rounded one (binomial, rejected at 1e-9: 6.1 sigma)."""
    kept = cuflash.dropout_mask((4, 256, 512), p, seed=3)
    rate = 1 - round(65536 * p) / 65536
    deviation = math.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - rate) < 6.1 * deviation


def test_every_bit_of_counter_and_key_changes_every_bit_of_the_words():
    """Each bit of counter and key flips half of the output's bits.

    24576 binomial rates are rejected at 1e-9 together. With a round less, some rates are 21
    standard deviations off.
    """
    counters = 4096
    drawn = np.random.default_rng(0).integers(0, 2**32, (6, counters), dtype=np.uint64)

    def outputs(words_in):
        return np.stack(philox._philox(list(words_in[:4]), tuple(words_in[4:]), np))

    plain = outputs(drawn)
    for bit in range(6 * 32):
        other = drawn.copy()
        other[bit // 32] ^= np.uint64(1 << bit % 32)
        changed = (outputs(other) ^ plain)[..., None] >> np.arange(32, dtype=np.uint64) & 1
        rates = changed.mean(1)
        assert np.abs(rates - 0.5).max() < 7.5 * 0.5 / math.sqrt(counters), bit


@pytest.mark.parametrize("bits_of", [4, 8])
def test_halves_of_words_are_uniform(bits_of):
    """Upper bits of halves are uniform (chi-squared at 1e-9, by Wilson and Hilferty's cube)."""
    counters = np.arange(1 << 18, dtype=np.uint64)
    zero = np.zeros(1, np.uint64)
    for word in philox._philox([counters % 512, counters // 512, zero, zero], (3, 0), np):
        for half in (word & np.uint64(0xFFFF), word >> np.uint64(16)):
            counts = np.bincount((half >> np.uint64(16 - bits_of)).astype(int))
            degrees, expected = (1 << bits_of) - 1, counters.size / (1 << bits_of)
            assert counts.size == degrees + 1
            chi = ((counts - expected) ** 2 / expected).sum() / degrees
            spread = 2 / (9 * degrees)
            assert abs(chi ** (1 / 3) - 1 + spread) < 6.1 * math.sqrt(spread)


def test_neighbours_entries_and_seeds_are_independent():
    signs = np.where(cuflash.dropout_mask((2, 256, 256), 0.5, seed=3), 1.0, -1.0)
    other = np.where(cuflash.dropout_mask((2, 256, 256), 0.5, seed=4), 1.0, -1.0)
    pairs = [(signs[0], signs[1]), (signs, other)]
    pairs += [(signs[:, s:], signs[:, :-s]) for s in (1, 2, 8, 16)]
    pairs += [(signs[..., s:], signs[..., :-s]) for s in (1, 2, 8, 16)]
    for a, b in pairs:
        assert abs((a * b).mean()) < 6.1 / math.sqrt(a.size)


@pytest.mark.parametrize("dropout", [0.25, 0.3])
def test_attention_drops_what_the_mask_says(dropout):
    """The CPU path, whose tiles have other edges, drops those probabilities that the mask drops."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 300, 8))
    lse = cuflash.logsumexp(q, k, causal=True)
    p = cuflash.weights(q, k, lse, rows=slice(None), causal=True)
    mask = cuflash.dropout_mask((2, 3, 300, 300), dropout, seed=9)
    rate = 1 - round(65536 * dropout) / 65536
    expected = (p * mask / rate) @ v
    out, dropped = cuflash.attention(q, k, v, causal=True, dropout=dropout, seed=9, return_lse=True)
    np.testing.assert_array_max_ulp(dropped, lse, 8)
    assert np.abs(out - expected).max() < 300 * np.finfo(float).eps * np.abs(v).max() / rate


@pytest.mark.parametrize("shape", [(3, 40, 33), (2, 3, 16, 130), (1, 1), (0, 5)])
def test_the_mask_is_the_same_for_every_library(xp, shape):
    mask = cuflash.dropout_mask(shape, 0.3, seed=2**63 + 5, like=xp.zeros(1))
    assert type(mask) is xp.ndarray
    expected = cuflash.dropout_mask(shape, 0.3, seed=2**63 + 5)
    np.testing.assert_array_equal(memory.to_numpy(mask), expected)


def named_rows(xp, lead, rows, columns, first):
    """Return float32 rows in which row ``first + c`` has a 1 in column c."""
    return xp.zeros((*lead, 1, 1), np.float32) + xp.eye(rows, columns, -first, dtype=np.float32)


@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_dim_v"),
    [(np.float16, 128, 128), (bfloat16, 64, 64), (np.float16, 36, 36), (np.float32, 40, 48),
     (np.float32, 3, 8), (np.float64, 8, 32)],
)  # fmt: skip
def test_every_weight_is_dropped_as_the_mask_says(xp, dtype, head_dim, head_dim_v, p):
    """out is not 0 where a key is kept: weights are equal, and each value names its key."""
    lead, rows, keys = (2, 3), 210, 160
    q, k = (xp.zeros((*lead, n, head_dim), np.float32).astype(dtype) for n in (rows, keys))
    expected = cuflash.dropout_mask((*lead, rows, keys), p, seed=2**40 + 3)
    for first in range(0, keys, head_dim_v):
        v = named_rows(xp, lead, keys, head_dim_v, first).astype(dtype)
        out = cuflash.attention(q, k, v, dropout=p, seed=2**40 + 3)
        wanted = expected[..., first : first + head_dim_v]
        kept = (memory.to_numpy(out) != 0)[..., : wanted.shape[-1]]
        np.testing.assert_array_equal(kept, wanted)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(np.float16, 128), (bfloat16, 36), (np.float32, 40)]
)
def test_the_gradient_drops_the_same_weights(xp, dtype, head_dim):
    """dv is not 0 where a query keeps the key: each row of dout names its query."""
    lead, rows, keys = (2, 3), 160, 210
    q, k = (xp.zeros((*lead, n, head_dim), np.float32).astype(dtype) for n in (rows, keys))
    expected = cuflash.dropout_mask((*lead, rows, keys), 0.3, seed=7)
    _, pullback = cuflash.attention_vjp(q, k, k, dropout=0.3, seed=7)
    for first in range(0, rows, head_dim):
        dout = named_rows(xp, lead, rows, head_dim, first).astype(dtype)
        wanted = expected[..., first : first + head_dim, :].swapaxes(-1, -2)
        kept = (memory.to_numpy(pullback(dout).dv) != 0)[..., : wanted.shape[-1]]
        np.testing.assert_array_equal(kept, wanted)


@pytest.mark.parametrize(("dtype", "head_dim"), [(np.float16, 64), (np.float32, 4)])
def test_edges_of_p(xp, dtype, head_dim):
    rng = np.random.default_rng(0)
    q, k, v = xp.asarray(rng.standard_normal((3, 2, 170, head_dim)).astype(dtype))
    plain = cuflash.attention(q, k, v)
    for p in (0.0, 1e-9):
        assert (cuflash.attention(q, k, v, dropout=p, seed=5) == plain).all()
    out, pullback = cuflash.attention_vjp(q, k, v, dropout=1.0, seed=5)
    assert not out.any()
    assert not any(g.any() for g in vars_of(pullback(xp.ones_like(out))))


def vars_of(gradients):
    return (gradients.dq, gradients.dk, gradients.dv)


@pytest.mark.parametrize("elements", [1, 100, 400, 10**6])
def test_a_mask_that_is_made_in_parts_is_the_same(monkeypatch, elements):
    expected = cuflash.dropout_mask((3, 5, 17, 9), 0.4, seed=11)
    entries = np.arange(15).reshape(3, 5)
    whole = philox.kept(entries, slice(0, 17), slice(0, 9), 0.4, 11, np)
    np.testing.assert_array_equal(expected, whole)
    monkeypatch.setattr(probabilities, "_MASK_ELEMENTS", elements)
    np.testing.assert_array_equal(cuflash.dropout_mask((3, 5, 17, 9), 0.4, seed=11), expected)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 2**40, 2**20), (2**40, 0)])
def test_a_mask_of_nothing_takes_no_time(shape):
    assert cuflash.dropout_mask(shape, 0.5, seed=1).shape == shape


@pytest.mark.parametrize("origin", [Origin(query=8), Origin(key=8)])
def test_kernels_draw_for_parts_from_multiples_of_a_block_on(origin):
    q, options = np.zeros((16, 4)), cuflash.Options(dropout=0.5, seed=1)
    problem = describe(q, q, q, options)
    with pytest.raises(NotImplementedError, match=f"query {origin.query} and key {origin.key}:"):
        dispatch.placed(problem, options, origin)
    assert dispatch.placed(problem, options, Origin(query=32, key=16)).origin.key == 16
