"""Does packed attention equal the loop over its sequences, and what do odd packings give?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from support.budget import Budget
from support.problems import Call

HEADS, HEADS_KV = 4, 2
ALL = ("q", "k", "v", "bias", "alibi_slopes", "sink", "scale")


def drawn(seed, lengths_q, lengths_k, lead):
    rng = np.random.default_rng(seed)
    ends_q, ends_k = (
        np.cumsum([lead, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k)
    )
    total_q, total_k = int(ends_q[-1]) + 3, int(ends_k[-1]) + 2
    q = rng.standard_normal((HEADS, total_q, 6))
    k = rng.standard_normal((HEADS_KV, total_k, 6))
    v = rng.standard_normal((HEADS_KV, total_k, 5))
    return rng, q, k, v, ends_q, ends_k


def options_of(rng, sequences, longest_q, longest_k):
    """Every option at once; arrays per sequence, per head, or shared."""
    return {
        "enable_gqa": True,
        "window": (7, 4),
        "softcap": 3.0,
        "bias": rng.standard_normal((sequences, 1, longest_q, longest_k)),
        "mask": rng.random((HEADS, longest_q, longest_k)) > 0.2,
        "alibi_slopes": rng.random((sequences, HEADS)),
        "sink": rng.standard_normal(HEADS),
        "segment_ids": (
            rng.integers(0, 2, (sequences, 1, longest_q)),
            rng.integers(0, 2, longest_k),
        ),
        "kv_lengths": rng.integers(0, longest_k + 1, (sequences, 1)),
        "dropout": 0.2,
        "seed": 5,
    }


lengths = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4)


@given(seed=st.integers(0, 99), lengths=lengths, lead=st.integers(0, 2))
def test_every_option_at_once(seed, lengths, lead):
    """Against the definition, a padded batch: a law that no tile or slice knows."""
    lengths_q, lengths_k = zip(*lengths, strict=True)
    rng, q, k, v, ends_q, ends_k = drawn(seed, lengths_q, lengths_k, lead)
    chosen = cuflash.Options(**options_of(rng, len(lengths), max(lengths_q), max(lengths_k)))
    packed = (q, k, v, ends_q, ends_k)
    ours = cuflash.attention_varlen(*packed, options=chosen, return_lse=True)
    exact = reference.attention_varlen(*packed, options=chosen, return_lse=True)
    # float64 on both sides; at most 12 keys of scores below 3 + 4 + 12: some 100 roundings.
    bound = 200 * np.finfo(float).eps * max(1.0, np.abs(v).max())
    assert np.abs(ours.out - exact.out).max(initial=0) <= bound
    np.testing.assert_array_equal(np.isneginf(ours.lse), np.isneginf(exact.lse))
    seen = ~np.isneginf(exact.lse)
    assert np.abs(ours.lse[seen] - exact.lse[seen]).max(initial=0) <= 20 * bound

    dout, dlse = rng.standard_normal(ours.out.shape), rng.standard_normal(ours.lse.shape)
    rest = {"dlse": dlse, "wrt": ALL, "options": chosen}
    gradients = cuflash.attention_varlen_backward(
        dout, q, k, v, ours.out, ours.lse, ends_q, ends_k, **rest
    )
    expected = reference.attention_varlen_backward(
        dout, q, k, v, None, None, ends_q, ends_k, **rest
    )
    for name in ("dq", "dk", "dv", "dbias", "dslopes", "dsink", "dscale"):
        a, b = getattr(gradients, name), getattr(expected, name)
        assert a.shape == np.shape(b), name
        assert np.abs(a - b).max(initial=0) <= 1000 * bound, name


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_each_sequence_is_within_the_budget_of_its_own_call(dtype):
    _rng, *arrays, ends_q, ends_k = drawn(0, (40, 0, 9, 70), (33, 5, 0, 70), 2)
    q, k, v = (a.astype(dtype) for a in arrays)
    result = cuflash.attention_varlen(
        q, k, v, ends_q, ends_k, causal=True, enable_gqa=True, return_lse=True
    )
    for i in range(4):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        out = result.out[:, rows]
        call = Call(
            q[:, rows], k[:, keys], v[:, keys], dout=out,
            options={"causal": True, "enable_gqa": True},
        )  # fmt: skip
        if out.size:
            Budget(call).check_forward(out, result.lse[:, rows])


def test_rows_of_no_sequence_are_zero():
    _rng, q, k, v, ends_q, ends_k = drawn(1, (5, 6), (7, 3), 2)
    q[:, :2] = q[:, -3:] = np.nan
    k[:, :2] = v[:, -2:] = np.nan
    out, lse = cuflash.attention_varlen(q, k, v, ends_q, ends_k, enable_gqa=True, return_lse=True)
    outside = [0, 1, -3, -2, -1]
    assert not out[:, outside].any()
    assert np.isneginf(lse[:, outside]).all()
    assert np.isfinite(out).all()
    dout = np.where(out == 0, np.nan, 1.0)
    gradients = cuflash.attention_varlen_backward(
        dout, q, k, v, out, lse, ends_q, ends_k, enable_gqa=True
    )
    assert not gradients.dq[:, outside].any()
    assert not gradients.dk[:, [0, 1, -2, -1]].any()
    assert all(np.isfinite(g).all() for g in (gradients.dq, gradients.dk, gradients.dv))


def test_other_layouts_and_destinations():
    _rng, q, k, v, ends_q, ends_k = drawn(2, (5, 6), (7, 3), 0)
    expected = cuflash.attention_varlen(q, k, v, ends_q, ends_k, enable_gqa=True)
    axes = [(-3, -1)] * 4
    swapped = [np.moveaxis(a, 0, 1).copy() for a in (q, k, v)]
    out = np.full((q.shape[1], HEADS, 5), np.nan)
    result = cuflash.attention_varlen(*swapped, ends_q, ends_k, axes=axes, enable_gqa=True, out=out)
    assert result is out
    np.testing.assert_array_equal(np.moveaxis(out, 1, 0), expected)


WRONG = {
    "floats": ({"ends_q": np.array([0.0, 5.0])}, TypeError, "cu_seqlens_q: .*float64"),
    "a list": ({"ends_k": [0, 5]}, TypeError, "cu_seqlens_k: .*list"),
    "a matrix": ({"ends_q": np.zeros((2, 2), int)}, ValueError, r"cu_seqlens_q: .*\(2, 2\)"),
    "nothing": ({"ends_q": np.zeros(0, int)}, ValueError, "cu_seqlens_q: "),
    "decreasing": ({"ends_q": np.array([0, 5, 3])}, ValueError, "cu_seqlens_q: .*decrease"),
    "negative": ({"ends_q": np.array([-1, 5, 6])}, ValueError, "cu_seqlens_q: .*from 0 to"),
    "past the end": ({"ends_k": np.array([0, 5, 99])}, ValueError, "cu_seqlens_k: .*from 0 to"),
    "of other numbers": ({"ends_k": np.array([0, 5])}, ValueError, "cu_seqlens_k: .*1 sequences"),
    "with a small bias": ({"bias": np.zeros((2, 3))}, ValueError, "bias: .*at least 5"),
    "with few slopes": (
        {"alibi_slopes": np.zeros((3, HEADS, 1))}, ValueError, "alibi_slopes: .*at most 2 axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_packings_are_named(name):
    changes, kind, message = WRONG[name]
    _, q, k, v, ends_q, ends_k = drawn(3, (5, 6), (7, 3), 0)
    packing = {"ends_q": ends_q, "ends_k": ends_k} | changes
    rest = {n: a for n, a in packing.items() if not n.startswith("ends")}
    with pytest.raises(kind, match=message):
        cuflash.attention_varlen(
            q, k, v, packing["ends_q"], packing["ends_k"], enable_gqa=True, **rest
        )
