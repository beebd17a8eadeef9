"""Which laws does attention obey, whatever the numbers?

Each law relates a call to another whose result follows from the first. The oracle checks the second
call against the truth of the first, carried over. On a GPU, where a row's bits depend on neither
its neighbours nor the shape, the results are also compared bit for bit. On NumPy arrays a row's
bits do not depend on its neighbours in the batch (P3, P4), but BLAS changes its order of summation
with the shape of an entry, so that the other laws hold there only within the budget.

P1 to P26 are the numbers of the properties in the project's verification plan. Which weights
dropout keeps depends on the positions of batch entry, query and key, so that laws which move these
are drawn without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from ml_dtypes import finfo

import cuflash
from cuflash import reference
from cuflash._kernels.portable import padded
from cuflash._problem.option_table import of_stages
from cuflash._problem.problem import HALVES
from cuflash._select import hardware
from cuflash.testing._budget import Budget
from support import derivatives, memory
from support.problems import (
    ALL_OPTIONS,
    EVERYWHERE,
    HOST_TILE,
    WITHOUT_DROPOUT,
    WITHOUT_SINK,
    Call,
    calls,
    limits_of,
    make_call,
    packed,
    run,
    unpacked,
)

Move = Callable[[str, np.ndarray], np.ndarray]
EVERYTHING = ("out", "lse", "q", "k", "v")
FORWARD = ("out", "lse")
FULL_BATCHES = ((), (2,), (3,), (2, 3))

pytestmark = pytest.mark.usefixtures("small_host_tiles")


def same(_name: str, array: np.ndarray) -> np.ndarray:
    return array


def assert_follows(
    xp: ModuleType,
    base: Call,
    derived: Call,
    move: Move = same,
    exact: Sequence[str] = (),
    *,
    same_entries: bool = False,
) -> None:
    """Check that the results of ``derived`` are those of ``base``, carried over by ``move``.

    ``move`` maps a result of base, by name ('out', 'lse', or an input for its gradient). ``exact``
    names the results that agree bit for bit where the order of summation is fixed. On NumPy arrays
    it is fixed if the calls have the ``same_entries``.
    """
    source, target = Budget(base), Budget(derived)
    result = run(xp, derived)
    truth = cuflash.AttentionResult(move("out", source.truth.out), move("lse", source.truth.lse))
    target.check_forward(result.out, result.lse, truth=truth)
    gradients = {name: move(name, tensor.truth) for name, tensor in source.gradients.items()}
    target.check_backward(result.gradients, truth=gradients, given=(result.out, result.lse))
    if (xp is np or hasattr(xp, "rehearsed")) and not same_entries:  # support/rehearsal.py
        return
    original = run(xp, base)
    for name in exact:
        was = original.gradients[name] if name in base.wrt else getattr(original, name)
        now = result.gradients[name] if name in base.wrt else getattr(result, name)
        np.testing.assert_array_equal(move(name, was), now, err_msg=name)


def take(array: Any, axis: int, index: np.ndarray | slice, extent: int) -> Any:
    """Return ``array`` indexed along ``axis``, unless it is broadcast there."""
    if not isinstance(array, np.ndarray) or array.ndim < -axis or array.shape[axis] != extent:
        return array
    return array[(..., index, *(slice(None),) * (-axis - 1))]


def option_map(call: Call, change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return options of ``change(name, value)``; segment_ids_q and segment_ids_k are two names."""
    options = {n: change(n, value) for n, value in call.options.items() if n != "segment_ids"}
    if "segment_ids" in call.options:
        ids = zip(("segment_ids_q", "segment_ids_k"), call.options["segment_ids"], strict=True)
        options["segment_ids"] = tuple(change(n, value) for n, value in ids)
    return options


def core_taken(call: Call, axis: int, index: np.ndarray | slice, extent: int) -> dict[str, Any]:
    """Return the options, indexed along their queries (axis -2) or keys (axis -1)."""
    ids = {-2: "segment_ids_q", -1: "segment_ids_k"}[axis]

    def change(name: str, value: Any) -> Any:
        if name == ids:
            return value[..., index]
        return take(value, axis, index, extent) if name in ("bias", "mask") else value

    return option_map(call, change)


# Algebra.


@given(data=st.data())
def test_p1_order_of_keys(xp: ModuleType, data: st.DataObject) -> None:
    base = data.draw(calls(limits_of(xp), options=(*EVERYWHERE, "segment_ids", "sink")))
    keys = base.k.shape[-2]
    order = np.array(data.draw(st.permutations(range(keys))), int)
    derived = base.but(
        k=base.k[..., order, :], v=base.v[..., order, :], options=core_taken(base, -1, order, keys)
    )
    assert_follows(xp, base, derived, lambda name, a: a[..., order, :] if name in ("k", "v") else a)


@given(data=st.data())
def test_p2_order_of_queries(xp: ModuleType, data: st.DataObject) -> None:
    base = data.draw(calls(limits_of(xp), options=(*EVERYWHERE, "segment_ids", "sink")))
    rows = base.q.shape[-2]
    order = np.array(data.draw(st.permutations(range(rows))), int)

    def move(name: str, a: np.ndarray) -> np.ndarray:
        if name in ("out", "q"):
            return a[..., order, :]
        return a[..., order] if name == "lse" else a

    derived = base.but(
        q=base.q[..., order, :],
        dout=base.dout[..., order, :],
        dlse=None if base.dlse is None else base.dlse[..., order],
        options=core_taken(base, -2, order, rows),
    )
    assert_follows(xp, base, derived, move, exact=("out", "lse", "q"))


def on_batch(call: Call, axis: int, index: np.ndarray | slice) -> tuple[Call, Move]:
    """Return the call with batch axis ``axis`` indexed (< 0, counted from the last batch axis)."""
    extent = call.batch[axis]
    cores = {"bias": 2, "mask": 2, "segment_ids_q": 1, "segment_ids_k": 1}
    options = option_map(
        call, lambda name, value: take(value, axis - cores.get(name, 0), index, extent)
    )

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return take(a, axis - 1 if name == "lse" else axis - 2, index, extent)

    derived = call.but(
        **{name: move(name, getattr(call, name)) for name in ("q", "k", "v", "dout")},
        dlse=None if call.dlse is None else move("lse", call.dlse),
        options=options,
    )
    return derived, move


@given(data=st.data())
def test_p3_order_of_batch_and_heads(xp: ModuleType, data: st.DataObject) -> None:
    base = data.draw(
        calls(
            limits_of(xp),
            options=WITHOUT_DROPOUT,
            batches=FULL_BATCHES[1:],
            broadcast=False,
            group_sizes=(1,),
        )
    )
    axis = data.draw(st.integers(-len(base.batch), -1))
    order = np.array(data.draw(st.permutations(range(base.batch[axis]))), int)
    derived, move = on_batch(base, axis, order)
    assert_follows(xp, base, derived, move, exact=EVERYTHING, same_entries=True)


@given(data=st.data())
def test_p4_one_batch_entry(xp: ModuleType, data: st.DataObject) -> None:
    """Batch invariance: an entry's bits do not depend on what else is in the batch."""
    base = data.draw(
        calls(
            limits_of(xp),
            options=WITHOUT_DROPOUT,
            batches=FULL_BATCHES[1:],
            broadcast=False,
            group_sizes=(1,),
        )
    )
    axis = data.draw(st.integers(-len(base.batch), -1))
    entry = data.draw(st.integers(0, base.batch[axis] - 1))
    derived, move = on_batch(base, axis, slice(entry, entry + 1))
    assert_follows(xp, base, derived, move, exact=EVERYTHING, same_entries=True)


@given(data=st.data(), times=st.sampled_from((2, 3)))
def test_p5_repeated_keys(xp: ModuleType, data: st.DataObject, times: int) -> None:
    base = data.draw(calls(limits_of(xp), options=(*EVERYWHERE, "segment_ids")))
    keys = base.k.shape[-2]
    index = np.tile(np.arange(keys), times)

    def move(name: str, a: np.ndarray) -> np.ndarray:
        if name == "lse":
            return a + np.log(a.dtype.type(times))
        return a[..., index, :] / times if name in ("k", "v") else a

    derived = base.but(
        k=base.k[..., index, :], v=base.v[..., index, :], options=core_taken(base, -1, index, keys)
    )
    assert_follows(xp, base, derived, move)


def longer(array: np.ndarray, extra: int, value: float) -> np.ndarray:
    tail = np.full((*array.shape[:-2], extra, array.shape[-1]), value, array.dtype)
    return np.concatenate([array, tail], -2)


def wider(value: np.ndarray, extent: int, extra: int, fill: float) -> np.ndarray:
    """Append ``extra`` columns of ``fill`` to an option array of core (m, n)."""
    full = np.broadcast_to(value, (*value.shape[:-1], extent))
    tail = np.full((*value.shape[:-1], extra), fill).astype(value.dtype)
    return np.concatenate([full, tail], -1)


@given(data=st.data(), extra=st.sampled_from((1, 5, HOST_TILE, 70)))
def test_p6_keys_beyond_the_length(xp: ModuleType, data: st.DataObject, extra: int) -> None:
    """NaN keys and values beyond every length change nothing."""
    base = data.draw(calls(limits_of(xp)))
    keys = base.k.shape[-2]
    base = base.with_options(kv_lengths=base.options.get("kv_lengths", keys))
    fills = {"bias": 7.0, "mask": True, "segment_ids_k": 0}
    options = option_map(
        base,
        lambda name, value: wider(value, keys, extra, fills[name]) if name in fills else value,
    )
    derived = base.but(
        k=longer(base.k, extra, np.nan), v=longer(base.v, extra, np.nan), options=options
    )

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return longer(a, extra, 0) if name in ("k", "v") else a

    assert_follows(xp, base, derived, move, exact=EVERYTHING)


@given(data=st.data(), by=st.sampled_from(("bias", "mask")), fill=st.sampled_from((np.nan, 3.0)))
def test_p6_keys_that_are_masked(xp: ModuleType, data: st.DataObject, by: str, fill: float) -> None:
    """Keys appended with a bias of -inf, or a mask of False, change nothing."""
    allowed = ("causal", "offset", "window", "alibi_slopes", "segment_ids", "sink", *EVERYWHERE)
    base = data.draw(calls(limits_of(xp), options=allowed))
    assume(base.options.get("causal") != "bottom_right")
    rows, keys, extra = base.q.shape[-2], base.k.shape[-2], 9
    neutral = np.zeros((1, 1), np.float32) if by == "bias" else np.ones((1, 1), bool)
    options = {by: neutral, **base.options}
    if options.get("causal") != "top_left":
        options.setdefault("offset", keys - rows)
    base = base.but(options=options)
    fills = {"bias": -np.inf if by == "bias" else 1.0, "mask": by != "mask", "segment_ids_k": 0}
    wide = option_map(
        base,
        lambda name, value: wider(value, keys, extra, fills[name]) if name in fills else value,
    )
    derived = base.but(k=longer(base.k, extra, fill), v=longer(base.v, extra, fill), options=wide)

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return longer(a, extra, 0) if name in ("k", "v") else a

    # Rows of a tile with a NaN are computed again pair by pair: exact, in another order.
    assert_follows(xp, base, derived, move, exact=("lse",) if np.isnan(fill) else EVERYTHING)


@given(data=st.data(), power=st.sampled_from((1, 4)))
def test_p7_scaled_values(xp: ModuleType, data: st.DataObject, power: int) -> None:
    base = data.draw(calls(limits_of(xp), families=("normal", "constant_rows", "sparse_integers")))
    base = base.but(dlse=None)
    factor = 2**power

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return a * a.dtype.type(factor) if name in ("out", "q", "k") else a

    derived = base.but(v=base.v * base.v.dtype.type(factor))
    assert_follows(xp, base, derived, move, exact=("lse", "v"), same_entries=True)
    was, now = (run(xp, call, backward=False).out for call in (base, derived))
    was[np.abs(was) < finfo(base.dtype).smallest_normal] = 0  # subnormal numbers lose bits
    np.testing.assert_array_equal(move("out", was), np.where(was == 0, 0, now))


@given(data=st.data(), shift=st.integers(-3, 3))
def test_p7_shifted_values(xp: ModuleType, data: st.DataObject, shift: int) -> None:
    base = data.draw(calls(limits_of(xp), options=WITHOUT_SINK, families=("sparse_integers",)))
    seen = ~np.isneginf(Budget(base).truth.lse)[..., None]

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return a + shift * seen if name == "out" else a

    assert_follows(xp, base, base.but(v=base.v + base.v.dtype.type(shift)), move)


@given(data=st.data())
def test_p8_shifted_rows_of_scores(xp: ModuleType, data: st.DataObject) -> None:
    base = data.draw(calls(limits_of(xp), options=WITHOUT_SINK))
    rows = base.q.shape[-2]
    shift = np.random.default_rng(0).integers(-8, 9, rows).astype(np.float32)
    old = base.options.get("bias", np.zeros((1, 1), np.float32)).astype(np.float32)
    base = base.with_options(bias=np.round(old))

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return a + shift if name == "lse" else a

    assert_follows(xp, base, base.with_options(bias=base.options["bias"] + shift[:, None]), move)


@given(data=st.data())
def test_p9_scale_moves_between_factors(xp: ModuleType, data: st.DataObject) -> None:
    derived = data.draw(calls(limits_of(xp), families=("uniform", "normal", "one_hot")))
    scale = derived.options.get("scale", derived.q.shape[-1] ** -0.5)
    derived = derived.with_options(scale=scale)
    base = derived.but(q=derived.q * derived.q.dtype.type(0.25)).with_options(scale=4 * scale)
    derived = derived.but(q=base.q * derived.q.dtype.type(4))

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return a / a.dtype.type(4) if name == "q" else a

    assert_follows(xp, base, derived, move, exact=("out", "lse", "v"))


@given(data=st.data())
def test_p10_grouped_heads(xp: ModuleType, data: st.DataObject) -> None:
    """Grouped heads equal repeated key/value heads: a group is consecutive query heads."""
    derived = data.draw(
        calls(limits_of(xp), batches=((1,), (2,), (2, 3)), group_sizes=(2, 3), broadcast=False)
    )
    group = derived.group_size
    base = derived.but(
        k=np.repeat(derived.k, group, -3),
        v=np.repeat(derived.v, group, -3),
        options={n: value for n, value in derived.options.items() if n != "enable_gqa"},
    )

    def move(name: str, a: np.ndarray) -> np.ndarray:
        if name not in ("k", "v"):
            return a
        *batch, heads, length, columns = a.shape
        return a.reshape(*batch, heads // group, group, length, columns).sum(-3)

    assert_follows(xp, base, derived, move, exact=("out", "lse", "q"))


@given(data=st.data(), which=st.sampled_from(("head_dim", "head_dim_v")))
def test_p11_padded_features(xp: ModuleType, data: st.DataObject, which: str) -> None:
    """Zero features change nothing: bit for bit where the padded tiles have as many columns."""
    base = data.draw(calls(limits_of(xp)))
    base = base.with_options(scale=base.options.get("scale", 0.125))
    named = ("q", "k") if which == "head_dim" else ("v", "dout", "out")
    if which == "head_dim_v" and data.draw(st.booleans()):
        base = base.but(v=base.v[..., :40], dout=base.dout[..., :40])
    extra, columns = 8, getattr(base, named[0]).shape[-1]

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, extra)]) if name in named else a

    changes = {name: move(name, getattr(base, name)) for name in named if name != "out"}
    wide, wider = (padded(n) for n in (columns, columns + extra))
    assert_follows(xp, base, base.but(**changes), move, EVERYTHING if wide == wider else ())


@given(data=st.data())
def test_p12_causal_is_a_window(xp: ModuleType, data: st.DataObject) -> None:
    """Causal has the bits of a window with a right side of 0."""
    drawn = data.draw(
        calls(limits_of(xp), options=("offset", "kv_lengths", "alibi_slopes", "sink", *EVERYWHERE))
    )
    left = data.draw(st.sampled_from((None, 0, 20)))
    causal = run(xp, drawn.with_options(causal=True, window=(left, data.draw(st.integers(0, 9)))))
    window = run(xp, drawn.with_options(window=(left, 0)))
    assert causal.out.tobytes() == window.out.tobytes()
    assert causal.lse.tobytes() == window.lse.tobytes()
    for name, gradient in causal.gradients.items():
        assert gradient.tobytes() == window.gradients[name].tobytes()


@given(data=st.data(), by=st.sampled_from(("bias", "mask")))
def test_p12_positions_are_a_mask(xp: ModuleType, data: st.DataObject, by: str) -> None:
    """Causal with an offset and a window equals a mask, and a bias of -inf."""
    drawn = data.draw(calls(limits_of(xp), options=("scale", "softcap", "sink")))
    rows, keys = drawn.q.shape[-2], drawn.k.shape[-2]
    offset = data.draw(st.integers(-rows - 2, keys + 2))
    left, right = data.draw(st.tuples(*[st.sampled_from((None, 0, 3, 20))] * 2))
    base = drawn.with_options(window=(left, right), offset=offset)
    distance = np.arange(keys) - np.arange(rows)[:, None] - offset
    seen = np.ones((rows, keys), bool)
    seen &= True if left is None else distance >= -left
    seen &= True if right is None else distance <= right
    written = seen if by == "mask" else np.where(seen, 0, -np.inf).astype(np.float32)
    assert_follows(xp, base, drawn.with_options(**{by: written}))


@given(data=st.data())
def test_p12_segments_are_a_mask(xp: ModuleType, data: st.DataObject) -> None:
    drawn = data.draw(calls(limits_of(xp), options=("causal", "scale", "segment_ids")))
    assume("segment_ids" in drawn.options)
    ids_q, ids_k = drawn.options["segment_ids"]
    mask = ids_q[..., :, None] == ids_k[..., None, :]
    assert_follows(xp, drawn.with_options(mask=mask, segment_ids=None), drawn)


@given(data=st.data())
def test_p20_alibi_is_a_bias(xp: ModuleType, data: st.DataObject) -> None:
    """ALiBi equals a bias, with slopes of few bits, whose products with distances are exact."""
    drawn = data.draw(calls(limits_of(xp), options=("softcap", "mask", "sink", "alibi_slopes")))
    assume("alibi_slopes" in drawn.options)
    slopes = np.asarray(np.round(4 * drawn.options["alibi_slopes"].astype(np.float32)) / 4)
    rows, keys = drawn.q.shape[-2], drawn.k.shape[-2]
    distance = np.abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys))
    bias = -slopes[..., None, None] * distance.astype(np.float32)
    base = drawn.with_options(bias=bias, alibi_slopes=None)
    assert_follows(xp, base, drawn.with_options(alibi_slopes=slopes))


@given(data=st.data())
def test_p20_sink_is_a_key_without_a_value(xp: ModuleType, data: st.DataObject) -> None:
    """A sink equals one more key with a value of 0 and a score given by the bias."""
    allowed = ("scale", "softcap", "bias", "mask", "sink")
    derived = data.draw(calls(limits_of(xp), options=allowed, families=("normal",)))
    assume("sink" in derived.options)
    rows, keys = derived.q.shape[-2], derived.k.shape[-2]
    sink = derived.options["sink"].astype(np.float64)[..., None, None]
    bias = derived.options.get("bias", np.zeros((1, 1))).astype(np.float64)
    shape = np.broadcast_shapes(bias.shape, (*derived.batch, rows, 1), sink.shape)
    bias = np.broadcast_to(bias, (*shape[:-1], bias.shape[-1]))
    bias = np.broadcast_to(bias, (*shape[:-1], keys))
    wide = np.concatenate([bias, np.broadcast_to(sink, (*shape[:-1], 1))], -1)
    options = {"bias": wide, "sink": None}
    if "mask" in derived.options:
        options["mask"] = wider(derived.options["mask"], keys, 1, True)
    base = derived.but(k=longer(derived.k, 1, 0), v=longer(derived.v, 1, 0))
    base = base.with_options(**options)

    def move(name: str, a: np.ndarray) -> np.ndarray:
        return a[..., :-1, :] if name in ("k", "v") else a

    assert_follows(xp, base, derived, move)


@given(data=st.data())
def test_p12_offset_is_counted_from_the_lengths(xp: ModuleType, data: st.DataObject) -> None:
    """The default offset is kv_length - q_length of each entry, and 'top_left' is 0.

    The offset is an array where lengths are arrays, and a number elsewhere: with an array of
    offsets a short call would have larger tiles, and thus another order of sums.
    """
    drawn = data.draw(
        calls(limits_of(xp), options=("q_lengths", "kv_lengths", "window", "alibi_slopes"))
    )
    rows = drawn.options.get("q_lengths", drawn.q.shape[-2])
    keys = drawn.options.get("kv_lengths", drawn.k.shape[-2])
    offset = keys - rows
    if not isinstance(offset, int):
        offset = np.asarray(offset, np.int64)
    base = drawn.with_options(causal=True, offset=offset)
    for word in (True, "bottom_right"):
        assert_follows(xp, base, drawn.with_options(causal=word), exact=EVERYTHING)
    base = drawn.with_options(causal=True, offset=0)
    assert_follows(xp, base, drawn.with_options(causal="top_left"), exact=EVERYTHING)


@given(data=st.data())
def test_p13_packed_sequences(xp: ModuleType, data: st.DataObject) -> None:
    """Packed sequences have the bits that they have alone.

    Gradients have these bits where the same kernels compute them. Two kinds of kernels take no
    packed sequences: Hopper's kernels of all gradients in one pass, and kernels of float64 in which
    two warps share rows. The latter add the halves of a block in an order of their own. Slopes of
    16-bit calls on Hopper are added to products by tensor cores, except in packed sequences: the
    sums are rounded at other places.
    """
    base = data.draw(
        calls(limits_of(xp), batches=((2, 3), (3, 2)), broadcast=False, group_sizes=(1, 2))
    )
    together = packed(base)
    batch, result = unpacked(together, run(xp, together))
    budget = Budget(batch)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))
    alone = run(xp, base)
    on_hopper = xp is not np and hardware.present().hopper
    if on_hopper and base.dtype in HALVES and "alibi_slopes" in base.options:
        return
    assert alone.out.tobytes() == result.out.tobytes()
    assert alone.lse.tobytes() == result.lse.tobytes()
    score_math = {option.name for option in of_stages("cap", "add", "see", "weight")}
    partners = xp is not np and base.dtype == np.float64 and not score_math & base.options.keys()
    if base.lead == memory.BAND and not partners:
        for name, gradient in alone.gradients.items():
            assert gradient.tobytes() == result.gradients[name].tobytes(), name


# Merging.


def partial(xp: ModuleType, call: Call) -> tuple[Any, Any]:
    """Return out in float32 or better, and lse, on the device."""
    wide = np.promote_types(np.float32, call.lse_dtype)
    result = run(xp, call, backward=False, with_out=True, out_dtype=wide)
    return memory.to_device(xp, result.out), memory.to_device(xp, result.lse)


@given(data=st.data(), parts=st.integers(1, 4))
def test_p15_split_and_merge(xp: ModuleType, data: st.DataObject, parts: int) -> None:
    allowed = ("causal", "offset", "window", "alibi_slopes", "segment_ids", "sink", *EVERYWHERE)
    base = data.draw(calls(limits_of(xp), options=allowed))
    rows, keys = base.q.shape[-2], base.k.shape[-2]
    default = 0 if base.options.get("causal") == "top_left" else keys - rows
    offset = base.options.get("offset", default)
    cuts = sorted(data.draw(st.integers(0, keys)) for _ in range(parts - 1))
    outs, lses = [], []
    for first, last in zip([0, *cuts], [*cuts, keys], strict=True):
        options = core_taken(base, -1, slice(first, last), keys)
        options |= {"offset": offset - first}
        if options.get("causal"):
            options["causal"] = True
        if outs:  # exactly one part has the sink
            options.pop("sink", None)
        part = base.but(k=base.k[..., first:last, :], v=base.v[..., first:last, :], options=options)
        out, lse = partial(xp, part)
        outs.append(out)
        lses.append(lse)
    merged = cuflash.merge(outs, lses)
    Budget(base).check_forward(memory.to_numpy(merged.out), memory.to_numpy(merged.lse))


@given(data=st.data())
def test_p15_merge_is_an_algebra(xp: ModuleType, data: st.DataObject) -> None:
    """Parts merge in any order and nesting up to a rounding of lse.

    Two parts in either order, and a part that saw no key, are exact bit for bit.

    Rounding an inner lse, by half a unit in its last place, multiplies all inner weights, so that
    no merge of rounded parts gives out to within one unit. Weights err by some eps of their own:
    exponents of -d round by d eps, which is multiplied by exp(-d).
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    outs = rng.standard_normal((3, 5, 4)).astype(np.float32)
    lses = (30 * rng.standard_normal((3, 5))).astype(np.float32)
    lses[rng.random((3, 5)) < 0.3] = -np.inf
    outs[np.isneginf(lses)] = 0
    a, b, c = zip(memory.to_device(xp, outs), memory.to_device(xp, lses), strict=True)

    def merged(*parts: tuple[Any, Any]) -> tuple[Any, Any]:
        return tuple(cuflash.merge([p[0] for p in parts], [p[1] for p in parts]))

    exact = reference.merge(outs, lses)
    eps = np.finfo(np.float32).eps
    spread = eps * np.abs(lses[np.isfinite(lses)]).max(initial=1)
    for result in (merged(a, b, c), merged(c, a, b), merged(merged(a, b), c)):
        out, lse = (memory.to_numpy(x) for x in result)
        hidden = np.isneginf(exact.lse)
        np.testing.assert_array_equal(np.isneginf(lse), hidden)
        shown = ~hidden
        assert np.all(np.abs(lse[shown] - exact.lse[shown]) <= spread + 8 * eps)
        assert np.all(np.abs(out - exact.out) <= (2 * spread + 16 * eps) * np.abs(outs).max(0))
    for x, y in zip(merged(a, b), merged(b, a), strict=True):
        assert memory.to_numpy(x).tobytes() == memory.to_numpy(y).tobytes()
    nothing = (xp.full_like(a[0], np.nan), xp.full_like(a[1], -np.inf))
    for parts in ((a, nothing), (nothing, a)):
        for x, y in zip(merged(*parts), merged(a), strict=True):
            assert memory.to_numpy(x).tobytes() == memory.to_numpy(y).tobytes()


# Bounds and sums.


@given(data=st.data(), cap=st.sampled_from((0.5, 2.0, 30.0)))
def test_p17_softcap_bounds_scores(xp: ModuleType, data: st.DataObject, cap: float) -> None:
    """A softcap bounds scores: with one key, lse is its score."""
    drawn = data.draw(
        calls(limits_of(xp), options=("scale",), families=("one_hot", "lse_plus_200", "normal"))
    )
    call = drawn.but(k=drawn.k[..., :1, :], v=drawn.v[..., :1, :]).with_options(softcap=cap)
    result = run(xp, call, backward=False)
    assert np.all(np.abs(result.lse[np.isfinite(result.lse)]) <= cap)


@given(data=st.data())
def test_p17_far_softcap_changes_nothing(xp: ModuleType, data: st.DataObject) -> None:
    """A softcap of 2^60 changes nothing: tanh(x) is x then, and a power of 2 divides exactly."""
    allowed = tuple(name for name in ALL_OPTIONS if name != "softcap")
    base = data.draw(calls(limits_of(xp), options=allowed))
    result = run(xp, base.with_options(softcap=2.0**60))
    budget = Budget(base)
    budget.check_forward(result.out, result.lse)
    budget.check_backward(result.gradients, given=(result.out, result.lse))


@given(data=st.data(), ones=st.booleans())
def test_p18_p19_constant_values(xp: ModuleType, data: st.DataObject, ones: bool) -> None:
    """Where all values are equal, out is that value: the weights add up to 1.

    In 16 bits kernels round the weights of the numerator, by half a unit at most, and out likewise.
    So out is the value or its neighbour. It is 1 where the value is 1, whose lower neighbour is
    half as far away as its upper one. In wider formats numerator and denominator sum the same
    weights, in two orders with at most n roundings each.
    """
    drawn = data.draw(
        calls(limits_of(xp), options=WITHOUT_SINK, families=("normal", "one_hot", "lse_minus_120"))
    )
    value = np.ones_like(drawn.v[..., :1, :]) if ones else drawn.v[..., :1, :]
    call = drawn.but(v=np.broadcast_to(value, drawn.v.shape).copy())
    budget = Budget(call)
    result = run(xp, call, backward=False)
    seen = np.broadcast_to(~np.isneginf(budget.truth.lse)[..., None], result.out.shape)
    if not call.k.shape[-2]:
        return
    heads = np.repeat(value, call.group_size, -3) if call.group_size > 1 else value
    expected = np.broadcast_to(heads, result.out.shape)
    if call.dtype.itemsize == 2:
        units = expected.view(np.int16).astype(int) - result.out.view(np.int16)
        assert np.abs(units[seen]).max(initial=0) <= (0 if xp is np or ones else 1)
        return
    keys = call.k.shape[-2]
    factor = 2 * min(keys, 3 * keys**0.5) * budget.u + 8 * budget.u
    expected, got = (a.astype(np.float64) for a in (expected, result.out))
    assert np.all(np.abs(got - expected)[seen] <= factor * np.abs(expected)[seen])


@given(data=st.data())
def test_p28_a_probability_of_0_drops_nothing(xp: ModuleType, data: st.DataObject) -> None:
    base = data.draw(calls(limits_of(xp), options=WITHOUT_DROPOUT))
    derived = base.with_options(dropout=0.0, seed=data.draw(st.integers(0, 2**64 - 1)))
    assert_follows(xp, base, derived, exact=EVERYTHING, same_entries=True)


# Gradients.


@given(data=st.data())
def test_p21_gradients_are_derivatives(data: st.DataObject) -> None:
    """Gradients of float64 agree with differences along random directions, with any options."""
    limits = limits_of(np)
    drawn = data.draw(
        calls(limits, families=("normal", "uniform", "sparse_integers"), gradients=True)
    )
    call = drawn.but(**{n: getattr(drawn, n).astype(np.float64) for n in ("q", "k", "v", "dout")})
    call = call.but(dlse=None if call.dlse is None else call.dlse.astype(np.float64))
    result = run(np, call)
    rng = np.random.default_rng(1)

    arrays = {name: np.asarray(call.array(name), np.float64) for name in ("q", "k", "v", *call.wrt)}
    arrays["scale"] = np.asarray(call.options.get("scale", call.q.shape[-1] ** -0.5))

    def objective(name: str) -> Callable[[np.ndarray], float]:
        def value(x: np.ndarray) -> float:
            given_arrays = {**arrays, name: np.asarray(x)}
            q, k, v = (given_arrays.pop(n) for n in ("q", "k", "v"))
            given_arrays["scale"] = float(given_arrays["scale"])
            options = {**call.options, **given_arrays}
            out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
            total = float((call.dout * out).sum())
            if call.dlse is not None:
                total += float((call.dlse * np.where(np.isneginf(lse), 0, lse)).sum())
            return total

        return value

    for name in call.wrt:
        x = arrays[name]
        direction = np.asarray(rng.standard_normal(x.shape))
        direction /= max(float(np.linalg.norm(direction)), 1.0)
        expected = derivatives.along(objective(name), x, direction)
        got = float((result.gradients[name].astype(np.float64) * direction).sum())
        size = max(1.0, float(np.linalg.norm(result.gradients[name].astype(np.float64))))
        bound = 1e-7 * size
        if name in call.options and name != "scale":
            bound += float(finfo(call.array(name).dtype).eps) * size  # its gradient is rounded
        assert abs(got - expected) <= bound, f"d{name}: {got} against {expected}"


@given(data=st.data())
def test_p24_weights_of_a_row_add_up_to_one_in_dv(xp: ModuleType, data: st.DataObject) -> None:
    """Summed over keys, dv is dout summed over the rows that see any key."""
    call = data.draw(
        calls(
            limits_of(xp),
            options=WITHOUT_SINK,
            batches=FULL_BATCHES,
            broadcast=False,
            group_sizes=(1,),
        )
    )
    budget = Budget(call)
    result = run(xp, call)
    tensor = budget.gradients["v"]
    seen = ~np.isneginf(budget.truth.lse)[..., None]
    expected = (call.dout.astype(np.float64) * seen).sum(-2)
    got = result.gradients["v"].astype(np.float64).sum(-2)
    largest = float(np.abs(tensor.truth).max(initial=0))
    own = finfo(tensor.dtype)
    ulp = max(largest * max(float(own.eps), 2 * budget.u), float(own.smallest_subnormal))
    bound = (tensor.accumulation + tensor.rounding + ulp).sum(-2)
    assert np.all(np.abs(got - expected) <= bound)


def test_p24_dbias_of_a_row_adds_up_to_zero(xp: ModuleType) -> None:
    """dbias of a row adds up to 0 (without sink and dlse), as the Jacobian of softmax says."""
    rng = np.random.default_rng(4)
    bias = rng.standard_normal((2, 40, 50)).astype(np.float32)
    shapes = (2, 40, 8), (2, 50, 8), (2, 50, 8)
    call = make_call(
        "normal", 4, np.float32, *shapes, options={"bias": bias}, wrt=("q", "k", "v", "bias")
    )
    tensor = Budget(call).gradients["bias"]
    got = run(xp, call).gradients["bias"].astype(np.float64).sum(-1)
    assert np.all(np.abs(got) <= 2 * tensor.accumulation.sum(-1))


def test_p24_equal_keys_have_no_gradient_in_q(xp: ModuleType) -> None:
    """Equal keys leave nothing of dq (without dlse), because dS sums to 0 over keys."""
    shape = (2, 40, 64)
    call = make_call("constant_rows", 3, np.float16, shape, shape, shape)
    budget = Budget(call)
    assert np.abs(budget.gradients["q"].truth).max() < 1e-12
    budget.check_backward(run(xp, call).gradients)


@given(data=st.data())
def test_p25_what_is_hidden_has_gradient_zero(xp: ModuleType, data: st.DataObject) -> None:
    """What is hidden has gradient 0, and dout is not read there, with a sink or without."""
    call = data.draw(calls(limits_of(xp), batches=FULL_BATCHES, broadcast=False, group_sizes=(1,)))
    call = call.but(wrt=(*call.wrt, *(n for n in ("bias", "sink") if n in call.options)))
    budget = Budget(call)
    visible = budget.inputs.visible
    result = run(xp, call)
    lonely_rows, lonely_keys = ~visible.any(-1), ~visible.any(-2)
    assert not np.any(result.gradients["q"][lonely_rows])
    assert not np.any(result.gradients["k"][lonely_keys])
    assert not np.any(result.gradients["v"][lonely_keys])
    dout = call.dout.copy()
    dout[lonely_rows] = np.nan
    poisoned = run(xp, call.but(dout=dout))
    if xp is np:
        for name, gradient in result.gradients.items():
            assert poisoned.gradients[name].tobytes() == gradient.tobytes(), name
    else:  # pair by pair: exact, in another order
        budget.check_backward(poisoned.gradients, given=(poisoned.out, poisoned.lse))


@given(data=st.data())
def test_p26_backward_from_the_exact_lse(xp: ModuleType, data: st.DataObject) -> None:
    call = data.draw(calls(limits_of(xp)))
    budget = Budget(call)
    exact = budget.truth.lse.astype(call.lse_dtype)
    budget.check_backward(run(xp, call, lse=exact).gradients)
