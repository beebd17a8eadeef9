"""Does packed attention equal the loop over its sequences, and what do odd packings give?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash._problem.options import OPTION_NAMES
from cuflash._problem.packed import describe_packed
from cuflash.testing._budget import Budget
from support import memory
from support.problems import FIELDS, Call

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
    """Return every option at once, with arrays per sequence, per head, or shared."""
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
#: Axes of (sequences, batch) that options have: all, all with one entry, all with one sequence, the
#: batch only, its last axis only, none.
SHAPES = (
    lambda *full: full,
    lambda *full: (full[0], *(1 for _ in full[1:])),
    lambda *full: (1, *full[1:]),
    lambda *full: full[1:],
    lambda *full: full[1:][-1:],
    lambda *_: (),
)


def check_against_the_definition(rng, q, k, v, ends_q, ends_k, chosen, on_device=lambda a: a):
    """Compare with the definition, which pads sequences to a batch, with every gradient."""
    given = (q, k, v, ends_q, ends_k)
    options = {name: value for name in OPTION_NAMES if (value := getattr(chosen, name)) is not None}
    placed = {name: on_device(value) for name, value in options.items()}
    packed = [on_device(a) for a in given]
    ours = cuflash.attention_varlen(*packed, return_lse=True, **placed)
    exact = reference.attention_varlen(*given, options=chosen, return_lse=True)
    dout, dlse = rng.standard_normal(exact.out.shape), rng.standard_normal(exact.lse.shape)
    wrt = tuple(name for name in ALL if name in (*"qkv", "scale", *chosen.arrays))
    gradients = cuflash.attention_varlen_backward(
        on_device(dout), *packed[:3], *ours, *packed[3:], dlse=on_device(dlse), wrt=wrt, **placed
    )
    expected = reference.attention_varlen_backward(
        dout, q, k, v, None, None, ends_q, ends_k, dlse=dlse, wrt=wrt, options=chosen
    )
    out, lse = map(memory.to_numpy, ours)
    # float64 on both sides, and at most 12 keys of scores below 3 + 4 + 12: some 100 roundings.
    bound = 200 * np.finfo(float).eps * max(1.0, np.abs(v).max(initial=0))
    assert np.abs(out - exact.out).max(initial=0) <= bound
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact.lse))
    seen = ~np.isneginf(exact.lse)
    assert np.abs(lse[seen] - exact.lse[seen]).max(initial=0) <= 20 * bound
    for name in wrt:
        a, b = (getattr(g, FIELDS[name]) for g in (gradients, expected))
        a = memory.to_numpy(a)
        assert a.shape == np.shape(b), name
        assert np.abs(a - b).max(initial=0) <= 1000 * bound, name


@given(seed=st.integers(0, 99), lengths=lengths, lead=st.integers(0, 2))
def test_every_option_at_once(seed, lengths, lead):
    lengths_q, lengths_k = zip(*lengths, strict=True)
    rng, *packed = drawn(seed, lengths_q, lengths_k, lead)
    options = options_of(rng, len(lengths), max(lengths_q), max(lengths_k))
    options["kv_lengths"] = np.minimum(options["kv_lengths"], np.array(lengths_k)[:, None])
    check_against_the_definition(rng, *packed, cuflash.Options(**options))


def options_of_shapes(rng, shapes, batch, lengths):
    """Return every option with an array, each of one of the ``shapes`` of (sequences, batch)."""
    full = (len(lengths), *batch)
    longest = [max(n) for n in zip(*lengths, strict=True)]

    def shape(name):
        return shapes[name](*full)

    def at_most(name, own):
        """Return lengths within those of the sequences that they are for."""
        most = np.array(own).reshape(len(own), *(1 for _ in batch))
        has_sequences = len(shape(name)) == len(full) and shape(name)[0] > 1
        return rng.integers(0, (most if has_sequences else min(own)) + 1, shape(name))

    core = (*shape("bias"), longest[0], 1), (*shape("mask"), 1, longest[1])
    ids = (rng.integers(0, 2, (*shape(name), n)) for name, n in zip("qk", longest, strict=True))
    return {
        "causal": True,
        "offset": rng.integers(0, 9, shape("offset")),
        "bias": rng.standard_normal(core[0]),
        "mask": rng.random(core[1]) > 0.2,
        "alibi_slopes": np.asarray(rng.random(shape("alibi_slopes"))),
        "sink": np.asarray(rng.standard_normal(shape("sink"))),
        "segment_ids": tuple(ids),
        "q_lengths": at_most("q_lengths", [n for n, _ in lengths]),
        "kv_lengths": at_most("kv_lengths", [n for _, n in lengths]),
    }


SHAPED = ("offset", "bias", "mask", "alibi_slopes", "sink", "q", "k", "q_lengths", "kv_lengths")


def packed_of(rng, batch, lengths):
    ends = [np.cumsum([0, *n]) for n in zip(*lengths, strict=True)]
    widths = zip((ends[0], ends[1], ends[1]), (6, 6, 5), strict=True)
    return (*(rng.standard_normal((*batch, of[-1], d)) for of, d in widths), *ends)


@given(data=st.data(), seed=st.integers(0, 99), lengths=lengths)
def test_options_of_every_shape(data, seed, lengths):
    rng = np.random.default_rng(seed)
    batch = data.draw(st.sampled_from(((), (3,), (2, 3))))
    shapes = {name: data.draw(st.sampled_from(SHAPES)) for name in SHAPED}
    options = options_of_shapes(rng, shapes, batch, lengths)
    present = data.draw(st.sets(st.sampled_from(list(options))))
    options = {name: value for name, value in options.items() if name in present}
    packed = packed_of(rng, batch, lengths)
    check_against_the_definition(rng, *packed, cuflash.Options(**options))


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_options_of_each_shape(xp, batch, number):
    """Each option with each shape is right; one kernel computes all of them on a GPU."""
    rng = np.random.default_rng(number)
    lengths = [(12, 9), (0, 3), (5, 12)]
    shapes = {name: SHAPES[(number + i) % len(SHAPES)] for i, name in enumerate(SHAPED)}
    chosen = cuflash.Options(**options_of_shapes(rng, shapes, batch, lengths))
    packed = packed_of(rng, batch, lengths)
    check_against_the_definition(rng, *packed, chosen, lambda value: on(xp, value))


#: (queries, keys) of sequences: of several tiles, empty on one side or both, one row.
PACKINGS = {
    "mixed": (((40, 33), (0, 5), (9, 0), (70, 70)), 2),
    "longer than tiles": (((300, 170), (1, 400), (129, 1), (0, 0), (64, 65)), 0),
}


def per_sequence(rng, sequences, longest_q, longest_k):
    """Return options for a kernel that differ in every sequence."""
    bias = rng.standard_normal((sequences, 1, longest_q, longest_k)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return {
        "window": (50, 20),
        "softcap": 3.0,
        "bias": bias,
        "mask": rng.random((HEADS, longest_q, longest_k)) > 0.2,
        "alibi_slopes": (rng.random((sequences, HEADS)) / 8).astype(np.float32),
        "sink": rng.standard_normal((sequences, HEADS)).astype(np.float32),
        "segment_ids": (
            rng.integers(0, 2, (sequences, 1, longest_q)), rng.integers(0, 2, longest_k),
        ),
        "q_lengths": rng.integers(longest_q // 2, longest_q + 1, (sequences, 1)),
        "kv_lengths": rng.integers(longest_k // 2, longest_k + 1, (sequences, 1)),
    }  # fmt: skip


def of_sequence(options, i, rows, keys):
    """Return the options of sequence ``i``, with ``rows`` queries and ``keys`` keys."""
    own = dict(options)
    for name in ("bias", "alibi_slopes", "sink"):
        if name in own:
            own[name] = own[name][i]
    for name in ("bias", "mask"):
        if name in own:
            own[name] = own[name][..., :rows, :keys]
    if "segment_ids" in own:
        ids_q, ids_k = own["segment_ids"]
        own["segment_ids"] = ids_q[i][..., :rows], ids_k[:keys]
    for name, extent in (("q_lengths", rows), ("kv_lengths", keys)):
        if name in own:
            own[name] = np.minimum(own[name][i], extent)
    return own


def on(xp, value):
    if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        return tuple(on(xp, array) for array in value)
    return memory.to_device(xp, value) if isinstance(value, np.ndarray) else value


def check_sequences(dtype, packing, kind, attend):
    """Check each sequence against the budget of its own call.

    ``attend(arrays, ends, options, wrt)`` returns out, lse and the gradients by input name.
    """
    lengths, lead = PACKINGS[packing]
    rng, *arrays, ends_q, ends_k = drawn(0, *zip(*lengths, strict=True), lead)
    q, k, v = (a.astype(dtype) for a in arrays)
    longest = (max(n) for n in zip(*lengths, strict=True))
    options = {
        "none": {}, "causal": {"causal": True}, "every": per_sequence(rng, len(lengths), *longest)
    }[kind]  # fmt: skip
    options["enable_gqa"] = True
    wrt = tuple(n for n in ALL if n in options or n in ("q", "k", "v", "scale"))
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(dtype)
    out, lse, all_gradients = attend((dout, q, k, v), (ends_q, ends_k), options, wrt)
    exact, bound = 0.0, 0.0  # of dscale
    outside = np.ones(q.shape[1], bool)
    for i in range(len(lengths)):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        outside[rows] = False
        saved = out[:, rows], lse[:, rows]
        gradients = {
            n: g if n == "scale" else g[:, rows if n == "q" else keys] if n in "qkv" else g[i]
            for n, g in all_gradients.items()
        }
        if not saved[0].size:
            assert not any(gradients[n].any() for n in "qkv")
            continue
        own = of_sequence(options, i, *lengths[i])
        inputs = (q[:, rows], k[:, keys], v[:, keys], dout[:, rows])
        if "bias" in gradients:
            gradients["bias"] = gradients["bias"][..., : lengths[i][0], : lengths[i][1]]
        budget = Budget(Call(*inputs, options=own, wrt=wrt))
        budget.check_forward(*saved)
        budget.given = saved
        scale = budget.gradients["scale"]
        exact, bound = exact + scale.truth, bound + (scale.accumulation + scale.rounding)
        gradients["scale"] = scale.truth
        budget.check_backward(gradients, given=saved)
    assert abs(all_gradients["scale"] - exact) <= bound
    assert not out[:, outside].any()
    assert np.isneginf(lse[:, outside]).all()
    assert not all_gradients["q"][:, outside].any()


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["none", "causal", "every"])
def test_each_sequence_is_within_the_budget_of_its_own_call(xp, dtype, packing, kind):
    def attend(arrays, ends, options, wrt):
        options = dict(options)
        for name, of in zip(("q_lengths", "kv_lengths"), ends, strict=True):
            if xp is np and name in options:  # kernels clamp lengths to a sequence
                options[name] = np.minimum(options[name], np.diff(of)[:, None])
        given = {name: on(xp, value) for name, value in options.items()}
        dout, *packed, ends_q, ends_k = (on(xp, a) for a in (*arrays, *ends))
        ends = (ends_q, ends_k)
        result = cuflash.attention_varlen(*packed, *ends, return_lse=True, **given)
        g = cuflash.attention_varlen_backward(dout, *packed, *result, *ends, wrt=wrt, **given)
        out, lse = map(memory.to_numpy, result)
        return out, lse, {n: memory.to_numpy(getattr(g, FIELDS[n])) for n in wrt}

    check_sequences(dtype, packing, kind, attend)


def test_dropout_counts_sequences_and_heads(xp):
    """Dropout counts sequences and heads; out shows which keys are kept (one-hot values)."""
    lengths = ((40, 33), (70, 64), (20, 50))
    _, _, _, _, ends_q, ends_k = drawn(0, *zip(*lengths, strict=True), 0)
    q = np.zeros((HEADS, ends_q[-1], 8), np.float16)
    k = np.zeros((HEADS, ends_k[-1], 8), np.float16)
    hot = np.concatenate([np.eye(n, 64, dtype=np.float16) for _, n in lengths])
    v = np.broadcast_to(hot, (HEADS, *hot.shape)).copy()
    packed = (on(xp, a) for a in (q, k, v, ends_q, ends_k))
    out = memory.to_numpy(cuflash.attention_varlen(*packed, dropout=0.3, seed=8))
    for i, (rows, keys) in enumerate(lengths):
        mask = cuflash.dropout_mask(((i + 1) * HEADS, rows, keys), 0.3, seed=8)[-HEADS:]
        np.testing.assert_array_equal(out[:, slice(*ends_q[i : i + 2]), :keys] > 0, mask)


@pytest.mark.gpu
def test_numbers_on_the_device_that_lie_outside_are_cut_off():
    """Ends on the device that lie outside are clamped, so that no unread number causes a fault."""
    import cupy as xp

    q, k, v = (on(xp, np.ones((HEADS, 90, 8), np.float16)) for _ in range(3))
    for ends in ([-5, 40, 300], [1 << 40, -(1 << 40), 3], [80, 10, 90]):
        array = on(xp, np.array(ends))
        out, lse = cuflash.attention_varlen(q, k, v, array, array, return_lse=True)
        g = cuflash.attention_varlen_backward(out, q, k, v, out, lse, array, array)
        assert all(bool(xp.isfinite(a).all()) for a in (out, g.dq, g.dk, g.dv))
    cut = cuflash.attention_varlen(q, k, v, *[on(xp, np.array([-5, 40, 300]))] * 2, causal=True)
    whole = cuflash.attention_varlen(q, k, v, *[on(xp, np.array([0, 40, 90]))] * 2, causal=True)
    assert bool((cut == whole).all())


@pytest.mark.parametrize("heads_k", [(), (2,)])
def test_formulas_count_sequences_as_batch_entries(heads_k):
    """Formulas count sequences as batch entries, without a heads axis and with one of keys only."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((*heads, 9, 3)) for heads in ((), heads_k, ()))
    ends = np.array([0, 4, 9])
    chosen = cuflash.Options(
        score_mod=cuflash.ScoreMod(
            "score * (1 + b) + h * k", grad="1 + b",
            host=lambda score, b, h, q, k: score * (1 + b) + h * k,
            host_grad=lambda score, b, h, q, k: 1 + b + 0 * score,
        ),
        mask_mod=cuflash.MaskMod("k >= b - h", host=lambda b, h, q, k: k >= b - h),
    )  # fmt: skip
    ours = cuflash.attention_varlen(q, k, v, ends, ends, options=chosen, return_lse=True)
    exact = reference.attention_varlen(q, k, v, ends, ends, options=chosen)
    # float64, and at most 5 keys of scores below 20: some 100 roundings, each of 20 units.
    bound = 2000 * np.finfo(float).eps
    np.testing.assert_allclose(ours.out, exact, rtol=0, atol=bound)
    rest = (q, k, v, ours.out, ours.lse, ends, ends)
    gradients = cuflash.attention_varlen_backward(ours.out, *rest, options=chosen)
    expected = reference.attention_varlen_backward(ours.out, *rest, options=chosen)
    for name in ("dq", "dk", "dv"):
        a, b = getattr(gradients, name), getattr(expected, name)
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * bound, err_msg=name)


@pytest.mark.parametrize("path", [cuflash, reference])
def test_no_sequences_at_all(path):
    _rng, q, k, v, _, _ = drawn(5, (4,), (3,), 0)
    none = np.zeros(1, int)
    out, lse = path.attention_varlen(q, k, v, none, none, enable_gqa=True, return_lse=True)
    assert out.shape == (HEADS, 7, 5)
    assert not out.any()
    assert np.isneginf(lse).all()
    gradients = path.attention_varlen_backward(out, q, k, v, out, lse, none, none, enable_gqa=True)
    assert gradients.dk.shape == k.shape
    assert not gradients.dk.any()


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
    "a tuple of words": ({"ends_k": ("0", "5")}, TypeError, "cu_seqlens_k: .*integer"),
    "a matrix": ({"ends_q": np.zeros((2, 2), int)}, ValueError, r"cu_seqlens_q: .*\(2, 2\)"),
    "nothing": ({"ends_q": np.zeros(0, int)}, ValueError, "cu_seqlens_q: "),
    "decreasing": ({"ends_q": np.array([0, 5, 3])}, ValueError, "cu_seqlens_q: .*decreasing"),
    "negative": ({"ends_q": np.array([-1, 5, 6])}, ValueError, "cu_seqlens_q: .*from 0 to"),
    "past the end": ({"ends_k": np.array([0, 5, 13])}, ValueError, "cu_seqlens_k: .*from 0 to 12"),
    "of other numbers": ({"ends_k": np.array([0, 5])}, ValueError, "cu_seqlens_k: .*1 sequences"),
    "with a small bias": ({"bias": np.zeros((2, 3))}, ValueError, "bias: .*at least 5"),
    "with a bias of one axis": ({"bias": np.zeros(9)}, ValueError, r"bias: .*\(2, 1, m, n\)"),
    "with a mask of no axis": ({"mask": np.array(True)}, ValueError, r"mask: .*\(2, 1, m, n\)"),
    "with segments of no axis": (
        {"segment_ids": (np.array(1), np.array(1))}, ValueError, r"segment_ids_q: .*\(2, 1, m\)"),
    "with few slopes": (
        {"alibi_slopes": np.zeros((3, HEADS, 1))}, ValueError, r"alibi_slopes: .*\(2, 1\)"),
    "with slopes of more sequences": (
        {"alibi_slopes": np.zeros((3, HEADS))}, ValueError, r"alibi_slopes: .*2 or 1 sequences"),
    "with a bias of more sequences": (
        {"bias": np.zeros((3, 1, 6, 7))}, ValueError, r"bias: .*2 or 1 sequences"),
    "with a length that a sequence has not": (
        {"kv_lengths": 7}, ValueError, "kv_lengths: got 7, .*from 0 to 3"),
    "with lengths of the wrong sequences": (
        {"q_lengths": np.array([[6], [5]])}, ValueError, "q_lengths: got .*6, .*from 0 to 5"),
    "with a length beyond any": ({"q_lengths": 10**30}, ValueError, "q_lengths: got an int of 100"),
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


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("sink", np.zeros((3, HEADS)), r"got .*2 or 1 sequences on"),
        ("mask", np.ones((3, 1, 6, 7), bool), r"got .*2 or 1 sequences on"),
        ("q_lengths", 15, "got 15, expected a length from 0 to 14"),
        ("kv_lengths", np.array([[5], [13]]), "got values from 5 to 13, .* from 0 to 12"),
        ("kv_lengths", np.array([[5], [-1]]), "got values from -1 to 5, .* from 0 to 12"),
        ("q_lengths", -1, "got -1, expected a length from 0 to 14"),
    ],
)
def test_what_a_call_on_a_gpu_checks(option, value, message):
    """On a GPU ends are not read, so that a length may be as large as all sequences together."""
    _, q, k, v, ends_q, ends_k = drawn(3, (5, 6), (7, 3), 0)
    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    options = cuflash.Options(enable_gqa=True, **{option: value})
    with pytest.raises(ValueError, match=f"{option}: {message}"):
        describe_packed(q, k, v, options, ends, axes=None, precision=None)


def test_no_sequence_is_longer_on_a_gpu_than_what_its_arrays_hold():
    """On a GPU no sequence is longer than a bias, a mask or segments, wherever it ends."""
    _, q, k, v, ends_q, ends_k = drawn(3, (5, 6), (7, 3), 0)
    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    for own, limits in (
        ({}, (14, 12)),
        ({"bias": np.zeros((2, 1, 6, 1))}, (6, 12)),
        ({"bias": np.zeros((6, 8)), "mask": np.ones((7, 7), bool)}, (6, 7)),
        ({"segment_ids": (np.zeros(9, int), np.zeros(20, int))}, (9, 12)),
        ({"mask": np.ones((9, 9), bool), "q_lengths": 4}, (4, 9)),
    ):
        options = cuflash.Options(enable_gqa=True, **own)
        found = describe_packed(q, k, v, options, ends, axes=None, precision=None)
        assert (found.q_length_value, found.kv_length_value) == limits


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": np.ones((5, 3), bool)},
        {"kv_lengths": np.array([[1], [-1]])},
        {"alibi_slopes": np.zeros((2, HEADS + 1))},
    ],
)
def test_nothing_is_written_before_every_sequence_is_checked(wrong):
    _, q, k, v, ends_q, ends_k = drawn(3, (5, 6), (3, 7), 0)
    pair = np.full((HEADS, q.shape[1], 5), 7.0), np.full(q.shape[:2], 7.0)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cuflash.attention_varlen(
            q, k, v, ends_q, ends_k, enable_gqa=True, return_lse=True, out=pair, **wrong
        )
    assert all((a == 7).all() for a in pair)


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_lse_has_one_dtype(dtype):
    q, k, v = np.ones((3, 8, 4), np.float32)
    pair = np.zeros((8, 4), np.float32), np.zeros(8, dtype)
    ends = np.array([0, 3, 8])
    with pytest.raises(TypeError, match=f"out: got lse of dtype {np.dtype(dtype)}, .*float32"):
        cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True, out=pair)


def moved(memory, array):
    """Return a copy of ``array`` in ``memory``."""
    copy = memory.view(array.dtype)[: array.size].reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("other", ["out", "q", "mask", "cu_seqlens_q"])
def test_results_have_memory_of_their_own(other):
    q, k, v, out = np.ones((4, 8, 4))
    ends, memory = np.array([0, 3, 8]), np.zeros(32)
    given = {"q": q, "mask": np.ones((8, 8), bool), "cu_seqlens_q": ends, "out": out}
    given[other] = moved(memory, given[other])
    with pytest.raises(ValueError, match=f"lse: got memory shared with {other},"):
        cuflash.attention_varlen(
            given["q"], k, v, given["cu_seqlens_q"], ends, mask=given["mask"],
            return_lse=True, out=(given["out"], memory[:8]),
        )  # fmt: skip


@pytest.mark.parametrize("other", ["grads_out.dq", "q", "lse", "dlse", "mask", "cu_seqlens_k"])
def test_gradients_have_memory_of_their_own(other):
    q, k, v, out, dq = np.ones((5, 8, 4))
    ends, memory = np.array([0, 3, 8]), np.zeros(32)
    given = {"q": q, "lse": np.ones(8), "dlse": np.ones(8), "mask": np.ones((8, 8), bool)}
    given |= {"cu_seqlens_k": ends, "grads_out.dq": dq}
    given[other] = moved(memory, given[other])
    buffers = cuflash.Gradients(dq=given["grads_out.dq"], dk=memory.reshape(8, 4))
    with pytest.raises(ValueError, match=f"grads_out.dk: got memory shared with {other},"):
        cuflash.attention_varlen_backward(
            out, given["q"], k, v, out, given["lse"], ends, given["cu_seqlens_k"],
            dlse=given["dlse"], mask=given["mask"], grads_out=buffers,
        )  # fmt: skip


def test_every_array_is_of_one_library():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def on_a_gpu(shape, dtype):
        memory = cupy.cuda.UnownedMemory(4096, 1 << 20, None, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    x, ends, device_ends = np.ones((8, 4)), np.array([0, 3, 8]), on_a_gpu((3,), np.int64)
    device_x = on_a_gpu((8, 4), float)
    lse = np.ones(8)

    def refuses(message, call, *args, **rest):
        with pytest.raises(TypeError, match=message):
            call(*args, **rest)

    varlen, backward = cuflash.attention_varlen, cuflash.attention_varlen_backward
    for i, name in ((0, "cu_seqlens_q"), (1, "cu_seqlens_k")):
        pair = [ends, ends]
        pair[i] = device_ends
        refuses(f"{name}: got a cupy array", varlen, x, x, x, *pair)
        refuses(f"{name}: got a cupy array", backward, x, x, x, x, x, lse, *pair)
    refuses("cu_seqlens_q: got a numpy array", varlen, *[device_x] * 3, ends, ends)
    refuses("out: got a cupy array", varlen, x, x, x, ends, ends, out=device_x)
    lengths = on_a_gpu((2,), np.int64)
    refuses("kv_lengths: got a cupy array", varlen, x, x, x, ends, ends, kv_lengths=lengths)


def test_workspace_of_packed_sequences():
    q = np.zeros((2, 8, 4))
    assert cuflash.workspace_size(q, q, q, cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8]) == 0
    with pytest.raises(ValueError, match="cu_seqlens_k: got 2 sequences"):
        cuflash.workspace_size(q, q, q, cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 2, 8])
    with pytest.raises(TypeError, match="cu_seqlens_k"):
        cuflash.workspace_size(q, q, q, cu_seqlens_q=[0, 8])
