"""Do a user's own formulas mean the same as the options that they can express?"""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import MaskMod, ScoreMod, reference
from cuflash._jit import compilation
from cuflash._jit.compilation import compile_static, source_of
from cuflash._jit.source import kernels_dir
from cuflash._problem.formulas import formulas_of
from cuflash._problem.problem import describe
from cuflash.testing._budget import Budget
from support import memory
from support.chosen import portable
from support.problems import Call

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 37, 51
SLOPES = np.array([0.5, 0.25, -0.125, 0.0])
CAP = 3.0


def score_mod(
    host,
    host_grad=lambda score, *_, **__: np.ones_like(score),
    expression="score",
    grad="1.0f",
    **arrays,
) -> ScoreMod:
    return ScoreMod(expression, grad=grad, arrays=arrays, host=host, host_grad=host_grad)


#: A formula, and the options that mean the same. The offset of these shapes is 14.
SAME = {
    "ALiBi": (
        {"score_mod": score_mod(
            lambda score, b, h, q, k, slopes: score - slopes[h] * np.abs(q + 14 - k),
            expression="score - slopes[h] *\n    abs(q + 14 - k)", slopes=SLOPES,
        )},
        {"alibi_slopes": SLOPES},
    ),
    "softcap": (
        {"score_mod": score_mod(
            lambda score, *_: CAP * np.tanh(score / CAP),
            lambda score, *_: 1 - np.tanh(score / CAP) ** 2,
            "3.0f * tanhf(score / 3.0f)",
            "1.0f - tanhf(score / 3.0f) * tanhf(score / 3.0f)",
        )},
        {"softcap": CAP},
    ),
    "scale": (
        {"score_mod": score_mod(
            lambda s, *_: 0.5 * s, lambda s, *_: np.full_like(s, 0.5), "0.5f * score", "0.5f"
        )},
        {"scale": 0.5 / np.sqrt(8)},
    ),
    "entry": (
        {"score_mod": score_mod(
            lambda score, b, h, q, k: score + np.where(b == 1, k / 8, 0.0),
            expression="score + (b == 1 ? k / 8.0f : 0.0f)",
        )},
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


def on_a_gpu(cupy, options):
    """Return the options with the arrays of their formulas on the device."""
    moved = {}
    for name, value in options.items():
        if hasattr(value, "arrays"):
            arrays = {n: cupy.asarray(a) for n, a in value.arrays.items()}
            moved[name] = replace(value, arrays=arrays)
        else:
            moved[name] = memory.to_device(cupy, value) if hasattr(value, "shape") else value
    return moved


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAME)
def test_formula_in_the_kernels_is_the_option_that_it_stands_for(name):
    import cupy

    q, k, v, dout = inputs(np.float16)
    formula, option = SAME[name]
    rounded = {n: a.astype(np.float32) if n == "bias" else a for n, a in option.items()}
    call = Call(q, k, v, dout, options={**rounded, "enable_gqa": True})
    options = on_a_gpu(cupy, {**formula, "enable_gqa": True})
    got = results(cuflash, [memory.to_device(cupy, a) for a in (q, k, v, dout)], options)
    got = {n: memory.to_numpy(a) for n, a in got.items()}
    budget = Budget(call)
    budget.check_forward(got["out"], got["lse"])
    gradients = {n: got[f"d{n}"] for n in "qkv"}
    budget.check_backward(gradients, given=(got["out"], got["lse"]))
    rows = [0, 20]
    on_device = (memory.to_device(cupy, a) for a in (q, k, got["lse"]))
    weights = memory.to_numpy(cuflash.weights(*on_device, rows=rows, **options))
    exact = reference.weights(q, k, rows=rows, **call.options)
    # For float32 scores below 64 and their lse: some 20 roundings with units of 64.
    np.testing.assert_allclose(weights, exact, rtol=0, atol=1300 * np.finfo(np.float32).eps)


def formula_that_notes(asked, rows, keys):
    """Return an identity that sets asked[0] for pairs of the problem, and asked[1] for others."""
    note = f"const_cast<float*>(asked)[q < {rows} && k < {keys} ? 0 : 1] = 1.0f"
    return score_mod(lambda s, *_, **__: s, expression=f"({note}, score)",
                     grad=f"({note}, 1.0f)", asked=asked)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.not_rehearsed  # kernels write to ``asked``
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [6, 24, 128])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_formula_is_asked_about_pairs_that_exist(dtype, head_dim, causal):
    """Kernels evaluate formulas for existing pairs only, whose indices are legal in any array."""
    import cupy

    rows, keys = 70, 300
    q, dout = cupy.ones((2, 2, rows, head_dim), dtype)
    k, v = cupy.ones((2, 2, keys, head_dim), dtype)
    for wrt in ((), ("q",), ("k", "v"), ("scale",)):
        asked = cupy.zeros(2, np.float32)
        options = cuflash.Options(causal=causal, score_mod=formula_that_notes(asked, rows, keys))
        out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
        if wrt:
            asked[0] = 0
            cuflash.attention_backward(dout, q, k, v, out, lse, options=options, wrt=wrt)
        assert asked.tolist() == [1, 0], wrt


@pytest.mark.gpu
def test_bias_under_a_formula_has_its_slope():
    """A formula that halves scores halves the gradients of bias, slopes and scale."""
    import cupy

    q, k, v, dout = (memory.to_device(cupy, a) for a in inputs(np.float16))
    rng = np.random.default_rng(1)
    bias = cupy.asarray(rng.standard_normal((HEADS, SEQLEN_Q, SEQLEN_K)).astype(np.float32))
    half = score_mod(
        lambda s, *_: 0.5 * s, lambda s, *_: np.full_like(s, 0.5), "0.5f * score", "0.5f"
    )
    scale = q.shape[-1] ** -0.5

    def gradients(**options):
        wrt = ("q", "bias", "alibi_slopes", "scale")
        options["enable_gqa"] = True
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        return cuflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options)

    slopes = cupy.asarray(SLOPES, np.float32)
    a = gradients(bias=bias, alibi_slopes=slopes, score_mod=half, scale=scale)
    b = gradients(bias=bias / 2, alibi_slopes=slopes / 2, scale=scale / 2)
    for name, factor in (("dbias", 0.5), ("dslopes", 0.5), ("dscale", 0.5), ("dq", 1.0)):
        got, expected = (memory.to_numpy(getattr(g, name)).astype(np.float64) for g in (a, b))
        size = np.abs(expected).max()
        np.testing.assert_allclose(got, factor * expected, rtol=0, atol=2e-3 * size, err_msg=name)


@pytest.mark.nvrtc
def test_what_does_not_compile_is_shown_by_its_own_line():
    formulas = formulas_of(cuflash.Options(
        score_mod=score_mod(lambda s, *_: s, expression="score +\n  undefined_name"),
    ))  # fmt: skip
    problem = replace(describe(*inputs(np.float16)[:3], cuflash.Options(enable_gqa=True)),
                      formulas=formulas)  # fmt: skip
    with pytest.raises(
        cuflash.CompileError, match=r"score_mod\.expression\(2\): error.*undefined_"
    ):
        compile_static(portable("forward_sm80", problem, 99 << 10, 16), "sm_80")


#: Words that C++, CUDA and their headers may define, tried beside the words of our sources.
WORDS = """
asm and bitor compl not_eq xor char8_t char16_t concept requires consteval constinit co_await
export import module final override typeof restrict inline volatile union mutable thread_local
signed wchar_t friend goto alignas decltype noexcept dim3 float2 float4 uint4 half __half
blockDim gridDim warpSize clock64 printf assert malloc memcpy min max abs exp log sqrtf rsqrtf NULL
INFINITY NAN INT_MAX FLT_MAX M_PI size_t ptrdiff_t int8_t uint8_t int64_t uint64_t intptr_t std
cuda nv linux unix i386 defined main errno stdin EOF true false nullptr bool score_mod mask_mod x
arrays value table seen weights _ _x x_ _X x__y __x
"""


def with_array(name):
    return MaskMod("true", arrays={name: np.zeros(2)}, host=lambda *_, **__: True)


def accepted(name):
    try:
        with_array(name)
    except ValueError:
        return False
    return True


@pytest.mark.nvrtc
def test_every_name_of_an_array_that_is_accepted_compiles():
    """Every accepted array name compiles beside another array.

    Each is in a copy of the class that holds formulas and their arrays.
    """
    problem = describe(*inputs(np.float16)[:3], cuflash.Options(enable_gqa=True))
    source = source_of(portable("forward_sm80", problem, 99 << 10, 16))
    words = sorted({*re.findall(r"[A-Za-z_]\w*", source), *WORDS.split()})
    names = [word for word in words if accepted(word)]
    assert {"x", "_x", "table", "warpSize"} <= set(names)
    assert len(words) - len(names) > 100
    text = (kernels_dir() / "score/formulas.cuh").read_text()
    text = text[text.index("struct FormulaArrays") : text.rindex("}  // namespace")]
    text = re.sub(r'#include "formulas/s.*', "score", text)
    text = re.sub(r'#include "formulas/m.*', "true", text)
    for i, name in enumerate(names):
        arrays = formulas_of(cuflash.Options(mask_mod=MaskMod(
            "true", arrays={name: np.zeros(2), "another_": np.zeros(2, np.int64)},
            host=lambda *_, **__: True,
        ))).texts[0]  # fmt: skip
        assert arrays[0] == "formulas/arrays"
        own = text.replace('#include "formulas/arrays"', arrays[1])
        source += f'namespace cuflash::copy_{i} {{\n#line 1 "{name}"\n{own}}}\n'
    compilation._nvrtc(source, (*compilation.OPTIONS, "-arch=sm_80"))


@pytest.mark.parametrize(
    "name", ["int", "class", "template", "xor", "__half", "_Bool", "a__b", "CUFLASH_DTYPE",
             "int64_t", "Real", "formula_array", "NULL", "b", "score", "lambda", "1", "", "a b",
             "ä"],
)  # fmt: skip
def test_words_of_the_compiler_name_no_array(name):
    with pytest.raises(ValueError, match=f"arrays: got the name '{name}', expected an identifier"):
        with_array(name)


def test_formulas_share_the_names_of_their_arrays():
    a, b = np.zeros((2, 3))
    score = score_mod(lambda s, *_, **__: s, x=a)
    mask = MaskMod("x[k] > 0", arrays={"x": b}, host=lambda b, h, q, k, x: x[k] > 0)
    with pytest.raises(ValueError, match="mask_mod: got array 'x', which is another"):
        formulas_of(cuflash.Options(score_mod=score, mask_mod=mask))
    six, seven = (
        MaskMod("true", arrays={f"x{i}": a for i in range(n)}, host=lambda *_, **__: True)
        for n in (6, 7)
    )
    declared = dict(formulas_of(cuflash.Options(mask_mod=six)).texts)["formulas/arrays"]
    for i in range(6):
        assert f"const x{i} = formula_array<double, {i}>();" in declared
    with pytest.raises(ValueError, match="got 7 arrays, expected at most 6"):
        formulas_of(cuflash.Options(mask_mod=seven))


def test_formulas_follow_softcap_bias_and_alibi():
    """A formula gets the score after softcap, bias and ALiBi."""
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
    ("host", "host_grad", "message"),
    [
        (lambda s, *_: s, lambda s, *_: np.where(s > 9, np.nan, 1), "host_grad: got nan at score"),
        (lambda s, *_: s, lambda s, *_: np.full_like(s, np.nan), "host_grad: got nan at score"),
        (lambda s, *_: s, lambda s, *_: np.full_like(s, np.inf), "host_grad: got inf at score"),
        (lambda s, *_: np.sqrt(s), lambda s, *_: 0.5 / np.sqrt(s), "host: got nan at score -10"),
        (lambda s, *_: np.where(s < 0, np.inf, s), lambda s, *_: np.ones_like(s),
         "host: got inf at score -10"),
        (lambda s, *_: np.where(s < 0, -np.inf, s), lambda s, *_: np.where(s < 0, np.nan, 1.0),
         "host_grad: got nan at score .*a finite number"),
        (lambda s, *_: s, lambda s, *_: np.ones(3), r"host_grad: got an array of shape \(3,\)"),
        (lambda s, *_: s[:7], lambda s, *_: 1.0, r"host: got an array of shape \(7,\)"),
    ],
)  # fmt: skip
def test_a_slope_that_is_no_number_is_found(host, host_grad, message):
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match=f"^{message}"):
        score_mod(host, host_grad).check()


@pytest.mark.parametrize(
    ("host", "host_grad", "ends"),
    [
        (lambda s, *_: 3.0, lambda s, *_: 0.0, (-10, 10)),  # constants broadcast
        (lambda s, *_: np.where(s < 0, -np.inf, s), lambda s, *_: 1.0, (-10, 10)),
        (lambda s, *_: np.sqrt(s), lambda s, *_: 0.5 / np.sqrt(s), (0.5, 10)),
    ],
)
def test_a_right_slope_passes(host, host_grad, ends):
    score_mod(host, host_grad).check(*ends)


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (np.nan, 1), (0, np.inf), ("a", 1), (None, 1)])
def test_ends_between_which_nothing_can_be_checked_are_named(ends):
    with pytest.raises((TypeError, ValueError), match=r"^low, high: got .* expected two "):
        score_mod(lambda s, *_: s).check(*ends)


def overwriting(formula):
    """Return the formula, which afterwards overwrites all arrays that it was given."""

    def in_place(*given, **arrays):
        result = np.array(formula(*given, **arrays))
        for array in (*given, *arrays.values()):
            if array.flags.writeable:
                array[...] = 7
        return result

    return in_place


@pytest.mark.parametrize("library", [cuflash, reference], ids=["cuflash", "reference"])
@pytest.mark.parametrize("name", SAME)
def test_formulas_that_overwrite_what_they_get_change_nothing_else(library, name, request):
    """A formula that overwrites its arguments changes no tile, other formula or caller's array."""
    if library is cuflash:
        request.getfixturevalue("small_host_tiles")
    options = SAME[name][0]
    ((kind, mod),) = options.items()
    names = ("host", "host_grad") if kind == "score_mod" else ("host",)
    rude = replace(mod, **{n: overwriting(getattr(mod, n)) for n in names})
    given = inputs(np.float64)
    arrays = {n: a.copy() for n, a in mod.arrays.items()}
    expected = results(library, given, options)
    got = results(library, given, {kind: rude})
    for result, array in got.items():
        np.testing.assert_array_equal(array, expected[result], err_msg=result)
    for n, array in mod.arrays.items():
        np.testing.assert_array_equal(array, arrays[n])


def test_no_formula_writes_into_the_callers_arrays():
    def host(score, b, h, q, k, slopes):
        slopes *= 2
        return score

    q, k, v, _ = inputs(np.float32)
    with pytest.raises(ValueError, match="read-only"):
        cuflash.attention(q, k, v, enable_gqa=True, score_mod=score_mod(host, slopes=SLOPES))
    assert SLOPES.flags.writeable  # the caller may still write


def by_slope(score, b, h, q, k, slopes):
    return score - slopes[h]


def slope_of_one(score, b, h, q, k, slopes):
    return np.ones_like(score)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_of_formulas_are_formulas(copied):
    """Copied and pickled formulas compute the same, if their functions can be pickled."""
    mod = score_mod(by_slope, slope_of_one, "score - slopes[h]", slopes=SLOPES)
    again = copied(cuflash.Options(score_mod=mod, enable_gqa=True))
    shared = again.score_mod.arrays["slopes"] is mod.arrays["slopes"]
    assert shared is (copied is copy.copy)
    assert (again.score_mod.expression, again.score_mod.grad) == (mod.expression, mod.grad)
    given = inputs(np.float32)
    expected = results(cuflash, given, {"score_mod": mod})
    for name, array in results(cuflash, given, {"score_mod": again.score_mod}).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def failing_at(call: int, formula):
    """Return the formula, which fails at call number ``call``."""
    calls = []

    def counted(*given):
        calls.append(0)
        if len(calls) == call:
            raise ZeroDivisionError("late")
        return formula(*given)

    return counted


@pytest.mark.usefixtures("small_host_tiles")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod"])
def test_a_formula_that_fails_late_leaves_results_as_they_were(kind, packed):
    q, k, v, dout = (a[0] for a in inputs(np.float32))
    ends = [np.array([0, 20, 37]), np.array([0, 20, 51])] if packed else []
    forward = cuflash.attention_varlen if packed else cuflash.attention
    backward = cuflash.attention_varlen_backward if packed else cuflash.attention_backward

    def options(call):
        if kind == "score_mod":
            return {kind: score_mod(failing_at(call, lambda s, *_: s)), "enable_gqa": True}
        host = failing_at(call, lambda b, h, q, k: q >= k)
        return {kind: MaskMod("q >= k", host=host), "enable_gqa": True}

    failed = 0
    for call in range(1, 100):
        out, lse = np.full(q.shape, 3, np.float32), np.full(q.shape[:2], 3, np.float32)
        given = cuflash.Gradients(*(np.full(a.shape, 3, np.float32) for a in (q, k, v)))
        own = options(call)
        try:
            forward(q, k, v, *ends, out=(out, lse), return_lse=True, **own)
            backward(dout, q, k, v, out.copy(), lse.copy(), *ends, grads_out=given, **own)
        except ZeroDivisionError:
            failed += 1
        else:
            break
        written = not np.all(out == 3), not np.all(lse == 3)
        assert written in ((False, False), (True, True))
        assert all(np.all(a == 3) for a in (given.dq, given.dk, given.dv))
        if written[0]:
            np.testing.assert_array_equal(out, forward(q, k, v, *ends, **options(0)))
    assert failed > 8
    assert not any(np.any(a == 3) for a in (out, lse, given.dq, given.dk, given.dv))


TEXTS = {
    "an include": '#include "/etc/passwd"', "of a library": "#include <cstdio>",
    "with blanks": '\n #  include "x"', "a digraph": '\n%:include "x"',
    "a spliced digraph": '\n%\\\n:include "x"', "a trigraph": '\n??=include "x"',
    "another directive": "\n#define q k", "a comment before": '/* */ #/* */include "x"',
    "no Unicode": "score + \ud800", "a zero byte": "score\0",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["expression", "grad", "of a mask"])
def test_a_text_that_is_more_than_an_expression_is_refused(name, text):
    make = {
        "of a mask": lambda: MaskMod(text, host=min),
        "expression": lambda: score_mod(min, expression=text),
        "grad": lambda: score_mod(min, grad=text),
    }[name]
    argument = "grad" if name == "grad" else "expression"
    with pytest.raises(ValueError, match=f"^{argument}: got .*expected an expression"):
        make()


def test_expressions_may_have_what_looks_like_a_directive():
    for text in ("q % 3 == 0", "q % ::abs(k)", "q ? k : h", "/* include */ q > k", "a\\\n b"):
        MaskMod(text, host=min)


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
        ({"mask_mod": MaskMod("k", host=lambda *_: [[True], [True, False]])}, TypeError,
         "mask_mod.host"),
    ],
)  # fmt: skip
def test_formula_of_a_wrong_result_is_named(options, kind, argument):
    q, k, v, _ = inputs(np.float32)
    with pytest.raises(kind, match=f"^{argument}: got "):
        cuflash.attention(q, k, v, enable_gqa=True, **options)
