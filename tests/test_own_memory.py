"""May memory that cuflash allocates hold anything, and does a call stay within what it is given?

What a call allocates, workspaces above all, is filled before the call: with bytes that are NaN in
every format, then with bytes of a large number. A kernel that reads unwritten memory gives NaN, or
other bits the second time. The calls are those of `test_every_kernel`, where the error budget
checks their results, and calls whose workspaces are written by some tiles only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import test_every_kernel as every

import cuflash
from support import memory
from support.memory import Placement
from support.problems import Call, Results, make_call, run

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.own_memory]

#: NaN in every format. 3156 in float32 and 5.3 in float16, and as an index far beyond any array.
FILLINGS = (0xFF, 0x45)
HEAD_DIMS = every.HEAD_DIMS
ALIGNED = Placement.dense(4, lead=64)


@contextmanager
def memory_full_of(byte: int) -> Iterator[list[int]]:
    """Let CuPy allocate memory with all bytes equal to ``byte``; yield the sizes asked for."""
    pool, sizes = cupy.cuda.MemoryPool(), []

    def filled(size: int) -> Any:
        found = pool.malloc(size)
        sizes.append(size)
        if size:
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(found.ptr, byte, size, stream)
        return found

    with cupy.cuda.using_allocator(filled):
        yield sizes


def assert_same_bits(first: Results, second: Results) -> None:
    assert second.out.tobytes() == first.out.tobytes(), "out"
    assert second.lse.tobytes() == first.lse.tobytes(), "lse"
    for name, gradient in first.gradients.items():
        assert second.gradients[name].tobytes() == gradient.tobytes(), f"the gradient of {name}"


def assert_indifferent(call: Call, expected: Results) -> None:
    for byte in FILLINGS:
        with memory_full_of(byte) as sizes:
            found = run(cupy, call, with_out=True)
        assert max(sizes) > 0
        assert_same_bits(expected, found)


@pytest.mark.parametrize(("kernel", "name"), every.CASES, ids=str)
def test_every_kernel(kernel: str, name: str) -> None:
    call, result, _ = every.found(kernel, name, True)
    assert_indifferent(call, result)


def beside(kernel: str, rows: int, keys: int, **options: Any) -> Call:
    """Return a call with arrays for Hopper's kernels, or for the portable kernels."""
    d, d_v = HEAD_DIMS[kernel]
    dtype = np.float32 if "float32" in kernel else np.float16
    shapes = (2, 3, rows, d), (2, 3, keys, d), (2, 3, keys, d_v)
    call = make_call("normal", 7, dtype, *shapes, options=options)
    if "hopper" not in kernel:
        return call
    names = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    return call.but(placements=dict.fromkeys(names, ALIGNED))


@pytest.mark.parametrize("kernel", HEAD_DIMS)
@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (410, 150, {"causal": True}),  # the first 260 queries see nothing: no tile adds to their dq
        (150, 410, {"causal": "top_left"}),  # no query sees the last keys
        (300, 300, {"kv_lengths": np.array([[0], [130]])}),  # an entry without a key
        (300, 300, {"window": (20, 20), "offset": 200}),
        (1, 1, {}),
        (129, 257, {}),
    ],
    ids=str,
)
def test_tiles_that_nothing_reaches(
    kernel: str, rows: int, keys: int, options: dict[str, Any]
) -> None:
    call = beside(kernel, rows, keys, **options)
    expected = run(cupy, call, with_out=True)
    every.Budget(call).check_backward(expected.gradients, given=(expected.out, expected.lse))
    assert_indifferent(call, expected)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("head_dim", [3, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wider_elements(dtype: Any, head_dim: int, segments: bool) -> None:
    """float32 and float64 read no unwritten memory; narrow heads and Hopper have other kernels."""
    rng = np.random.default_rng(5)
    options = {
        "causal": True, "alibi_slopes": rng.random(3).astype(np.float32),
        "sink": rng.standard_normal(3).astype(np.float32),
    }  # fmt: skip
    if segments:
        ids = tuple(np.sort(rng.integers(0, 4, (2, 1, n)), -1) for n in (410, 150))
        options["segment_ids"] = ids
    shapes = (2, 3, 410, head_dim), (2, 3, 150, head_dim), (2, 3, 150, head_dim)
    call = make_call("normal", 9, dtype, *shapes, options=options)
    call = call.but(wrt=("q", "k", "v", "alibi_slopes", "sink", "scale"))
    expected = run(cupy, call, with_out=True)
    every.Budget(call).check_backward(expected.gradients, given=(expected.out, expected.lse))
    assert_indifferent(call, expected)


@pytest.mark.parametrize("kernel", ["hopper", "hopper 64", "hopper 256"])
def test_sums_of_dq_in_any_order(kernel: str) -> None:
    """Unordered sums of dq are within the budget in any memory, though their bits may differ."""
    call = beside(kernel, 300, 410, causal=True).but(deterministic=False)
    for byte in FILLINGS:
        with memory_full_of(byte):
            found = run(cupy, call, with_out=True)
        every.Budget(call).check_backward(found.gradients, given=(found.out, found.lse))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"segments": True}], ids=str)
@pytest.mark.parametrize("head_dim", [36, 64, 128])
def test_a_given_workspace_is_not_left(head_dim: int, options: dict[str, Any]) -> None:
    """A call writes inside a workspace of the size asked for, at the least alignment."""
    given = dict(options)
    if given.pop("segments", False):
        ids = np.sort(np.random.default_rng(0).integers(0, 5, (2, 300)))
        given["segment_ids"] = tuple(map(cupy.asarray, ids))
    of = make_call("normal", 3, np.float16, *((2, 3, 300, head_dim),) * 3)
    q, k, v, dout = (memory.to_device(cupy, of.array(name)) for name in ("q", "k", "v", "dout"))
    results = []
    for poison in ("nan", "canary"):
        rooms = []
        for backward in (False, True):
            size = cuflash.workspace_size(q, k, v, backward=backward, **given)
            placement = Placement.dense(1, lead=16)
            rooms.append(memory.reserve(cupy, (size,), np.uint8, placement, poison))
        out, lse = cuflash.attention(q, k, v, return_lse=True, workspace=rooms[0].view, **given)
        found = cuflash.attention_backward(
            dout, q, k, v, out, lse, workspace=rooms[1].view, **given
        )
        for room in rooms:
            memory.assert_written_inside("workspace", room)
        results.append([a.get().tobytes() for a in (out, lse, found.dq, found.dk, found.dv)])
    assert results[0] == results[1]
