"""Is logsumexp attention without values, and its gradient that of the logarithm of a sum?

The truth is the budget of a call whose values have no features. Closed forms and finite differences
are compared, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import cuflash
from cuflash import reference
from cuflash.testing._budget import Budget
from support import derivatives, memory
from support.problems import (
    DTYPES,
    FEATURE_FIRST,
    FIELDS,
    SEQUENCE_OUTSIDE_HEADS,
    Call,
    calls,
    limits_of,
)

pytestmark = pytest.mark.usefixtures("small_host_tiles")


@st.composite
def logsumexp_calls(draw: st.DrawFn, xp: ModuleType = np, **limits: Any) -> Call:
    """Draw a call without values: its batch is that of q and k, and dv is not in its wrt.

    Options without batch axes broadcast, as in attention.
    """
    of_module = replace(limits_of(xp), values_dims=(0,))
    call = draw(calls(of_module, gradients=True, **limits))
    call = Call(
        call.q, call.k, call.k[..., :0], call.dout, options=call.options,
        wrt=tuple(name for name in call.wrt if name != "v"), origin=call.origin,
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape = (*call.batch, call.q.shape[-2])
    dout = np.zeros((*shape, 0), call.dtype)
    return call.but(dout=dout, dlse=rng.standard_normal(shape).astype(call.lse_dtype))


def fits(call: Call) -> bool:
    """Return whether every option broadcasts to the batch of q and k alone."""
    cores = {"bias": 2, "mask": 2, "segment_ids_q": 1, "segment_ids_k": 1}
    shapes = (a.shape[: a.ndim - cores.get(n, 0)] for n, a in call.option_arrays.items())
    try:
        return np.broadcast_shapes(call.batch, *shapes) == call.batch
    except ValueError:
        return False


def on(xp: ModuleType, value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
        return tuple(on(xp, array) for array in value)
    return memory.to_device(xp, value) if isinstance(value, np.ndarray) else value


def gradients_of(call: Call, lse: Any, xp: ModuleType = np) -> dict[str, np.ndarray]:
    """Return the gradients by input name, after checking their shapes and dtypes."""
    options = {name: on(xp, value) for name, value in call.options.items()}
    found = cuflash.logsumexp_backward(
        *(on(xp, a) for a in (call.dlse, call.q, call.k)), lse, wrt=call.wrt, **options
    )
    for name, field in FIELDS.items():
        gradient = getattr(found, field)
        assert (gradient is not None) == (name in call.wrt)
        if gradient is not None:
            own = call.array(name)
            assert (gradient.dtype, gradient.shape) == (own.dtype, own.shape)
    return {name: memory.to_numpy(getattr(found, FIELDS[name])) for name in call.wrt}


@given(data=st.data())
def test_drawn_problem(xp: ModuleType, data: st.DataObject) -> None:
    call = data.draw(logsumexp_calls(xp).filter(fits))
    options = {name: on(xp, value) for name, value in call.options.items()}
    lse = cuflash.logsumexp(on(xp, call.q), on(xp, call.k), **options)
    assert lse.dtype == call.lse_dtype
    budget = Budget(call)
    budget.check_forward(np.zeros_like(call.dout), memory.to_numpy(lse))
    budget.check_backward(gradients_of(call, lse, xp))


@given(call=logsumexp_calls().filter(fits), data=st.data())
def test_values_make_no_difference(call: Call, data: st.DataObject) -> None:
    """lse and gradients have the bits that attention has with any values and any dropout."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((*call.k.shape[:-1], data.draw(st.sampled_from((1, 8)))))
    values = values.astype(call.dtype)
    result = cuflash.attention(call.q, call.k, values, return_lse=True, **call.options)
    assert result.lse.tobytes() == cuflash.logsumexp(call.q, call.k, **call.options).tobytes()
    dropped = {**call.options, "dropout": 0.7, "seed": 3}
    assert result.lse.tobytes() == cuflash.logsumexp(call.q, call.k, **dropped).tobytes()
    lse = result.lse
    plain, other = (
        gradients_of(call.but(options=options), lse) for options in (call.options, dropped)
    )
    for name, gradient in plain.items():
        assert gradient.tobytes() == other[name].tobytes(), name


def test_results_are_written_where_they_are_wanted() -> None:
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 3, 21, 5)), rng.standard_normal((3, 33, 5))
    expected = cuflash.logsumexp(q, k, causal=True)
    lse = np.full((2, 3, 42), np.nan)[..., ::2]
    assert cuflash.logsumexp(q, k, causal=True, out=lse) is lse
    np.testing.assert_array_equal(lse, expected)
    grads = cuflash.Gradients(dq=np.full(q.shape, np.nan), dk=np.full(k.shape, np.nan))
    found = cuflash.logsumexp_backward(lse, q, k, lse, causal=True, grads_out=grads)
    assert found.dq is grads.dq
    assert found.dk is grads.dk
    wanted = cuflash.logsumexp_backward(lse, q, k, lse, causal=True)
    np.testing.assert_array_equal(grads.dq, wanted.dq)
    np.testing.assert_array_equal(grads.dk, wanted.dk)
    with pytest.raises(ValueError, match=r"lse: got .*shape"):
        cuflash.logsumexp(q, k, out=np.empty((2, 3, 20)))


ORDERS = (FEATURE_FIRST[0], SEQUENCE_OUTSIDE_HEADS[0])


@pytest.mark.parametrize("own", [*itertools.product(ORDERS, ORDERS)])
@pytest.mark.parametrize("pairs", [2, 4])
def test_axes(own: tuple[tuple[int, int], tuple[int, int]], pairs: int) -> None:
    """Two axes pairs suffice, and other axes orders give views of the canonical results."""
    rng = np.random.default_rng(2)
    canonical = rng.standard_normal((2, 4, 21, 5)), rng.standard_normal((2, 2, 33, 5))
    options = {"enable_gqa": True, "causal": True, "kv_lengths": np.array([[33], [20]])}
    dlse = rng.standard_normal((2, 4, 21))
    expected = cuflash.logsumexp(*canonical, **options)
    q, k = (np.moveaxis(a, (-2, -1), pair) for a, pair in zip(canonical, own, strict=True))
    axes = [*own, (-2, -1), (-2, -1)][:pairs]
    lse = cuflash.logsumexp(q, k, axes=axes, **options)
    np.testing.assert_allclose(lse, expected, rtol=1e-14)
    np.testing.assert_allclose(reference.logsumexp(q, k, axes=axes, **options), lse, rtol=1e-14)
    plain = cuflash.logsumexp_backward(dlse, *canonical, expected, **options)
    moved = cuflash.logsumexp_backward(dlse, q, k, lse, axes=tuple(axes), **options)
    other = reference.logsumexp_backward(dlse, q, k, axes=axes, **options)
    for name, pair in zip(("dq", "dk"), own, strict=True):
        back = np.moveaxis(getattr(moved, name), pair, (-2, -1))
        np.testing.assert_allclose(back, getattr(plain, name), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(
            getattr(other, name), getattr(moved, name), rtol=1e-12, atol=1e-14
        )


@given(call=logsumexp_calls(families=("normal", "uniform", "sparse_integers")).filter(fits))
def test_gradients_are_derivatives(call: Call) -> None:
    """Gradients of float64 agree with differences along random directions."""
    call = call.but(
        q=call.q.astype(np.float64), k=call.k.astype(np.float64), v=call.v.astype(np.float64),
        dlse=call.dlse.astype(np.float64), dout=call.dout.astype(np.float64),
    )  # fmt: skip
    arrays = {name: np.asarray(call.array(name), np.float64) for name in ("q", "k", *call.wrt)}
    arrays["scale"] = np.asarray(call.options.get("scale", call.q.shape[-1] ** -0.5))
    call = call.with_options(
        **{n: a for n, a in arrays.items() if n in call.options and n != "scale"}
    )
    call = call.with_options(scale=float(arrays["scale"]))
    gradients = gradients_of(call, cuflash.logsumexp(call.q, call.k, **call.options))

    def objective(name: str) -> Callable[[np.ndarray], float]:
        def value(x: np.ndarray) -> float:
            given_arrays = {**arrays, name: np.asarray(x)}
            q, k = (given_arrays.pop(n) for n in ("q", "k"))
            given_arrays["scale"] = float(given_arrays["scale"])
            lse = cuflash.logsumexp(q, k, **{**call.options, **given_arrays})
            return float((call.dlse * np.where(np.isneginf(lse), 0, lse)).sum())

        return value

    rng = np.random.default_rng(1)
    for name in call.wrt:
        direction = np.asarray(rng.standard_normal(arrays[name].shape))
        direction /= max(float(np.linalg.norm(direction)), 1.0)
        expected = derivatives.along(objective(name), arrays[name], direction)
        got = float((gradients[name] * direction).sum())
        bound = 1e-7 * max(1.0, float(np.linalg.norm(gradients[name])))
        assert abs(got - expected) <= bound, f"d{name}: {got} against {expected}"


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_count_the_keys(dtype: str) -> None:
    """With q = 0, lse is the logarithm of the number of visible keys."""
    q, k = np.zeros((20, 3), DTYPES[dtype]), np.ones((37, 3), DTYPES[dtype])
    lse = cuflash.logsumexp(q, k, causal=True)
    exact = np.log(np.arange(20) + 18.0)
    np.testing.assert_allclose(lse, exact, rtol=4 * np.finfo(lse.dtype).eps)


def test_the_gradient_is_attention_over_the_keys() -> None:
    """With dlse = 1, dq = scale * attention(q, k, k)."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 3, 40, 6)), rng.standard_normal((2, 3, 50, 6))
    options = {
        "causal": True,
        "scale": 0.3,
        "bias": rng.standard_normal((40, 50)),
        "alibi_slopes": rng.random(3),
        "kv_lengths": np.array([[50], [31]]),
    }
    lse = cuflash.logsumexp(q, k, **options)
    got = cuflash.logsumexp_backward(np.ones((2, 3, 40)), q, k, lse, **options)
    np.testing.assert_allclose(
        got.dq, 0.3 * cuflash.attention(q, k, k, **options), rtol=1e-12, atol=1e-14
    )


def test_a_shift_of_the_scores_comes_out() -> None:
    """A bias of c in each row adds c to lse, and its gradient is dlse itself."""
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((20, 4)), rng.standard_normal((33, 4))
    shift = rng.standard_normal((20, 1))
    lse = cuflash.logsumexp(q, k, bias=shift)
    np.testing.assert_allclose(lse, cuflash.logsumexp(q, k) + shift[:, 0], rtol=1e-13, atol=1e-14)
    dlse = rng.standard_normal(20)
    dbias = cuflash.logsumexp_backward(dlse, q, k, lse, wrt=("bias",), bias=shift).dbias
    np.testing.assert_allclose(dbias[:, 0], dlse, rtol=1e-12)


def test_a_sink_is_one_more_score() -> None:
    """A sink adds one more score; where it is alone, lse = sink and dsink = dlse."""
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 9, 4)), rng.standard_normal((2, 5, 4))
    sink, dlse = np.array([1.5, -2.0]), rng.standard_normal((2, 9))
    plain, full = cuflash.logsumexp(q, k), cuflash.logsumexp(q, k, sink=sink)
    np.testing.assert_allclose(full, np.logaddexp(plain, sink[:, None]), rtol=1e-14)
    alone = cuflash.logsumexp(q, k, sink=sink, kv_lengths=0)
    np.testing.assert_array_equal(alone, np.broadcast_to(sink[:, None], (2, 9)))
    got = cuflash.logsumexp_backward(
        dlse, q, k, alone, wrt=("q", "k", "sink"), sink=sink, kv_lengths=0
    )
    assert not got.dq.any()
    assert not got.dk.any()
    np.testing.assert_allclose(got.dsink, dlse.sum(-1), rtol=1e-14)


# Nothing visible, and empty arrays.


def test_cotangents_of_rows_that_see_nothing_are_not_read() -> None:
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((20, 4)), rng.standard_normal((12, 4))
    options = {"causal": True, "window": (3, 0)}  # the first 8 queries come before all keys
    lse = cuflash.logsumexp(q, k, **options)
    hidden = np.isneginf(lse)
    np.testing.assert_array_equal(hidden, np.arange(20) < 8)
    dlse = rng.standard_normal(20)
    expected = cuflash.logsumexp_backward(dlse, q, k, lse, **options)
    dlse[hidden] = np.nan
    got = cuflash.logsumexp_backward(dlse, q, k, lse, **options)
    assert got.dq.tobytes() == expected.dq.tobytes()
    assert got.dk.tobytes() == expected.dk.tobytes()
    assert not got.dq[hidden].any()


@pytest.mark.parametrize("shapes", [((0, 3), (5, 3)), ((4, 3), (0, 3)), ((0, 2, 4, 3), (2, 5, 3))])
def test_empty_extents(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k = (np.ones(shape, np.float32) for shape in shapes)
    lse = cuflash.logsumexp(q, k)
    assert lse.shape == q.shape[:-1]
    assert np.isneginf(lse).all()
    got = cuflash.logsumexp_backward(np.ones_like(lse), q, k, lse)
    assert got.dq.shape == q.shape
    assert got.dk.shape == k.shape
    assert not got.dq.any()
    assert not got.dk.any()


# Wrong calls.


def wrong_calls() -> dict[str, tuple[Callable[[], Any], type[Exception], str, str]]:
    """Return name -> call, exception, argument and words of the message."""
    q, k = np.ones((2, 4, 3)), np.ones((2, 5, 3))
    lse, dlse = cuflash.logsumexp(q, k), np.ones((2, 4))
    backward = cuflash.logsumexp_backward
    return {
        "no features": (lambda: cuflash.logsumexp(q[..., :0], k[..., :0]), ValueError, "q", "0"),
        "other features": (lambda: cuflash.logsumexp(q, k[..., :2]), ValueError, "k", "3"),
        "integers": (lambda: cuflash.logsumexp(q, k.astype(int)), TypeError, "k", "int64"),
        "lists": (lambda: cuflash.logsumexp(q, [[1.0]]), TypeError, "k", "list"),
        "halves of two kinds": (
            lambda: cuflash.logsumexp(q.astype(np.float16), k.astype(bfloat16)),
            TypeError, "k", "bfloat16",
        ),
        "unknown option": (
            lambda: cuflash.logsumexp(q, k, casual=True), TypeError, "casual", "causal"
        ),
        "three pairs": (
            lambda: cuflash.logsumexp(q, k, axes=[(-2, -1)] * 3), ValueError, "axes", "pairs"
        ),
        "values": (
            lambda: backward(dlse, q, k, lse, wrt=("q", "v")), ValueError, "wrt", "has no v"
        ),
        "no bias": (
            lambda: backward(dlse, q, k, lse, wrt=("bias",)), ValueError, "wrt", "has no bias"
        ),
        "no tuple": (lambda: backward(dlse, q, k, lse, wrt=None), TypeError, "wrt", "None"),
        "dlse missing": (lambda: backward(None, q, k, lse), TypeError, "dlse", "None"),
        "dlse of one row": (
            lambda: backward(dlse[:, :1], q, k, lse), ValueError, "dlse", r"\(2, 4\)"
        ),
        "integer dlse": (
            lambda: backward(dlse.astype(int), q, k, lse), TypeError, "dlse", "int64"
        ),
        "lse of other shape": (
            lambda: backward(dlse, q, k, lse[0]), ValueError, "lse", r"\(2, 4\)"
        ),
        "lse missing": (lambda: backward(dlse, q, k, None), TypeError, "lse", "None"),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_call(name: str) -> None:
    call, kind, argument, words = wrong_calls()[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert argument in str(caught.value)
