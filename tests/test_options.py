"""Does an option mean what it holds at the time of the call, and stay the same elsewhere?"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import Options
from cuflash._problem.options import OPTION_NAMES, resolve

ROOT = Path(__file__).resolve().parents[1]
Q, K, V = np.random.default_rng(0).standard_normal((3, 6, 4))


class Changing:
    """A number that changes in place and hashes by identity, as a tensor of torch does."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class ChangingInt(Changing):
    """An integer that changes in place."""

    def __index__(self) -> int:
        return int(self.value)


class NamedInt(int):
    """A subclass of int, which may have attributes."""


class Pair(tuple):
    """A window whose sides change."""

    sides = (0, 0)

    def __iter__(self):
        return iter(self.sides)


class HashableArray(np.ndarray):
    """An array that hashes by identity, as arrays of other libraries do."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


#: option -> makes a value, changes it in place, and the rest of the call
CHANGING: dict[str, tuple[Callable[[], object], Callable[[object], None], dict[str, object]]] = {
    "scale": (lambda: Changing(0.5), lambda x: vars(x).update(value=2.0), {}),
    "softcap": (lambda: Changing(0.5), lambda x: vars(x).update(value=2.0), {}),
    "dropout": (lambda: Changing(0.25), lambda x: vars(x).update(value=0.75), {"seed": 1}),
    "offset": (lambda: ChangingInt(0), lambda x: vars(x).update(value=2), {"causal": True}),
    "q_lengths": (lambda: ChangingInt(2), lambda x: vars(x).update(value=4), {}),
    "kv_lengths": (lambda: ChangingInt(2), lambda x: vars(x).update(value=4), {}),
    "window": (lambda: (ChangingInt(0), 0), lambda x: vars(x[0]).update(value=2), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_a_value_that_changes_in_place_is_read_by_every_call(name):
    make, change, rest = CHANGING[name]
    given = {name: make(), **rest}
    before = [cuflash.attention(Q, K, V, **given) for _ in range(2)][1]
    change(given[name])
    after = cuflash.attention(Q, K, V, **given)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, cuflash.attention(Q, K, V, options=Options(**given)))


@pytest.mark.parametrize("name", ["bias", "mask", "alibi_slopes", "sink", "segment_ids"])
def test_no_cache_keeps_an_array_alive(name):
    """No cache keeps arrays alive that hash by identity: a thousand calls would keep a thousand."""
    shape = {"bias": (6, 6), "mask": (6, 6), "segment_ids": (6,)}.get(name, ())
    dtype = {"mask": bool, "segment_ids": int}.get(name, float)
    array = np.ones(shape, dtype).view(HashableArray)
    gone = weakref.ref(array)
    cuflash.attention(Q, K, V, **{name: (array, array) if name == "segment_ids" else array})
    del array
    gc.collect()
    assert gone() is None


VALUES = (int, float, bool, str, type(None), np.float64, np.int64, np.bool_)


def of_any_kind():
    """Return values of builtin and other types that options take, and values that they refuse."""
    array = np.ones((), np.int64)
    numbers = [0, 1, True, 1.0, 0.25, "top_left", None, np.float64(0.25), np.int64(1), np.bool_(1)]
    others = [Changing(1), ChangingInt(1), NamedInt(1), array, array.view(HashableArray), object()]
    pairs = [(a, b) for a in (0, None, True, 1.0, NamedInt(1), ChangingInt(1), array) for b in (1,)]
    return [*numbers, *others, *pairs, Pair((0, 1)), ((0, 1), 1), (array, array), [0, 1]]


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_options_of_values_alone_are_cached(name):
    """Options are cached if all values are of types that compare by value and cannot change."""
    cached = 0
    for value in of_any_kind():
        given = {"seed": 1, name: value}
        try:
            found = resolve(None, given)
        except (TypeError, ValueError):
            continue
        again = resolve(None, dict(given))
        parts = value if type(value) is tuple else (value,)
        converted = isinstance(getattr(found, name), np.ndarray)  # a tuple of lengths or slopes
        assert (again is found) is (
            not converted and all(type(part) in VALUES for part in parts)
        ), value
        cached += again is found
    assert cached  # None at least


def test_equal_values_of_other_types_are_other_calls():
    """A value that equals a cached one but has another type is refused: 1 == True == 1.0."""
    for first, second in (
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"causal": True}, {"causal": 1}),
        ({"enable_gqa": True}, {"enable_gqa": 1}),
        ({"dropout": 1, "seed": 1}, {"dropout": True, "seed": 1}),
        ({"kv_lengths": 1}, {"kv_lengths": 1.0}),
        ({"kv_lengths": 1, "dropout": 0.0}, {"kv_lengths": 1.0, "dropout": 0}),
    ):
        resolve(None, first)
        with pytest.raises(TypeError):
            resolve(None, second)


def test_a_repeated_call_finds_its_options():
    given = {"causal": True, "window": (3, None), "scale": np.float64(0.5), "softcap": 2}
    assert resolve(None, given) is resolve(None, dict(given))


SOME = [
    Options(),
    Options(causal="top_left", window=(3, None), scale=0.5, softcap=2.0, enable_gqa=True),
    Options(causal=True, offset=2, q_lengths=3, kv_lengths=4, dropout=0.5, seed=7),
]


@pytest.mark.parametrize("options", SOME, ids=str)
def test_pickled_options_are_the_same_in_another_process(options):
    """Unpickled options are equal and hash alike, though hashes of strings differ by process."""
    program = (
        "import pickle, sys; import cuflash;"
        "given = pickle.loads(bytes.fromhex(sys.argv[1]));"
        f"own = cuflash.{options!r};"
        "assert given == own and own in {given} and given in {own: 0}, (hash(given), hash(own))"
    )
    for seed in ("1", "2"):
        words = [sys.executable, "-c", program, pickle.dumps(options).hex()]
        own = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(words, check=True, env=os.environ | own)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_copies_of_options_are_options(copied):
    for options in SOME:
        again = copied(options)
        assert again == options
        assert hash(again) == hash(options)
    bias, ids = np.ones((6, 6)), np.zeros(6, int)
    options = Options(bias=bias, segment_ids=(ids, ids))
    again = copied(options)
    assert (again == options) is (again.bias is bias)  # arrays compare by identity
    assert list(again.arrays) == list(options.arrays)
    assert again.arrays["bias"] is again.bias
    for name, array in options.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)
    assert (again.bias is bias) is (copied is copy.copy)
    scaled = Options(q_scale=np.ones((1, 1)), k_scale=2.0, v_scale=np.ones((3, 1)))
    again = copied(scaled)
    assert (again.q_scale is scaled.q_scale) is (copied is copy.copy)
    np.testing.assert_array_equal(again.v_scale, scaled.v_scale)
    assert again.k_scale == 2.0
    made = cuflash.Gradients(dk=np.ones(3), dq=np.zeros(2), order=("dk", "dq"))
    again = copied(made)
    assert (again.dk is made.dk) is (copied is copy.copy)
    np.testing.assert_array_equal(np.concatenate([*again]), [1, 1, 1, 0, 0])
