"""What do tensor cores, which cut off sums, compute as a product of float32 matrices?

The model is that of Hopper's TF32. Eight products and the sum so far are aligned to the largest of
them, keep two bits more than float32 and are cut off, and so is their sum. Errors of emulated
attention are those of the kernels on an H100 (docs/decisions.md, D34).
"""

from __future__ import annotations

from typing import Any

import numpy as np

EXTRA_BITS = 2
STEP = 8


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and low TF32 part of float32, in float64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    high = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    low = (x.astype(np.float32) - high).view(np.uint32) & np.uint32(0xFFFFE000)
    return high.astype(np.float64), low.view(np.float32).astype(np.float64)


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to float32, in float64."""
    return x.astype(np.float32).astype(np.float64)


def _step(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return acc (m, n) + a (m, 8) . b (8, n)."""
    products = a[:, None, :] * b.T[None, :, :]
    largest = np.maximum(np.abs(products).max(-1), np.abs(acc))
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 24 - EXTRA_BITS)
    total = (np.trunc(products / unit[..., None]).sum(-1) + np.trunc(acc / unit)) * unit
    mantissa, exponent = np.frexp(total)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def product(a: np.ndarray, b: np.ndarray, part: int, *, apart: bool = False) -> np.ndarray:
    """Return a . b in parts of ``part`` terms.

    Small products are summed first in each part, or ``apart``, in sums of their own.
    """
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    shape = (a.shape[0], b.shape[1])
    total, small = np.zeros(shape), np.zeros(shape)
    for first in range(0, a.shape[1], part):
        steps = [slice(k, k + STEP) for k in range(first, min(first + part, a.shape[1]), STEP)]
        if not apart:
            small = np.zeros(shape)
        for k in steps:
            small = _step(_step(small, a_low[:, k], b_high[k]), a_high[:, k], b_low[k])
        acc = np.zeros(shape) if apart else small
        for k in steps:
            acc = _step(acc, a_high[:, k], b_high[k])
        total = rounded(total + acc)
    return rounded(total + small) if apart else total


def attention(
    call: Any, *, in_parts: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return out, lse, dq and dk of one head, without options: in parts, or as kernels once did.

    They summed all columns of dp, and 64 keys of out, before a sum was rounded.
    """
    q, k, v, dout = (call.array(name).astype(np.float64) for name in ("q", "k", "v", "dout"))
    scale = q.shape[-1] ** -0.5
    of_dp, of_out = (16, 32) if in_parts else (v.shape[-1], 64)
    scores = rounded(product(q, k.T, 32 if in_parts else q.shape[-1], apart=not in_parts) * scale)
    largest = scores.max(-1, keepdims=True)
    p = rounded(np.exp(rounded(scores - largest)))
    total = rounded(p.sum(-1, keepdims=True))
    out = np.zeros((q.shape[0], v.shape[1]))
    for first in range(0, k.shape[0], 64):
        keys = slice(first, first + 64)
        for own in np.split(np.arange(64), 64 // of_out):
            out = rounded(out + product(p[:, keys][:, own], v[keys][own], of_out))
    out = rounded(out / total)
    lse = rounded(largest + np.log(total))
    p = rounded(np.exp(rounded(scores - lse)))
    delta = rounded((dout * out).sum(-1, keepdims=True))
    dp = product(dout, v.T, of_dp, apart=not in_parts)
    ds = rounded(p * rounded(dp - delta))
    dq, dk = np.zeros_like(q), np.zeros_like(k)
    for first in range(0, k.shape[0], 32):
        keys = slice(first, first + 32)
        dq = rounded(dq + product(ds[:, keys], k[keys], 32))
    for first in range(0, q.shape[0], 32):
        rows = slice(first, first + 32)
        dk = rounded(dk + product(ds[rows].T, q[rows], 32))
    return [a.astype(np.float32) for a in (out, lse[:, 0], dq * scale, dk * scale)]
