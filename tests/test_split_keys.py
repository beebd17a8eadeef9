"""Do parts of the keys add up to the whole? Kernels run by a C++ compiler, without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_few_queries import options_of

import cuflash
from cuflash import reference
from cuflash._kernels import forward_combine, portable, split_keys
from cuflash._kernels.forward_sm80 import ForwardConfig
from cuflash._kernels.forward_sm90 import ForwardSm90Config
from cuflash._kernels.request import Request
from cuflash._problem.options import signature
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import describe, in_pages
from cuflash._select import hardware
from cuflash._select.access import Access
from cuflash._select.choose import choose
from cuflash.testing._budget import Budget
from support.problems import Call, make_call

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import plan_cache, run
from cuflash._launch.workspace import Workspace
from support.host_device import COMPILER, HostDevice, host_device, on_device, options_on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def full(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.full)


@pytest.fixture
def device(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """Split even as few keys as make two parts, since the host is slow.

    Packed sequences have so few parts that parts of long sequences have more keys.
    """
    few = split_keys.BOUNDS._replace(min_keys=512, max_ragged_part_keys=512, max_packed_parts=3)
    monkeypatch.setattr(split_keys, "BOUNDS", few)
    with host_device(tmp_path) as found:
        yield found


@pytest.fixture
def clusters(tmp_path: Any) -> Iterator[HostDevice]:
    """A device on which the thread blocks of a tile form clusters."""
    with host_device(tmp_path, 90, multiprocessors=132, tensor_maps=True) as found:
        yield found


def forward(
    call: Call, options: cuflash.Options, out: Any = None, lse: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    options_on_device(options)
    q, k, v = (on_device(call.array(name)) for name in "qkv")
    problem = describe(q, k, v, options, out=out)
    if out is None:
        out = on_device(np.full(problem.out_shape, np.nan, problem.dtype))
        lse = on_device(np.full(problem.lse_shape, np.nan, problem.lse_dtype))
    run.forward(problem, (q, k, v), options, out, lse)
    return np.asarray(out), np.asarray(lse)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that splits the keys of every call into ``parts``."""

    def into(parts: int) -> None:
        plan_cache.forget()
        monkeypatch.setattr(split_keys, "wanted", lambda _: parts > 0)
        monkeypatch.setattr(split_keys, "parts_of", lambda *_: parts)

    return into


@pytest.mark.full
@pytest.mark.parametrize("kind", list(options_of(3, 700)))
def test_options_are_within_the_budget(device: HostDevice, splits: Any, kind: str) -> None:
    given = options_of(3, 700)[kind]
    shapes = (2, 2, 3, 20), (2, 1, 700, 20), (2, 1, 700, 28)
    splits(5)
    call = make_call("normal", 1, np.dtype(np.float16), *shapes, options=given, wrt=())
    Budget(call).check_forward(*forward(call, cuflash.Options(**given)))
    assert device.launched[-2:] == ["cuflash_forward_sm80", "cuflash_forward_combine"]


@pytest.mark.parametrize(
    "dtype",
    [
        np.float16,
        pytest.param(bfloat16, marks=pytest.mark.full),
        pytest.param(np.float32, marks=pytest.mark.full),
        pytest.param(np.float64, marks=pytest.mark.full),
    ],
)
def test_any_number_of_parts_is_within_the_budget(
    device: HostDevice, splits: Any, dtype: Any
) -> None:
    """Any number of parts is within the budget, with the same bits whatever memory held."""
    sink = np.array(0.7, np.float32)  # one part has the sink
    options = {"enable_gqa": True, "kv_lengths": np.array([[10], [333]]), "sink": sink}
    shapes = (2, 4, 2, 24), (2, 2, 350, 24), (2, 2, 350, 24)
    call = make_call("normal", 4, np.dtype(dtype), *shapes, options=options, wrt=())
    for parts in (1, 2, 3):
        splits(parts)
        found = []
        for device.unwritten in (0xFF, 0x45):
            found.append(forward(call, cuflash.Options(**options)))
        assert [a.tobytes() for a in found[0]] == [a.tobytes() for a in found[1]]
        Budget(call).check_forward(*found[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["causal", "a sink alone", *map(full, ("mask", "the rest"))])
@pytest.mark.parametrize("dtype", [np.float16, full(np.float32)])
def test_a_cluster_has_the_bits_of_two_kernels(
    clusters: HostDevice, splits: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, kind: str
) -> None:
    """A cluster has the bits of two kernels, within the budget, whatever memory held."""
    given = options_of(5, 700)[kind]
    shapes = (2, 2, 5, 20), (2, 1, 700, 20), (2, 1, 700, 27)
    call = make_call("normal", 1, np.dtype(dtype), *shapes, options=given, wrt=())
    for parts in (1, 3, 8):
        splits(parts)
        found = []
        for clusters.unwritten in (0xFF, 0x45):
            found.append(forward(call, cuflash.Options(**given)))
            assert clusters.launched[-1] == "cuflash_forward_sm80"
        with monkeypatch.context() as patch:
            patch.setattr(split_keys, "in_clusters", lambda _: False)
            plan_cache.forget()
            found.append(forward(call, cuflash.Options(**given)))
        last = "cuflash_forward_sm80" if parts == 1 else "cuflash_forward_combine"
        assert clusters.launched[-1] == last
        assert len({out.tobytes() + lse.tobytes() for out, lse in found}) == 1
        Budget(call).check_forward(*found[0])


@pytest.mark.parametrize("kind", ["causal", *map(full, ("a sink alone", "the rest"))])
def test_pairs_have_the_bits_of_two_kernels(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Two thread blocks for each tile, one tile for each SM, have the bits of two kernels."""
    few = split_keys.BOUNDS._replace(min_keys=256, min_keys_beside_tiles=256)
    monkeypatch.setattr(split_keys, "BOUNDS", few)
    given = options_of(5, 600)[kind]
    shapes = (2, 2, 5, 20), (2, 2, 600, 20), (2, 2, 600, 40)
    call = make_call("normal", 1, np.dtype(np.float16), *shapes, options=given, wrt=())
    found, launched = [], []
    for clusters in (True, False):
        with (
            monkeypatch.context() as patch,
            host_device(tmp_path, 90, multiprocessors=4, tensor_maps=True) as device,
        ):
            if not clusters:
                patch.setattr(split_keys, "in_clusters", lambda _: False)
            found.append(forward(call, cuflash.Options(**given)))
            launched.append(device.launched[-1])
    assert launched == ["cuflash_forward_sm80", "cuflash_forward_combine"]
    assert len({out.tobytes() + lse.tobytes() for out, lse in found}) == 1
    Budget(call).check_forward(*found[0])


@pytest.mark.parametrize("rows", [40, full(64)])
def test_rows_are_dealt_out_to_the_blocks_of_a_cluster(
    clusters: HostDevice, splits: Any, rows: int
) -> None:
    """Clusters of fewer blocks than rows are right, with out and lse that are strided."""
    options = {"causal": True, "q_lengths": np.array([rows, rows - 3])}
    shapes = (2, rows, 24), (2, 600, 24), (2, 600, 40)
    call = make_call("normal", 5, np.dtype(np.float16), *shapes, options=options, wrt=())
    splits(5)
    out = np.full((rows, 2, 80), np.nan, np.float32)[..., ::2].swapaxes(0, 1)
    lse = np.full((2, 2 * rows), np.nan, np.float32)[:, ::2]
    found = forward(call, cuflash.Options(**options), on_device(out), on_device(lse))
    Budget(call).check_forward(*found)
    assert clusters.launched == ["cuflash_forward_sm80"]


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_a_cluster_has_all_columns_and_fits(arch: str) -> None:
    """Where shared memory is too small for that, the keys are not split among a cluster."""
    device = hardware.typical(arch)
    found = set()
    pairs = device.multiprocessors, 4096
    for (entries, keys), dtype, d, d_v in itertools.product(
        ((2, 512), pairs), (np.float16, np.float32), (64, 128, 256), (64, 128)
    ):
        shapes = ((1, d), (keys, d), (keys, d_v))
        q, k, v = (np.broadcast_to(dtype(0), (entries, *shape)) for shape in shapes)
        for step in choose(describe(q, k, v, cuflash.Options()), device):
            if getattr(step.config, "clusters", False):
                assert step.config.split_columns == 1
                assert step.config.smem_bytes <= device.limits.block_smem
                if keys == 4096:  # two thread blocks run on an SM
                    assert portable.fits(step.config, device.limits.block_smem)
            found.add(getattr(step.config, "clusters", False))
    assert True in found


@pytest.mark.full
def test_a_tile_of_96_rows(clusters: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 96 rows is within the budget, over as few keys as a cluster splits here."""
    few, many = split_keys.IN_CLUSTERS
    monkeypatch.setattr(split_keys, "IN_CLUSTERS", (few, many._replace(min_keys=1024)))
    shapes = (1, 1, 77, 64), (1, 1, 1024, 64), (1, 1, 1024, 64)
    given = {"causal": True}
    call = make_call("normal", 1, np.dtype(np.float16), *shapes, options=given, wrt=())
    Budget(call).check_forward(*forward(call, cuflash.Options(**given)))
    assert clusters.launched == ["cuflash_forward_sm80"]
    assert [config.block_m for config in clusters.configs] == [96]


@pytest.mark.long
@pytest.mark.parametrize(
    "many", [False, True], ids=["a thread block for each row", "a warp for each row"]
)
@pytest.mark.parametrize("seen", [{}, {"window": (100, 0)}], ids=["all", "the last"])
def test_more_parts_than_a_warp_has_lanes(
    device: HostDevice,
    splits: Any,
    monkeypatch: pytest.MonkeyPatch,
    seen: dict[str, Any],
    many: bool,
) -> None:
    """More parts and columns than lanes are right, with strided results and parts without a key."""
    splits(40)
    monkeypatch.setattr(forward_combine, "BLOCKS_PER_SM", 0 if many else 4)
    options = {"kv_lengths": np.array([2560, 300]), **seen}
    shapes = (2, 3, 24), (2, 2560, 24), (2, 2560, 72)
    call = make_call("normal", 5, np.dtype(np.float16), *shapes, options=options, wrt=())
    out = np.full((3, 2, 144), np.nan, np.float32)[..., ::2].swapaxes(0, 1)
    lse = np.full((2, 6), np.nan, np.float32)[:, ::2]
    found = forward(call, cuflash.Options(**options), on_device(out), on_device(lse))
    Budget(call).check_forward(*found)
    assert np.isfinite(out).all()
    assert device.launched[-1] == "cuflash_forward_combine"
    (combining,) = (config for config in device.configs if config.computes == "combine")
    assert combining.rows == (combining.num_warps if many else 1)


@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.full), 256])
def test_tiles_of_two_warps(device: HostDevice, d: int) -> None:
    """Tiles of two warps are right for 20 queries and few keys, with options that rows read."""
    given = {"causal": True, "mask": np.random.default_rng(1).random((20, 600)) < 0.7}
    shapes = (1, 2, 20, d), (1, 2, 600, d), (1, 2, 600, d)
    call = make_call("normal", 1, np.dtype(np.float16), *shapes, options=given, wrt=())
    Budget(call).check_forward(*forward(call, cuflash.Options(**given)))
    assert device.launched[-2:] == ["cuflash_forward_sm80", "cuflash_forward_combine"]
    config = next(c for c in device.configs if c.computes == "out")
    assert (config.block_m, config.num_warps, config.split_keys) == (32, 2, True)


@pytest.mark.long
@pytest.mark.parametrize("keys", [511, 600])
def test_tiles_of_two_warps_are_not_split_where_they_fill_the_device(
    device: HostDevice, keys: int
) -> None:
    """Tiles that fill the device are not split, and few keys have no tiles of two warps."""
    call = make_call("normal", 1, np.dtype(np.float16), (9, 1, 64), (9, keys, 64), (9, keys, 64),
                     options={"sink": np.array(0.7, np.float32)}, wrt=())  # fmt: skip
    Budget(call).check_forward(*forward(call, cuflash.Options(**call.options)))
    assert device.launched == ["cuflash_forward_sm80"]
    (config,) = device.configs
    assert (config.block_m == 32, config.split_keys) == (keys >= 512, False)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(
    "bound",
    [
        {"causal": True},
        {"causal": True, "kv_lengths": np.array([[2], [333]])},
        {"window": (200, 1), "offset": np.array([[300], [-1]])},
        {"window": (90, 0), "softcap": 3.0},
    ],
    ids=["causal", "lengths", "offsets", "window"],
)
def test_queries_of_the_heads_of_a_group_are_rows(
    device: HostDevice, splits: Any, dtype: Any, bound: dict[str, Any]
) -> None:
    """Query heads of a group become rows, each with the bound of its query."""
    given = {"enable_gqa": True, **bound}
    shapes = (2, 6, 5, 24), (2, 2, 350, 24), (2, 2, 350, 24)
    call = make_call("normal", 4, np.dtype(dtype), *shapes, options=given, wrt=())
    for parts in (0, 3):
        splits(parts)
        Budget(call).check_forward(*forward(call, cuflash.Options(**given)))
        config = next(c for c in device.configs if c.computes == "out")
        assert config.heads_in_rows


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["causal", "sink", "mask", "key bias"])
def test_narrow_heads(device: HostDevice, splits: Any, dtype: Any, kind: str) -> None:
    """Narrow heads are split by the kernel whose threads own rows."""
    rng, shapes = np.random.default_rng(3), ((2, 2, 70, 3), (2, 1, 700, 3), (2, 1, 700, 5))
    bias = {"bias": np.where(rng.random((2, 1, 1, 700)) < 0.1, -np.inf, 0.5).astype(dtype)}
    given = bias if kind == "key bias" else options_of(70, 700)[kind]
    call = make_call("normal", 1, np.dtype(dtype), *shapes, options=given, wrt=())
    for parts in (2, 5):
        splits(parts)
        Budget(call).check_forward(*forward(call, cuflash.Options(**given)))
        assert device.launched[-2:] == ["cuflash_forward_narrow", "cuflash_forward_combine"]


@pytest.mark.parametrize("kind", ["causal", pytest.param("sink", marks=pytest.mark.full)])
def test_packed_sequences_are_split_by_their_own_lengths(device: HostDevice, kind: str) -> None:
    """Packed sequences split by their own lengths keep their bits beside others; the rest is 0."""
    rng, given = np.random.default_rng(3), {"causal": True}
    if kind == "sink":
        given = {"sink": np.array([1.5, -2.0], np.float32)}
    rows, keys = np.array([1, 3, 0, 2, 1]), np.array([17, 1300, 40, 0, 700])
    q, k, v = (
        rng.standard_normal((2, n, 24)).astype(np.float16)
        for n in (rows.sum() + 2, keys.sum() + 5, keys.sum() + 5)
    )

    def attend(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        ends = (
            np.cumsum([n[:first].sum() + start, *n[first : first + count]]).astype(np.int32)
            for n, start in ((rows, 1), (keys, 2))
        )
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(on_device, ends), strict=True))
        options = options_on_device(cuflash.Options(**given))
        arrays = on_device(q), on_device(k), on_device(v)
        problem = describe_packed(*arrays, options, packed, axes=None, precision=None)
        out = on_device(np.full(problem.out_shape, np.nan, problem.dtype))
        lse = on_device(np.full(problem.lse_shape, np.nan, problem.lse_dtype))
        run.forward(problem, arrays, options, out, lse, cu_seqlens=packed)
        return np.asarray(out), np.asarray(lse)

    out, lse = attend(0, 5)
    assert device.launched[-2:] == ["cuflash_forward_sm80", "cuflash_forward_combine"]
    assert not out[:, [0, -1]].any()
    assert (lse[:, [0, -1]] == -np.inf).all()
    first_q, first_k = 1, 2
    for m, n in zip(rows, keys, strict=True):
        own_q, own_k = (slice(i, i + size) for i, size in ((first_q, m), (first_k, n)))
        call = Call(q[:, own_q], k[:, own_k], v[:, own_k], q[:, own_q], options=given, wrt=())
        if m:
            Budget(call).check_forward(out[:, own_q], lse[:, own_q])
        first_q, first_k = first_q + m, first_k + n
    alone = attend(1, 1)
    assert alone[0][:, 2:5].tobytes() == out[:, 2:5].tobytes()
    assert alone[1][:, 2:5].tobytes() == lse[:, 2:5].tobytes()


@pytest.mark.long
def test_logsumexp(device: HostDevice, splits: Any) -> None:
    """logsumexp, a call without columns of values, splits keys, too."""
    splits(3)
    rng = np.random.default_rng(9)
    q, k = (rng.standard_normal((2, n, 24)).astype(np.float32) for n in (3, 700))
    call = Call(q, k, k[..., :0], q[..., :0], options={}, wrt=())
    out, lse = forward(call, cuflash.Options())
    assert out.shape == (2, 3, 0)
    np.testing.assert_allclose(lse, reference.logsumexp(q, k), rtol=1e-6)
    assert device.launched[-1] == "cuflash_forward_combine"


@pytest.mark.long
@pytest.mark.parametrize("where", ["clusters", full("device")])
def test_what_is_not_finite_reaches_the_rows_that_see_it(
    request: pytest.FixtureRequest, splits: Any, where: str
) -> None:
    """A NaN key in one part and a NaN value in another reach only the rows that see them."""
    request.getfixturevalue(where)
    call = make_call("normal", 2, np.dtype(np.float16), (1, 8, 24), (1, 300, 24), (1, 300, 24),
                     options={"causal": True, "offset": 100}, wrt=())  # fmt: skip
    splits(3)
    clean = forward(call, cuflash.Options(**call.options))
    k, v = call.k.copy(), call.v.copy()
    k[0, 105], v[0, 103, 3] = np.nan, np.inf
    k[0, 290], v[0, 290] = np.nan, np.nan
    out, lse = forward(call.but(k=k, v=v), cuflash.Options(**call.options))
    np.testing.assert_allclose(out[0, :3], clean[0][0, :3], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(lse[0, :5], clean[1][0, :5], rtol=1e-6)
    assert not np.isfinite(out[0, 3:, 3]).any()
    assert np.isnan(out[0, 5:]).all()
    assert np.isnan(lse[0, 5:]).all()


@pytest.mark.full
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("size", [1e4, 6e4])
def test_values_and_scores_that_are_large(splits: Any, size: float) -> None:
    """Means of values near the largest number are finite, and rows far from 0 within the budget."""
    splits(3)
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 16)).astype(np.float32) for n in (4, 200))
    v = np.full((1, 200, 16), 3e38, np.float32)
    call = Call(q, k, v, np.zeros_like(q), options={}, wrt=())
    out, _ = forward(call, cuflash.Options())
    np.testing.assert_allclose(out, 3e38, rtol=1e-5)
    far = {"scale": size}
    call = Call(q, k, rng.standard_normal(v.shape).astype(np.float32), np.zeros_like(q),
                options=far, wrt=())  # fmt: skip
    Budget(call).check_forward(*forward(call, cuflash.Options(**far)))


def test_the_number_of_parts_follows_from_shapes_and_device() -> None:
    def parts(
        batch: tuple[int, ...], rows: int, keys: int, sms: int = 132, d: int = 64,
        page_size: int = 0, capability: int = 80, **options: Any,
    ) -> int:  # fmt: skip
        dtype = np.float16 if d == 64 else np.float32
        q, k = (np.broadcast_to(dtype(0), (*batch, n, d)) for n in (rows, keys))
        problem = describe(np.empty_like(q), np.empty_like(k), k, cuflash.Options(**options))
        if page_size:
            pages = signature(np.empty((1, batch[1], page_size, d), dtype))
            table = signature(np.zeros((batch[0], 1, keys // page_size), np.int32))
            problem = in_pages(problem, pages, pages, table)
        request = Request(problem, capability, num_sms=sms)
        if not (split_keys.wanted(request) or split_keys.has_tiles_of_few_rows(request)):
            return 0
        (config,) = ForwardConfig.chosen(request)
        assert config.split_keys
        return split_keys.parts_of(problem, config, sms)

    lengths = np.array([[3], [100_000]])
    assert parts((1, 8), 1, 2047) == 0
    assert parts((1, 8), 1, 2048) == 16  # a block of 128 keys each: 16 parts may be short
    assert parts((1, 8), 1, 8192) == 32  # two blocks, as a part has at least 256 keys
    assert parts((1, 8), 1, 511, capability=90) == 0
    assert parts((1, 8), 1, 512, capability=90) == 8  # a cluster, one block of 64 keys each
    assert parts((1, 8), 64, 512, capability=90) == 8
    assert parts((1, 8), 1, 2048, capability=90) == 8
    assert parts((2, 8), 1, 512, capability=90) == 8
    assert parts((3, 8), 1, 512, capability=90) == 0  # enough tiles
    assert parts((1, 8), 77, 4096, capability=90) == 8
    assert parts((1, 8), 1, 2049, capability=90) == 9  # by two kernels
    assert parts((1, 8), 1, 2047, capability=90, d=256) == 0  # columns are split
    assert parts((1, 8), 1, 496, page_size=16) == 0
    assert parts((1, 8), 1, 512, page_size=16) == 8  # one block of 64 keys
    assert parts((1, 8), 64, 512, page_size=16) == 6  # blocks of 96 keys, by another tile
    assert parts((1, 8), 65, 2032, page_size=16) == 0
    assert parts((1, 8), 65, 2047) == 0
    assert parts((1, 8), 65, 2048) == 8  # of 256 keys
    assert parts((1, 8), 1, 65536) == 32  # 8 tiles, two on each of 132 SMs
    assert parts((1, 8), 1, 65536, sms=66) == 16
    assert parts((1, 8), 1, 65536, sms=0) == 0
    assert parts((1, 8), 1, 65536, d=256) == 16  # columns are split, too
    assert parts((1, 1), 1, 262_144, sms=1000) == 256
    assert parts((1, 1), 1, 262_145, sms=1000) == 228  # at most 256 parts, none without keys
    assert parts((16, 8), 1, 4095, capability=90) == 0  # enough tiles for Hopper's kernel
    assert parts((16, 8), 1, 4096, capability=90) == 2  # two thread blocks share an SM
    assert parts((16, 8), 1, 2048) == 2
    assert parts((20, 8), 1, 8192) == 3  # four share an SM: one for each tile would be too few
    assert parts((20, 8), 1, 4096) == 1
    assert parts((11, 8), 1, 2048) == 3
    assert parts((12, 8), 17, 4096, capability=90) == 0
    assert parts((17, 8), 1, 2048) == 1
    assert parts((16, 8), 33, 8192) == 0
    assert parts((64, 8), 1, 2047) == 0
    assert parts((64, 8), 1, 4096) == 1
    assert parts((2, 64), 1, 100_000) == 2
    assert parts((2, 64), 1, 100_000, d=256) == 0
    assert parts((2, 64), 1, 100_000, kv_lengths=lengths) == 25  # at most 4096 keys each
    assert parts((2, 64), 1, 4096, kv_lengths=lengths // 100) == 2
    assert parts((2, 64), 64, 100_000, kv_lengths=lengths) == 25
    assert parts((2, 64), 65, 100_000, kv_lengths=lengths) == 0
    assert parts((1, 8), 512, 50_000) == 8
    assert parts((1, 8), 512, 4095) == 0  # too many queries


def test_a_tile_of_hopper_does_not_split_the_keys_of_packed_sequences() -> None:
    """Hopper's tile by ``config=`` splits no keys of packed sequences; the chosen kernel does."""
    q, k = (np.empty((2, n, 64), np.float16) for n in (8, 8000))
    ends = {"cu_seqlens_q": np.arange(9), "cu_seqlens_k": 1000 * np.arange(9)}
    problem = describe_packed(q, k, k, cuflash.Options(), ends, axes=None, precision=None)
    own = hardware.typical("sm_90")
    assert choose(problem, own)[0].config.split_keys
    (tile,) = ForwardSm90Config.chosen(Request(problem))
    (step,) = choose(problem, own, override=tile)
    assert (step.config.kernel, step.config.split_keys) == ("forward_sm90", False)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_a_workspace_suffices_wherever_arrays_lie(
    monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """A workspace suffices for any addresses, and for out and lse with gaps anywhere."""
    monkeypatch.setattr(run, "runtime", SimpleNamespace(getDevice=lambda: 0))
    rng, own, needed = np.random.default_rng(0), hardware.typical(arch), set()
    for _ in range(150):
        heads, group, rows = rng.choice([1, 2, 8]), rng.choice([1, 3, 8]), rng.choice([1, 20, 100])
        batch, keys, d = rng.choice([1, 2, 5]), rng.integers(2000, 9000), rng.choice([64, 192, 256])
        q = np.empty((batch, heads * group, rows, d), np.float16)
        k = np.empty((batch, heads, keys, d), np.float16)
        options = cuflash.Options(enable_gqa=bool(group > 1), causal=bool(rng.random() < 0.3))
        problem = describe(q, k, k, options)
        gaps = rng.choice([0, 0, 1], 3)
        out = np.empty([n + gap for n, gap in zip(q.shape[:3], gaps, strict=True)] + [d], q.dtype)
        out = out[tuple(map(slice, q.shape))]
        call = describe(q, k, k, options, out=out)
        lse = np.empty(problem.lse_shape, np.float32)
        layouts = run.layouts_of(call, {"out": call.out}, lse=lse)
        has_maps = bool(rng.random() < 0.5)
        with hardware.assumed(own):
            steps = choose(call, own, Access(layouts, lambda *_, found=has_maps: found))
            size = Workspace.of(call, backward=False, splits=run._splits_of(steps)).size
            assert size <= run.workspace_size(problem, "forward")
        needed.add(size > 0)
    assert needed == {False, True}


@pytest.mark.long
def test_a_workspace_has_room_for_every_part(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "runtime", SimpleNamespace(getDevice=lambda: 0))
    q, k = (on_device(np.zeros((1, 1, n, 24), np.float16)) for n in (2, 1024))
    problem = describe(q, k, k, cuflash.Options())
    size, rows = run.workspace_size(problem, "forward"), 2
    parts = 8  # each a block of 128 keys: up to 16 may be short
    assert size == 128 + 4 * parts * rows * (24 + 1)
    out = on_device(np.zeros(problem.out_shape, problem.dtype))
    given = problem, (q, k, k), cuflash.Options(), out, None
    with pytest.raises(ValueError, match=f"workspace: got {size - 1} bytes .* at least {size}"):
        run.forward(*given, workspace=on_device(np.zeros(size - 1, np.uint8)))
    assert not device.launched
    run.forward(*given, workspace=on_device(np.zeros(size + 16, np.uint8)))
    assert device.launched == ["cuflash_forward_sm80", "cuflash_forward_combine"]
