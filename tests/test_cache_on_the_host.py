"""Do the kernels of a cache do what its NumPy form does? Run by a C++ compiler, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

import cuflash
from cuflash._kernels.cache_grow import CacheGrowConfig
from cuflash._problem.float8 import divided

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import cache as kernels
from cuflash._select import hardware
from support.host_device import COMPILER, HostDevice, host_device, on_device
from support.recorded_launches import recorded_launches

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
# Rows wider than a warp, more keys than a thread block writes, and more pages of a sequence than a
# thread reads at once.
HEADS, D, D_V, SIZE, MOST = 2, 70, 35, 4, 40


@pytest.fixture(scope="module")
def device(tmp_path_factory: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path_factory.mktemp("kernels")) as found:
        yield found


class Twin:
    """A cache in NumPy, and a second set of its arrays, which kernels write."""

    def __init__(self, sequences: int, pages: int, dtype: Any = np.float32) -> None:
        self.cache, own = (
            cuflash.KVCache(
                sequences, HEADS, D, max_length=MOST, head_dim_v=D_V, page_size=SIZE, pages=pages,
                dtype=dtype,
            )
            for _ in range(2)
        )  # fmt: skip
        self.k, self.v, self.table, self.lengths = map(on_device, own.arrays)
        self.dropped, self.starts, self.sources, self.taken, self.old_table = map(
            on_device, (own.dropped, own._starts, own._sources, own._taken, own._old_table)
        )

    def append(
        self, k: Any, v: Any, counts: Any = None, frequencies: Any = None, **rotary: Any
    ) -> None:
        """Append by kernels alone, which drop tokens that find no room."""
        counts = None if counts is None else on_device(np.asarray(counts, np.int64))
        kernels.grow(
            self.table, self.lengths, self.dropped, counts, self.starts, self.sources, self.taken,
            page_size=SIZE, max_length=MOST, num_tokens=k.shape[2],
        )  # fmt: skip
        kernels.write(
            on_device(k), on_device(v), self.k, self.v, frequencies, self.table, self.starts,
            self.lengths, self.sources, **{"rotation": "none", "num_pairs": 0} | rotary,
        )  # fmt: skip

    def take(self, parents: Any, lengths: Any = None) -> None:
        arrays = [
            None if a is None else on_device(np.asarray(a, np.int64)) for a in (parents, lengths)
        ]
        kernels.take(self.table, self.lengths, self.old_table, self.starts, *arrays)

    def check(self, tolerance: float = 0.0) -> None:
        np.testing.assert_array_equal(self.lengths, self.cache.lengths)
        lengths, columns = self.cache.lengths[:, None], np.arange(self.table.shape[1])
        used = columns * SIZE < lengths
        np.testing.assert_array_equal(self.table[used], self.cache.page_table[used])
        s, n = np.nonzero(np.arange(MOST) < lengths)
        places = self.table[s, n // SIZE], slice(None), n % SIZE
        for own, expected in ((self.k, self.cache.k_pages), (self.v, self.cache.v_pages)):
            check_equal(own[places], expected[places], tolerance)


def check_equal(found: Any, expected: Any, tolerance: float) -> None:
    if tolerance:
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    else:  # NumPy finds no NaN among floats of 8 bits
        numbers = (np.asarray(array).astype(np.float64) for array in (found, expected))
        np.testing.assert_array_equal(*numbers)


def tokens(rng: np.random.Generator, sequences: int, steps: int, dtype: Any = np.float32) -> Any:
    """Return keys and values, neither of them contiguous."""
    k = rng.standard_normal((sequences, steps, D, HEADS)).astype(dtype)
    v = rng.standard_normal((sequences, HEADS, steps, 2 * D_V)).astype(dtype)
    return k.transpose(0, 3, 1, 2), v[..., ::2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("sequences", "pages", "dtype"),
    [
        (3, 40, np.float32),
        (3, 40, float8_e4m3fn),
        (70, 800, np.float16),
        (1030, 11_000, np.float64),
    ],
)
@pytest.mark.usefixtures("device")
def test_any_calls_make_the_arrays_of_numpy(sequences: int, pages: int, dtype: Any) -> None:
    rng, twin = np.random.default_rng(sequences), Twin(sequences, pages, dtype)
    for step in range(3 if sequences > 1000 else 6):
        steps = 20 if step < 2 else int(rng.integers(1, 9))
        k, v = tokens(rng, sequences, steps, dtype)
        room = np.maximum(MOST - twin.cache.lengths, 0)
        counts = np.minimum(rng.integers(0, steps + 1, sequences), room)
        for append in (twin.cache.append, twin.append):
            append(k, v, counts)
        twin.check()
        parents = rng.integers(-1, sequences, sequences)
        kept = rng.integers(0, MOST, sequences) if step % 2 else None
        for take in (twin.cache.take, twin.take):
            take(parents, kept)
        twin.check()
    assert not twin.dropped.any()


@pytest.mark.usefixtures("device")
def test_what_finds_no_room_is_dropped() -> None:
    """Sequences take free pages in order, and tokens that find no page are dropped and counted."""
    twin = Twin(3, 5)
    k, v = tokens(np.random.default_rng(0), 3, 9)
    twin.append(k, v)  # three pages each
    assert [*twin.lengths] == [9, 8, 0]
    assert [*twin.dropped] == [0, 1, 9]
    assert [*twin.table[0, :3], *twin.table[1, :2]] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(twin.k[3], k[1, :, :4])
    twin.append(k, v, [-4, 10**12, 2])  # counts are clamped, and no page is free
    assert [*twin.lengths] == [9, 8, 0]
    assert [*twin.dropped] == [0, 1 + 9, 9 + 2]
    twin.take([0, 0, 0])  # the page that is not full is shared, and free pages suffice for one copy
    twin.append(k, v, [1, 1, 1])
    assert [*twin.lengths] == [10, 10, 9]
    assert [*twin.table[:, 2]] == [3, 4, 2]
    np.testing.assert_array_equal(twin.k[4][:, :2], np.stack([k[0, :, 8], k[1, :, 0]], axis=1))
    twin.take([7, 1, -1], [-1, 5, 9])
    assert [*twin.lengths] == [0, 5, 0]


@pytest.mark.usefixtures("device")
def test_a_table_of_any_numbers_is_no_fault() -> None:
    """Page numbers and lengths outside the cache write nothing outside it."""
    twin = Twin(2, 20)
    twin.table[:] = [[-5], [10**9]]
    twin.lengths[:] = -3, 10**6
    before = twin.k.copy()
    twin.append(*tokens(np.random.default_rng(0), 2, 2))
    assert [*twin.lengths] == [2, MOST]
    assert (twin.k[1:] == before[1:]).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("number", [-5, 20, 10**9])
def test_a_page_that_does_not_exist_is_replaced(number: int) -> None:
    """A page number that does not exist is replaced by a free page when a key is added to it."""
    twin = Twin(2, 20)
    k, v = tokens(np.random.default_rng(0), 2, 2)
    twin.append(k, v)
    twin.table[1, 0] = number
    guarded = np.full((24, HEADS, SIZE, D), 7, np.float32)
    guarded[2:22] = twin.k
    twin.k = on_device(guarded)[2:22]
    twin.append(k, v)
    assert [*twin.lengths] == [4, 4]
    assert [*twin.table[:, 0]] == [0, 1]
    np.testing.assert_array_equal(twin.k[1][:, 2:], k[1])
    assert (guarded[:2] == 7).all()
    assert (guarded[22:] == 7).all()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rotation", ["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_keys_are_turned_as_they_are_written(rotation: str, dtype: Any) -> None:
    twin, interleaved = Twin(2, 20, dtype), rotation == "neighbours"
    k, v = tokens(np.random.default_rng(0), 2, 7, dtype)
    own = on_device(np.arange(D) / 7)[:33] if interleaved else None  # fewer pairs
    options = {"interleaved": interleaved, "frequencies": own}
    pairs = D // 2 if own is None else len(own)
    for part in (slice(0, 3), slice(3, 7)):
        new = k[:, :, part], v[:, :, part]
        twin.append(*new, frequencies=own, rotation=rotation, num_pairs=pairs)
        twin.cache.append(*new, rotary=True, **options)
    expected = cuflash.rotary(k, np.arange(7), **options)
    found = [twin.k[twin.table[0, n // SIZE], :, n % SIZE] for n in range(7)]
    tolerance = 1e-14 if dtype == np.float64 else 0  # two libraries compute the sines
    check_equal(np.stack(found, axis=1), expected[0], tolerance)
    twin.check(tolerance)


#: Ties, limits and numbers that no 8-bit float is near.
EDGES = [
    0,
    -0.0,
    2**-10,
    3 * 2**-10,
    -(2**-30),
    17,
    18,
    19,
    449,
    464,
    480,
    -1e30,
    5e4,
    61440,
    1e-30,
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rotation", ["none", "halves"])
@pytest.mark.parametrize("pages", [float8_e4m3fn, float8_e5m2])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32])
def test_pages_of_8_bits_round_what_is_appended(dtype: Any, pages: Any, rotation: str) -> None:
    """They have the bits of rotated and quantised arrays, also where a shared page is copied."""
    twin, scales = Twin(2, 20, pages), (np.float32([0.5, 3]), 2.0**-3)
    with np.errstate(over="ignore"):
        k, v = tokens(np.random.default_rng(0), 2, 7, dtype)
        k[0, 0, 0, : len(EDGES)] = np.array(EDGES).astype(dtype)
        k[1, 1, 2, 3], v[1, 0, 5, :2] = np.nan, np.inf
    turned = {"rotation": rotation, "num_pairs": D // 2 if rotation == "halves" else 0}
    shape = {"k_scale": scales[0][:, None, None], "v_scale": scales[1]}
    for part in (slice(0, 3), slice(3, 7)):
        new = k[:, :, part], v[:, :, part]
        twin.append(*new, scales=(on_device(scales[0]), scales[1]), **turned)
        twin.cache.append(*new, rotary=rotation == "halves", **shape)
        twin.check()
        for take in (twin.cache.take, twin.take):
            take([0, 0] if part.start == 0 else [1, 0])
    twin.check()
    wide = cuflash.rotary(k, np.arange(7)) if rotation == "halves" else k
    expected = divided(wide[0, :, :3], scales[0][:, None, None], np.dtype(pages))
    found = np.stack([twin.k[twin.table[0, 0]][:, n] for n in range(3)], axis=1)
    check_equal(found, expected, 0.0)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("positions", [2**33, "rows", "entries", "eight axes"])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary(positions: Any, inverse: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 10, 2, 100)).astype(np.float32).swapaxes(1, 2)
    arrays = {
        "rows": np.arange(20)[::2],
        "entries": rng.integers(-9, 99999, (3, 1, 20)).astype(np.int32)[..., ::2],
        "eight axes": rng.integers(-9, 99, (1, *(2,) * 8)).T,
    }
    if positions == "eight axes":  # no two of these axes can be merged into one
        x = rng.standard_normal((2,) * 8 + (3, 70)).astype(np.float32)
    given, frequencies = arrays.get(positions, positions), np.arange(33.0)
    x, out = on_device(x), on_device(np.full(x.shape, np.nan, np.float32))
    kernels.turn(
        x, out, given if isinstance(given, int) else on_device(given), on_device(frequencies), 33,
        "halves", inverse=inverse,
    )  # fmt: skip
    expected = cuflash.rotary(np.asarray(x), given, frequencies=frequencies, inverse=inverse)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("pages", [1, 32, 2**15, 2**15 + 1, 3 * 2**14, 2**18])
def test_shared_memory_has_bits_for_every_page(pages: int) -> None:
    config = CacheGrowConfig.of(pages)
    assert 32 * config.page_words >= pages
    assert 8 * config.page_words < config.smem_bytes <= 99 << 10


@pytest.mark.parametrize("arch", hardware.ARCHITECTURES)
def test_a_cache_has_no_more_pages_than_shared_memory_has_bits_for(arch: str) -> None:
    own = hardware.typical(arch)
    with recorded_launches() as (library, _), hardware.assumed(own):
        most = kernels.most_pages()
        assert CacheGrowConfig.of(most).smem_bytes <= own.limits.block_smem
        assert most == 2**18 or CacheGrowConfig.of(most + 1).smem_bytes > own.limits.block_smem
        given = {"max_length": 1, "page_size": 1, "like": library.empty(1, np.float16)}
        with pytest.raises(ValueError, match=f"pages: got {most + 1}, expected at most {most} on"):
            cuflash.KVCache(1, 1, 1, pages=most + 1, **given)
        assert cuflash.KVCache(1, 1, 1, pages=most, **given).k_pages.shape[0] == most


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["x", "out", "positions"])
def test_elements_off_their_boundaries_are_refused(name: str) -> None:
    shapes = {"x": (2, 3, 8), "out": (2, 3, 8), "positions": (3,)}
    dtypes = {"x": np.float32, "out": np.float32, "positions": np.int64}
    given = {n: on_device(np.zeros(shape, dtypes[n])) for n, shape in shapes.items()}
    off = np.zeros(given[name].nbytes + 4, np.uint8)[2:-2].view(dtypes[name])
    given[name] = on_device(off.reshape(shapes[name]))
    with pytest.raises(ValueError, match=f"{name}: got misaligned elements of . bytes"):
        kernels.turn(*given.values(), None, 4, "halves", inverse=False)
