"""Do pages on a GPU have the bits of keys in order, and can one captured step generate?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_paged import Paged

import cuflash
from cuflash._kernels import split_keys

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

from support.portable import planned_kernels, portable_kernels  # noqa: E402

POISON = -(10**9)


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    moved = {n: cupy.asarray(a) for n, a in options.items() if isinstance(a, np.ndarray)}
    if "segment_ids" in options:
        moved["segment_ids"] = tuple(map(cupy.asarray, options["segment_ids"]))
    return options | moved


def poison_what_is_not_used(call: Paged) -> None:
    """Write NaN to unused rows, and numbers of no page beyond the lengths."""
    used = np.zeros((len(call.k_pages), call.size), bool)
    for row, length in zip(call.table, call.lengths, strict=True):
        for n in range(length):
            used[row[n // call.size], n % call.size] = True
        row[-(-length // call.size) :] = POISON
    for pages in (call.k_pages, call.v_pages):
        pages.swapaxes(1, 2)[~used] = np.nan


def bits(result: Any) -> tuple[bytes, ...]:
    return tuple(a.get().tobytes() for a in result)


@pytest.mark.parametrize(
    ("dtype", "d", "size", "keys", "rows", "kind"),
    [
        (bfloat16, 128, 16, 704, 1, "dropout"),  # split
        (bfloat16, 128, 16, 9000, 1, "sink"),  # split
        (np.float16, 64, 1, 300, 5, "bias"),
        (np.float16, 256, 256, 6000, 3, "window"),  # split
        (bfloat16, 64, 48, 700, 200, "causal"),
        (np.float32, 64, 16, 5000, 1, "none"),  # split
        (np.float32, 10, 3, 200, 70, "mask"),
        (np.float64, 40, 16, 300, 4, "segment_ids"),
    ],
    ids=str,
)
def test_pages_have_the_bits_of_keys_in_order(
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any, d: int, size: int, keys: int, rows: int, kind: str,
) -> None:  # fmt: skip
    """Pages have the bits of keys in order where kernel, tile and number of splits are the same.

    Clusters have the same splits in both cases. Without clusters, few queries of 512 to 2047 keys
    are split in pages only, so that keys in order are split here, too.
    """
    bounds = split_keys.BOUNDS
    monkeypatch.setattr(split_keys, "BOUNDS", bounds._replace(min_keys=bounds.min_keys_in_pages))
    call = Paged(7, size, -(-keys // size), rows, dtype, d=d)
    options = on_device(call.options(kind))
    contiguous = [*map(cupy.asarray, call.contiguous())]
    lengths = cupy.asarray(call.lengths[:, None])
    poison_what_is_not_used(call)
    arrays = [*map(cupy.asarray, call.arrays())]
    few = rows <= split_keys.FEW_ROWS
    for planned in (portable_kernels, planned_kernels)[: 1 + few]:
        with planned() as configs:
            cuflash.attention_paged(*arrays, **options)
            config = next(config for config in configs if config.computes == "out")
            configs.clear()
            expected = cuflash.attention(
                *contiguous, kv_lengths=lengths, return_lse=True, config=config, **options
            )
            own = next(config for config in configs if config.computes == "out")
            runs = {
                bits(cuflash.attention_paged(*arrays, return_lse=True, **options))
                for _ in range(200)
            }
        assert (config.paged, own.paged) == (True, False)
        assert config.split_keys == own.split_keys == (few and keys >= 512)
        assert config.clusters == own.clusters
        assert runs == {bits(expected)}


def test_numbers_of_no_page_read_no_foreign_memory() -> None:
    call = Paged(2, 4, 8, 2, np.float16, d=64)
    call.lengths[:] = 30
    wild = call.table.copy()
    call.table[0, 2], call.table[1, 3] = 0, len(call.k_pages) - 1
    wild[0, 2], wild[1, 3] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    expected = cuflash.attention_paged(*map(cupy.asarray, call.arrays()), enable_gqa=True)
    call.table = wild
    found = cuflash.attention_paged(*map(cupy.asarray, call.arrays()), enable_gqa=True)
    assert bits((found,)) == bits((expected,))


class Generation:
    """Sequences whose next query, key and value are what attention returned."""

    def __init__(self, sequences: int, dtype: Any, most: int, size: int = 16) -> None:
        rng = cupy.random.default_rng(3)
        self.heads, self.d = 4, 32
        self.x = rng.standard_normal((sequences, self.heads, 1, self.d)).astype(dtype)
        self.cache = cuflash.KVCache(
            sequences, self.heads, self.d, max_length=most, page_size=size, dtype=dtype,
            like=self.x,
        )  # fmt: skip
        start = rng.standard_normal((2, sequences, self.heads, 11, self.d)).astype(dtype)
        self.counts = cupy.asarray(np.arange(sequences) % 12)
        self.cache.append(*start, counts=self.counts)
        self.q, self.out = cupy.empty_like(self.x), cupy.empty_like(self.x)
        k, v, table, _ = self.cache.arrays
        room = cuflash.workspace_size(self.q, k, v, page_table=table, causal=True)
        self.room = cupy.empty(room, np.uint8)

    def step(self) -> None:
        cache = self.cache
        cuflash.rotary(self.x, cache.lengths[:, None, None], out=self.q)
        cache.append(self.x, self.x, rotary=True)
        cuflash.attention_paged(
            self.q, *cache.arrays, causal=True, out=self.out, workspace=self.room
        )
        cupy.tanh(self.out, out=self.x)

    def state(self) -> tuple[bytes, ...]:
        table, lengths = self.cache.page_table.get(), self.cache.lengths.get()
        used = np.arange(table.shape[1]) * self.cache.k_pages.shape[2] < lengths[:, None]
        return (self.out.get().tobytes(), np.where(used, table, 0).tobytes(), lengths.tobytes(),
                self.cache.dropped.get().tobytes())  # fmt: skip


def captured(step: Any) -> Any:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            step()
        finally:
            graph = stream.end_capture()
    return stream, graph


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("sequences", "most"), [(1, 100), (64, 100), (3, 5000)])
def test_replays_of_one_step_are_the_steps(dtype: Any, sequences: int, most: int) -> None:
    """Replays equal single steps across pages, also at the end, where some caches are full."""
    plain, replayed = (Generation(sequences, dtype, most) for _ in range(2))
    for own in (plain, replayed):
        own.step()  # compiles
    stream, graph = captured(replayed.step)
    for step in range(105):
        plain.step()
        graph.launch(stream)
        if step % 15 == 0 or step > 85:
            stream.synchronize()
            cupy.cuda.Device().synchronize()
            assert replayed.state() == plain.state(), step
    assert bool(plain.cache.dropped.any()) == (most == 100)
    assert np.isfinite(plain.out.get()).all()


def test_a_graph_forks_rewinds_and_frees() -> None:
    """A replay forks, rewinds and frees; it copies a shared page before it adds a key to it."""
    own, other = (Generation(4, np.float32, 60, size=4) for _ in range(2))
    parents, kept = cupy.asarray([1, 1, -1, 3]), cupy.asarray([40, 3, 0, 2])

    def step_of(generation: Generation) -> Any:
        def step() -> None:
            generation.cache.take(parents, kept)
            generation.step()

        return step

    for generation in (own, other):
        step_of(generation)()
    stream, graph = captured(step_of(other))
    for change in ([0, 0, 0, 0], [3, 2, 1, 0], [0, -1, 2, 2], [1, 1, 2, 3]):
        parents[...] = cupy.asarray(change)
        kept[...] = cupy.asarray([9, 2, 40, 5])
        cupy.cuda.Device().synchronize()
        step_of(own)()
        graph.launch(stream)
        stream.synchronize()
        assert other.state() == own.state()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("out", lambda g: cuflash.attention_paged(g.q, *g.cache.arrays, workspace=g.room)),
        ("page_table", lambda g: cuflash.attention_paged(
            g.q, *g.cache.arrays[:2], g.wide_table, g.cache.lengths, out=g.out)),
        ("kv_lengths", lambda g: cuflash.attention_paged(
            g.q, *g.cache.arrays[:3], [3], out=g.out)),
        ("counts", lambda g: g.cache.append(g.x, g.x, counts=[1])),
        ("frequencies", lambda g: g.cache.append(
            g.x, g.x, rotary=True, frequencies=g.x[0, 0, 0, :4])),
        ("parents", lambda g: g.cache.take([0])),
        ("out", lambda g: cuflash.rotary(g.x, 3)),
        ("positions", lambda g: cuflash.rotary(g.x, g.narrow, out=g.q)),
    ],
)  # fmt: skip
def test_what_would_allocate_in_a_capture_is_named(argument: str, call: Any) -> None:
    generation = Generation(1, np.float32, 40)
    generation.wide_table = generation.cache.page_table.astype(np.int64)
    generation.narrow = cupy.zeros(1, np.int8)
    generation.step()
    call(generation)  # works outside of a capture

    def inside() -> None:
        with pytest.raises(RuntimeError, match=f"^{argument}: cannot allocate"):
            call(generation)
        generation.q.fill(0)  # gives the graph a node

    captured(inside)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_on_a_gpu(dtype: Any, interleaved: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 70, 24)).astype(dtype)
    positions = rng.integers(-(10**6), 10**6, (3, 1, 70))
    expected = cuflash.rotary(x, positions, interleaved=interleaved)
    found = cuflash.rotary(cupy.asarray(x), cupy.asarray(positions), interleaved=interleaved)
    unit = {2: 1e-2, 4: 1e-6, 8: 1e-10}[x.dtype.itemsize]
    np.testing.assert_allclose(
        found.get().astype(np.float64), expected.astype(np.float64), atol=unit, rtol=unit
    )
    back = cuflash.rotary(found, cupy.asarray(positions), interleaved=interleaved, inverse=True)
    np.testing.assert_allclose(
        back.get().astype(np.float64), x.astype(np.float64), atol=4 * unit, rtol=4 * unit
    )
