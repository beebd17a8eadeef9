"""Do the pages of a cache hold what was appended, whatever the grouping, sharing and freeing?"""

from __future__ import annotations

import copy
import functools
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

import cuflash

SEQUENCES, HEADS, D, D_V = 3, 2, 4, 3


def tokens(rng: np.random.Generator, count: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    k, v = (rng.standard_normal((SEQUENCES, HEADS, count, d)).astype(dtype) for d in (D, D_V))
    return k, v


def in_order(cache: cuflash.KVCache) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return keys and values of each sequence, row by row in the order of the page table."""
    size, found = cache.k_pages.shape[2], []
    for row, length in zip(cache.page_table, cache.lengths, strict=True):
        places = [(row[n // size], n % size) for n in range(length)]
        own = [
            np.stack([pages[p, :, n] for p, n in places], axis=1)
            if places else np.zeros((HEADS, 0, pages.shape[-1]), pages.dtype)
            for pages in (cache.k_pages, cache.v_pages)
        ]  # fmt: skip
        found.append((own[0], own[1]))
    return found


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 5, 16]) | st.integers(1, 256),
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([np.float16, bfloat16, np.float32, np.float64, float8_e4m3fn, float8_e5m2]),
)
def test_any_grouping_gives_the_same_rows(
    seed: int, size: int, counts: list[list[int]], dtype: Any
) -> None:
    rng, totals = np.random.default_rng(seed), np.sum(counts, axis=0)
    k, v = tokens(rng, max(int(totals.max()), 1), dtype)
    cache = cuflash.KVCache(
        SEQUENCES, HEADS, D, max_length=40, head_dim_v=D_V, page_size=size, dtype=dtype
    )
    start = np.zeros(SEQUENCES, int)
    for step in counts:
        most = max(step)
        parts = [
            np.stack([np.pad(a[s], ((0, 0), (0, most), (0, 0)))[:, start[s] :][:, :most]
                      for s in range(SEQUENCES)])
            for a in (k, v)
        ]  # fmt: skip
        cache.append(*parts, counts=step)
        start += step
    np.testing.assert_array_equal(cache.lengths, totals)
    for s, own in enumerate(in_order(cache)):
        for found, given_ in zip(own, (k, v), strict=True):
            np.testing.assert_array_equal(found, given_[s, :, : totals[s]])
    assert not cache.dropped.any()


class CacheMachine(RuleBasedStateMachine):
    """A small cache beside lists of rows: appends, forks, rewinds and frees in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.cache = cuflash.KVCache(
            SEQUENCES, HEADS, D, max_length=10, head_dim_v=D_V, page_size=3, pages=9,
            dtype=np.float32,
        )  # fmt: skip
        self.rows: list[Any] = [
            (np.zeros((HEADS, 0, D)), np.zeros((HEADS, 0, D_V))) for _ in range(SEQUENCES)
        ]

    @rule(count=st.integers(1, 4), data=st.data())
    def append(self, count: int, data: st.DataObject) -> None:
        counts = data.draw(st.lists(st.integers(0, count), min_size=3, max_size=3))
        k, v = tokens(self.rng, count)
        before = [a.copy() for a in (*self.cache.arrays, self.cache.dropped)]
        try:
            self.cache.append(k, v, counts=np.array(counts))
        except ValueError as error:
            if "keys for sequence" not in str(error) or not self.is_short(counts):
                raise
            for old, new in zip(before, (*self.cache.arrays, self.cache.dropped), strict=True):
                np.testing.assert_array_equal(old, new)
            return
        self.rows = [
            tuple(np.concatenate([old, new[s, :, :n]], axis=1)
                  for old, new in zip(rows, (k, v), strict=True))
            for s, (rows, n) in enumerate(zip(self.rows, counts, strict=True))
        ]  # fmt: skip

    def is_short(self, counts: list[int]) -> bool:
        """Return whether keys may not fit; copying a shared page needs a free page meanwhile."""
        lengths = self.cache.lengths + counts
        pages = int((-(-lengths // 3)).sum())
        return bool(lengths.max() > 10) or pages + 1 > 9

    @rule(parents=st.lists(st.integers(-1, 2), min_size=3, max_size=3), data=st.data())
    def take(self, parents: list[int], data: st.DataObject) -> None:
        lengths = data.draw(st.none() | st.lists(st.integers(-2, 12), min_size=3, max_size=3))
        self.cache.take(parents, lengths)
        kept = [10, 10, 10] if lengths is None else lengths
        self.rows = [
            tuple(a[:, : max(n, 0) if p >= 0 else 0] for a in self.rows[p])
            for p, n in zip(parents, kept, strict=True)
        ]

    @precondition(lambda self: self.cache.lengths.any())
    @rule()
    def attend(self) -> None:
        q = self.rng.standard_normal((SEQUENCES, HEADS, 2, D)).astype(np.float32)
        out = cuflash.attention_paged(q, *self.cache.arrays, causal=True)
        for s, (k, v) in enumerate(self.rows):
            own = cuflash.attention(q[s], k.astype(np.float32), v.astype(np.float32), causal=True)
            np.testing.assert_allclose(out[s], own, rtol=1e-5, atol=1e-6)

    @invariant()
    def holds_the_rows(self) -> None:
        for own, rows in zip(in_order(self.cache), self.rows, strict=True):
            for found, expected in zip(own, rows, strict=True):
                np.testing.assert_array_equal(found, expected)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
test_cache_against_lists = CacheMachine.TestCase


def full_cache(**changes: Any) -> cuflash.KVCache:
    """Return a cache whose sequences have 4 keys each, with one free page."""
    values = {"max_length": 8, "page_size": 4, "pages": 4, "head_dim_v": D_V, "dtype": np.float32}
    cache = cuflash.KVCache(SEQUENCES, HEADS, D, **values | changes)
    cache.append(*tokens(np.random.default_rng(1), 4))
    return cache


def test_a_full_cache_writes_nothing() -> None:
    cache = full_cache()
    before = [a.copy() for a in cache.arrays]
    with pytest.raises(
        ValueError, match=r"k: got 1 keys for sequence 1 of length 4.* at most 0.*1 of 4"
    ):
        cache.append(*tokens(np.random.default_rng(2), 1))
    with pytest.raises(ValueError, match="5 keys for sequence 0 of length 4, expected at most 4"):
        cache.append(*tokens(np.random.default_rng(2), 5), counts=[5, 0, 0])
    for old, new in zip(before, cache.arrays, strict=True):
        np.testing.assert_array_equal(old, new)
    cache.take([0, -1, 2])  # frees a page
    cache.append(*tokens(np.random.default_rng(2), 4), counts=[4, 0, 1])
    assert cache.lengths.tolist() == [8, 0, 5]
    cache.append(*tokens(np.random.default_rng(2), 1), counts=[0, 0, 1])  # sequence 0 is full
    assert cache.lengths.tolist() == [8, 0, 6]
    with pytest.raises(ValueError, match="5 keys for sequence 0 of length 4, expected at most 3"):
        full_cache(max_length=7).append(*tokens(np.random.default_rng(2), 5), counts=[5, 0, 0])
    cache = full_cache(page_size=3, pages=6)
    cache.take([0, 0, 2])  # two pages are free, and one of them is needed to copy a shared page
    with pytest.raises(ValueError, match="1 keys for sequence 1 of length 4, expected at most 0"):
        cache.append(*tokens(np.random.default_rng(2), 4), counts=[4, 1, 0])


@pytest.mark.parametrize(("most", "size"), [(8, 4), (9, 4), (11, 4), (3, 5), (7, 1)])
def test_pages_are_as_many_as_let_every_sequence_grow(most: int, size: int) -> None:
    """By default every sequence can grow to its largest length, and takes the lowest free pages."""
    cache = cuflash.KVCache(SEQUENCES, HEADS, D, max_length=most, page_size=size, dtype=np.float32)
    k, _ = tokens(np.random.default_rng(1), most)
    cache.append(k, k)
    assert cache.page_table.ravel().tolist() == list(range(len(cache.k_pages)))


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = full_cache(page_size=3, pages=8)
    cache.take([0, 0, 0])
    assert len(set(cache.page_table[:, 1].tolist())) == 1
    first, shared = cache.page_table[0, :2]
    cache.append(*tokens(np.random.default_rng(2), 1), counts=[1, 1, 0])
    assert len(set(cache.page_table[:, 1].tolist())) == 3
    assert (cache.page_table[:, 0] == first).all()
    assert cache.page_table[2, 1] == shared
    rows = in_order(cache)
    np.testing.assert_array_equal(rows[0][0][:, :4], rows[1][0][:, :4])
    assert (rows[0][0][:, 4] != rows[1][0][:, 4]).all()


def test_arrays_keep_their_addresses() -> None:
    cache = full_cache()
    before = [a.ctypes.data for a in (*cache.arrays, cache.dropped)]
    cache.append(*tokens(np.random.default_rng(2), 1), counts=[1, 0, 0])
    cache.take([0, 0, -1])
    assert before == [a.ctypes.data for a in (*cache.arrays, cache.dropped)]
    assert repr(cache) == (
        "<cuflash.KVCache of 3 sequences, 4 pages of 4 keys, 2 heads, head_dim 4, float32>"
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_is_a_cache_of_its_own(copied: Any) -> None:
    cache, rng = full_cache(pages=8), np.random.default_rng(2)
    before, other, new = in_order(cache), copied(cache), tokens(rng, 2)
    other.append(*new)
    for (old, _), (k, _), (kept, _), added in zip(
        before, in_order(other), in_order(cache), new[0], strict=True
    ):
        np.testing.assert_array_equal(k, np.concatenate([old, added], axis=1))
        np.testing.assert_array_equal(kept, old)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, k, v: c.append(k[:2], v), ValueError, r"k: got shape \(2, 2, 1, 4\), expected"),
        (lambda c, k, v: c.append(k, v[:, :, :0]), ValueError, r"v: got shape \(3, 2, 0, 3\)"),
        (lambda c, k, v: c.append(k.astype(np.float64), v), TypeError, "k: got dtype float64"),
        (lambda c, k, v: c.append(k, v, [2, 0, 0]), ValueError, "counts: got numbers from 0 to 2"),
        (lambda c, k, v: c.append(k, v, (1, -1, 0)), ValueError, "counts: got numbers from -1 to"),
        (lambda c, k, v: c.append(k, v, [1.0, 0, 0]), TypeError, "counts: got dtype float64"),
        (lambda c, k, v: c.append(k, v, [[1], [1, 2], [3]]), TypeError, "counts: got list that"),
        (lambda c, k, v: c.append(k, v, [1]), ValueError, r"counts: got shape \(1,\)"),
        (lambda c, k, v: c.append(k, v, interleaved=True), ValueError, "rotary: got False, expect"),
        (lambda c, k, v: c.append(k, v, frequencies=np.ones(1)), ValueError, "rotary: got False"),
        (lambda c, k, v: c.append(k, v, rotary=1), TypeError, "rotary: got 1"),
        (lambda c, k, v: c.append(k, v, rotary=True, frequencies=np.ones(3)), ValueError,
         r"frequencies: got shape \(3,\), expected shape \(r,\) where 2 r is at most 4"),
        (lambda c, k, v: c.append(k, v, count=3), TypeError,
         "count: got an unknown keyword, .*did you mean counts="),
        (lambda c, k, v: c.take([0, 1, 2], block_size=3), TypeError,
         "block_size: .* keywords of this function are parents, lengths"),
        (lambda c, k, v: c.append(c.k_pages[:3, :, :1], v), ValueError,
         r"k: got memory of the cache, expected memory of its own; write k\.copy\(\)"),
        (lambda c, k, v: cuflash.KVCache(10**5, 1, 1, max_length=10**6, page_size=1), ValueError,
         "pages: got 100000000000, expected an int from 1 to 2147483647; pass pages=, or"),
        (lambda c, k, v: cuflash.KVCache(1, 2**31 - 1, 2**31 - 1, max_length=64), ValueError,
         "pages: got 4 pages of 2147483647 x 16 x 2147483647 elements, expected arrays of"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1, dtype=None), TypeError,
         "dtype: got None, expected one of float16, bfloat16, float32, float64, float8_e4m3fn, f"),
        (lambda c, k, v: c.take(()), ValueError, r"parents: got shape \(0,\), expected shape"),
        (lambda c, k, v: c.take([0, 1, 3]), ValueError, "parents: got numbers from 0 to 3"),
        (lambda c, k, v: c.take(np.array([2**64 - 1, 0, 0], np.uint64)), ValueError, "parents:"),
        (lambda c, k, v: c.take((0, -2, 1)), ValueError, "parents: got numbers from -2 to 1"),
        (lambda c, k, v: c.take([0, 1]), ValueError, r"parents: got shape \(2,\)"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 0, max_length=1), ValueError, "head_dim: got 0"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1, page_size=257), ValueError,
         "page_size: got 257, expected an int from 1 to 256"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1.5), TypeError,
         "max_length: got 1.5"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1, dtype=int), TypeError,
         "dtype: got int64"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1, dtype="complex64"), TypeError,
         "dtype: got complex64, expected one of float16, bfloat16,"),
        (lambda c, k, v: cuflash.KVCache(1, 1, 1, max_length=1, dtype="no"), TypeError,
         "dtype: got"),
        (lambda c, k, v: cuflash.attention(k, c, c), TypeError, "k: got cuflash.KVCache, expected"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused_by_name(call: Any, error: Any, message: str) -> None:
    cache = full_cache(pages=8)
    before = [a.copy() for a in cache.arrays]
    with pytest.raises(error, match=message):
        call(cache, *tokens(np.random.default_rng(2), 1))
    for old, new in zip(before, cache.arrays, strict=True):
        np.testing.assert_array_equal(old, new)


def test_an_array_of_a_cache_is_not_replaced() -> None:
    """An array of a cache can be changed in place, but not replaced."""
    cache = full_cache()
    for name in ("k_pages", "v_pages", "page_table", "lengths", "dropped"):
        message = rf"{name}: got list, expected the exist.* write into it: cache\.{name}\[\.\.\.\]"
        with pytest.raises(AttributeError, match=message):
            setattr(cache, name, [0, 0, 0])
    cache.lengths -= 1
    assert cache.lengths.tolist() == [3, 3, 3]


def of_lengths(number: int) -> Callable[[cuflash.KVCache], None]:
    return lambda cache: cache.lengths.fill(number)


def read_only(name: str) -> Callable[[cuflash.KVCache], None]:
    return lambda cache: getattr(cache, name).setflags(write=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_lengths(-1), "lengths: got numbers from -1 to -1 in the cache, expected .* 0 to 8"),
        (of_lengths(-(2**31)), "lengths: got numbers from -2147483648 to"),
        (of_lengths(9), "lengths: got numbers from 9 to 9 in the cache"),
        *((read_only(name), f"{name}: got a read-only array, expected")
          for name in ("k_pages", "v_pages", "page_table", "lengths")),
    ],
)  # fmt: skip
def test_arrays_that_a_caller_spoiled_are_named(spoil: Any, message: str) -> None:
    new = tokens(np.random.default_rng(2), 1)
    for call in (lambda c: c.append(*new, counts=[1, 0, 0]), lambda c: c.take([1, 0, 2])):
        cache = full_cache(pages=8)
        spoil(cache)
        before = [a.copy() for a in cache.arrays]
        with pytest.raises(ValueError, match=message):
            call(cache)
        for old, now in zip(before, cache.arrays, strict=True):
            np.testing.assert_array_equal(old, now)


def interrupted_at(line: int, call: Callable[[], None]) -> bool:
    """Make a call that is interrupted after ``line`` lines of the cache's code."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in ("kv_cache.py", "cache.py"):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", ["append", "take"])
def test_an_interrupted_call_is_made_as_a_whole_or_not_at_all(name: str) -> None:
    """A call that is interrupted anywhere has been made or not, and the cache still works."""
    new = tokens(np.random.default_rng(2), 3)

    def shared() -> cuflash.KVCache:
        cache = full_cache(page_size=3, pages=12)
        cache.take([0, 0, 2])  # one page has to be copied, other pages begin
        return cache

    def call(cache: cuflash.KVCache) -> None:
        if name == "append":
            cache.append(*new, rotary=True)
        else:
            cache.take([2, -1, 0], [4, 4, 2])

    whole, old = shared(), in_order(shared())
    call(whole)
    places = 0
    while interrupted_at(places, functools.partial(call, cache := shared())):
        places += 1
        is_made = cache.lengths.tolist() == whole.lengths.tolist()
        expected = in_order(whole) if is_made else old
        for found, rows in zip(in_order(cache), expected, strict=True):
            np.testing.assert_array_equal(found[0], rows[0])
            np.testing.assert_array_equal(found[1], rows[1])
        if not is_made:
            call(cache)
            np.testing.assert_array_equal(cache.page_table, whole.page_table)
    assert places > (40 if name == "append" else 15)


@pytest.mark.parametrize("number", [-1, 8])
def test_a_number_of_no_page_is_an_error(number: int) -> None:
    """A page number outside the cache is an error that writes nothing; beyond lengths it is not."""
    cache, new = full_cache(pages=8), tokens(np.random.default_rng(2), 1)
    cache.page_table[1, 1] = number
    cache.append(*new)  # takes a page for this number
    before = [a.copy() for a in cache.arrays]
    cache.page_table[2, 0] = before[2][2, 0] = number
    with pytest.raises(
        ValueError, match=rf"page_table: got page numbers from .*{number}.* within the"
    ):
        cache.append(*new)
    for old, now in zip(before, cache.arrays, strict=True):
        np.testing.assert_array_equal(old, now)


@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2])
def test_a_cache_of_8_bits_has_half_the_bytes(dtype: Any) -> None:
    """A cache of 8 bits has half the bytes of 16 bits, and the same attention with its scales."""
    rng, scales = np.random.default_rng(4), {"k_scale": 0.5, "v_scale": 2.0}
    values = {"max_length": 40, "head_dim_v": D_V, "page_size": 3}
    caches = [cuflash.KVCache(SEQUENCES, HEADS, D, **values, dtype=d) for d in (dtype, bfloat16)]
    for steps in (7, 1, 1):
        new = [a.astype(dtype) for a in tokens(rng, steps)]
        caches[0].append(*new)
        wide = (a.astype(np.float32) * s for a, s in zip(new, scales.values(), strict=True))
        caches[1].append(*(a.astype(bfloat16) for a in wide))
    assert 2 * caches[0].k_pages.nbytes == caches[1].k_pages.nbytes
    assert 2 * caches[0].v_pages.nbytes == caches[1].v_pages.nbytes
    q = rng.standard_normal((SEQUENCES, HEADS, 2, D)).astype(bfloat16)
    found = cuflash.attention_paged(q, *caches[0].arrays, causal=True, **scales)
    expected = cuflash.attention_paged(q, *caches[1].arrays, causal=True)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
    with pytest.raises(ValueError, match=r"rotary: got True, .* append wider keys"):
        caches[0].append(*new, rotary=True)


@pytest.mark.parametrize("dtype", [float8_e4m3fn, float8_e5m2])
@pytest.mark.parametrize("wider", [np.float16, bfloat16, np.float32])
def test_a_cache_of_8_bits_quantises_what_is_appended(dtype: Any, wider: Any) -> None:
    """Appending in any groups gives the bits of rotated, divided and rounded arrays."""
    rng, scales = np.random.default_rng(4), (np.float32([[[0.5]], [[3.0]]]), 0.25)
    k, v = (a.astype(wider) for a in tokens(rng, 9))
    caches = [
        cuflash.KVCache(SEQUENCES, HEADS, D, max_length=9, head_dim_v=D_V, dtype=dtype)
        for _ in range(2)
    ]
    turned = cuflash.rotary(k, np.arange(9))
    parts = (np.asarray(a, np.float32) / s for a, s in zip((turned, v), scales, strict=True))
    caches[0].append(*(part.astype(dtype) for part in parts))
    for part in (slice(0, 4), slice(4, 9)):
        new = k[:, :, part], v[:, :, part]
        caches[1].append(*new, k_scale=scales[0], v_scale=np.float64(scales[1]), rotary=True)
    for old, now in zip(*(cache.arrays for cache in caches), strict=True):
        assert old.tobytes() == now.tobytes()


@pytest.mark.parametrize(
    ("dtype", "given", "words"),
    [
        (float8_e4m3fn, {"v": "float16"}, "v: got dtype float16, expected dtype float32 as in k"),
        (float8_e4m3fn, {"k": "float64"}, "k: got dtype float64, expected dtype float8_e4m3fn or"),
        (float8_e4m3fn, {"k_scale": 0.0}, "k_scale: got 0.0, expected"),
        (float8_e4m3fn, {"v_scale": np.ones((3, 1, 1))}, "broadcasts to (2, 1, 1)"),
        (np.float32, {"k_scale": 2.0}, "k_scale: got a scale for float32 elements and a cache of"),
    ],
)
def test_wrong_scales_of_a_cache(dtype: Any, given: dict[str, Any], words: str) -> None:
    cache = cuflash.KVCache(SEQUENCES, HEADS, D, max_length=9, head_dim_v=D_V, dtype=dtype)
    k, v = tokens(np.random.default_rng(4), 1)
    arrays = [a.astype(given.pop(n, np.float32)) for n, a in (("k", k), ("v", v))]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        cache.append(*arrays, **given)
    assert not cache.lengths.any()


def test_gradients_of_pages_are_refused_by_name() -> None:
    cache, x = full_cache(pages=8), np.ones((SEQUENCES, HEADS, 1, D), np.float32)
    for function in (cuflash.attention_vjp, cuflash.attention_backward):
        arrays = [x] * (3 if function is cuflash.attention_vjp else 6)
        with pytest.raises(TypeError, match=r"page_table: .* attention_paged.* have no gradient"):
            function(*arrays, page_table=cache.page_table)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.sampled_from([{}, {"interleaved": True}, {"frequencies": np.array([0.3])}]),
)
def test_keys_turn_by_their_positions_as_they_are_added(
    counts: list[int], dtype: Any, options: dict[str, Any]
) -> None:
    k, v = tokens(np.random.default_rng(1), sum(counts), dtype)
    values = {"max_length": 40, "head_dim_v": D_V, "page_size": 3, "dtype": dtype}
    first, second = (cuflash.KVCache(SEQUENCES, HEADS, D, **values) for _ in range(2))
    first.append(cuflash.rotary(k, np.arange(k.shape[2]), **options), v)
    start = 0
    for count in counts:
        part = slice(start, start := start + count)
        second.append(k[:, :, part], v[:, :, part], rotary=True, **options)
    for whole, grouped in zip(in_order(first), in_order(second), strict=True):
        np.testing.assert_array_equal(whole[0], grouped[0])
        np.testing.assert_array_equal(whole[1], grouped[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, float8_e4m3fn, float8_e5m2])
def test_a_cache_on_a_gpu_is_the_same_and_counts_what_it_drops(dtype: Any) -> None:
    import cupy

    values = {"max_length": 8, "page_size": 4, "pages": 8, "head_dim_v": D_V, "dtype": dtype}
    caches = [
        cuflash.KVCache(SEQUENCES, HEADS, D, **values),
        cuflash.KVCache(SEQUENCES, HEADS, D, **values, like=cupy.zeros(1)),
    ]
    for cache in caches:
        xp = cupy if cache is caches[1] else np
        rng, scales = np.random.default_rng(1), {}
        if dtype != np.float32:
            scales = {"k_scale": xp.asarray(np.float32([[[0.3]], [[2.0]]])), "v_scale": 0.25}
        for counts in ([3, 0, 2], [1, 3, 3], [2, 2, 0]):
            cache.append(*map(xp.asarray, tokens(rng, 3)), counts=xp.asarray(counts), **scales)
        cache.take(xp.asarray([0, 0, 2]), [5, 6, 8])
        cache.append(*map(xp.asarray, tokens(rng, 2)), counts=[1, 2, 0], **scales)
    plain, on_device = caches
    np.testing.assert_array_equal(plain.lengths, on_device.lengths.get())
    np.testing.assert_array_equal(plain.page_table, on_device.page_table.get())
    size = plain.k_pages.shape[2]
    for row, length in zip(plain.page_table, plain.lengths, strict=True):
        for n in range(length):
            place = row[n // size], slice(None), n % size
            for name in ("k_pages", "v_pages"):
                own, there = getattr(plain, name), getattr(on_device, name)
                bits = [a.view(f"u{own.itemsize}")[place] for a in (own, there)]
                np.testing.assert_array_equal(bits[0], bits[1].get())
    assert not cupy.asnumpy(caches[1].dropped).any()
    caches[1].append(*map(cupy.asarray, tokens(np.random.default_rng(1), 9)))
    assert cupy.asnumpy(caches[1].dropped).tolist() == [7, 9, 6]
    assert caches[1].lengths.tolist() == [8, 8, 8]
