"""Do parts of a call give the results of the whole, when joined and at positions in the whole?"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import distributed, reference
from cuflash._api.dispatch import launch, run_backward, run_forward
from cuflash._errors import NoKernel
from cuflash._problem.philox import Origin
from cuflash._problem.problem import describe
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, lasts_of

CUT = 160  # keys of the first part
OPTIONS = {
    "full": ({}, {}, {}),
    "causal": (
        {"causal": True, "offset": 64}, {"causal": True, "offset": 64 - CUT},
        {"causal": True, "offset": 64},
    ),
    "window": (
        {"window": (70, 3), "offset": 64}, {"window": (70, 3), "offset": 64 - CUT},
        {"window": (70, 3), "offset": 64},
    ),
    "dropout": ({"dropout": 0.3, "seed": 7},) * 3,
    "softcap and dropout": ({"softcap": 5.0, "dropout": 0.3, "seed": 7},) * 3,
}  # fmt: skip


def _cupy():
    import cupy

    return cupy


def drawn(dtype, *shapes):
    rng = _cupy().random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


def _striped():
    return cuflash.MaskMod("(q + k + h) % 3 > 0", host=lambda b, h, q, k: (q + k + h) % 3 > 0)


def exact(array):
    """Return an array on the host, in float64."""
    return array.astype(np.float32).get().astype(np.float64)


def error(found, truth):
    return np.linalg.norm(found - truth) / np.linalg.norm(truth)


def test_the_last_block_of_rows_is_known():
    whole, low, high, keys = slice(0, 8), slice(0, 4), slice(4, 8), slice(0, 1)
    rows_of_steps = ([whole], [high], [low, high], [])
    steps = [[Block(rows, keys, 0, 0, bounded=False) for rows in step] for step in rows_of_steps]
    assert list(lasts_of(steps)) == [False, False, True, True]


@pytest.mark.parametrize(
    ("batch_q", "batch_k", "first", "joins"),
    [
        ((2, 4), (2, 4), 0, True),
        ((2, 3, 2, 4), (1, 3, 2, 4), 0, True),
        ((2, 4), (2, 4), 1, False),  # off 16 bytes
        ((2, 3, 2, 4), (1, 3, 1, 4), 0, False),  # four batch axes; a tensor map has three
    ],
)
def test_whether_results_can_join_others_is_known_before(
    monkeypatch, batch_q, batch_k, first, joins
):
    """A call knows before launching whether its kernel joins results: Hopper must load operands."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuflash._launch import run
    from support.host_device import on_device
    from support.recorded_launches import recorded_launches

    monkeypatch.setattr(run, "runtime", SimpleNamespace(getDevice=lambda: 0))
    shape = (*batch_q, 99, 64)
    with recorded_launches() as (library, launched):
        room = library.empty(math.prod(shape) + 16, np.uint16)
        aligned = -room.data.ptr % 16 // 2
        q = room[aligned + first :][: math.prod(shape)].view(bfloat16).reshape(shape)
        k = library.empty((*batch_k, 333, 64), bfloat16)
        so_far = on_device(np.zeros(shape, np.float32))
        lse = on_device(np.zeros(shape[:-1], np.float32))
        problem, options = describe(q, k, k, cuflash.Options(), out=so_far), cuflash.Options()
        assert run.can_merge_partial(problem, (q, k, k), options) == joins
        if joins:
            run.forward(problem, (q, k, k), options, so_far, lse, so_far=so_far)
            assert [(c.kernel, c.joins) for c in launched] == [("forward_sm90", True)]
        else:
            with pytest.raises(NoKernel):
                run.forward(problem, (q, k, k), options, so_far, lse, so_far=so_far)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "head_dim", "nan_at"),
    [(n, d, None) for n in OPTIONS for d in (64, 128)]
    + [("full", d, None) for d in (72, 192, 256)]
    + [("full", 128, 5), ("full", 128, 300), ("causal", 128, 300)],
)
def test_results_join_those_over_other_keys(name, head_dim, nan_at):
    """Joined results are exact in float32 and rounded, and NaN only in rows that see a NaN."""
    first, then, whole = (cuflash.Options(enable_gqa=True, **kw) for kw in OPTIONS[name])
    q, k, v = drawn(bfloat16, (4, 320, head_dim), (2, 384, head_dim), (2, 384, head_dim))
    if nan_at is not None:
        v[1, nan_at] = np.nan
    so_far = _cupy().full(q.shape, np.nan, np.float32)
    lse = _cupy().full(q.shape[:-1], np.nan, np.float32)
    parts = (q, k[:, :CUT], v[:, :CUT]), (q, k[:, CUT:], v[:, CUT:])
    run_forward(describe(*parts[0], first, out=so_far), parts[0], first, so_far, lse)
    if not launch().can_merge_partial(describe(*parts[1], then, out=so_far), parts[1], then):
        assert _cupy().cuda.Device().compute_capability != "90"
        pytest.skip("the kernel of this device does not join results")
    out, own = _cupy().full_like(q, np.nan), lse.copy()
    for target, its_lse in ((out, own), (so_far, lse)):
        problem = describe(*parts[1], then, out=target)
        run_forward(problem, parts[1], then, target, its_lse, origin=Origin(key=CUT), so_far=so_far)
    assert _cupy().array_equal(own, lse, equal_nan=True)
    np.testing.assert_array_equal(exact(so_far.astype(bfloat16)), exact(out))
    one, its_lse = cuflash.attention(q, k, v, options=whole, return_lse=True)
    np.testing.assert_array_equal(np.isnan(exact(out)), np.isnan(exact(one)))
    np.testing.assert_allclose(lse.get(), its_lse.get(), rtol=1e-5, atol=1e-5)
    truth = reference.attention(*map(exact, (q, k, v)), enable_gqa=True, **OPTIONS[name][2])
    seen = np.isfinite(truth)
    assert error(exact(so_far)[seen], truth[seen]) < error(exact(one)[seen], truth[seen])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
@pytest.mark.parametrize("name", ["full", "dropout"])
def test_gradients_in_float32_are_those_that_are_rounded(name, head_dim):
    options = cuflash.Options(enable_gqa=True, causal=True, **OPTIONS[name][2])
    shapes = [(4, 320, head_dim), (2, 384, head_dim), (2, 384, head_dim), (4, 320, head_dim)]
    q, k, v, dout = drawn(bfloat16, *shapes)
    out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
    sums = {
        n: _cupy().full(a.shape, np.nan, np.float32) for n, a in zip("qkv", (q, k, v), strict=True)
    }
    run_backward(describe(q, k, v, options), (q, k, v), options, Saved(dout, out, lse), sums)
    rounded = cuflash.attention_backward(dout, q, k, v, out, lse, options=options)
    for own, right in zip(sums.values(), rounded, strict=True):
        np.testing.assert_array_equal(exact(own.astype(bfloat16)), exact(right))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bfloat16, np.float32])
@pytest.mark.parametrize(
    ("size", "method"), [(2, "ring"), (4, "all_gather"), (2, "ulysses"), (4, "usp")]
)
def test_dropout_of_ranks_has_the_bits_of_one_gpu(size, method, dtype):
    """Ranks drop what one GPU drops: v is a unit matrix, so that out is the matrix of weights."""
    comm, length = distributed.simulated(size), 256
    q, k = drawn(dtype, (2, 4, length, 64), (2, 2, length, 64))
    v = (
        _cupy()
        .broadcast_to(_cupy().eye(length, dtype=np.float32), (2, 2, length, length))
        .astype(dtype)
    )
    cut = [distributed.shard(a, comm=comm) for a in (q, k, v)]
    options = {"enable_gqa": True, "dropout": 0.4, "seed": 11, "scale": 1e-3}
    out = distributed.attention(*cut, comm=comm, method=method, **options)
    weights = exact(distributed.unshard(out, comm=comm)[0])
    kept = cuflash.dropout_mask((2, 4, length, length), 0.4, 11)
    np.testing.assert_array_equal(weights != 0, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "causal", "alibi", "formula"])
@pytest.mark.parametrize(
    ("size", "method"), [(2, "ring"), (4, "ring"), (2, "all_gather"), (4, "usp")]
)
def test_ranks_on_one_gpu(size, method, name):
    """Ranks err at most 1.15 times as much as one GPU, in root mean square."""
    options = {
        "full": {}, "causal": {"causal": True},
        "alibi": {"causal": True, "alibi_slopes": _cupy().asarray([0.5, 0.25, 0.125, 0.1])},
        "formula": {"mask_mod": _striped()},
    }[name] | {"enable_gqa": True}  # fmt: skip
    comm = distributed.simulated(size)
    q, k, v, dout = drawn(bfloat16, *((2, h, 512, 64) for h in (4, 2, 2, 4)))
    cut = [distributed.shard(a, comm=comm) for a in (q, k, v)]
    how = {"comm": comm, "method": method, **options}
    out, pullback = distributed.attention_vjp(*cut, **how)
    gradients = pullback(distributed.shard(dout, comm=comm))
    found = [out, *zip(*gradients, strict=True)]
    found = [exact(distributed.unshard(list(a), comm=comm)[0]) for a in found]
    one, own_pullback = cuflash.attention_vjp(q, k, v, **options)
    own = [exact(a) for a in (one, *own_pullback(dout))]
    host = {n: a.get() if hasattr(a, "get") else a for n, a in options.items()}
    truth = reference.attention_vjp(*map(exact, (q, k, v)), **host)
    right = [truth[0], *truth[1](exact(dout))]
    for ours, single, exactly in zip(found, own, right, strict=True):
        assert error(ours, exactly) < 1.15 * error(single, exactly)
