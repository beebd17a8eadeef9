"""Is attention, forward and backward, what the definition says, and does it keep its promises?

Every number is checked against the one oracle, `cuflash.testing`. Every call runs on poisoned
memory.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash.testing._budget import Budget
from cuflash.testing._families import OF_EVERY_DTYPE
from cuflash.testing._strategies import HALVES
from support import memory, problems
from support.problems import (
    DTYPES,
    Call,
    Results,
    calls,
    limits_of,
    make_call,
    run,
)

pytestmark = pytest.mark.usefixtures("small_host_tiles")


def assert_within_budget(call: Call, result: Results) -> None:
    budget = Budget(call)
    budget.check_forward(result.out, result.lse)
    if result.gradients:
        budget.check_backward(result.gradients, given=(result.out, result.lse))


def assert_same_bits(a: Results, b: Results) -> None:
    pairs = {"out": (a.out, b.out), "lse": (a.lse, b.lse)}
    pairs |= {f"d{name}": (a.gradients[name], b.gradients[name]) for name in a.gradients}
    for name, (x, y) in pairs.items():
        assert x.tobytes() == y.tobytes(), f"{name} differs in its bits"


def dtypes_of(xp: ModuleType, dtype: str) -> np.dtype:
    if dtype not in limits_of(xp).dtypes:
        pytest.skip(f"{xp.__name__} has no {dtype} kernels")
    return DTYPES[dtype]


def some_bias(rows: int, keys: int) -> np.ndarray:
    bias = np.random.default_rng(5).standard_normal((rows, keys)).astype(np.float32)
    bias[::7, ::3] = -np.inf
    return bias


SCORE_OPTIONS = {
    "full": lambda _rows, _keys: {},
    "causal": lambda _rows, _keys: {"causal": True},
    "window": lambda _rows, _keys: {"window": (20, 5)},
    "softcap": lambda _rows, _keys: {"softcap": 15.0},
    "everything": lambda rows, keys: {
        "causal": True,
        "offset": 3,
        "window": (50, None),
        "scale": 0.2,
        "softcap": 10.0,
        "bias": some_bias(rows, keys),
        "mask": np.random.default_rng(6).random((2, 1, rows, keys)) < 0.8,
        "q_lengths": np.array([[rows], [rows - 1]]),
        "kv_lengths": np.array([[keys], [max(keys - 3, 0)]]),
    },
}


# Whole problems.


@given(data=st.data())
def test_drawn_problem(xp: ModuleType, data: st.DataObject) -> None:
    """Any legal call, in any memory layout, is within the budget and writes to no other memory."""
    call = data.draw(calls(limits_of(xp), layouts=True, gradients=True))
    first = run(xp, call, poison="nan", with_out=True)
    assert_within_budget(call, first)
    assert_same_bits(first, run(xp, call, poison="canary", with_out=True))


@given(data=st.data())
def test_drawn_problem_allocates_its_results(xp: ModuleType, data: st.DataObject) -> None:
    call = data.draw(calls(limits_of(xp), layouts=True, gradients=True))
    first = run(xp, call, poison="nan")
    assert_within_budget(call, first)
    assert_same_bits(first, run(xp, call, poison="canary"))


# Families and tails.


@pytest.mark.parametrize("options", SCORE_OPTIONS)
@pytest.mark.parametrize("family", OF_EVERY_DTYPE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_family(xp: ModuleType, dtype: str, family: str, options: str) -> None:
    """Every family is within the budget in shapes with enough rows for the rules on samples."""
    kind = dtypes_of(xp, dtype)
    rows, keys, head_dim = (33, 49, 16) if dtype == "float64" else (65, 129, 64)
    call = make_call(
        family, 3, kind, (2, 4, rows, head_dim), (2, 2, keys, head_dim), (1, 2, keys, head_dim),
        options={"enable_gqa": True, **SCORE_OPTIONS[options](rows, keys)},
    )  # fmt: skip
    dlse = np.random.default_rng(7).standard_normal((2, 4, rows)).astype(call.lse_dtype)
    call = call.but(dlse=dlse)
    assert_within_budget(call, run(xp, call))
    hot = problems.probe(call)
    Budget(hot).check_probe(run(xp, hot, backward=False).out)


@pytest.mark.parametrize("options", ["full", "causal", "everything"])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65])
def test_tails(xp: ModuleType, rows: int, options: str) -> None:
    """Every partial tile is within the budget, where exp would overflow for a padded score of 0."""
    dtype = np.dtype(np.float16)
    for keys in (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 192):
        extra = SCORE_OPTIONS[options](rows, keys)
        shapes = (2, 1, rows, 40), (2, 1, keys, 40), (2, 1, keys, 40)
        call = make_call("lse_minus_120", keys, dtype, *shapes, options=extra)
        assert_within_budget(call, run(xp, call))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("head_dim_v", [1, 8, 33, 64, 256])
@pytest.mark.parametrize("head_dim", [1, 2, 8, 31, 64, 80, 129, 192, 256])
def test_head_dims(xp: ModuleType, head_dim: int, head_dim_v: int, dtype: type) -> None:
    call = make_call(
        "normal", 0, dtype, (2, 33, head_dim), (2, 47, head_dim), (2, 47, head_dim_v),
        options={"causal": True},
    )  # fmt: skip
    assert_within_budget(call, run(xp, call))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_visible_key_is_copied(xp: ModuleType, dtype: str) -> None:
    """Where a row sees one key, out is a copy of its value and dv a copy of the row's cotangent.

    They are equal bit for bit where results have 16 bits or weights are exp(s - s). A GPU keeps
    scores in units of log 2. There weight and sum are 1 up to one rounding each, the same for both,
    and their quotient has the rounding of the value and one of its own. lse is rounded in those
    units and once more in its own, so that the gradient's exp(s - lse) is 1 up to two roundings of
    lse and one of itself.
    """
    kind = dtypes_of(xp, dtype)
    shape = (2, 40, 64)
    call = make_call("sparse_integers", 1, kind, shape, shape, shape, options={"window": (0, 0)})
    result = run(xp, call)
    if xp is np or np.dtype(kind).itemsize == 2:
        np.testing.assert_array_equal(result.out, call.v)
        np.testing.assert_array_equal(result.gradients["v"], call.dout)
    else:
        eps = np.finfo(kind).eps
        assert (np.abs(result.out - call.v) <= 4 * eps * np.abs(call.v)).all()
        of_weights = (2 * np.abs(result.lse) + 4) * eps
        off = np.abs(result.gradients["v"] - call.dout)
        assert (off <= of_weights[..., None] * np.abs(call.dout)).all()
    assert_within_budget(call, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_weights_are_exact(xp: ModuleType, dtype: str) -> None:
    """With scale 0 and 64 keys, out is a sum of integers over 64 and exact in every dtype.

    The gradient is exact only after its rounding to 16 bits: exp(-log 64) itself is rounded.
    """
    kind = dtypes_of(xp, dtype)
    call = make_call(
        "sparse_integers", 2, kind, (2, 17, 64), (2, 64, 64), (2, 64, 64), options={"scale": 0.0}
    )
    call = call.but(dout=np.ones_like(call.dout))
    result = run(xp, call)
    exact = call.v.astype(np.float64).sum(-2, keepdims=True) / 64
    np.testing.assert_array_equal(
        result.out.astype(np.float64), np.broadcast_to(exact, result.out.shape)
    )
    assert_within_budget(call, result)
    if call.dtype.itemsize == 2:
        np.testing.assert_array_equal(
            result.gradients["v"].astype(np.float64), np.full(call.v.shape, 17 / 64)
        )
    assert not np.any(result.gradients["q"])
    assert not np.any(result.gradients["k"])


# Nothing is visible.


@pytest.mark.parametrize("keys", [0, 1])
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 0), (0, 3)])
def test_empty_extents(xp: ModuleType, batch: tuple[int, ...], rows: int, keys: int) -> None:
    call = make_call(
        "normal", 0, np.float16, (*batch, rows, 64), (*batch, keys, 64), (*batch, keys, 64)
    )
    result = run(xp, call, with_out=True)
    assert_within_budget(call, result)
    if keys == 0:
        assert np.all(np.isneginf(result.lse))


def test_no_values(xp: ModuleType) -> None:
    """With d_v = 0, out is empty, and lse and the gradients are within the budget."""
    call = make_call("normal", 0, np.float16, (3, 9, 64), (3, 20, 64), (3, 20, 0))
    result = run(xp, call)
    assert result.out.shape == (3, 9, 0)
    assert_within_budget(call, result)
    call = call.but(dlse=np.ones((3, 9), np.float32))
    assert_within_budget(call, run(xp, call))


NOTHING_VISIBLE = {
    "mask": {"mask": np.zeros((1, 1), bool)},
    "bias": {"bias": np.full((1, 1), -np.inf, np.float32)},
    "kv_lengths": {"kv_lengths": 0},
    "q_lengths": {"q_lengths": 0},
    "window before the keys": {"window": (2, 0), "offset": -50},
    "window behind the keys": {"window": (2, 0), "offset": 500},
    "causal": {"causal": True, "offset": -50},
}


@pytest.mark.parametrize("reason", NOTHING_VISIBLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_visible(xp: ModuleType, dtype: str, reason: str) -> None:
    """Where nothing is visible, all results are +0 (never -0), whatever the arrays hold."""
    kind = dtypes_of(xp, dtype)
    call = make_call(
        "normal", 0, kind, (2, 18, 64), (2, 21, 64), (2, 21, 64), options=NOTHING_VISIBLE[reason]
    )
    poisoned = {name: np.full_like(getattr(call, name), np.nan) for name in ("dout", "v")}
    if reason not in ("bias",):
        poisoned |= {name: np.full_like(getattr(call, name), np.nan) for name in ("q", "k")}
    call = call.but(dlse=np.full((2, 18), np.nan, call.lse_dtype), **poisoned)
    result = run(xp, call, with_out=True)
    assert np.all(np.isneginf(result.lse))
    for array in (result.out, *result.gradients.values()):
        assert not np.any(array.view(f"u{array.itemsize}")), "not +0 everywhere"


# NaN and infinity.


def poisoned_twin(call: Call, value: float, hidden_keys: slice, hidden_rows: slice) -> Call:
    changes = {}
    for name, hidden in (("k", hidden_keys), ("v", hidden_keys), ("q", hidden_rows),
                         ("dout", hidden_rows)):  # fmt: skip
        changes[name] = getattr(call, name).copy()
        changes[name][..., hidden, :] = value
    dlse = call.dlse.copy()
    dlse[..., hidden_rows] = value
    return call.but(**changes, dlse=dlse)


HIDING = {
    "lengths": {"q_lengths": 30, "kv_lengths": 50},
    "lengths and causal": {"q_lengths": 30, "kv_lengths": 50, "causal": True},
    "window": {"window": (4, 4), "offset": 15, "q_lengths": 30},
    "mask": {"mask": (np.arange(40) < 30)[:, None] & (np.arange(70) < 50)},
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nobody_sees_has_no_effect(
    xp: ModuleType, dtype: str, hiding: str, value: float
) -> None:
    """What is hidden has no effect: bitwise with lengths and windows, in value with a mask."""
    kind = dtypes_of(xp, dtype)
    call = make_call(
        "normal", 4, kind, (2, 40, 64), (2, 70, 64), (2, 70, 64), options=HIDING[hiding]
    )
    call = call.but(dlse=np.ones((2, 40), call.lse_dtype))
    plain = run(xp, call)
    assert_within_budget(call, plain)
    poisoned = run(xp, poisoned_twin(call, value, slice(50, None), slice(30, None)))
    if hiding == "mask" and xp is not np:  # pair by pair: exact, in another order
        assert_within_budget(call, poisoned)
    else:
        assert_same_bits(plain, poisoned)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("options", ["full", "causal", "window"])
def test_what_some_rows_see_reaches_those_rows_only(
    xp: ModuleType, options: str, where: str, value: float
) -> None:
    """A non-finite element makes exactly the rows that see it non-finite, also within a tile."""
    shape = (2, 50, 64)
    call = make_call(
        "normal", 5, np.float16, shape, shape, shape, options=SCORE_OPTIONS[options](50, 50)
    )
    array = getattr(call, where).copy()
    array[1, 20, 3] = value
    call = call.but(**{where: array})
    assert_within_budget(call, run(xp, call))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_behind_a_bias_of_minus_infinity(xp: ModuleType, value: float) -> None:
    bias = np.zeros((20, 20), np.float32)
    bias[:, 7] = -np.inf
    bias[3, 7] = 0
    call = make_call("normal", 6, np.float16, *[(2, 20, 64)] * 3, options={"bias": bias})
    v = call.v.copy()
    v[0, 7, 1] = value
    call = call.but(v=v)
    assert_within_budget(call, run(xp, call))


def test_a_bias_of_plus_infinity_gives_a_row_of_nan(xp: ModuleType) -> None:
    bias = np.zeros((20, 20), np.float32)
    bias[3, 7] = np.inf
    call = make_call("normal", 6, np.float16, *[(2, 20, 64)] * 3, options={"bias": bias})
    result = run(xp, call)
    assert np.isnan(result.out[:, 3].astype(np.float32)).all()
    assert_within_budget(call, result)


@pytest.mark.parametrize("least", [-6e4, np.finfo(np.float32).min])
def test_a_finite_bias_that_stands_for_a_mask(xp: ModuleType, least: float) -> None:
    """finfo.min hides no key: a row that has no other bias averages over its keys."""
    bias = np.zeros((20, 33), np.float32)
    bias[:, 20:] = least
    bias[5] = least
    call = make_call(
        "normal", 6, np.float16, (2, 20, 64), (2, 33, 64), (2, 33, 64), options={"bias": bias}
    )
    assert_within_budget(call, run(xp, call))


# Types and dtypes of results.


def test_return_types(xp: ModuleType) -> None:
    q, k, v = (memory.to_device(xp, a) for a in np.ones((3, 2, 5, 64), np.float16))
    out = cuflash.attention(q, k, v)
    assert type(out) is xp.ndarray
    assert out.dtype == np.float16
    result = cuflash.attention(q, k, v, return_lse=True)
    assert type(result) is cuflash.AttentionResult
    assert result.lse.dtype == np.float32
    gradients = cuflash.attention_backward(out, q, k, v, *result)
    assert type(gradients) is cuflash.Gradients
    assert gradients.dbias is None
    assert gradients.dscale is None


def test_out_is_returned_and_filled(xp: ModuleType) -> None:
    q, k, v = (memory.to_device(xp, a) for a in np.ones((3, 2, 5, 64), np.float16))
    room = memory.to_device(xp, np.full((2, 5, 64), np.nan, np.float16))
    assert cuflash.attention(q, k, v, out=room) is room
    np.testing.assert_array_equal(memory.to_numpy(room), np.ones((2, 5, 64)))


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_out_of_16_bit_inputs(xp: ModuleType, dtype: str) -> None:
    """A float32 result rounded to 16 bits is the 16-bit result, and the backward takes either."""
    call = make_call("normal", 8, DTYPES[dtype], *[(2, 33, 64)] * 3, options={"causal": True})
    narrow = run(xp, call, with_out=True)
    wide = run(xp, call, with_out=True, out_dtype=np.float32)
    assert wide.out.dtype == np.float32
    np.testing.assert_array_equal(wide.out.astype(call.dtype), narrow.out)
    assert_within_budget(call, wide)


@pytest.mark.parametrize("wrt", [(), ("q",), ("k",), ("v",), ("v", "q"), ("k", "v")])
def test_wrt(xp: ModuleType, wrt: tuple[str, ...]) -> None:
    """Each gradient in wrt has the bits that it has when all gradients are computed."""
    call = make_call("normal", 9, np.float16, *[(2, 33, 64)] * 3, options={"causal": True})
    every = run(xp, call)
    some = run(xp, call.but(wrt=wrt), with_out=True)
    assert set(some.gradients) == set(wrt)
    for name in wrt:
        assert some.gradients[name].tobytes() == every.gradients[name].tobytes()


@pytest.mark.parametrize("shape", [(5, 37), (37, 5)])
@pytest.mark.parametrize(
    ("far", "unbounded"),
    [
        ({"window": (5, sys.maxsize)}, {"window": (5, None)}),
        ({"window": (sys.maxsize, 0)}, {"window": (None, 0)}),
        ({"window": (2**63 - 10, 2**70)}, {}),
        ({"causal": True, "offset": 2**59, "window": (sys.maxsize, None)}, {}),
        ({"offset": -(2**59), "window": (0, sys.maxsize)}, {}),
    ],
)
def test_a_window_wider_than_any_array_is_none(
    xp: ModuleType, shape: tuple[int, int], far: dict, unbounded: dict
) -> None:
    rows, keys = shape
    seen = reference.visible(cuflash.Options(**unbounded), (), rows, keys)
    np.testing.assert_array_equal(reference.visible(cuflash.Options(**far), (), rows, keys), seen)
    for mask in ({}, {"mask": np.ones(shape, bool)}):
        operands = (2, rows, 16), (2, keys, 16), (2, keys, 16)
        call = make_call("normal", 9, np.float16, *operands, options=far | mask)
        assert_within_budget(call, run(xp, call))


def test_options_object_equals_keywords(xp: ModuleType) -> None:
    call = make_call("normal", 10, np.float16, *[(2, 33, 64)] * 3)
    q, k, v = (memory.to_device(xp, a) for a in (call.q, call.k, call.v))
    keywords = {"causal": True, "window": (9, None), "softcap": 3.0}
    one = cuflash.attention(q, k, v, options=cuflash.Options(**keywords))
    two = cuflash.attention(q, k, v, **keywords)
    assert memory.to_numpy(one).tobytes() == memory.to_numpy(two).tobytes()


def test_pullback_is_attention_backward(xp: ModuleType) -> None:
    call = make_call("normal", 11, np.float16, *[(2, 33, 64)] * 3, options={"causal": True})
    call = call.but(dlse=np.ones((2, 33), np.float32))
    direct = run(xp, call)
    q, k, v, dout, dlse = (
        memory.to_device(xp, a) for a in (call.q, call.k, call.v, call.dout, call.dlse)
    )
    out, pullback = cuflash.attention_vjp(q, k, v, **call.options)
    gradients = pullback(dout, dlse=dlse)
    assert memory.to_numpy(out).tobytes() == direct.out.tobytes()
    own = {name: memory.to_numpy(getattr(gradients, f"d{name}")) for name in direct.gradients}
    if xp is np:  # the pullback has kept probabilities
        Budget(call).check_backward(own, given=(direct.out, direct.lse))
        return
    for name, gradient in direct.gradients.items():
        assert own[name].tobytes() == gradient.tobytes()


def test_a_pullback_has_every_keyword_of_its_call(monkeypatch) -> None:
    """The pullback receives all keywords of its call, also those that change no result on a CPU."""
    q, dlse = np.ones((4, 8)), np.ones(4)
    call = {"axes": [(-2, -1)] * 4, "precision": "tf32", "deterministic": False}
    # With a softcap, no probabilities are kept.
    _, pullback = cuflash.attention_vjp(q, q, q, softcap=9, **call)
    given: dict[str, object] = {}
    attention = sys.modules["cuflash._api.attention"]
    monkeypatch.setattr(attention, "attention_backward", lambda *_, **rest: given.update(rest))
    pullback(q, dlse=dlse, wrt=("q",))
    expected = call | {"options": cuflash.Options(softcap=9), "wrt": ("q",)}
    assert given.pop("dlse") is dlse
    assert given == expected


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float16", "float32", "float16"), "float32"),
        (("float32", "float32", "bfloat16"), "float32"),
        (("float64", "float32", "float16"), "float64"),
    ],
)
def test_mixed_dtypes_promote(dtypes: tuple[str, str, str], expected: str) -> None:
    """Results are those of inputs converted beforehand; each gradient has its input's dtype."""
    rng = np.random.default_rng(12)
    arrays = [rng.standard_normal((2, 20, 8)).astype(DTYPES[name]) for name in dtypes]
    wide = [a.astype(DTYPES[expected]) for a in arrays]
    out, lse = cuflash.attention(*arrays, return_lse=True)
    assert out.dtype == DTYPES[expected]
    np.testing.assert_array_equal(out, cuflash.attention(*wide))
    mixed = cuflash.attention_backward(out, *arrays, out, lse)
    plain = cuflash.attention_backward(out, *wide, out, lse)
    for name, dtype in zip("qkv", dtypes, strict=True):
        gradient = getattr(mixed, f"d{name}")
        assert gradient.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(gradient, getattr(plain, f"d{name}").astype(DTYPES[dtype]))


def test_bias_of_another_dtype(xp: ModuleType) -> None:
    """The bias is read in its own dtype, which does not change the dtype of the result."""
    for dtype in (np.float16, bfloat16, np.float32, np.float64):
        bias = np.random.default_rng(13).standard_normal((20, 20)).astype(dtype)
        call = make_call("normal", 13, np.float16, *[(2, 20, 64)] * 3, options={"bias": bias})
        assert_within_budget(call, run(xp, call))


def test_tf32_permission_is_harmless_on_the_host() -> None:
    call = make_call("normal", 14, np.float32, *[(2, 20, 64)] * 3)
    plain = cuflash.attention(call.q, call.k, call.v)
    allowed = cuflash.attention(call.q, call.k, call.v, precision="tf32")
    np.testing.assert_array_equal(plain, allowed)


@pytest.mark.gpu
@pytest.mark.not_rehearsed
def test_tf32_is_taken_on_a_gpu() -> None:
    """The error is that of rounding to 11 bits; without TF32 it is a thousandth of that."""
    import cupy

    call = make_call("normal", 14, np.float32, *[(2, 70, 64)] * 3)
    q, k, v = map(cupy.asarray, (call.q, call.k, call.v))
    exact = reference.attention(*(a.astype(np.float64) for a in (call.q, call.k, call.v)))

    def error(precision: str | None) -> float:
        out = cuflash.attention(q, k, v, precision=precision).get()
        return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))

    assert 2.0**-15 < error("tf32") < 2.0**-10
    assert error(None) < 2.0**-20


# Weights.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", SCORE_OPTIONS)
def test_weights(xp: ModuleType, dtype: str, options: str) -> None:
    """Selected rows and columns are the definition's probabilities, exactly 0 where invisible."""
    kind = dtypes_of(xp, dtype)
    rows, keys = 19, 33
    given = {"enable_gqa": True, **SCORE_OPTIONS[options](rows, keys)}
    call = make_call("normal", 15, kind, (2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 8),
                     options=given)  # fmt: skip
    budget = Budget(call)
    bound = budget.p * budget.relative_error + budget.tiny
    on_device = {
        n: memory.to_device(xp, v) if isinstance(v, np.ndarray) else v for n, v in given.items()
    }
    q, k, lse = (
        memory.to_device(xp, a) for a in (call.q, call.k, budget.truth.lse.astype(call.lse_dtype))
    )
    for m, n in (([0, 5, -1], slice(None)), (slice(2, 9), [3, 3, 0]), (slice(None), None)):
        got = memory.to_numpy(cuflash.weights(q, k, lse, rows=m, cols=n, **on_device))
        pick = slice(None) if n is None else n
        exact = reference.weights(call.q, call.k, rows=m, cols=n, **given)
        assert got.dtype == call.lse_dtype
        assert got.shape == exact.shape
        assert np.all(np.abs(got - exact) <= bound[..., m, :][..., pick])
        assert not np.any(got[exact == 0])


@pytest.mark.parametrize("heads", [(0, 2), (0, 0)])
def test_no_query_heads_in_groups(heads: tuple[int, int]) -> None:
    q, k = (np.ones((2, n, length, 8), np.float32) for n, length in zip(heads, (5, 7), strict=True))
    for library in (cuflash, cuflash.reference):
        out, lse = library.attention(q, k, k, enable_gqa=True, return_lse=True)
        assert (out.shape, lse.shape) == ((2, 0, 5, 8), (2, 0, 5))
        gradients = library.attention_backward(out, q, k, k, out, lse, enable_gqa=True)
        assert gradients.dk.shape == k.shape
        assert not gradients.dk.any()
