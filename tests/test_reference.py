"""Is the definition right? Checked against paper, and against differences in float64.

All other tests compare with `cuflash.reference`, so these use nothing else of cuflash: examples
small enough to work out by hand, an independent evaluation by plain loops, and finite differences
for every option.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import exp, inf, log, sqrt, tanh
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cuflash import reference
from support.problems import FIELDS, Call, calls, limits_of


def column(*values: float) -> np.ndarray:
    return np.array(values, float)[:, None]


# By hand. With d = 1 and scale = 1 a score is the product of two numbers.


def test_two_keys() -> None:
    """Scores 0 and ln 3 give weights 1/4 and 3/4, and a sum of exponentials of 4."""
    out, lse = reference.attention(
        column(1), column(0, log(3)), column(8, 4), scale=1.0, return_lse=True
    )
    np.testing.assert_allclose(out, [[5]], rtol=1e-15)
    np.testing.assert_allclose(lse, [log(4)], rtol=1e-15)


def test_gradient_of_two_keys() -> None:
    """Weights 1/4 and 3/4, out 5; with dout = 1: dv = p, ds = p (v - out), dq = ds.k, dk = ds q."""
    q, k, v = column(1), column(0, log(3)), column(8, 4)
    gradients = reference.attention_backward(column(1), q, k, v, scale=1.0)
    np.testing.assert_allclose(gradients.dv, column(0.25, 0.75), rtol=1e-15)
    np.testing.assert_allclose(gradients.dq, column(-0.75 * log(3)), rtol=1e-15)
    np.testing.assert_allclose(gradients.dk, column(0.75, -0.75), rtol=1e-15)


def test_gradient_of_lse() -> None:
    """d lse / d score = p, so with dlse = 1 and dout = 0: dq = p.k, dk = p q, dv = 0."""
    q, k, v = column(2), column(0, log(3) / 2), column(8, 4)
    gradients = reference.attention_backward(column(0), q, k, v, dlse=np.array([1.0]), scale=1.0)
    np.testing.assert_allclose(gradients.dq, column(0.75 * log(3) / 2), rtol=1e-15)
    np.testing.assert_allclose(gradients.dk, column(0.5, 1.5), rtol=1e-15)
    np.testing.assert_array_equal(gradients.dv, column(0, 0))


def test_default_scale_is_one_over_root_d() -> None:
    q, k = np.ones((1, 4)), np.array([[1.0, 1, 1, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(reference.scores(q, k), [[2, 0]])


def test_softcap_comes_before_bias() -> None:
    """The score is 2 tanh(6 / 2) + 1, not 2 tanh((6 + 1) / 2)."""
    score = reference.scores(column(2), column(3), scale=1.0, softcap=2.0, bias=np.array([[1.0]]))
    np.testing.assert_allclose(score, [[2 * tanh(3) + 1]], rtol=1e-15)


def test_gradient_of_softcap() -> None:
    """For scores 0 and 2 tanh(x / 2) = ln 3, the slope of the second is 1 - (ln 3 / 2)^2."""
    x = 2 * np.arctanh(log(3) / 2)
    gradients = reference.attention_backward(
        column(1), column(1), column(0, x), column(8, 4), scale=1.0, softcap=2.0
    )
    slope = 1 - (log(3) / 2) ** 2
    np.testing.assert_allclose(gradients.dk, column(0.75, -0.75 * slope), rtol=1e-14)
    np.testing.assert_allclose(gradients.dq, column(-0.75 * slope * x), rtol=1e-14)


def test_alibi_by_hand() -> None:
    """Query 0 of 2, at position 1 of 3 keys, has distances 1, 0, 1."""
    scores = reference.scores(column(0, 0), column(0, 0, 0), alibi_slopes=np.array(0.5))
    np.testing.assert_array_equal(scores, [[-0.5, 0, -0.5], [-1, -0.5, 0]])


def test_sink_by_hand() -> None:
    """Scores 0 and ln 3 and a sink of ln 4 give weights 1/8 and 3/8, and 1/2 to the sink."""
    q, k, v = column(1), column(0, log(3)), column(8, 4)
    given = {"scale": 1.0, "sink": np.array(log(4))}
    out, lse = reference.attention(q, k, v, return_lse=True, **given)
    np.testing.assert_allclose(out, [[2.5]], rtol=1e-15)
    np.testing.assert_allclose(lse, [log(8)], rtol=1e-15)
    gradients = reference.attention_backward(column(1), q, k, v, wrt=("v", "sink"), **given)
    np.testing.assert_allclose(gradients.dv, column(1 / 8, 3 / 8), rtol=1e-15)
    np.testing.assert_allclose(gradients.dsink, -0.5 * 2.5, rtol=1e-15)
    out, lse = reference.attention(q, k, v, return_lse=True, kv_lengths=0, **given)
    np.testing.assert_array_equal(out, [[0]])
    np.testing.assert_allclose(lse, [log(4)], rtol=1e-15)


def test_a_row_beyond_the_length_has_no_sink() -> None:
    """A row beyond q_lengths has lse = -inf, and its dlse does not reach the sink."""
    q, k, v = column(1, 1), column(0, log(3)), column(8, 4)
    given = {"scale": 1.0, "sink": np.array(log(4)), "q_lengths": 1}
    out, lse = reference.attention(q, k, v, return_lse=True, **given)
    np.testing.assert_allclose(out, column(2.5, 0), rtol=1e-15)
    np.testing.assert_allclose(lse, [log(8), -inf], rtol=1e-15)
    gradients = reference.attention_backward(
        column(0, np.nan), q, k, v, dlse=np.array([1, np.nan]), wrt=("q", "v", "sink"), **given
    )
    np.testing.assert_allclose(gradients.dsink, 0.5, rtol=1e-15)
    np.testing.assert_array_equal(gradients.dv, column(0, 0))
    assert gradients.dq[1] == 0
    with_keys = reference.logsumexp(q, k, kv_lengths=0, **given)
    np.testing.assert_allclose(with_keys, [log(4), -inf], rtol=1e-15)
    np.testing.assert_array_equal(reference.weights(q, k, **given)[1], [0, 0])


def seen(rows: int, keys: int, **options: Any) -> list[str]:
    """Return visibility as rows of x and ., read off scores that are all 0."""
    scores = reference.scores(np.zeros((rows, 1)), np.zeros((keys, 1)), **options)
    return ["".join("." if s == -inf else "x" for s in row) for row in scores]


VISIBLE = [
    (3, 5, {"causal": True}, ["xxx..", "xxxx.", "xxxxx"]),
    (3, 5, {"causal": "bottom_right"}, ["xxx..", "xxxx.", "xxxxx"]),
    (3, 5, {"causal": "top_left"}, ["x....", "xx...", "xxx.."]),
    (5, 3, {"causal": True}, ["...", "...", "x..", "xx.", "xxx"]),
    (5, 3, {"causal": "top_left"}, ["x..", "xx.", "xxx", "xxx", "xxx"]),
    (3, 5, {"causal": True, "offset": 1}, ["xx...", "xxx..", "xxxx."]),
    (3, 5, {"causal": True, "offset": -1}, [".....", "x....", "xx..."]),
    (4, 4, {"window": (1, 0)}, ["x...", "xx..", ".xx.", "..xx"]),
    (4, 4, {"window": (0, 1)}, ["xx..", ".xx.", "..xx", "...x"]),
    (4, 4, {"window": (None, 1)}, ["xx..", "xxx.", "xxxx", "xxxx"]),
    (4, 4, {"window": (1, None)}, ["xxxx", "xxxx", ".xxx", "..xx"]),
    (2, 4, {"window": (1, 1)}, [".xxx", "..xx"]),
    (4, 4, {"window": (1, 3), "causal": True}, ["x...", "xx..", ".xx.", "..xx"]),
    (3, 4, {"kv_lengths": 2}, ["xx..", "xx..", "xx.."]),
    (3, 4, {"q_lengths": 2}, ["xxxx", "xxxx", "...."]),
    # The default offset is the difference of the lengths: 3 - 2 = 1.
    (3, 5, {"q_lengths": 2, "kv_lengths": 3, "causal": True}, ["xx...", "xxx..", "....."]),
    (3, 5, {"kv_lengths": 3, "causal": "top_left"}, ["x....", "xx...", "xxx.."]),
    (2, 2, {"mask": np.array([[True, False], [True, True]])}, ["x.", "xx"]),
    (2, 2, {"mask": np.array([[False], [True]]), "causal": True}, ["..", "xx"]),
    (2, 2, {"bias": np.array([[0, -inf], [-inf, -inf]])}, ["x.", ".."]),
    (3, 3, {"segment_ids": (np.array([0, 0, 1]), np.array([0, 1, 1]))}, ["x..", "x..", ".xx"]),
]


@pytest.mark.parametrize(("rows", "keys", "options", "expected"), VISIBLE)
def test_visibility(rows: int, keys: int, options: dict[str, Any], expected: list[str]) -> None:
    assert seen(rows, keys, **options) == expected


def test_onnx_offset() -> None:
    """Offsets are those of ONNX Attention: 0 without a cache, with one the length of the past."""
    past, rows = 3, 2
    assert seen(rows, rows, causal=True, offset=0) == ["x.", "xx"]
    assert seen(rows, past + rows, causal=True, offset=past) == ["xxxx.", "xxxxx"]
    assert seen(rows, past + rows, causal=True, offset=past) == seen(rows, past + rows, causal=True)
    assert seen(4, 2, causal=True, offset=0) == ["x.", "xx", "xx", "xx"]


def test_lengths_per_batch_entry() -> None:
    """Lengths (batch, 1) broadcast over heads, and each entry has its own offset."""
    q, k = np.zeros((2, 3, 2, 1)), np.zeros((2, 3, 4, 1))
    scores = reference.scores(q, k, causal=True, kv_lengths=np.array([[4], [2]]))
    assert scores.shape == (2, 3, 2, 4)
    np.testing.assert_array_equal(scores[0, 1] == 0, [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(scores[1, 2] == 0, [[1, 0, 0, 0], [1, 1, 0, 0]])


def test_nothing_visible() -> None:
    q, k, v = column(1, 1), column(0, 0), column(8, 4)
    mask = np.array([[True, True], [False, False]])
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    np.testing.assert_array_equal(out, column(6, 0))
    np.testing.assert_array_equal(lse, [log(2), -inf])
    assert not np.signbit(out[1, 0])
    dout, dlse = column(1, np.nan), np.array([1, np.nan])
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, mask=mask)
    np.testing.assert_array_equal(gradients.dq, column(0, 0))
    np.testing.assert_array_equal(gradients.dv, column(0.5, 0.5))
    assert np.isfinite(gradients.dk).all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 3), (2, 0), (0, 0)])
def test_empty_extents(rows: int, keys: int) -> None:
    q, k, v = np.ones((2, rows, 4)), np.ones((2, keys, 4)), np.ones((2, keys, 3))
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_array_equal(out, np.zeros((2, rows, 3)))
    np.testing.assert_array_equal(lse, np.full((2, rows), -inf))
    gradients = reference.attention_backward(np.ones((2, rows, 3)), q, k, v)
    np.testing.assert_array_equal(gradients.dk, np.zeros((2, keys, 4)))


def test_a_group_is_consecutive_query_heads() -> None:
    """Query heads 0 and 1 read key/value head 0, heads 2 and 3 read head 1."""
    q, k = np.zeros((4, 1, 1)), np.zeros((2, 1, 1))
    v = np.array([10.0, 20.0])[:, None, None]
    out = reference.attention(q, k, v, enable_gqa=True)
    np.testing.assert_array_equal(out[:, 0, 0], [10, 10, 20, 20])
    dout = np.array([1.0, 2, 3, 4])[:, None, None]
    gradients = reference.attention_backward(dout, q, k, v, enable_gqa=True)
    np.testing.assert_array_equal(gradients.dv[:, 0, 0], [3, 7])


def test_gradients_are_summed_over_broadcast_axes() -> None:
    q, k, v = np.zeros((3, 1, 1)), np.zeros((1, 1)), np.zeros((1, 1, 1))
    gradients = reference.attention_backward(np.ones((3, 1, 1)), q, k, v)
    assert gradients.dk.shape == (1, 1)
    np.testing.assert_array_equal(gradients.dv, [[[3]]])


def test_axes() -> None:
    """Axes (batch, seqlen, heads, head_dim) give the results of the canonical order, moved."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 3, 5, 4))
    pairs = [(-3, -1)] * 4
    moved = [np.moveaxis(a, -2, -3) for a in (q, k, v, dout)]
    out = reference.attention(*moved[:3], axes=pairs, causal=True)
    np.testing.assert_array_equal(
        np.moveaxis(out, -3, -2), reference.attention(q, k, v, causal=True)
    )
    by_axes = reference.attention_backward(moved[3], *moved[:3], axes=pairs, causal=True)
    canonical = reference.attention_backward(dout, q, k, v, causal=True)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(
            np.moveaxis(getattr(by_axes, name), -3, -2), getattr(canonical, name)
        )


def test_pullback() -> None:
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 5, 4))
    out, pullback = reference.attention_vjp(q, k, v, causal=True)
    np.testing.assert_array_equal(out, reference.attention(q, k, v, causal=True))
    direct = reference.attention_backward(dout, q, k, v, causal=True, wrt=("k",))
    result = pullback(dout, wrt=("k",))
    np.testing.assert_array_equal(result.dk, direct.dk)
    assert result.dq is None


def test_merge_by_hand() -> None:
    """Parts of weight 1 and 3 give out = (1 * 8 + 3 * 4) / 4; an empty part has no effect."""
    outs = np.array([[[8.0]], [[4.0]], [[np.nan]]])
    lses = np.array([[0.0], [log(3)], [-inf]])
    out, lse = reference.merge(outs, lses)
    np.testing.assert_allclose(out, [[5]], rtol=1e-15)
    np.testing.assert_allclose(lse, [log(4)], rtol=1e-15)
    out, lse = reference.merge(np.moveaxis(outs, 0, 1), np.moveaxis(lses, 0, 1), axis=1)
    np.testing.assert_allclose(out, [[5]], rtol=1e-15)
    out, lse = reference.merge(outs[2:], lses[2:])
    np.testing.assert_array_equal(out, [[0]])
    np.testing.assert_array_equal(lse, [-inf])


def test_weights_by_hand() -> None:
    q, k = column(1, 0), column(0, log(3), 5)
    given = {"scale": 1.0, "kv_lengths": 2}
    np.testing.assert_allclose(
        reference.weights(q, k, **given), [[0.25, 0.75, 0], [0.5, 0.5, 0]], rtol=1e-15
    )
    np.testing.assert_allclose(
        reference.weights(q, k, rows=[1, 0], cols=[1], **given), [[0.5], [0.75]], rtol=1e-15
    )


def test_the_arithmetic_is_what_was_asked_for() -> None:
    """Results have the dtype asked for; only longdouble distinguishes 1 + 2^-60 from 1."""
    if np.finfo(np.longdouble).eps > 2e-19:
        pytest.skip("longdouble is no wider than float64 here")
    v = np.array([[1.0], [1.0 + 2.0**-50]])
    for dtype in (np.float32, np.float64, np.longdouble):
        out, lse = reference.attention(column(0), column(0, 0), v, return_lse=True, dtype=dtype)
        assert out.dtype == lse.dtype == dtype
        exact = np.longdouble(1) + np.longdouble(2) ** -51
        assert abs(np.longdouble(out[0, 0]) - exact) <= np.finfo(dtype).eps


@pytest.mark.parametrize("value", [np.nan, inf])
def test_a_non_finite_key_reaches_the_rows_that_see_it(value: float) -> None:
    q, k, v = column(1, 2, 3), column(1, value, 1), column(1, 2, 3)
    out = reference.attention(q, k, v, window=(0, 0))
    np.testing.assert_array_equal(np.isfinite(out), column(1, 0, 1) == 1)
    gradients = reference.attention_backward(column(1, 1, 1), q, k, v, window=(0, 0))
    for gradient in (gradients.dq, gradients.dk, gradients.dv):
        assert np.isfinite(gradient[[0, 2]]).all()
        assert not np.isfinite(gradient[1]).any()


@pytest.mark.parametrize("value", [np.nan, inf])
def test_a_non_finite_value_reaches_the_rows_that_see_it(value: float) -> None:
    q, k, v = column(1, 2, 3), column(1, 1, 1), column(1, 2, value)
    out = reference.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isfinite(out), column(1, 1, 0) == 1)
    gradients = reference.attention_backward(column(1, 1, 1), q, k, v, causal=True)
    assert np.isfinite(gradients.dq[:2]).all()
    assert np.isfinite(gradients.dv).all()  # dv does not depend on v


def test_softcap_to_infinity_is_none() -> None:
    """A large softcap changes scores by s^3 / (3 cap^2) to first order."""
    q, k = np.random.default_rng(2).standard_normal((2, 6, 4))
    plain = reference.scores(q, k)
    capped = reference.scores(q, k, softcap=1e4)
    assert np.all(np.abs(plain - capped) <= np.abs(plain) ** 3 / 3e8 + 1e-15)


# By plain loops.


def by_loops(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention element by element, from the sentences of the documentation."""
    options = dict(call.options)
    rows, keys = call.q.shape[-2], call.k.shape[-2]
    out = np.zeros((*call.batch, rows, call.v.shape[-1]))
    lse = np.full((*call.batch, rows), -inf)
    p = round(65536 * options.get("dropout", 0.0)) / 65536
    kept = reference.dropout_mask((*call.batch, rows, keys), p, options.get("seed", 0))

    def entry(value: Any, index: tuple[int, ...], core: tuple[int, ...] = ()) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        full = (*index, *core)[-value.ndim :] if value.ndim else ()
        return value[tuple(0 if n == 1 else i for i, n in zip(full, value.shape, strict=True))]

    def vector(array: np.ndarray, index: tuple[int, ...], position: int) -> np.ndarray:
        own = array.shape[:-2]
        index = index[len(index) - len(own) :]
        index = tuple(0 if n == 1 else i for i, n in zip(index, own, strict=True))
        return array[(*index, position)].astype(np.float64)

    for index in itertools.product(*map(range, call.batch)):
        kv = index
        if call.group_size > 1:
            kv = (*index[:-1], index[-1] // call.group_size)
        q_length = entry(options.get("q_lengths", rows), index)
        kv_length = entry(options.get("kv_lengths", keys), index)
        segments = options.get("segment_ids")

        def segment_of(side: int, position: int, index: tuple[int, ...] = index) -> int:
            return int(entry(options["segment_ids"][side], index, (position,)))

        causal, (left, right) = options.get("causal"), options.get("window", (None, None))
        offset = entry(options.get("offset", kv_length - q_length), index)
        offset = 0 if causal == "top_left" else int(offset)
        for m in range(rows):
            scores, values = [], []
            for n in range(keys):
                scale = options.get("scale", 1 / sqrt(call.q.shape[-1]))
                score = scale * float(vector(call.q, index, m) @ vector(call.k, kv, n))
                if "softcap" in options:
                    score = options["softcap"] * tanh(score / options["softcap"])
                score += float(entry(options.get("bias", 0.0), index, (m, n)))
                slope = float(entry(options.get("alibi_slopes", 0.0), index))
                score -= slope * abs(m + offset - n)
                hidden = (
                    m >= q_length
                    or n >= kv_length
                    or (causal and n > m + offset)
                    or (right is not None and n > m + offset + right)
                    or (left is not None and n < m + offset - left)
                    or not entry(options.get("mask", True), index, (m, n))
                    or score == -inf
                    or (
                        segments
                        and entry(segments[0], index, (m,)) != entry(segments[1], index, (n,))
                    )
                )
                if not hidden:
                    scores.append(score)
                    values.append(vector(call.v, kv, n) / (1 - p) if kept[(*index, m, n)] else 0)
            sink = float(entry(options.get("sink", -inf), index)) if m < q_length else -inf
            if scores or sink > -inf:
                top = max([*scores, sink])
                weights = [exp(s - top) for s in scores]
                total = sum(weights) + exp(sink - top)
                lse[(*index, m)] = top + log(total)
                out[(*index, m)] = sum(w / total * v for w, v in zip(weights, values, strict=True))
    return out, lse


@given(call=calls(limits_of(np), seqlens=(0, 1, 2, 5), families=("normal", "sparse_integers")))
def test_forward_by_loops(call: Call) -> None:
    out, lse = reference.attention(call.q, call.k, call.v, return_lse=True, **call.options)
    expected_out, expected_lse = by_loops(call)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
    if "sink" not in call.options:
        q = np.broadcast_to(call.q, (*call.batch, *call.q.shape[-2:]))  # v may have more axes
        p = reference.weights(q, call.k, **call.options)
        np.testing.assert_allclose(p.sum(-1), p.any(-1).astype(float), rtol=1e-12)


# By differences.


def difference(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Return the gradient of ``f`` by central differences of order four, element by element."""
    gradient, step = np.zeros_like(x), 1e-3
    for index in np.ndindex(x.shape):

        def at(amount: float, index: tuple[int, ...] = index) -> float:
            moved = x.copy()
            moved[index] += amount * step
            return f(moved)

        gradient[index] = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    return gradient


@given(
    call=calls(
        limits_of(np), seqlens=(1, 3, 4), families=("normal",), batches=((), (2,), (1, 2)),
        group_sizes=(1, 2), gradients=True,
    )
)  # fmt: skip
def test_backward_by_differences(call: Call) -> None:
    """Every element of every gradient agrees with differences, with any options."""
    call = call.but(
        **{n: getattr(call, n)[..., :3].astype(np.float64) for n in ("q", "k", "v", "dout")},
        dlse=None if call.dlse is None else call.dlse.astype(np.float64),
    )
    options = {"scale": 0.4, **call.options}
    arrays = {n: np.asarray(call.array(n), np.float64) for n in ("q", "k", "v", *call.wrt)}
    arrays["scale"] = np.asarray(options["scale"])
    gradients = reference.attention_backward(
        call.dout, call.q, call.k, call.v, dlse=call.dlse, wrt=call.wrt, **options
    )

    def objective(name: str) -> Callable[[np.ndarray], float]:
        def value(x: np.ndarray) -> float:
            inputs = {**arrays, name: x}
            q, k, v = (inputs.pop(n) for n in ("q", "k", "v"))
            inputs["scale"] = float(inputs["scale"])
            out, lse = reference.attention(q, k, v, return_lse=True, **{**options, **inputs})
            total = float((call.dout * out).sum())
            if call.dlse is not None:
                total += float((call.dlse * np.where(np.isneginf(lse), 0, lse)).sum())
            return total

        return value

    for name in call.wrt:
        expected = difference(objective(name), arrays[name])
        got = getattr(gradients, FIELDS[name])
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-8, err_msg=name)


def test_gradients_come_in_the_order_that_wrt_names() -> None:
    """The reference orders gradients as wrt does, and refuses the same names as cuflash."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 5, 3))
    ends, bias = np.array([0, 2, 5]), rng.standard_normal((5, 5))
    plain = (dout, q, k, v, None, None)
    found = reference.attention_backward(*plain, wrt=("v", "bias", "q"), bias=bias)
    assert [*map(id, found)] == [*map(id, (found.dv, found.dbias, found.dq))]
    packed = reference.attention_varlen_backward(*plain, ends, ends, wrt=("v", "q"))
    assert [*map(id, packed)] == [*map(id, (packed.dv, packed.dq))]
    for wrt, error in ((("w",), ValueError), (("bias",), ValueError), ("q", TypeError)):
        with pytest.raises(error, match="wrt: got"):
            reference.attention_backward(*plain, wrt=wrt)
