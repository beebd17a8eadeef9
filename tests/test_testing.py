"""Does `cuflash.testing` notice what is wrong, accept what is right, and cost nothing otherwise?"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

import cuflash
from cuflash._errors import pip_install
from cuflash.testing import (
    FAMILIES,
    Call,
    arrays,
    assert_attention_close,
    calls,
    make_call,
    options,
)
from cuflash.testing._families import OF_EVERY_DTYPE

ROOT = Path(__file__).resolve().parents[1]
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
WITH_GRADIENT = ("bias", "alibi_slopes", "sink", "scale")
SHAPES = ((2, 3, 40, 8), (2, 3, 48, 8), (2, 3, 48, 6))


def backward(call: Call) -> tuple[Any, cuflash.Gradients]:
    """Return result and gradients by cuflash."""
    result = cuflash.attention(*call.qkv, **call.options, return_lse=True)
    gradients = cuflash.attention_backward(
        call.dout, *call.qkv, *result, dlse=call.dlse, wrt=call.wrt, **call.options
    )
    return result, gradients


def check(call: Call, result: Any, gradients: cuflash.Gradients | None = None) -> None:
    assert_attention_close(
        result, *call.qkv, gradients=gradients, dout=call.dout, dlse=call.dlse, **call.options
    )


@settings(max_examples=30)
@given(calls(gradients=WITH_GRADIENT))
def test_the_library_is_close(call):
    check(call, *backward(call))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mistake_in_one_element_is_noticed(dtype):
    call = make_call("normal", 0, dtype, *SHAPES)
    (out, lse), gradients = backward(call)
    check(call, (out, lse), gradients)
    check(call, out)
    wrong = out.copy()
    wrong[1, 2, 3, 4] += 64 * ml_dtypes.finfo(dtype).eps
    with pytest.raises(AssertionError, match=r"R6: out\[1, 2, 3, 4\]"):
        check(call, wrong)
    wrong = lse.copy()
    wrong[0, 1, 2] += 1e-3
    with pytest.raises(AssertionError, match=r"R4: lse\[0, 1, 2\]"):
        check(call, (out, wrong))
    gradients.dk[0, 0, 5, 1] += 0.5
    with pytest.raises(AssertionError, match=r"R6: dk\[0, 0, 5, 1\]"):
        check(call, (out, lse), gradients)


def test_another_mask_is_noticed():
    call = make_call("normal", 0, "float32", *SHAPES)
    with pytest.raises(AssertionError, match="R6: out"):
        assert_attention_close(cuflash.attention(*call.qkv), *call.qkv, causal=True)


def test_axes_options_and_precision():
    call = make_call("normal", 0, "float32", *SHAPES)
    axes = [(-3, -1), (-1, 0), (-2, -1), (0, 1)]
    q, k, v = (np.moveaxis(a, (-2, -1), own) for a, own in zip(call.qkv, axes, strict=False))
    given = cuflash.Options(causal=True, mask=np.tri(40, 48, 10, dtype=bool))
    result, pullback = cuflash.attention_vjp(q, k, v, axes=axes, options=given, return_lse=True)
    dout = np.ones_like(result.out)
    same = {"axes": axes, "options": given}
    assert_attention_close(result, q, k, v, gradients=pullback(dout), dout=dout, **same)
    cut = [(a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for a in (q, k, v)]
    rounded = cuflash.attention(*cut, axes=axes, options=given)
    assert_attention_close(rounded, q, k, v, precision="tf32", **same)
    with pytest.raises(AssertionError):
        assert_attention_close(rounded, q, k, v, **same)


@pytest.mark.parametrize(
    "dtypes", [(np.float16,) * 3, (np.float32, np.float32, np.float64)], ids=str
)
def test_products_of_tf32_are_those_of_float32(dtypes):
    """TF32 products have a wider budget in float32 only; other dtypes keep their budget."""
    call = make_call("normal", 0, dtypes, *SHAPES)
    out = cuflash.attention(*call.qkv).astype(np.float64)
    assert_attention_close(out, *call.qkv, precision="tf32")
    with pytest.raises(AssertionError):
        assert_attention_close(out * (1 + 2.0**-9), *call.qkv, precision="tf32")


@pytest.mark.parametrize("p", [0.1, 0.3, 1.0])
def test_dropout_is_rounded_as_the_library_rounds_it(p):
    call = make_call("normal", 0, "float32", *SHAPES, options={"dropout": p, "seed": 1})
    check(call, *backward(call))


def test_gradients_are_those_of_the_out_that_is_given():
    """Gradients belong to the out given: for values with a common part its rounding decides dq."""
    call = make_call("normal", 0, "bfloat16", (2, 128, 32), (2, 128, 32), (2, 128, 32))
    call = call.but(v=(call.v + 100).astype(call.dtype))
    out = np.empty(call.v.shape, np.float32)
    lse = cuflash.attention(*call.qkv, return_lse=True, out=(out, np.empty((2, 128), np.float32)))[
        1
    ]
    rounded = out.astype(call.dtype)
    for own, given_ in ((rounded, rounded), (out, out)):
        check(call, (own, lse), cuflash.attention_backward(call.dout, *call.qkv, given_, lse))
    with pytest.raises(AssertionError, match=r"R[12]: .*d[qk]"):
        check(call, (out, lse), cuflash.attention_backward(call.dout, *call.qkv, rounded, lse))


def test_wrong_arguments_are_named():
    call = make_call("normal", 0, "float32", *SHAPES)
    result, gradients = backward(call)
    with pytest.raises(ValueError, match=r"^dout: got gradients without dout"):
        assert_attention_close(result, *call.qkv, gradients=gradients)
    with pytest.raises(TypeError, match=r"^gradients: got dict"):
        assert_attention_close(result, *call.qkv, gradients={}, dout=call.dout)
    with pytest.raises(TypeError, match=r"^casual: .*did you mean causal="):
        assert_attention_close(result, *call.qkv, casual=True)
    with pytest.raises(ValueError, match=r"^k: got head_dim 7"):
        assert_attention_close(result, call.q, call.k[..., :7], call.v)
    with pytest.raises(TypeError, match=r"^q: got dtype int64"):
        assert_attention_close(result, call.q.astype(int), call.k, call.v)
    with pytest.raises(ValueError, match=r"^mask: .* write mask\[:, None, :, :\]"):
        assert_attention_close(result, *call.qkv, mask=np.ones((2, 40, 48), bool))
    with pytest.raises(ValueError, match=r"^dout: got shape"):
        assert_attention_close(result, *call.qkv, gradients=gradients, dout=call.dout[0])
    with pytest.raises(ValueError, match=r"^dlse: got shape \(3, 40\)"):
        assert_attention_close(result, *call.qkv, dlse=result.lse[0])
    with pytest.raises(TypeError, match=r"^actual: got a tuple of 3, expected out, or a pair"):
        assert_attention_close((*result, 0), *call.qkv)
    with pytest.raises(TypeError, match=r"^actual: got dtype complex64"):
        assert_attention_close(result.out + np.complex64(1j), *call.qkv)
    of_sink = cuflash.Gradients(dsink=np.zeros(3))
    with pytest.raises(ValueError, match=r"^gradients: got a gradient of sink, which"):
        assert_attention_close(result, *call.qkv, gradients=of_sink, dout=call.dout)
    with pytest.raises(AssertionError, match=r"^actual: got shape \(40, 6\)"):
        assert_attention_close(result.out[0, 0], *call.qkv)
    squared = cuflash.ScoreMod(
        "score * score", grad="2 * score", host=lambda s, *_: s * s, host_grad=lambda s, *_: 2 * s
    )
    with pytest.raises(NotImplementedError, match="score_mod"):
        assert_attention_close(result, *call.qkv, score_mod=squared)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: calls(dtypes=("f4",)), "dtypes: got 'f4', expected .* 'float32'"),
        (lambda: calls(dtypes="float32"), r"dtypes: got 'float32', .*; write \('float32',\)"),
        (lambda: calls(options=("casual",)), "options: got 'casual', expected .*'causal'"),
        (lambda: calls(option_sets=[("mask", "biass")]), "option_sets: got 'biass'"),
        (lambda: calls(families=("flat",)), "families: got 'flat', expected .*'uniform'"),
        (lambda: calls(gradients=("mask",)), "gradients: got 'mask', expected .*'bias'"),
        (lambda: options((4, 2), (4, 2), names=("casual",)), "names: got 'casual'"),
        (lambda: options((4, 2), (4, 2), dtype="f4"), "dtype: got 'f4'"),
        (lambda: arrays(*SHAPES, families=("flat",)), "families: got 'flat'"),
        (lambda: arrays(*SHAPES, families=()), r"families: got \(\), expected at least one"),
        (lambda: arrays((5,), (7, 8), (7, 8)), r"q: got \(5,\), expected a tuple of at least two"),
        (lambda: arrays((2, 5, 0), (2, 7, 0), (2, 7, 3)), "q: got .*a head_dim of at least 1"),
        (lambda: arrays((2, 5, 8), (3, 7, 8), (7, 8)), "q, k, v: got .*batch axes that broadcast"),
        (lambda: arrays(*SHAPES, xp="cupy"), "xp: got 'cupy', expected the module numpy or cupy"),
        (lambda: options((4, 2), (4, 2), names=None), "names: got None"),
        (lambda: calls(seqlens=64), "seqlens: got 64, expected a tuple of values to draw"),
        (lambda: calls(seqlens=()), r"seqlens: got \(\), expected at least one"),
        (lambda: calls(head_dims=(0,)), "head_dims: got 0, expected ints from 1 to"),
        (lambda: calls(values_dims=(2.0,)), "values_dims: got 2.0, expected ints from 0 to"),
        (lambda: calls(group_sizes=(2**70,)), "group_sizes: got 1180591620717411303424, expected"),
        (lambda: calls(batches=(2, 3)), "batches: got 2, expected shapes of batches, tuples of"),
        (lambda: calls(batches=[(-1,)]), r"batches: got \(-1,\)"),
        (lambda: calls(option_sets=iter([()])), "option_sets: got <list_iterator"),
        (lambda: calls(dtypes=(["float32"],)), r"dtypes: got \['float32'\], expected a tuple of"),
        (lambda: calls(broadcast="no"), "broadcast: got 'no', expected True or False"),
        (lambda: calls(mixed_dtypes=None), "mixed_dtypes: got None, expected True or False"),
    ],
)
def test_names_that_could_not_be_drawn_are_refused(strategy, message):
    """A name that could not be drawn is refused, or a test of a misspelt option would pass."""
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        find(strategy(), lambda _: True)


@pytest.mark.gpu
def test_arrays_of_cupy():
    import cupy

    call = make_call("normal", 0, "float16", *SHAPES).to(cupy)
    check(call, *backward(call))
    assert type(call.to(np).q) is np.ndarray


@given(arrays((2, 5, 8), (1, 7, 8), (7, 4), dtypes=("float16",), families=("one_hot",)))
def test_drawn_arrays(qkv):
    assert [a.shape for a in qkv] == [(2, 5, 8), (1, 7, 8), (7, 4)]
    assert {a.dtype for a in qkv} == {np.dtype(np.float16)}


@given(options((2, 3, 5, 8), (2, 3, 7, 8)), st.data())
def test_drawn_options_fit(drawn, data):
    q, k, v = data.draw(arrays((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), dtypes=("float32",)))
    assert_attention_close(cuflash.attention(q, k, v, options=drawn), q, k, v, options=drawn)


@given(calls(options=("causal", "sink"), option_sets=[("causal", "mask")], batches=[(2,)]))
def test_only_what_is_named_is_drawn(call):
    assert set(call.options) <= {"causal", "enable_gqa"}
    assert "causal" in call.options
    assert call.wrt == ("q", "k", "v")


@given(options((2, 3, 5, 8), (2, 3, 7, 8), names=("causal", "mask")))
def test_only_options_that_are_named_are_drawn(drawn):
    assert drawn == cuflash.Options(causal=drawn.causal, mask=drawn.mask)


@given(
    calls(options=(), broadcast=False, dtypes=("float16", "bfloat16")),
    calls(options=(), mixed_dtypes=False),
)
def test_what_is_forbidden_is_not_drawn(whole, of_one_dtype):
    assert whole.k.shape[:-2] == whole.v.shape[:-2]
    assert whole.q.shape[:-3] == whole.k.shape[:-3]
    assert len(whole.q.shape) == len(whole.k.shape)
    assert not {DTYPES[0], DTYPES[1]} <= {a.dtype.type for a in whole.qkv}
    assert len({a.dtype for a in of_one_dtype.qkv}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_arrays_is_drawn(dtype):
    assert find(arrays(*SHAPES), lambda qkv: qkv[0].dtype == dtype)[2].dtype == dtype


def has(name: str, holds: Any = lambda _: True) -> Any:
    """Return whether a call has an option for which ``holds`` is true."""
    return lambda call: name in call.options and bool(holds(call.options[name]))


def core_of(name: str, rows: bool, keys: bool) -> Any:
    """Return whether an option has a core of all or one of the rows, and all or one of the keys."""

    def holds(call: Call) -> bool:
        full = (call.q.shape[-2], call.k.shape[-2])
        own = (full[0] if rows else 1, full[1] if keys else 1)
        return name in call.options and min(full) > 1 and call.options[name].shape[-2:] == own

    return holds


def of_all_rows(call: Call) -> bool:
    """Return whether q_lengths is an array with a length of all rows."""
    lengths = call.options.get("q_lengths")
    return isinstance(lengths, np.ndarray) and 0 < lengths.max(initial=0) == call.q.shape[-2]


CORES = [(rows, keys) for rows in (True, False) for keys in (True, False)]
COUNTS = ("offset", "q_lengths", "kv_lengths")
#: Kinds of calls that a strategy of all calls must draw.
DRAWN: dict[str, Any] = {
    **{f"family {name}": lambda c, n=name: c.origin.startswith(f"{n},") for name in OF_EVERY_DTYPE},
    **{str(np.dtype(t)): lambda c, t=t: c.dtype == t for t in DTYPES},
    **{f"gradient of {n}": lambda c, n=n: n in c.wrt for n in WITH_GRADIENT},
    **{f"{n} {core}": core_of(n, *core) for n in ("bias", "mask") for core in CORES},
    **{f"number {n}": has(n, lambda x: isinstance(x, int)) for n in COUNTS},
    **{f"numbers {n}": has(n, lambda x: np.unique(x).size > 1) for n in COUNTS},
    **{f"{n} in another dtype": lambda c, n=n: n in c.options and c.options[n].dtype != np.float32
       for n in ("bias", "alibi_slopes", "sink")},
    "dtypes of their own": lambda c: len({a.dtype for a in c.qkv}) > 1,
    "grouped heads": lambda c: c.group_size > 1,
    "an axis missing": lambda c: c.k.ndim < len(c.batch) + 2,
    "an axis of one": lambda c: c.group_size == 1 and any(
        n == 1 < m for n, m in zip(c.v.shape[-3::-1], c.batch[::-1], strict=False)
    ),
    "no queries": lambda c: c.q.shape[-2] == 0,
    "no keys": lambda c: c.k.shape[-2] == 0,
    "no values": lambda c: c.v.shape[-1] == 0,
    "no entries": lambda c: 0 in c.batch,
    "dlse": lambda c: c.dlse is not None and c.dlse.size,
    "no dlse": lambda c: c.dlse is None,
    "causal": has("causal", lambda x: x is True),
    "top left": has("causal", lambda x: x == "top_left"),
    "offset below 0": has("offset", lambda x: np.min(x, initial=0) < 0),
    "window without a side": has("window", lambda x: (x[0] is None) != (x[1] is None)),
    "window of one key": has("window", lambda x: x == (0, 0)),
    "no length": lambda c: (
        c.k.shape[-2] > 0 == np.min(c.options.get("kv_lengths", 1), initial=1)
    ),
    "lengths of all rows": of_all_rows,
    "hidden by a bias": has("bias", lambda x: np.isneginf(x).any()),
    "negative scale": has("scale", lambda x: x < 0),
    "softcap": has("softcap"),
    "several segments": has("segment_ids", lambda x: all(np.unique(i).size > 1 for i in x)),
    "all dropped": has("dropout", lambda x: x == 1),
    "some dropped": has("dropout", lambda x: 0 < x < 1),
    "sink": has("sink"),
}  # fmt: skip


def test_every_kind_of_call_is_drawn():
    """Every kind of call is drawn, as no test would have the kinds that are not."""
    missing = dict(DRAWN)

    def all_reached(call: Call) -> bool:
        for name in [name for name, holds in missing.items() if holds(call)]:
            del missing[name]
        return not missing

    generated = settings(max_examples=600, derandomize=True, database=None, phases=[Phase.generate])
    with contextlib.suppress(NoSuchExample):
        find(calls(gradients=WITH_GRADIENT), all_reached, settings=generated)
    assert not missing


def test_what_would_test_nothing_raises():
    with pytest.raises(ValueError, match="family: got 'nope', expected one of uniform, "):
        make_call("nope", 0, "float32", *SHAPES)
    for wrong, message in (
        ({"family": ["normal"]}, r"family: got \['normal'\]"),
        ({"seed": None}, "seed: got None, expected an int from 0"),
        ({"dtype": "f3"}, "dtype: got 'f3', expected a floating dtype, or a tuple of three"),
        ({"dtype": int}, "dtype: got int64, expected a floating dtype"),
        ({"dtype": ("float32", "float32")}, "dtype: got .*, expected a floating dtype"),
        ({"options": ("causal",)}, "options: got tuple, expected a mapping, the keywords of"),
    ):
        given = {"family": "normal", "seed": 0, "dtype": "float32"} | wrong
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            make_call(**given, **dict(zip("qkv", SHAPES, strict=True)))
    call = make_call("normal", 0, "float32", *SHAPES)
    out = cuflash.attention(call.q, call.k, call.v)
    with pytest.raises(ValueError, match="gradients: got no gradient"):
        assert_attention_close(
            out, call.q, call.k, call.v, gradients=cuflash.Gradients(), dout=call.dout
        )


def test_calls_with_one_seed_are_one():
    first, again = (make_call("uniform", 7, "bfloat16", *SHAPES) for _ in range(2))
    np.testing.assert_array_equal(first.q, again.q)
    assert (make_call("uniform", 8, "bfloat16", *SHAPES).q != first.q).any()
    assert first.lse_dtype == np.float32
    mixed = make_call("uniform", 7, (np.float16, np.float32, np.float16), *SHAPES)
    assert mixed.dtype == mixed.dout.dtype == np.float32
    assert make_call("uniform", 7, "float64", *SHAPES).lse_dtype == np.float64
    assert repr(first) == (
        "Call(q=bfloat16[2, 3, 40, 8], k=bfloat16[2, 3, 48, 8], v=bfloat16[2, 3, 48, 6], "
        "dout=bfloat16[2, 3, 40, 6], origin='uniform, seed 7')"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_finite_and_of_their_shapes(family):
    call = make_call(family, 0, "float32", *SHAPES)
    assert [a.shape for a in (*call.qkv, call.dout)] == [*SHAPES, (2, 3, 40, 6)]
    assert all(np.isfinite(a).all() for a in call.qkv)


def spread(call: Call) -> list[float]:
    return [float(a.std()) for a in call.qkv]


def scores(call: Call) -> np.ndarray:
    return call.q @ call.k.swapaxes(-1, -2) / np.sqrt(call.q.shape[-1])


def between(low: float, high: float, *, dout: bool) -> Any:
    def holds(call: Call) -> bool:
        arrays = call.qkv + (call.dout,) * dout
        return all(low <= a.min() < a.max() < high for a in arrays)

    return holds


def near(logit: float) -> Any:
    return lambda call: abs(np.median(scores(call)) / logit - 1) < 0.1 and spread(call)[2] > 0.9


#: What the documentation says of each family.
CLAIMS: dict[str, Any] = {
    "uniform": between(0, 1, dout=False),
    "normal": lambda c: np.allclose(spread(c), 1, atol=0.1),
    "normal_times_3": lambda c: np.allclose(spread(c), 3, atol=0.3),
    "one_hot": lambda c: np.median(cuflash.reference.weights(c.q, c.k, rows=[0]).max(-1)) > 0.99,
    "constant_rows": lambda c: np.ptp(scores(c), -1).max() < 1e-12 < np.ptp(c.v, -2).min(),
    "sparse_integers": lambda c: all(
        set(np.unique(a)) == {-2, -1, 0, 1, 2} and 0.8 < (a == 0).mean() < 0.9 for a in c.qkv
    ),
    "outliers": lambda c: all(2e-4 < (abs(a) > 6).mean() < 2e-3 for a in c.qkv),
    "lse_minus_120": near(-120),
    "lse_minus_60000": near(-60000),
    "lse_plus_200": near(200),
    "one_sign": between(0, 1, dout=True),
    "one_sign_near_1": between(1, 1.1, dout=True),
    "one_sign_near_100": between(100, 101, dout=True),
    "one_sign_small": between(0, 1e-3, dout=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_what_they_are_said_to_be(family):
    call = make_call(family, 0, "float64", (3, 200, 64), (3, 300, 64), (3, 300, 64))
    assert CLAIMS[family](call)
    assert (call.dout.min() < -1 and call.dout.max() > 1) or family.startswith("one_sign")


PROGRAM = """
import sys
import cuflash
assert not {"hypothesis", "cuflash.testing"} & set(sys.modules)
sys.modules["hypothesis"] = None
from cuflash.testing import FAMILIES, assert_attention_close, make_call
call = make_call("normal", 0, "float32", (4, 8), (6, 8), (6, 8))
assert_attention_close(cuflash.attention(*call.qkv), *call.qkv)
try:
    from cuflash.testing import calls
except ImportError as error:
    print(error)
"""


def test_hypothesis_is_needed_for_strategies_alone():
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == f"cuflash.testing.calls: needs Hypothesis; {pip_install('testing')}\n"


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'cuflash\.testing' has no attribute 'cals'"):
        cuflash.testing.cals  # noqa: B018
