"""Does a configuration compute what the reference computes, as exactly as the shipped one does?

Errors are differences from the definition in float64, on a small problem: tiles are cut off on both
sides, and ring buffers wrap around. The largest error may be twice that of the shipped
configuration plus a unit in the last place; the root mean square 1.25 times, for gradients 1.5
times. The shipped configuration itself must agree with the definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import finfo

from cuflash import reference
from cuflash._arrays import array_module
from cuflash._select.pack_gqa import FEW
from cuflash.tuning._workload import DTYPES, ONE_PASS, Workload

Results = dict[str, np.ndarray]
#: Limits by dtype: two correct results differ by a few roundings of the operands, a wrong mask
#: makes a difference of order 1.
AGREEMENT = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-3, "float64": 1e-10}
_ROWS, _KEYS = 700, 2300


class Errors(NamedTuple):
    """Differences of one result from the definition."""

    largest: float
    rms: float


def small(workload: Workload) -> Workload:
    """A smaller problem for the same kernels and options, to compare with the definition.

    Small numbers of queries are kept, because they decide whether PackGQA puts heads that share
    keys into one tile.
    """
    group, keys = workload.heads_q // workload.heads_kv, _KEYS
    if workload.seqlen_q == workload.seqlen_k and workload.causal:
        keys = _ROWS
    if workload.seqlen_q <= FEW:
        rows, heads_kv = workload.seqlen_q, min(workload.heads_kv, 2)
    else:
        rows, heads_kv, group = _ROWS, 1, min(group, 2)
    return replace(
        workload, batch=2, heads_q=heads_kv * group, heads_kv=heads_kv, seqlen_q=rows, seqlen_k=keys
    )


def definition(workload: Workload, kernel: str, inputs: tuple[np.ndarray, ...]) -> Results:
    """Non-empty results of a kernel by the definition, in float64, or longdouble for float64."""
    q, k, v, dout = inputs
    options = workload.score_options()
    wide = np.longdouble if workload.dtype == "float64" else np.float64
    exact = reference.attention(q, k, v, return_lse=True, dtype=wide, **options)
    if kernel.startswith("forward"):
        return {"out": exact.out, "lse": exact.lse} if exact.out.size else {"lse": exact.lse}
    wrt = gradients_of(kernel)
    found = reference.attention_backward(
        dout, q, k, v, exact.out, exact.lse, wrt=wrt, dtype=wide, **options
    )
    gradients = {f"d{name}": getattr(found, f"d{name}") for name in wrt}
    return {name: array for name, array in gradients.items() if array.size}


def gradients_of(kernel: str) -> tuple[str, ...]:
    """The inputs whose gradients a kernel computes."""
    if kernel in ONE_PASS:
        return ("q", "k", "v")
    return ("q",) if "_dq_" in kernel else ("k", "v")


def errors(results: Results, truth: Results) -> dict[str, Errors]:
    """Errors of every result; NaN if it is not finite where the definition is."""
    found = {}
    for name, exact in truth.items():
        seen = np.isfinite(exact)
        own = results[name].astype(exact.dtype)
        gap = np.where(seen, own - np.where(seen, exact, 0.0), 0.0)
        gap = np.where(seen | (own == exact), gap, np.nan)
        found[name] = Errors(float(np.abs(gap).max()), float(np.sqrt(np.square(gap).mean())))
    return found


def complaint(
    own: dict[str, Errors], shipped: dict[str, Errors], truth: Results, dtype: str
) -> str:
    """What is wrong with results that have these errors; empty if nothing is."""
    accumulator = np.float64 if dtype == "float64" else np.float32
    slack = float(np.finfo(accumulator).eps)  # difference of sums in another order
    for name, mine in own.items():
        theirs = shipped[name]
        kind = accumulator if name == "lse" else DTYPES[dtype]
        about: Any = finfo(kind)  # type: ignore[no-untyped-call]
        largest = np.abs(np.where(np.isfinite(truth[name]), truth[name], 0.0)).max()
        unit = float(about.eps) * max(float(largest), float(about.smallest_normal))
        factor = 1.25 if name in ("out", "lse") else 1.5
        if not mine.largest <= 2 * theirs.largest + unit:
            return f"{name}: error {mine.largest:.3g}, the shipped one has {theirs.largest:.3g}"
        if not mine.rms <= factor * theirs.rms + slack * float(largest):
            return f"{name}: rms error {mine.rms:.3g}, the shipped one has {theirs.rms:.3g}"
    return ""


def shipped_complaint(shipped: dict[str, Errors], truth: Results, dtype: str) -> str:
    """What is wrong with the shipped configuration; empty if nothing is."""
    for name, found in shipped.items():
        exact = np.where(np.isfinite(truth[name]), truth[name], 0.0)
        size = float(np.sqrt(np.square(exact).mean()))
        if not found.rms <= AGREEMENT[dtype] * size:
            return f"{name} as shipped: rms error {found.rms:.3g} where values are {size:.3g}"
    return ""


def difference(a: Any, b: Any) -> float:
    """Frobenius norm of a - b divided by that of b; NaN if a or b is not finite."""
    xp = array_module(a)
    a, b = a.astype(np.float32), b.astype(np.float32)
    return float(xp.sqrt(xp.square(a - b).sum() / xp.square(b).sum()))
