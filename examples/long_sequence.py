"""How much time and memory does a sequence take whose score matrix hardly fits into memory?"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from progress import sign_of_life

import cuflash

Array = Any

CPU_SHAPE = (1, 4, 4096, 64)
GPU_SHAPE = (1, 16, 16384, 128)
QUICK_FACTOR = 8
LAST_ROWS = 32


@dataclass(frozen=True)
class Run:
    """Results of one forward and backward, their time, and their memory beyond the inputs."""

    arrays: dict[str, Array]
    seconds: float
    peak_bytes: int


def fused(q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
    """Causal attention and its gradient by cuflash."""
    out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
    grads = pullback(dout)
    return {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def unfused(q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
    """The same with dense matrices; at most two (batch, heads, seqlen, seqlen) exist at once."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    seqlen = q.shape[-2]
    future = np.triu(np.ones((seqlen, seqlen), dtype=bool), 1)
    p = q @ k.swapaxes(-1, -2)
    p *= scale
    np.copyto(p, -np.inf, where=future)
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    out = p @ v
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= scale
    return {"out": out, "dq": ds @ k, "dk": ds.swapaxes(-1, -2) @ q, "dv": dv}


def measure_on_cpu(compute: Callable[..., dict[str, Array]], *inputs: Array) -> Run:
    """Run twice: with tracemalloc, to which NumPy reports memory, and without it for the time."""
    # tracemalloc slows the tiled path ten times, dense NumPy twice (2 cores, 2026-11-21).
    tracemalloc.start()
    try:
        compute(*inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    start = time.perf_counter()
    arrays = compute(*inputs)
    return Run(arrays, time.perf_counter() - start, peak)


def measure_on_gpu(
    cupy: Any, compute: Callable[..., dict[str, Array]], *inputs: Array
) -> tuple[float, Run]:
    """Run twice; return the seconds of the first call, which compiles, and the second run.

    The peak is the memory that CuPy's pool took in addition to the inputs.
    """
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used_by_inputs = pool.used_bytes()
    seconds = []
    arrays: dict[str, Array] = {}
    for _ in range(2):
        arrays.clear()
        start = time.perf_counter()
        arrays.update(compute(*inputs))
        cupy.cuda.get_current_stream().synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[0], Run(arrays, seconds[1], pool.total_bytes() - used_by_inputs)


def show_on_cpu(*, quick: bool) -> bool:
    """Compare cuflash with the unfused computation; return whether their results agree."""
    shape = shortened(CPU_SHAPE, quick)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
    print(
        f"  causal forward and backward, (batch, heads, seqlen, head_dim) = {shape}, float32, CPU"
    )
    with sign_of_life("cuflash, forward and backward"):
        ours = measure_on_cpu(fused, *inputs)
    with sign_of_life("unfused, forward and backward"):
        dense = measure_on_cpu(unfused, *inputs)
    print(f"\n  {'':10}{'time':>10}{'peak memory':>16}    (on top of q, k, v and dout)")
    for name, run in (("cuflash", ours), ("unfused", dense)):
        print(f"  {name:10}{run.seconds:8.2f} s{binary_size(run.peak_bytes):>16}")
    faster, smaller = dense.seconds / ours.seconds, dense.peak_bytes / ours.peak_bytes
    print(f"  {'ratio':10}{faster:8.1f} x{smaller:14.1f} x")
    errors = {name: relative_error(ours.arrays[name], dense.arrays[name]) for name in ours.arrays}
    print(f"\n  largest difference of the two: {listed(errors)}")
    return max(errors.values()) < agreement(np.float32, shape[-2])


def show_on_gpu(cupy: Any, *, quick: bool) -> bool:
    """Run cuflash where the unfused computation hardly fits; check some rows densely."""
    shape = shortened(GPU_SHAPE, quick)
    rng = cupy.random.default_rng(0)
    inputs = [
        rng.standard_normal(shape, dtype=cupy.float32).astype(ml_dtypes.bfloat16) for _ in range(4)
    ]
    print(
        f"  causal forward and backward, (batch, heads, seqlen, head_dim) = {shape}, bfloat16, GPU"
    )
    with sign_of_life("cuflash, compiling and running"):
        first_seconds, ours = measure_on_gpu(cupy, fused, *inputs)
    batch, num_heads, seqlen, head_dim = shape
    matrix = batch * num_heads * seqlen**2
    # The forward has 2 products and the backward 5. A causal mask halves them.
    flops = 7 * 2 * matrix * head_dim / 2
    print(
        f"\n  time          {1e3 * ours.seconds:.1f} ms ({flops / ours.seconds / 1e12:.0f} TFLOP/s)"
        f"\n  first call    {first_seconds:.1f} s, compiling"
        f"\n  peak memory   {binary_size(ours.peak_bytes)} on top of q, k, v and dout"
        f"\n  unfused       would hold P and dP, two matrices of {binary_size(2 * matrix)} each:"
        f" {4 * matrix / ours.peak_bytes:.0f} times as much"
    )
    errors = row_errors(cupy, ours.arrays, inputs)
    print(f"\n  largest error of some rows against dense float32 ones: {listed(errors)}")
    return max(errors.values()) < agreement(ml_dtypes.bfloat16, seqlen)


def row_errors(xp: Any, arrays: dict[str, Array], inputs: list[Array]) -> dict[str, float]:
    """Compare some rows of the results with dense float32 rows; all rows would not fit."""
    rows = xp.asarray(rows_to_check(inputs[0].shape[-2]))
    wanted = dense_rows(xp, rows, *(x.astype(np.float32) for x in inputs))
    last_rows = slice(-LAST_ROWS, None)
    checked = {"out": rows, "dq": rows, "dk": last_rows, "dv": last_rows}
    return {
        name: relative_error(arrays[name].astype(np.float32)[..., selected, :], wanted[name])
        for name, selected in checked.items()
    }


def rows_to_check(seqlen: int) -> np.ndarray:
    """Rows spread over the second half, where results have similar sizes, and the last rows."""
    spread = np.linspace(seqlen // 2, seqlen - LAST_ROWS, LAST_ROWS, endpoint=False)
    return np.concatenate([spread.astype(int), np.arange(seqlen - LAST_ROWS, seqlen)])


def dense_rows(xp: Any, rows: Array, q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
    """Compute out and dq of ``rows`` only, and dk and dv of the last keys, densely.

    ``rows`` end with the last LAST_ROWS queries: only these see the last LAST_ROWS keys.
    """
    scale = q.shape[-1] ** -0.5
    q, dout = q[..., rows, :], dout[..., rows, :]
    scores = scale * (q @ k.swapaxes(-1, -2))
    scores = xp.where(xp.arange(k.shape[-2]) > rows[:, None], -xp.inf, scores)
    p = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    out = p @ v
    delta = (dout * out).sum(axis=-1, keepdims=True)
    ds = scale * p * (dout @ v.swapaxes(-1, -2) - delta)
    last = (..., slice(-LAST_ROWS, None), slice(-LAST_ROWS, None))
    return {
        "out": out,
        "dq": ds @ k,
        "dk": ds[last].swapaxes(-1, -2) @ q[..., -LAST_ROWS:, :],
        "dv": p[last].swapaxes(-1, -2) @ dout[..., -LAST_ROWS:, :],
    }


def shortened(shape: tuple[int, ...], quick: bool) -> tuple[int, ...]:
    batch, num_heads, seqlen, head_dim = shape
    return (batch, num_heads, seqlen // QUICK_FACTOR if quick else seqlen, head_dim)


def relative_error(ours: Array, theirs: Array) -> float:
    """Largest difference, in units of the largest entry."""
    return float(abs(ours - theirs).max() / abs(theirs).max())


def listed(errors: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {error:.0e}" for name, error in errors.items())
    return f"{shown}\n  (in units of the largest entry)"


def agreement(dtype: Any, seqlen: int) -> float:
    """The relative difference between two ways to compute the same that rounding can explain.

    bfloat16: two roundings of 2^-7, of the probabilities and of the result. float32: sums of
    ``seqlen`` terms in different orders; four standard deviations of a random walk of as many
    roundings.
    """
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        return 2 * 2.0**-7
    return 4 * 2.0**-23 * math.sqrt(seqlen)


def binary_size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
