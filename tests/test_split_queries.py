"""Do the parts of split queries, and several sums of dq, add up to the gradients?

A C++ compiler runs the kernels that add up. The layout of their float32 sums is written here a
second time, from the picture in `kernels_cu/tile/fragment.cuh`.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import Options
from cuflash._kernels import split_queries
from cuflash._kernels.backward_combine import BackwardCombineConfig
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._problem.layout import Layout
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, describe
from cuflash.testing._budget import Budget
from cuflash.tuning import BackwardConfigs
from support import chosen
from support.problems import Call, make_call

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from test_dq_sums_on_the_host import sums_of  # noqa: E402

from cuflash._launch import plan, plan_cache, run  # noqa: E402
from cuflash._launch.workspace import Workspace  # noqa: E402
from cuflash._select import hardware  # noqa: E402
from cuflash._select.choose import LaunchStep, Wanted, choose  # noqa: E402
from support.host_device import COMPILER, host_device, on_device  # noqa: E402

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def problem_of(
    batch: tuple[int, ...], rows: int, keys: int, head_dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (1, 1), **options: Any,
) -> Problem:  # fmt: skip
    """Return a problem of bfloat16 with (query, key) heads."""
    d, d_v = head_dims
    q = on_device(np.zeros((*batch, heads[0], rows, d), bfloat16))
    k, v = (on_device(np.zeros((*batch, heads[1], keys, w), bfloat16)) for w in (d, d_v))
    return describe(q, k, v, Options(enable_gqa=heads[0] != heads[1], **options))


def launched(folder: Any, step: LaunchStep, problem: Problem, **arrays: np.ndarray) -> list[str]:
    """Run one step on the host; ``arrays`` are given by operand name. Return the kernels' names."""
    with host_device(folder) as device:
        layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v")}
        layouts |= {f"d{name}": layout for name, layout in layouts.items()}
        launch = plan.plan_launch(step, problem, layouts, hardware.of_device(0), 0)
        given = {name: array.ctypes.data for name, array in arrays.items()}
        launch.run(tuple(given.get(name, 0) for name in launch.names), 0)
        return device.launched


def slice_of(rows: np.ndarray) -> np.ndarray:
    """Return 16 rows in the order of a warp's registers: tile of 8 columns, lane, half, pair."""
    split = rows.reshape(2, 8, rows.shape[1] // 8, 4, 2)  # half, row, tile, lane of a quad, pair
    return split.transpose(2, 1, 3, 0, 4).ravel()


@needs_compiler
@pytest.mark.parametrize("head_dims", [(64, 64), (40, 24), (128, 64)], ids=str)
def test_parts_of_dk_and_dv_are_added_in_their_order(tmp_path: Any, head_dims: Any) -> None:
    """Parts of dk and dv are added in order, to the bit; padded keys and columns are not read."""
    batch, heads_kv, group, keys, parts, scale = 2, 2, 3, 77, 3, 0.37
    problem = problem_of(
        (batch,), 50, keys, head_dims, (heads_kv * group, heads_kv), scale=scale
    )  # fmt: skip
    config = chosen.fused(problem, deterministic=True)
    width, width_v = config.head_dim, config.head_dim_v
    slices = -(-keys // 16)
    rng = np.random.default_rng(0)
    shape = (batch, heads_kv, parts, slices * 16, width + width_v)
    rows = rng.standard_normal(shape).astype(np.float32)
    rows[..., keys:, :] = np.nan
    lying = []
    for part in rows.reshape(-1, slices, 16, width + width_v):
        for own in part:
            lying += [slice_of(own[:, :width]), slice_of(own[:, width:])]
    total = np.zeros_like(rows[:, :, 0])
    for part in range(parts):
        total += rows[:, :, part]
    found = {f"d{n}": np.full((batch, heads_kv, keys, d), np.nan, bfloat16)
             for n, d in zip("kv", head_dims, strict=True)}  # fmt: skip
    step = LaunchStep(BackwardCombineConfig.after(config), splits=parts)
    names = launched(
        tmp_path, step, problem, dkv_parts=np.concatenate(lying), **found
    )  # fmt: skip
    assert names == ["cuflash_backward_combine"]
    dk = (total[..., :keys, : head_dims[0]] * np.float32(scale)).astype(bfloat16)
    dv = total[..., :keys, width : width + head_dims[1]].astype(bfloat16)
    np.testing.assert_array_equal(found["dk"].view(np.uint16), dk.view(np.uint16))
    np.testing.assert_array_equal(found["dv"].view(np.uint16), dv.view(np.uint16))


@needs_compiler
def test_parts_of_packed_sequences_lie_apart(tmp_path: Any) -> None:
    """Parts of each sequence begin with a new slice, and rows of no sequence are not written."""
    ends, total, parts, d = [0, 5, 5, 40, 60], 77, 2, 64
    cu = on_device(np.array(ends, np.int32))
    q = on_device(np.zeros((3, total, d), bfloat16))
    k = on_device(np.zeros((1, total, d), bfloat16))
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    problem = describe_packed(q, k, k, Options(scale=0.5), given, axes=None, precision=None)
    config = BackwardCombineConfig.after(
        chosen.fused(problem_of((3,), total, total), deterministic=True)
    ).replace(cu_seqlens="int32")
    sequences = len(ends) - 1
    slices = total // 16 + sequences
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((parts, slices, 16, 2 * d)).astype(np.float32)
    lying = [slice_of(own[:, side]) for part in rows for own in part
             for side in (slice(d), slice(d, 2 * d))]  # fmt: skip
    found = {name: np.full((1, total, d), 7, bfloat16) for name in ("dk", "dv")}
    want = {name: array.copy() for name, array in found.items()}
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        first = begin // 16 + sequence
        own = (rows[0] + rows[1])[first:].reshape(-1, 2 * d)[: end - begin]
        want["dk"][0, begin:end] = (own[:, :d] * np.float32(0.5)).astype(bfloat16)
        want["dv"][0, begin:end] = own[:, d:].astype(bfloat16)
    step = LaunchStep(config, splits=parts)
    launched(tmp_path, step, problem, dkv_parts=np.concatenate(lying), **given, **found)
    for name, array in found.items():
        np.testing.assert_array_equal(array.view(np.uint16), want[name].view(np.uint16))


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_several_sums_of_dq_are_added_in_their_order(tmp_path: Any, head_dim: int) -> None:
    """Sums of dq are added in order, without those to which no tile of keys has stored."""
    entries, seqlen_q, seqlen_k, count = 2, 333, 700, 5
    problem = problem_of((entries,), seqlen_q, seqlen_k, (head_dim, head_dim), window=(180, 0))
    config = chosen.fused(problem, deterministic=True)
    width, block = config.head_dim, config.block_m
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((count, entries, -(-seqlen_q // 16) * 16, width)).astype(np.float32)
    total = np.zeros_like(rows[0])
    for first in range(0, seqlen_q, block):
        own = slice(first, first + block)
        begin = max(first + seqlen_k - seqlen_q - 180, 0) // config.block_n
        last = min(first + block, seqlen_q) + seqlen_k - seqlen_q
        seen = {tile % count for tile in range(begin, -(-last // config.block_n))}
        for number in range(count):
            if number in seen:
                total[:, own] += rows[number, :, own]
            else:
                rows[number, :, own] = np.nan
    assert np.isnan(rows).any(), "a sum that is not stored"
    lying = np.stack([sums_of(entry, block) for own in rows for entry in own])
    dq = np.full((entries, 1, seqlen_q, head_dim), np.nan, bfloat16)
    step = LaunchStep(BackwardConvertConfig.after(config), dq_sums=count)
    assert launched(tmp_path, step, problem, sums=lying, dq=dq) == ["cuflash_backward_convert"]
    scale = np.float32(problem.scale)
    want = (total[:, None, :seqlen_q, :head_dim] * scale).astype(bfloat16)
    np.testing.assert_array_equal(dq.view(np.uint16), want.view(np.uint16))


def splits_of(
    problem: Problem, num_sms: int = 132, *, deterministic: bool = True
) -> tuple[int, int]:
    """Return the parts of queries, and sums of dq, on a Hopper device with ``num_sms`` SMs."""
    device = hardware.typical("sm_90a")._replace(multiprocessors=num_sms)
    steps = choose(problem, device, wanted=Wanted.of("qkv"), deterministic=deterministic)
    fused = next(step for step in steps if step.config.computes == "dqkv")
    assert fused.config.split_queries == (fused.splits > 1)
    assert fused.config.split_rows == (fused.splits > (problem.group_size or 1))
    return fused.splits, fused.dq_sums


def test_numbers_of_parts_follow_from_shapes_and_device() -> None:
    plain = problem_of((8, 16), 4096, 4096)
    assert splits_of(plain) == (1, 1)  # enough tiles
    shared = problem_of((2,), 4096, 4096, heads=(32, 1), window=(None, 0))
    parts, sums = splits_of(shared)
    assert parts in (4, 8, 16), "a divisor of the heads that share keys"
    assert sums == 1
    assert splits_of(shared, num_sms=0) == (1, 1)
    assert splits_of(problem_of((4,), 4096, 4096, heads=(32, 8), window=(None, 0))) == (1, 1)
    assert splits_of(problem_of((8,), 2048, 2048))[1] == 4
    assert splits_of(problem_of((8,), 2048, 2048, window=(None, 0)))[1] == 2
    assert splits_of(problem_of((8,), 2048, 8192))[1] == 2, "keys are many"
    few_keys = problem_of((8,), 4096, 77)
    assert splits_of(few_keys)[0] > 4  # blocks of queries
    few_rows = problem_of((8,), 512, 50_000)
    assert splits_of(few_rows)[1] > 1
    assert splits_of(few_rows, deterministic=False)[1] == 1
    assert splits_of(problem_of((8,), 512, 128))[1] == 1, "no more than tiles of keys"
    assert splits_of(problem_of((1,), 64, 50_000))[1] < 40, "each is read"


def test_a_workspace_has_room_for_every_part_and_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_queries, "parts_of", lambda *_: 6)
    monkeypatch.setattr(split_queries, "sums_of_dq", lambda *_: 3)
    problem = problem_of((5,), 300, 90, (64, 40), (6, 2))
    steps = choose(problem, hardware.typical("sm_90a"), wanted=Wanted.of("qkv"))
    fused = next(step for step in steps if step.config.computes == "dqkv")
    assert (fused.splits, fused.dq_sums) == (6, 3)
    assert [step.config.kernel for step in steps] == [
        "backward_delta", "backward_sm90", "backward_combine", "backward_convert"
    ]  # fmt: skip
    scratch = Workspace.of(problem, True, fused.config, fused.splits, fused.dq_sums)
    entries, rows, keys = 5 * 6, 304, 96  # in slices of 16
    assert scratch.num_turns == 1 + entries * 3 * 3  # blocks of 128 queries
    assert scratch.sums == 4 * 3 * entries * rows * 64
    assert scratch.dkv_parts == 4 * 6 * 5 * 2 * keys * (64 + 64)
    places = scratch.addresses(1 << 20)
    assert places["dkv_parts"] >= places["sums"] + scratch.sums
    assert places["dkv_parts"] + scratch.dkv_parts <= (1 << 20) + scratch.size
    assert places["dkv_parts"] % 128 == places["sums"] % 128 == 0


def gradient_of(
    heads: tuple[int, int], rows: int, d: int, batch: int = 1, **options: Any
) -> tuple[LaunchStep, Workspace]:
    """Return the step of all gradients of self-attention on Hopper, and the workspace."""
    q, k = (np.empty((batch, n, rows, d), bfloat16) for n in heads)
    problem = describe(q, k, k, Options(enable_gqa=heads[0] != heads[1], **options))
    steps = choose(problem, hardware.typical("sm_90"), wanted=Wanted.of("qkv"))
    fused = next(step for step in steps if step.config.computes == "dqkv")
    return fused, run._backward_workspace(problem, steps)


def test_workspaces_have_the_sizes_of_the_document() -> None:
    """Workspaces have the sizes of ``docs/backward-sm90.md``, "Few tiles"."""
    heads_of = {64: 32, 128: 16, 192: 16, 256: 8}
    wholes = [gradient_of((h, h), 4096, d, batch=4)[1].size for d, h in heads_of.items()]
    assert [round(size / 1e6, 1) for size in wholes] == [138.4, 136.3, 203.5, 135.3]
    sums = [gradient_of((32, 32), rows, 96, batch=4)[1].sums / rows for rows in (1, 17)]
    assert [round(size / (4 * 4 * 32 * 96), 2) for size in sums] == [16, 1.88]
    for heads, rows, expected in ((3, 8192, (2, [38, 25])), (6, 65_536, (1, [104, 0]))):
        fused, scratch = gradient_of((heads, heads), rows, 64)
        sizes = [round(size / 1e6) for size in (scratch.size, scratch.dkv_parts)]
        assert (fused.splits, sizes) == expected


@pytest.mark.parametrize(
    ("d", "group", "most"),
    [(64, 1, 39), (96, 1, 45), (128, 1, 59), (64, 8, 78), (128, 8, 225)],
)
def test_what_few_tiles_take_is_bounded(d: int, group: int, most: int) -> None:
    """Few tiles take at most this many MB beyond one sum of dq, as in ``docs/backward-sm90.md``."""
    split = 0
    for heads, tiles, causal in itertools.product(range(1, 133), range(1, 133), (False, True)):
        if heads * tiles > 132:
            continue
        fused, scratch = gradient_of((heads * group, heads), 128 * tiles, d, causal=causal)
        further = scratch.sums - scratch.sums // fused.dq_sums
        assert scratch.dkv_parts + further <= 1e6 * most
        assert further <= (2 if causal else 4) * 132 * 4 * fused.config.block_m * d
        split += fused.splits > 1
    assert split > 200


def test_millions_of_entries_that_share_keys_are_divided_at_once() -> None:
    for number in range(1, 500):
        found = split_queries._divisors(number)
        assert found == [n for n in range(1, number + 1) if number % n == 0]
    q = np.broadcast_to(np.zeros(8, bfloat16), (2**18, 2**10, 1, 8))
    k = np.zeros((1, 1, 65, 8), bfloat16)
    problem = describe(q, k, k, Options())
    config = chosen.fused(problem, deterministic=True)
    begin = time.process_time()
    assert split_queries.parts_of(problem, config, 132) > 1
    assert time.process_time() - begin < 2


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def split_into(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that splits the queries and sums of dq of every call."""
    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("the device has no wgmma")

    def into(parts: int, sums: int) -> None:
        plan_cache.forget()
        monkeypatch.setattr(split_queries, "parts_of", lambda *_: parts)
        monkeypatch.setattr(split_queries, "sums_of_dq", lambda *_: sums)

    yield into
    plan_cache.forget()


def gradients_of(call: Call) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return gradients of one pass in poisoned memory, and the out and lse that they are of."""
    dout, q, k, v = (cupy.asarray(call.array(name)) for name in ("dout", "q", "k", "v"))
    on_gpu = {n: cupy.asarray(x) if hasattr(x, "shape") else x for n, x in call.options.items()}
    options = Options(**on_gpu)
    out, lse = cuflash.attention(q, k, v, return_lse=True, options=options)
    config = chosen.fused(describe(q, k, v, options), deterministic=True)
    room = cuflash.Gradients(*(cupy.full(a.shape, np.nan, a.dtype) for a in (q, k, v)))
    found = cuflash.attention_backward(
        dout, q, k, v, out, lse, options=options, grads_out=room,
        config=BackwardConfigs(qkv=config), workspace=cupy.full(64 << 20, 0xFF, np.uint8),
    )  # fmt: skip
    return {n: getattr(found, f"d{n}").get() for n in "qkv"}, (out.get(), lse.get())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "head_dims", [(32, 32), (64, 64), (72, 40), (128, 128), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 20)}], ids=str)
def test_any_number_of_parts_is_within_the_budget(
    split_into: Any, head_dims: tuple[int, int], options: dict[str, Any]
) -> None:
    """Any number of parts is within the budget, with the same bits in 20 runs.

    Heads share keys, keys are few, or queries are few.
    """
    d, d_v = head_dims
    for heads, rows, keys in (((8, 2), 300, 515), ((2, 2), 700, 77), ((2, 2), 77, 900)):
        call = make_call(
            "normal", 3, np.dtype(bfloat16), (2, heads[0], rows, d), (2, heads[1], keys, d),
            (2, heads[1], keys, d_v), options={**options, "enable_gqa": True},
        )  # fmt: skip
        budget = Budget(call)
        for parts, sums in ((2, 1), (4, 3), (8, 2), (1, 7)):
            if parts > 1 and parts % (heads[0] // heads[1]) and heads[0] // heads[1] % parts:
                continue
            split_into(parts, sums)
            first, given = gradients_of(call)
            budget.check_backward(first, given=given)
            for _ in range(19):
                again, _ = gradients_of(call)
                assert [a.tobytes() for a in again.values()] == [
                    a.tobytes() for a in first.values()
                ]


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_those_who_see_it(split_into: Any, value: float) -> None:
    """Non-finite rows of dk, dv and dq are right: the kernel that adds parts recomputes them."""
    call = make_call(
        "normal", 5, np.dtype(np.float16), (2, 4, 300, 64), (2, 2, 400, 64), (2, 2, 400, 64),
        options={"causal": True, "enable_gqa": True},
    )  # fmt: skip
    dout, k, v = call.dout.copy(), call.k.copy(), call.v.copy()
    v[:, 0, 170, 5] = value
    k[:, 1, 190] = value
    dout[:, 2, 201, 3] = value
    call = call.but(dout=dout, k=k, v=v)
    budget = Budget(call)
    for parts, sums in ((2, 1), (4, 2)):
        split_into(parts, sums)
        found, given = gradients_of(call)
        budget.check_backward(found, given=given)


@pytest.mark.gpu
def test_lengths_of_an_entry_change_no_bits_of_another(split_into: Any) -> None:
    """An entry's lengths change no bits of another: extents of arrays decide where parts begin."""
    split_into(4, 3)
    found = []
    for rows, keys in ((300, 77), (5, 399)):
        lengths = {"q_lengths": np.array([[rows], [130]]), "kv_lengths": np.array([[keys], [400]])}
        call = make_call(
            "normal", 5, np.dtype(np.float16), (2, 2, 300, 64), (2, 2, 400, 64), (2, 2, 400, 64),
            options={"causal": True, **lengths},
        )  # fmt: skip
        gradients, given = gradients_of(call)
        Budget(call).check_backward(gradients, given=given)
        found.append({name: array[1] for name, array in gradients.items()})
    for name, gradient in found[0].items():
        assert gradient.tobytes() == found[1][name].tobytes()
