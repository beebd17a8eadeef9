"""Are rows beyond ``q_lengths`` no queries, whatever they hold, with a sink and without?

Their out is 0 and their lse -inf, and nothing that q, out, lse, dout or dlse hold there reaches a
gradient. Arrays have full blocks, some of them beyond a length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import describe
from cuflash._results import Saved
from cuflash.testing._budget import Budget
from support.memory import Placement
from support.problems import DTYPES, Call, Results, make_call, packed, run, unpacked

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import run as launch_run
from support.host_device import COMPILER, host_device, on_device, options_on_device

#: What a caller may leave in rows beyond the lengths.
LEFT_OVERS = (np.nan, np.inf, 3.0)
POSITIONS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"causal": True},
    "window": {"window": (70, 40), "offset": np.array([[5], [-9]])},
    "dropout": {"dropout": 0.25, "seed": 3},
}
Compute = Callable[..., Results]


def call_of(
    dtype: str,
    head_dims: tuple[int, int],
    position: str = "everything",
    *,
    sizes: tuple[int, int] = (300, 330),
    shared: tuple[int, ...] = (2, 2),
    sink: bool = True,
) -> Call:
    """Return a call whose entries are whole, end between blocks or in the first, or have no query.

    ``shared`` are the batch axes of k and v.
    """
    (rows, keys), (d, d_v) = sizes, head_dims
    lengths = np.array([[rows, rows * 3 // 5], [17, 0]], np.int32)
    options = {**POSITIONS[position], "q_lengths": lengths}
    options["kv_lengths"] = np.array([[keys], [keys - 40]])
    if sink:
        options["sink"] = np.array([[0.5, -1.0], [2.0, 0.0]], np.float32)
    wrt = ("q", "k", "v", "scale", *({"sink"} & set(options)))
    shapes = (2, 2, rows, d), (*shared, keys, d), (*shared, keys, d_v)
    call = make_call("normal", 7, DTYPES[dtype], *shapes, options=options, wrt=wrt, lead=64)
    dlse = np.random.default_rng(8).standard_normal((2, 2, rows)).astype(call.lse_dtype)
    return call.but(dlse=dlse)


def check(
    call: Call,
    compute: Compute,
    *,
    is_packed: bool = False,
    left_overs: tuple[float, ...] = LEFT_OVERS,
) -> None:
    """Check a call that ``compute(call, lse=None, saved_out=None)`` runs, batched or packed."""
    as_run = packed if is_packed else lambda same: same
    lengths = np.broadcast_to(call.options["q_lengths"], call.batch)[..., None]
    beyond = np.arange(call.q.shape[-2]) >= lengths
    result = compute(as_run(call))
    known = unpacked(as_run(call), result)[1] if is_packed else result
    assert (known.out[beyond] == 0).all()
    assert np.isneginf(known.lse[beyond]).all()
    assert (known.gradients["q"][beyond] == 0).all()
    budget = Budget(call)
    budget.check_forward(known.out, known.lse)
    budget.check_backward(known.gradients, given=(known.out, known.lse))
    beyond_as_run = np.concatenate(list(beyond), -1) if is_packed else beyond

    def left(array: np.ndarray, rows: np.ndarray, value: float) -> np.ndarray:
        copy = array.copy()
        copy[rows] = value
        return copy

    for value in left_overs:
        inputs = {n: left(getattr(call, n), beyond, value) for n in ("q", "dout", "dlse")}
        lse, out = (left(a, beyond_as_run, value) for a in (result.lse, result.out))
        again = compute(as_run(call.but(**inputs)), lse=lse, saved_out=out)
        np.testing.assert_array_equal(again.out, result.out)
        np.testing.assert_array_equal(again.lse, result.lse)
        for name, gradient in result.gradients.items():
            np.testing.assert_array_equal(again.gradients[name], gradient, f"{name}, {value}")


@pytest.mark.usefixtures("small_host_tiles")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_on_a_cpu(dtype: str, position: str, sink: bool, is_packed: bool) -> None:
    call = call_of(dtype, (8, 5), position, sizes=(70, 90), sink=sink)
    check(call, functools.partial(run, np), is_packed=is_packed)


def by_kernels_on_the_host(
    call: Call, *, lse: np.ndarray | None = None, saved_out: np.ndarray | None = None
) -> Results:
    """Run the portable kernels on the host, in memory full of NaN."""
    options = options_on_device(cuflash.Options(**call.options))
    dout, q, k, v = (on_device(call.array(name)) for name in ("dout", "q", "k", "v"))
    ends: dict[str, Any] = {}
    if call.sequences:
        totals = {"cu_seqlens_q": q.shape[-2], "cu_seqlens_k": k.shape[-2]}
        ends = {
            name: on_device(np.linspace(0, n, call.sequences + 1, dtype=np.int32))
            for name, n in totals.items()
        }
        problem = describe_packed(q, k, v, options, ends, axes=None, precision=None)
    else:
        problem = describe(q, k, v, options, precision=None)
    out, own_lse = (
        on_device(np.full(shape, np.nan, dtype))
        for shape, dtype in (
            (problem.out_shape, problem.dtype), (problem.lse_shape, problem.lse_dtype)
        )
    )  # fmt: skip
    launch_run.forward(problem, (q, k, v), options, out, own_lse, cu_seqlens=ends)
    saved = Saved(
        dout,
        out if saved_out is None else on_device(saved_out),
        own_lse if lse is None else on_device(lse),
        None if call.dlse is None else on_device(call.dlse),
    )
    gradients = {
        n: on_device(np.full(call.array(n).shape, 0 if ends else np.nan, call.array(n).dtype))
        for n in call.wrt
    }
    launch_run.backward(problem, (q, k, v), options, saved, gradients, cu_seqlens=ends)
    plain = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    return Results(np.asarray(out), np.asarray(own_lse), plain)


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "head_dims", "position", "capability", "is_packed"),
    [
        ("float16", (24, 40), "causal", "80", False),
        ("float32", (72, 24), "window", "80", True),
        ("float32", (3, 5), "everything", "80", True),
        ("float64", (24, 24), "dropout", "80", False),
        ("float32", (24, 24), "causal", "75", True),
    ],
    ids=str,
)
def test_kernels_on_the_host(
    dtype: str, head_dims: tuple[int, int], position: str, capability: str, is_packed: bool,
    tmp_path: Any,
) -> None:  # fmt: skip
    call = call_of(dtype, head_dims, position, sizes=(100, 140))
    with host_device(tmp_path, capability):
        check(call, by_kernels_on_the_host, is_packed=is_packed, left_overs=(np.nan, 3.0))


#: Head sizes of whole tiles, and sizes between these, which other kernels compute. k and v have
#: batch axes of their own, shared ones, or odd strides.
WIDTHS = ((40, 40), (64, 64), (72, 72), (80, 96), (112, 112), (128, 128), (160, 160), (176, 176),
          (192, 128), (256, 256))  # fmt: skip
FORMS = ("own", "shared", "repeated", "room between rows", "odd")


def in_form(call: Call, form: str) -> Call:
    """Return the call with k, v and their gradients in this memory layout."""
    ndim = call.k.ndim
    order, plain = tuple(range(ndim)), (False,) * ndim
    zeros = (form == "repeated", *plain[1:])
    width = {"room between rows": 2, "odd": 3}.get(form, 1)
    gaps = (1, 1, width, 2 if form == "odd" else 1)
    given = Placement(order, gaps, plain, zeros, lead=1 if form == "odd" else 64)
    changes: dict[str, Any] = {}
    if form == "repeated":
        changes = {n: np.repeat(call.array(n)[:1], 2, 0) for n in ("k", "v")}
    results = Placement(order, gaps, plain, plain, lead=given.lead)
    placements = {"k": given, "v": given, "dk": results, "dv": results}
    return call.but(**changes, placements=placements)


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "head_dims"), list(enumerate(WIDTHS)), ids=str)
@pytest.mark.parametrize("form", [*FORMS, "packed"])
def test_on_a_gpu(form: str, number: int, head_dims: tuple[int, int]) -> None:
    """Rows beyond lengths are no queries, in every form and at all head sizes."""
    import cupy

    turn = number + (*FORMS, "packed").index(form)
    dtype = ("float16", "bfloat16", "float16", "bfloat16", "float32", "float64")[turn % 6]
    position = list(POSITIONS)[turn % len(POSITIONS)]
    call = call_of(dtype, head_dims, position, shared=(1, 2) if form == "shared" else (2, 2))
    is_packed = form == "packed"
    check(
        call if is_packed else in_form(call, form),
        functools.partial(run, cupy),
        is_packed=is_packed,
    )


@pytest.mark.usefixtures("small_host_tiles")
@pytest.mark.parametrize("form", FORMS)
def test_forms_on_a_cpu(form: str) -> None:
    shared = (1, 2) if form == "shared" else (2, 2)
    call = call_of("float32", (8, 5), "window", sizes=(70, 90), shared=shared)
    check(in_form(call, form), functools.partial(run, np))
