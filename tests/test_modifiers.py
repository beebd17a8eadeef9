"""Do a user's own formulas mean what the options mean that they can stand for?"""

from __future__ import annotations

import numpy as np
import pytest

import cuflash
from cuflash import MaskMod, ScoreMod, reference

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 37, 51
SLOPES = np.array([0.5, 0.25, -0.125, 0.0])
CAP = 3.0


def score_mod(host, host_grad=lambda score, *_, **__: np.ones_like(score), **arrays) -> ScoreMod:
    return ScoreMod("score", grad="1.0f", arrays=arrays, host=host, host_grad=host_grad)


#: A formula, and the options that mean the same. The offset of these shapes is 14.
SAME = {
    "ALiBi": (
        {"score_mod": score_mod(
            lambda score, b, h, q, k, slopes: score - slopes[h] * np.abs(q + 14 - k), slopes=SLOPES
        )},
        {"alibi_slopes": SLOPES},
    ),
    "softcap": (
        {"score_mod": score_mod(
            lambda score, *_: CAP * np.tanh(score / CAP),
            lambda score, *_: 1 - np.tanh(score / CAP) ** 2,
        )},
        {"softcap": CAP},
    ),
    "scale": (
        {"score_mod": score_mod(lambda s, *_: 0.5 * s, lambda s, *_: np.full_like(s, 0.5))},
        {"scale": 0.5 / np.sqrt(8)},
    ),
    "entry": (
        {"score_mod": score_mod(lambda score, b, h, q, k: score + np.where(b == 1, k / 8, 0.0))},
        {"bias": np.array([0.0, 0.125])[:, None, None, None] * np.arange(SEQLEN_K)},
    ),
    "causal": ({"mask_mod": MaskMod("k <= q + 14", host=lambda b, h, q, k: k <= q + 14)},
               {"causal": True}),
    "mask of an array": (
        {"mask_mod": MaskMod(
            "seen[k]", arrays={"seen": np.arange(SEQLEN_K) % 3 > 0},
            host=lambda b, h, q, k, seen: seen[k],
        )},
        {"mask": np.arange(SEQLEN_K)[None] % 3 > 0},
    ),
    "heads": (
        {"mask_mod": MaskMod("h != 2 || k < 5", host=lambda b, h, q, k: (h != 2) | (k < 5))},
        {"mask": (np.arange(HEADS)[:, None, None] != 2) | (np.arange(SEQLEN_K) < 5)},
    ),
}  # fmt: skip


def inputs(dtype):
    rng = np.random.default_rng(5)
    shapes = ((HEADS, SEQLEN_Q), (2, SEQLEN_K), (2, SEQLEN_K), (HEADS, SEQLEN_Q))
    return [rng.standard_normal((BATCH, h, n, 8)).astype(dtype) for h, n in shapes]


def results(library, arrays, options):
    q, k, v, dout = arrays
    options = {**options, "enable_gqa": True}
    out, lse = library.attention(q, k, v, return_lse=True, **options)
    g = library.attention_backward(dout, q, k, v, out, lse, **options)
    return {"out": out, "lse": lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}


def assert_same(a, b, digits):
    for name, array in a.items():
        size = np.abs(b[name][np.isfinite(b[name])]).max()
        np.testing.assert_allclose(array, b[name], rtol=0, atol=size * 10.0**-digits, err_msg=name)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("together", [{}, {"window": (20, 3)}], ids=["alone", "window"])
@pytest.mark.parametrize(("dtype", "digits"), [(np.float64, 12), (np.float32, 5)])
def test_formula_is_the_option_that_it_stands_for(name, together, dtype, digits):
    formula, option = ({**options, **together} for options in SAME[name])
    given = inputs(dtype)
    exact = [a.astype(np.float64) for a in given]
    expected = results(reference, exact, option)
    assert_same(results(cuflash, given, formula), expected, digits)
    assert_same(results(reference, exact, formula), expected, 12)


def test_formulas_follow_softcap_bias_and_alibi():
    """The order of the pipeline: a formula sees the score after all of them."""
    seen = []

    def host(score, b, h, q, k):
        seen.append(score.copy())
        return score

    q, k, v, _ = inputs(np.float64)
    options = {"softcap": 2.0, "bias": np.ones((1, SEQLEN_K)), "alibi_slopes": SLOPES}
    cuflash.attention(q, k, v, enable_gqa=True, score_mod=score_mod(host), **options)
    expected = reference.scores(q, k, enable_gqa=True, **options)
    (scores,) = (s.reshape(expected.shape) for s in seen if s.size == expected.size)
    np.testing.assert_allclose(scores, expected, rtol=1e-12)


def test_a_wrong_slope_is_found():
    right = score_mod(lambda s, *_: s**3, lambda s, *_: 3 * s**2)
    right.check()
    with pytest.raises(ValueError, match="host_grad: got"):
        score_mod(lambda s, *_: s**3, lambda s, *_: 2 * s**2).check()


@pytest.mark.parametrize(
    ("options", "kind", "argument"),
    [
        ({"score_mod": score_mod(lambda s, *_: s[..., :-1])}, ValueError, "score_mod.host"),
        ({"score_mod": score_mod(lambda s, *_: s > 0)}, TypeError, "score_mod.host"),
        ({"score_mod": score_mod(lambda s, *_: s, lambda s, *_: np.ones(3))}, ValueError,
         "score_mod.host_grad"),
        ({"mask_mod": MaskMod("k", host=lambda b, h, q, k: k)}, TypeError, "mask_mod.host"),
        ({"mask_mod": MaskMod("k", host=lambda *_: np.ones((2, 3), bool))}, ValueError,
         "mask_mod.host"),
    ],
)  # fmt: skip
def test_formula_of_a_wrong_result_is_named(options, kind, argument):
    q, k, v, _ = inputs(np.float32)
    with pytest.raises(kind, match=f"^{argument}: got an array of"):
        cuflash.attention(q, k, v, enable_gqa=True, **options)
