"""Do kernels that read pages give the bits of keys in order? Run by a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from test_paged import KINDS, Paged

import cuflash
from cuflash._api import paged
from cuflash._kernels import split_keys
from cuflash._problem.operand import CANONICAL
from cuflash._problem.problem import Problem, describe
from cuflash._select import hardware
from cuflash._select.choose import choose

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import plan_cache, run
from support.host_device import COMPILER, HostDevice, host_device, on_device, options_on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def device(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path) as found:
        yield found


def forward(problem: Problem, q: Any, k: Any, v: Any, options: Any, **more: Any) -> list[bytes]:
    out = on_device(np.full(problem.out_shape, np.nan, problem.dtype))
    lse = on_device(np.full(problem.lse_shape, np.nan, problem.lse_dtype))
    run.forward(problem, (q, k, v), options, out, lse, **more)
    return [out.tobytes(), lse.tobytes()]


def of_pages(call: Paged, options: cuflash.Options) -> list[bytes]:
    problem, (q, k, v, table) = in_pages_of(call, options)
    return forward(problem, q, k, v, options, page_table=table)


def in_pages_of(call: Paged, options: cuflash.Options) -> tuple[Problem, Any]:
    """Return the problem and arrays of `attention_paged` on a GPU, with a table that is strided."""
    table = np.repeat(call.table, 2, axis=1)[:, ::2]
    given = paged._native(call.q, call.k_pages, call.v_pages, table)
    options = replace(options, kv_lengths=None)
    own, like, _, problem = paged._described(given, call.lengths, options, CANONICAL, None, None)
    problem, table = paged._for_kernels(problem, own)
    return problem, tuple(map(on_device, (call.q, *like, table)))


def check(call: Paged, kind: str) -> None:
    options = cuflash.Options(**call.options(kind), kv_lengths=call.lengths[:, None])
    options_on_device(options)
    q, k, v = map(on_device, call.contiguous())
    steps = choose(in_pages_of(call, options)[0], hardware.of_device(0))
    config = next(step.config for step in steps if step.config.computes == "out")
    expected = forward(describe(q, k, v, options), q, k, v, options, config=config)
    used = np.zeros((len(call.k_pages), call.size), bool)
    for row, length in zip(call.table, call.lengths, strict=True):
        for n in range(length):
            used[row[n // call.size], n % call.size] = True
        row[-(-length // call.size) :] = -(10**9)
    for pages in (call.k_pages, call.v_pages):
        pages.swapaxes(1, 2)[~used] = np.nan
    assert of_pages(call, options) == expected


@pytest.mark.parametrize(
    "kind", [k if k == "every" else pytest.param(k, marks=pytest.mark.full) for k in KINDS]
)
def test_options(device: HostDevice, kind: str) -> None:
    """Options have the bits of keys in order, with NaN in unused rows and numbers of no page."""
    check(Paged(7, 16, 9, 3, np.float16), kind)
    assert device.launched == ["cuflash_forward_sm80"] * 2 or kind in ("segment_ids", "every")


@pytest.mark.parametrize("dtype", [bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 3, 256])
@pytest.mark.full
@pytest.mark.usefixtures("device")
def test_dtypes_and_sizes_of_pages(dtype: Any, size: int) -> None:
    check(Paged(5, size, -(-300 // size), 2, dtype, d=20), "causal")


@pytest.mark.full
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cuda_cores_read_pages(tmp_path: Any, dtype: Any) -> None:
    with host_device(tmp_path, capability=75):
        check(Paged(5, 16, 9, 2, dtype, d=20), "causal")


@pytest.mark.long
@pytest.mark.usefixtures("device")
def test_parts_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_keys, "wanted", lambda _: True)
    monkeypatch.setattr(split_keys, "parts_of", lambda *_: 3)
    plan_cache.forget()
    call = Paged(3, 16, 20, 2, np.float16)
    call.table[:, 0] = len(call.k_pages) - 1
    check(call, "causal")


@pytest.mark.parametrize("keys", [512, 1008, 2048])
def test_clusters_have_the_same_parts_in_order_and_in_pages(keys: int) -> None:
    call = Paged(7, 16, keys // 16, 3, bfloat16, d=64)
    options = cuflash.Options(enable_gqa=True, kv_lengths=call.lengths[:, None])
    own = hardware.typical("sm_90")
    found = (
        choose(in_pages_of(call, options)[0], own),
        choose(describe(*call.contiguous(), options), own),
    )
    assert [len(steps) for steps in found] == [1, 1]
    (step,), (other,) = found
    assert step.config == other.config.replace(paged=True)
    assert step.splits == other.splits > 1


@pytest.mark.parametrize(
    ("rows", "keys", "in_order", "in_pages"),
    [
        (1, 496, 1, 1),
        (1, 512, 1, 8),
        (16, 2032, 1, 16),
        (1, 2048, 16, 16),
        (16, 9008, 29, 29),
        (65, 1024, 1, 1),
        (65, 2048, 8, 8),
    ],
)
def test_without_clusters_few_queries_of_512_to_2047_keys_have_other_parts_in_order(
    rows: int, keys: int, in_order: int, in_pages: int
) -> None:
    """Few queries of 512 to 2047 keys are split in pages only, with the same tile."""
    call = Paged(7, 16, keys // 16, rows, bfloat16, d=64)
    options = cuflash.Options(enable_gqa=True, kv_lengths=call.lengths[:, None])
    own = hardware.typical("sm_90")._replace(tensor_maps=False)
    step, *_ = choose(in_pages_of(call, options)[0], own)
    other, *_ = choose(describe(*call.contiguous(), options), own, override=step.config)
    assert (other.splits, step.splits) == (in_order, in_pages)


@pytest.mark.long
@pytest.mark.usefixtures("device")
def test_rows_that_are_computed_pair_by_pair() -> None:
    """Rows that see a NaN (key 88, hidden from two of four rows) have the bits of keys in order."""
    call = Paged(11, 5, 20, 4, np.float16)
    call.lengths[:] = 90
    last = len(call.k_pages) - 1
    call.table[call.table == last] = 0
    call.table[0, 17] = last
    call.v_pages[last, :, 3] = np.nan
    check(call, "causal")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_a_number_of_no_page_is_clamped(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(paged, "refuse_capture", lambda *_: None)
    call = Paged(2, 4, 8, 2, np.float16)
    call.lengths[:] = 30
    wild = call.table.astype(dtype)
    call.table[0, 2], call.table[1, 3] = 0, len(call.k_pages) - 1
    wild[0, 2], wild[1, 3] = np.iinfo(dtype).min, np.iinfo(dtype).max
    options = cuflash.Options(enable_gqa=True, kv_lengths=call.lengths[:, None])
    expected = of_pages(call, options_on_device(options))
    call.table = wild
    assert of_pages(call, options) == expected
