"""Is the forward on Hopper what the definition says, for everything that its kernel supports?

Each case asks for the kernel by a configuration. A configuration that a call cannot use is an
error.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import describe
from cuflash._select import hardware
from cuflash.testing import _families as families
from cuflash.testing._budget import Budget
from support import chosen, problems
from support.hopper import CASES, OPTIONS, ROWS, SHAPES, in_every_shape, make
from support.memory import to_device

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

from cuflash._launch import plan_cache, tile_counters  # noqa: E402

MANY_TILES = ((2, 40), 200, 150)  # more tiles than SMs


@pytest.fixture(autouse=True)
def hopper():
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")


def upload(array):
    return to_device(cupy, array)


def forced(q, k, v, options, multiprocessors=132):
    config = chosen.one("forward_sm90", describe(q, k, v, options), num_sms=multiprocessors)
    assert config is not None
    return config


def attend(q, k, v, multiprocessors=132, **keywords):
    """Return out and lse by the configuration of the kernel, written over NaN."""
    options = cuflash.Options(**keywords)
    problem = describe(q, k, v, options)
    out = upload(np.full(problem.out_shape, np.nan, q.dtype))
    lse = cupy.full(problem.lse_shape, np.nan, np.float32)
    config = forced(q, k, v, options, multiprocessors)
    cuflash.attention(q, k, v, options=options, return_lse=True, out=(out, lse), config=config)
    return out, lse


def attend_packed(q, k, v, ends_q, ends_k, **keywords):
    """Return out and lse of packed sequences, all written over NaN, and the configuration."""
    options = cuflash.Options(**keywords)
    ends = {"cu_seqlens_q": cupy.asarray(ends_q), "cu_seqlens_k": cupy.asarray(ends_k)}
    problem = describe_packed(q, k, v, options, ends, axes=None, precision=None)
    config = chosen.one("forward_sm90", problem)
    assert config is not None
    out = upload(np.full(problem.out_shape, np.nan, q.dtype))
    lse = cupy.full(problem.lse_shape, np.nan, np.float32)
    cuflash.attention_varlen(
        q, k, v, *ends.values(), options=options, return_lse=True, out=(out, lse), config=config
    )
    return (out, lse), config


def check_each_sequence(call, ends_q, ends_k, out, lse, block_n):
    """Check that each sequence has the bits that it has alone, and no other row a result."""
    q, k, v = (upload(call.array(name)) for name in "qkv")
    options = cuflash.Options(**call.options)
    spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    for a, b, c, d in spans:
        rows, keys = slice(a, b), slice(c, d)
        own = q[..., rows, :], k[..., keys, :], v[..., keys, :]
        if a == b:
            continue
        if c == d:
            assert not out[..., rows, :].any()
            assert (lse[..., rows] == -np.inf).all()
            continue
        config = forced(*own, options).replace(block_n=block_n)
        alone = cuflash.attention(*own, options=options, return_lse=True, config=config)
        assert_same_bits(alone, (out[..., rows, :], lse[..., rows]))
    for rows in (slice(0, ends_q[0]), slice(ends_q[-1], None)):
        assert not out[..., rows, :].any()
        assert (lse[..., rows] == -np.inf).all()


def check(call):
    """Check one call against the budget, with the tiles of a small device and of a real one."""
    q, k, v = (upload(call.array(name)) for name in "qkv")
    options = {n: upload(x) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
    budget = Budget(call)
    for multiprocessors in (0, 132):
        out, lse = attend(q, k, v, multiprocessors, **options)
        budget.check_forward(out.get(), lse.get())
    return q, k, v, options, out, lse


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.get().tobytes() == y.get().tobytes()


@pytest.mark.parametrize(("head_dims", "name"), CASES, ids=str)
def test_within_budget(head_dims, name):
    for call in in_every_shape(head_dims, name):
        check(call)


@pytest.mark.parametrize("name", ["none", "causal", "window", "lengths"])
@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_several_tiles_for_each_block_of_threads(head_dims, name):
    check(make(head_dims, ((2, 70), 400, 410), OPTIONS[name]))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bias(head_dims, dtype):
    rng = np.random.default_rng(6)
    of_pairs = rng.standard_normal((3, 300, 400)).astype(dtype)
    of_pairs[:, :, 370:] = of_pairs[1, 13] = -np.inf
    of_keys = rng.standard_normal((2, 1, 1, 515)).astype(dtype)
    ends = {"q_lengths": 290, "kv_lengths": 391}
    check(make(head_dims, ((2, 3), 300, 400), {"bias": of_pairs}))
    check(make(head_dims, ((2, 3), 300, 399), {"bias": of_pairs[..., :399], "causal": True}))
    check(make(head_dims, ((2, 3), 300, 400), {"bias": of_pairs, **ends}, np.float16))
    check(make(head_dims, ((2, 3), 70, 515), {"bias": of_keys, "sink": np.float32([1, 0, -1])}))
    if head_dims != (256, 256):
        check(make(head_dims, ((2, 3), 300, 400), {"bias": of_pairs, "window": (70, 20)}))


def test_a_window_too_wide_for_narrow_blocks():
    check(make((128, 128), ((2,), 4400, 4500), {"window": (4100, 30)}))


@pytest.mark.parametrize("family", families.OF_EVERY_DTYPE)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_every_family_of_inputs(family, head_dims, dtype):
    check(make(head_dims, SHAPES[1], {"causal": True}, dtype, family))
    check(make(head_dims, SHAPES[0], {"softcap": 30.0}, dtype, family))


@pytest.mark.parametrize("factor", [8, 40, 2000])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"window": (500, 0)}, {"softcap": 30.0},
        {"softcap": 9.0, "causal": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 192)], ids=str)
def test_rows_that_outgrow_their_reference_leave_the_others_alone(head_dims, options, factor):
    """Where rows outgrow their reference, the other rows of their warp keep their bits.

    The warp then lets the reference follow, or multiplies again. With a softcap they keep them,
    too, beside rows with scores outside the range of its polynomial.
    """
    call = make(head_dims, ((2, 3), 700, 900), options)
    calm, k, v = (call.array(name) for name in "qkv")
    loud = factor * calm  # weights beyond 2^8 relative to the first block, or overflowing
    mixed = np.where(np.arange(700)[:, None] % 5 < 2, loud, calm)
    results = [attend(*map(upload, (q, k, v)), **options) for q in (calm, loud, mixed)]
    for of_calm, of_loud, of_mixed in zip(*results, strict=True):
        assert not np.isnan(of_mixed.get()).any()
        for rows, alone in (((0, 1), of_loud), ((2, 3, 4), of_calm)):
            for first in rows:
                at = np.s_[:, :, first::5]
                assert_same_bits([of_mixed[at].copy()], [alone[at].copy()])


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True, "offset": -1}, {"window": (900, 5)}, {"softcap": 40.0},
        {"alibi_slopes": np.array([1.5, 0.1, -0.3], np.float32)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 96), (128, 128)], ids=str)
def test_references_that_follow_are_within_budget(head_dims, options, dtype):
    """Weights that grow from block to block, even beyond overflow, are within the budget."""
    call = make(head_dims, ((2, 3), 700, 1300), options, dtype)
    first_keys_most = np.linspace(1, 0.05, 1300)[:, None]
    for factor in (1, 6, 60):
        check(call.but(k=(factor * first_keys_most * call.k).astype(dtype)))


MANY = [(d, name) for d in ROWS for name in ("none", "causal")]
MANY += [(d, name) for d in ((64, 64), (256, 256)) for name in ("window", "softcap")]
MANY += [((128, 128), "window")]


@pytest.mark.parametrize(("head_dims", "name"), MANY, ids=str)
@pytest.mark.not_rehearsed
def test_more_tiles_than_multiprocessors(head_dims, name):
    """A row's bits depend on its own inputs alone, whichever order tiles are drawn in."""
    options = OPTIONS[name]
    q, k, v, given, out, lse = check(make(head_dims, MANY_TILES, options, np.float16))
    one = (slice(1, 2), slice(7, 8))
    assert_same_bits(attend(q[one], k[one], v[one], **given), (out[one], lse[one]))
    if not options:  # the same rows at another place in their tiles
        rows = attend(q[..., 50:, :], k, v, **given)
        assert_same_bits(rows, (out[..., 50:, :], lse[..., 50:]))
    for _ in range(20):
        assert_same_bits(attend(q, k, v, **given), (out, lse))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 30)}], ids=str)
def test_lengths_hide_what_lies_beyond(head_dims, options):
    rng = np.random.default_rng(7)
    rows, keys = 300, 400
    lengths = {
        "q_lengths": rng.integers(0, rows + 1, (6, 1)),
        "kv_lengths": rng.integers(0, keys + 1, (6, 1)),
    }
    lengths["q_lengths"][1], lengths["kv_lengths"][2] = 0, 0
    call = make(head_dims, ((6, 4), rows, keys), {**options, **lengths})
    *_, given, out, lse = check(call)
    q, k, v = (call.array(name).copy() for name in "qkv")
    for entry in range(6):
        q[entry, :, lengths["q_lengths"][entry, 0] :] = np.nan
        k[entry, :, lengths["kv_lengths"][entry, 0] :] = np.nan
        v[entry, :, lengths["kv_lengths"][entry, 0] :] = np.inf
    assert_same_bits(attend(*map(upload, (q, k, v)), **given), (out, lse))


@pytest.mark.parametrize(
    "options", [{"kv_lengths": 100}, {"causal": "top_left", "window": (50, 0)}]
)
@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_keys_that_no_row_sees_have_no_effect(head_dims, options):
    call = make(head_dims, ((2, 2), 100, 333), options)
    *_, given, out, lse = check(call)
    q, k, v = (call.array(name).copy() for name in "qkv")
    k[..., 100:, :] = np.nan
    v[..., 100:, :] = np.nan
    assert_same_bits(attend(*map(upload, (q, k, v)), **given), (out, lse))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 5)}], ids=str)
def test_what_some_rows_see_reaches_those_rows_only(head_dims, value, options):
    call = make(head_dims, ((2, 3), 300, 300), options, np.float16)
    k, v = call.k.copy(), call.v.copy()
    v[:, :, 170, 5] = value
    k[:, 1, 90] = value
    check(call.but(k=k, v=v))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_mask(head_dim):
    mask = np.random.default_rng(1).random((2, 1, 200, 333)) < 0.6
    mask[0, :, 17] = False
    check(make((head_dim, head_dim), ((2, 3), 200, 333), {"mask": mask, "causal": True}))
    if head_dim <= 192:  # the portable kernel computes two costly options at wider heads
        check(make((head_dim, head_dim), ((2, 3), 200, 333), {"mask": mask, "softcap": 3.0}))


@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_grouped_heads_and_broadcast_values(head_dim):
    call = problems.make_call(
        "normal", 3, bfloat16, (2, 6, 200, head_dim), (2, 2, 300, head_dim), (1, 2, 300, head_dim),
        options={"causal": True, "enable_gqa": True},
    )  # fmt: skip
    check(call)


DECODED = [
    (1, {"causal": True}),
    (1, {"causal": True, "kv_lengths": np.array([[300], [0], [77], [128]])}),
    (5, {"softcap": 2.0, "kv_lengths": 200}),
    (40, {}),
]


@pytest.mark.parametrize(("rows", "options"), DECODED, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_query_heads_of_a_group_in_one_tile(head_dim, rows, options):
    """Heads of a group in one tile are within the budget, with the bits of each head alone."""
    call = problems.make_call(
        "normal", 3, bfloat16, (4, 6, rows, head_dim), (4, 2, 300, head_dim),
        (4, 2, 300, head_dim), options={**options, "enable_gqa": True},
    )  # fmt: skip
    q, k, v, given, out, lse = check(call)
    for head in range(6):
        own = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        alone = attend(q[:, own[0]], k[:, own[1]], v[:, own[1]], **given)
        assert_same_bits(alone, (out[:, own[0]], lse[:, own[0]]))


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_sequence_before_heads_and_rows_with_room_behind(head_dims):
    call = make(head_dims, ((2, 3), 200, 333), {"causal": True})
    swapped = [upload(np.swapaxes(call.array(name), 1, 2)).swapaxes(1, 2) for name in "qkv"]
    wide = []
    for a in (call.array(name) for name in "qkv"):
        room = np.pad(a, ((0, 0),) * 3 + ((8, 16),), constant_values=np.nan)
        wide.append(upload(room)[..., 8 : 8 + a.shape[-1]])
    for q, k, v in (swapped, wide):
        out, lse = attend(q, k, v, causal=True)
        Budget(call).check_forward(out.get(), lse.get())


@pytest.mark.not_rehearsed
def test_config_decides_which_kernel_runs():
    call = make((64, 64), SHAPES[1], {})
    q, k, v = (upload(call.array(name)) for name in "qkv")
    problem = describe(q, k, v, cuflash.Options())
    portable = chosen.portable("forward_sm80", problem, 227 * 1024, 16)
    hopper = forced(q, k, v, cuflash.Options())
    found = []
    for config in (portable, hopper, hopper.replace(block_n=64), None, None):
        out, lse = cuflash.attention(q, k, v, return_lse=True, config=config)
        Budget(call).check_forward(out.get(), lse.get())
        found.append((out, lse))
    assert_same_bits(found[1], found[3])
    assert_same_bits(found[1], found[4])  # from the plan cache
    assert found[0][0].get().tobytes() != found[1][0].get().tobytes()


def test_what_it_cannot_serve_goes_to_the_portable_kernel():
    call = make((64, 64), SHAPES[0], {})
    q, k, v = (upload(call.array(name)) for name in "qkv")
    config = forced(q, k, v, cuflash.Options())
    moved = upload(np.append(call.q[:1, :1, :1, :1], call.q))[1:].reshape(q.shape)
    apart = upload(np.pad(call.k, ((0, 0),) * 3 + ((0, 2),)))[..., :64]
    backwards = upload(call.v[:, ::-1])[:, ::-1]
    for arrays in ((moved, k, v), (q, apart, v), (q, k, backwards)):
        with pytest.raises(ValueError, match="config"):
            cuflash.attention(*arrays, config=config)
        out, lse = cuflash.attention(*arrays, return_lse=True)
        Budget(call).check_forward(out.get(), lse.get())
    wide = cuflash.attention(q, k, v, out=cupy.empty(q.shape, np.float32), config=config)
    Budget(call).check_forward(wide.get())


def test_without_an_encoder_it_cannot_serve(monkeypatch):
    q, k, v = (upload(make((64, 64), SHAPES[0], {}).array(name)) for name in "qkv")
    config = forced(q, k, v, cuflash.Options())
    monkeypatch.setattr(plan_cache, "_plans", {})
    older = hardware.present()._replace(tensor_maps=False)
    with hardware.assumed(older), pytest.raises(ValueError, match="config"):
        cuflash.attention(q, k, v, config=config)


def test_a_map_is_never_stale():
    """Tensor maps are right where the memory pool reuses addresses for other shapes and dtypes."""
    for shape in [((2, 3), 77, 130), ((2, 3), 130, 77), ((3, 2), 77, 130)] * 2:
        for dtype in (np.float16, bfloat16):
            check(make((64, 64), shape, {}, dtype))


PACKED = [{}, {"causal": True}, {"window": (70, 20)}, {"causal": True, "offset": -3}]


@pytest.mark.parametrize("options", PACKED, ids=str)
@pytest.mark.parametrize("head_dims", ROWS, ids=str)
def test_packed_sequences(head_dims, options):
    """Each sequence has the bits that it has alone, whatever its neighbours hold."""
    call = make(head_dims, ((2,), 900, 1000), options, np.float16)
    ends_q = np.array([7, 77, 77, 333, 461, 462, 890])
    ends_k = np.array([0, 200, 230, 230, 400, 527, 960])
    arrays = [upload(call.array(name)) for name in "qkv"]
    (out, lse), config = attend_packed(*arrays, ends_q, ends_k, **options)
    check_each_sequence(call, ends_q, ends_k, out, lse, config.block_n)
    for i in range(ends_q.size - 1):
        q, k, v = (call.array(name).copy() for name in "qkv")
        inside = np.s_[:, ends_q[i] : ends_q[i + 1]]
        q[:, ends_q[i + 1] :], q[:, : ends_q[i]] = np.nan, np.inf
        k[:, ends_k[i + 1] :], k[:, : ends_k[i]] = np.nan, np.nan
        v[:, ends_k[i + 1] :], v[:, : ends_k[i]] = np.inf, np.nan
        beside, _ = attend_packed(*map(upload, (q, k, v)), ends_q, ends_k, **options)
        assert_same_bits([x[inside] for x in beside], (out[inside], lse[inside]))


@pytest.mark.parametrize("options", PACKED[:3], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_more_packed_sequences_than_a_warp_has_lanes(head_dims, options):
    """70 sequences are right, many of them empty, however their tiles are drawn."""
    rng = np.random.default_rng(11)
    ends = []
    for total in (10_000, 12_000):
        lengths = rng.choice([0, 1, 30, 64, 128, 190, 256], 70)
        ends.append(np.cumsum([5, *lengths]))
        assert ends[-1][-1] < total
    call = make(head_dims, ((3,), 10_000, 12_000), options)
    arrays = [upload(call.array(name)) for name in "qkv"]
    want, config = attend_packed(*arrays, *ends, **options)
    check_each_sequence(call, *ends, *want, config.block_n)
    for _ in range(10):
        assert_same_bits(attend_packed(*arrays, *ends, **options)[0], want)


PACKED_LENGTHS = {
    "q_lengths": np.array([[60], [0], [200]]),
    "kv_lengths": np.array([[50], [9], [0]]),
}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {**PACKED_LENGTHS, "causal": True}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences_within_budget(head_dim, options):
    call = make((head_dim, head_dim), ((2,), 600, 700), {})
    ends_q, ends_k = np.array([0, 100, 130, 580]), np.array([0, 300, 310, 700])
    given = {n: upload(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    arrays = [upload(call.array(name)) for name in "qkv"]
    (out, lse), _ = attend_packed(*arrays, ends_q, ends_k, **given)
    for i in range(3):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        own = {n: x[i] if isinstance(x, np.ndarray) else x for n, x in options.items()}
        part = call.but(
            q=call.q[:, rows], k=call.k[:, keys], v=call.v[:, keys], dout=call.dout[:, rows],
            options=own,
        )  # fmt: skip
        Budget(part).check_forward(out[:, rows].get(), lse[:, rows].get())


def captured(stream, launch):
    with stream:
        stream.begin_capture()
        launch()
        return stream.end_capture()


@pytest.mark.parametrize("dealt", [False, True], ids=["drawn", "dealt"])
@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)
def test_graphs_replayed_side_by_side(head_dims, dealt, monkeypatch):
    """Graphs replay side by side: each owns its counter, or its tiles are dealt in advance."""
    q, k, v, _, want, want_lse = check(make(head_dims, MANY_TILES, {"causal": True}, np.float16))
    if dealt:
        monkeypatch.setattr(tile_counters, "_of_device", {})
    options = cuflash.Options(causal=True)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = [(cupy.empty_like(want), cupy.empty_like(want_lse)) for _ in streams]
    cupy.cuda.Device().synchronize()

    def launch(out):
        cuflash.attention(q, k, v, options=options, return_lse=True, out=out)

    graphs = [
        captured(stream, lambda out=out: launch(out))
        for stream, out in zip(streams, results, strict=True)
    ]
    for _ in range(20):
        for stream, graph, out in zip(streams, graphs, results, strict=True):
            with stream:
                for array in out:
                    array.fill(np.nan)
                graph.launch(stream)
        for stream, out in zip(streams, results, strict=True):
            stream.synchronize()
            assert_same_bits(out, (want, want_lse))


@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)
def test_one_captured_call_replayed_one_after_the_other(head_dims):
    """Two instances of one graph, which share a counter, are right when replayed one after another.

    They run on one stream, and then alternate between two streams.
    """
    q, k, v, _, want, want_lse = check(make(head_dims, MANY_TILES, {"causal": True}, np.float16))
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    out = cupy.empty_like(want), cupy.empty_like(want_lse)
    cupy.cuda.Device().synchronize()
    graph = captured(
        first, lambda: cuflash.attention(q, k, v, causal=True, return_lse=True, out=out)
    )
    runtime = cupy.cuda.runtime
    instances = [runtime.graphInstantiate(graph.graph) for _ in range(2)]
    differs = cupy.zeros((), np.bool_)
    cupy.cuda.Device().synchronize()
    for streams in ((first, first), (first, second)):
        for i in range(200):
            stream, other = streams[i % 2], streams[1 - i % 2]
            with stream:
                for array in out:
                    array.fill(np.nan)
                runtime.graphLaunch(instances[i % 2], stream.ptr)
                for array, wanted in zip(out, (want, want_lse), strict=True):
                    differs |= (array != wanted).any()
                other.wait_event(stream.record())
    cupy.cuda.Device().synchronize()
    for instance in instances:
        runtime.graphExecDestroy(instance)
    assert not differs


def test_a_stream_that_has_the_handle_of_a_destroyed_one():
    """A stream that reuses the handle of a destroyed stream loses no tile.

    The driver reuses a handle while work of the destroyed stream is in flight. Beside a kernel that
    holds most SMs for a while, thread blocks of both launches start together. With one shared
    counter, half of these rounds lost tiles.
    """
    call = make((64, 64), ((4, 16), 2048, 2048), {}, np.float16)
    q, k, v = (upload(call.array(name)) for name in "qkv")
    want = cuflash.attention(q, k, v)
    outs = [cupy.empty_like(want) for _ in range(2)]
    probe = Path(__file__).parent / "support" / "spin_probe.cu"
    spin = cupy.RawKernel(probe.read_text(encoding="utf-8"), "cuflash_spin")
    spin.max_dynamic_shared_size_bytes = shared = 200_000
    busy, reused = cupy.cuda.Stream(non_blocking=True), 0
    for turn in range(60):
        for out in outs:
            out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        with busy:
            spin((120,), (32,), (42_500 * (turn + 1),), shared_mem=shared)
        handles = []
        for out in outs:
            stream = cupy.cuda.Stream(non_blocking=True)
            handles.append(stream.ptr)
            with stream:
                cuflash.attention(q, k, v, out=out)
            del stream  # destroys the stream
        reused += handles[0] == handles[1]
        cupy.cuda.Device().synchronize()
        assert all(bool((out == want).all()) for out in outs)
    assert reused, "nothing was tried"


def test_counters_are_zero_between_launches():
    for shape in (MANY_TILES, ((7, 40), 130, 70)):
        check(make((128, 128), shape, {}))
    memory = tile_counters._of_device[cupy.cuda.Device().id]._memory
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    assert not cupy.ndarray(memory.size // 4, np.uint32, pointer).any()


@pytest.mark.parametrize("head_dims", ROWS, ids=str)
@pytest.mark.not_rehearsed
def test_the_same_bits_a_thousand_times_beside_a_busy_stream(head_dims):
    q, k, v, _, want, want_lse = check(make(head_dims, MANY_TILES, {"causal": True}))
    options = cuflash.Options(causal=True)
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        load = cupy.ones((2048, 2048), np.float32)
    differs = cupy.zeros((), np.bool_)
    for i in range(1000):
        if i % 10 == 0:
            with busy:
                load @ load
        out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
        differs |= (out.view(np.int16) != want.view(np.int16)).any() | (lse != want_lse).any()
    busy.synchronize()
    assert not differs


def test_launches_on_several_streams_draw_from_their_own_counters():
    calls = [make((64, 64), MANY_TILES, {"causal": True}), make((128, 128), MANY_TILES, {})]
    works = [check(call) for call in calls] * 2
    wrong: list[object] = []

    def loop(work):
        q, k, v, given, out, lse = work
        options = cuflash.Options(**given)
        config = forced(q, k, v, options)
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(100):
                    found = cuflash.attention(
                        q, k, v, options=options, return_lse=True, config=config
                    )
                    stream.synchronize()
                    assert_same_bits((found.out, found.lse), (out, lse))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
