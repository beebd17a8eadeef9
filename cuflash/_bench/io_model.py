"""Which bytes does attention move? The IO model of FlashAttention, and of the unfused form.

Standard attention writes and reads the matrices of scores and weights: Theta(N d + N^2) bytes of
device memory. FlashAttention brings k and v once for every tile of queries: with M elements of
on-chip memory a tile has Theta(M / d) rows, hence Theta(N^2 d^2 / M) (Dao et al. 2022, theorem 2).
These bytes enter the multiprocessors. Device memory sees them only where L2 does not keep k and v:
the least that it moves is every operand once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuflash._bench.workload import DTYPES, ONE_PASS, Workload


def _lse_bytes(work: Workload) -> int:
    return max(4, DTYPES[work.dtype].itemsize)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one forward call with lse."""

    read_once: int  # q, k and v: the least that device memory is read
    loaded: int  # q, k and v that the multiprocessors load, through L2
    stored: int  # out and lse
    unfused: int  # of device memory, with scores and weights as arrays
    asymptotic: float  # N^2 d^2 / M of all heads, in bytes, without its constant

    @property
    def once(self) -> int:
        """Every operand once: the least that device memory moves."""
        return self.read_once + self.stored

    @property
    def fused(self) -> int:
        """What crosses the border of the multiprocessors."""
        return self.loaded + self.stored


def forward(
    work: Workload, block_m: int, block_n: int, smem_bytes: int, *, boxes: bool = False
) -> Traffic:
    """Bytes that a forward with these tiles moves.

    ``boxes``: TMA brings whole tiles, zeros past the end of an array included.
    """
    size = DTYPES[work.dtype].itemsize
    heads = work.batch * work.heads_q
    d, d_v, m, n = work.head_dim, work.head_dim_v, work.seqlen_q, work.seqlen_k
    q, out = heads * m * d * size, heads * m * d_v * size
    lse = heads * m * _lse_bytes(work)
    keys = _keys_of_tiles(work, block_m, block_n)
    rows = m
    if boxes:
        keys, rows = -(-keys // block_n) * block_n, -(-m // block_m) * block_m
    pairs = heads * m * n * size
    return Traffic(
        read_once=least_bytes(work, "forward") - out - lse,
        loaded=heads * (rows * d + int(keys.sum()) * (d + d_v)) * size,
        stored=out + lse,
        unfused=q + heads * n * (d + d_v) * size + out + 4 * pairs,
        asymptotic=heads * m * n * d * d_v / (smem_bytes / size) * size,
    )


def least_bytes(work: Workload, kernel: str, grads: str = "kv") -> int:
    """Every operand of a kernel of ``kernels_cu`` once: what is read, and what is written.

    ``grads`` are those of dk and dv that a pass for them computes: dv alone does not need v.
    """
    size = DTYPES[work.dtype].itemsize
    rows, keys = (
        work.batch * work.heads_q * work.seqlen_q,
        work.batch * work.heads_kv * work.seqlen_k,
    )
    d, d_v = work.head_dim, work.head_dim_v
    q, dout, k, v = rows * d, rows * d_v, keys * d, keys * d_v
    if kernel.startswith("forward"):
        return size * (q + k + v + dout) + _lse_bytes(work) * rows  # out has the size of dout
    if kernel in ONE_PASS:  # adds to float32 sums of dq
        return size * (q + dout + 2 * (k + v)) + 4 * q + 2 * _lse_bytes(work) * rows
    written = q if "_dq_" in kernel else {"kv": k + v, "k": k, "v": 0}[grads]  # dv in place of v
    return size * (q + dout + k + v + written) + 2 * _lse_bytes(work) * rows


def _keys_of_tiles(work: Workload, block_m: int, block_n: int) -> np.ndarray:
    """Keys that each tile of queries loads, in whole blocks, cut off at the end of the array."""
    first = np.arange(0, work.seqlen_q, block_m)
    last = np.minimum(first + block_m, work.seqlen_q) - 1
    offset = work.seqlen_k - work.seqlen_q
    left, right = work.window or (None, None)
    right = 0 if work.causal else right
    low, high = np.zeros_like(first), np.full_like(first, work.seqlen_k)
    if left is not None:
        low = np.maximum(first + offset - left, 0)
    if right is not None:
        high = np.clip(last + offset + right + 1, 0, work.seqlen_k)
    low = low // block_n * block_n
    high = np.minimum(-(-high // block_n) * block_n, work.seqlen_k)
    return np.where(high > low, high - low, 0)
