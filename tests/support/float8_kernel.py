"""What does the kernel of 8 bits compute? Emulated for one head, without options.

The kernel is ``kernels_cu/forward_fp8_sm90.cu``. Tensor cores sum as in MMA-Sim (Xie et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuflash

Array = Any
E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)

BLOCK_N = 128
STEP = 32  # products that a tensor core sums at once
KEPT_BITS = 13  # bits kept behind the leading one of the largest product
# As in kernels_cu/sm90/softmax.cuh.
WEIGHT_EXPONENT, MOST_SUM = 8.0, 440.0
_CUT = 2.0**-KEPT_BITS
_SMALLEST = 2.0**-100  # sums below it are 0
_AT_ONCE = 1 << 19  # products


class Quantized(NamedTuple):
    """Matrices of 8 bits and their scales."""

    q: Array
    k: Array
    v: Array
    factors: tuple[Array, Array, Array]


def quantized(inputs: Sequence[Array], rotation: int | None) -> Quantized:
    """Quantise as `cuflash.quantize` does; v is not rotated."""
    q, k = (cuflash.quantize(x, rotation=rotation) for x in inputs[:2])
    v = cuflash.quantize(inputs[2])
    return Quantized(q.array, k.array, v.array, (q.scale, k.scale, v.scale))


def cut_product(a: Array, b: Array, acc: Array | None = None) -> Array:
    """Return acc + a . b in float32, summed as a tensor core sums e4m3.

    It aligns 32 products and the sum so far to the largest of them, and cuts each off.
    """
    a, b = (x.astype(np.float32) for x in (a, b.T))
    total = np.zeros((len(a), len(b)), np.float32) if acc is None else acc.copy()
    rows = max(_AT_ONCE // (STEP * len(b)), 1)
    for first in range(0, len(a), rows):
        own = slice(first, first + rows)
        for k in range(0, a.shape[1], STEP):
            products = a[own, None, k : k + STEP] * b[None, :, k : k + STEP]
            largest = np.maximum(abs(products).max(-1), abs(total[own]))
            least = np.maximum(largest, np.float32(_SMALLEST))
            unit = (least.view(np.uint32) & 0xFF800000).view(np.float32) * np.float32(_CUT)
            products *= (1 / unit)[..., None]
            kept = products.astype(np.int32).sum(-1) + (total[own] / unit).astype(np.int32)
            total[own] = kept * unit
            total[own].view(np.uint32)[...] &= 0xFFFFFC00
    return total


def emulated(
    q: Array,
    k: Array,
    v: Array,
    factors: Sequence[float],
    *,
    promotes: bool = True,
    weight_exponent: float = WEIGHT_EXPONENT,
    weights: Any = E4M3,
) -> tuple[Array, Array]:
    """Return ``out`` in bfloat16 and ``lse`` of one head, without options.

    With ``promotes`` the sum over a block is added in float32. Weights are rounded to ``weights``
    after multiplication by 2^``weight_exponent``.
    """  # fmt: skip
    unit = np.float32(np.log2(np.e) / np.sqrt(q.shape[-1]) * factors[0] * factors[1])
    total = np.zeros((len(q), 1), np.float32)
    o = np.zeros((len(q), v.shape[-1]), np.float32)
    lanes = np.arange(BLOCK_N) // 2 % 4  # the lane of each key in a row
    for first in reversed(range(0, len(k), BLOCK_N)):
        keys = slice(first, first + BLOCK_N)
        s = cut_product(q, k[keys].T) * unit
        highest = s.max(-1, keepdims=True)
        if is_first := first + BLOCK_N >= len(k):  # the first visited block
            reference_ = highest
        with np.errstate(all="ignore"):
            p = np.exp2(s - reference_ + np.float32(weight_exponent))
            sums = [p[:, lanes[: p.shape[1]] == lane].sum(-1, keepdims=True) for lane in range(4)]
            sum_, largest = np.max(sums, 0), p.max(-1, keepdims=True)
            room = np.ceil(np.log2(sum_ / largest) - 0.05)
        grew, lost = (sum_ > MOST_SUM) & (not is_first), largest > 2.0**100
        growth = np.where(grew, highest - reference_ + np.where(lost, 0, room), 0)
        rescale = np.exp2(-growth)
        reference_ = reference_ + growth
        p = np.exp2(s - reference_ + np.float32(weight_exponent))
        total = total * rescale + p.sum(-1, keepdims=True)
        rounded = np.minimum(p, np.float32(ml_dtypes.finfo(weights).max)).astype(weights)
        o *= rescale
        o = o + cut_product(rounded, v[keys]) if promotes else cut_product(rounded, v[keys], o)
    lse = (reference_ - weight_exponent + np.log2(total)) * np.log(2)
    return (o * np.float32(factors[2]) / total).astype(BF16), lse[:, 0].astype(np.float32)
