"""Which bytes does attention move? The IO model of FlashAttention, and of the unfused form.

Standard attention writes and reads the matrices of scores and weights: Theta(N d + N^2) bytes of
device memory. FlashAttention brings k and v once for every tile of queries: with M elements of
on-chip memory a tile has Theta(M / d) rows, hence Theta(N^2 d^2 / M) (Dao et al. 2022, theorem 2).
Theorem 5 says the same of the gradient: ``io_gradient.py``.
These bytes enter the multiprocessors. Device memory sees them only where L2 does not keep k and v:
the least that it moves is every operand once. Options that are arrays are not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuflash.tuning._workload import DTYPES, ONE_PASS, Workload


def lse_bytes(work: Workload) -> int:
    """Bytes of a number of lse or delta."""
    return max(4, DTYPES[work.dtype].itemsize)


class Traffic(NamedTuple):
    """Bytes of one kernel, or of several."""

    read_once: int  # every operand: the least that device memory is read
    loaded: int  # operands that the multiprocessors load, through L2 (D108)
    written_once: int  # every result: the least that device memory is written
    stored: int  # results that the multiprocessors store, and what they add to them
    asymptotic: float  # N^2 d^2 / M of all heads, in bytes, without its constant
    added: int = 0  # of what is stored: L2 reads and writes as much of its own

    @property
    def once(self) -> int:
        """Every operand once: the least that device memory moves."""
        return self.read_once + self.written_once

    @property
    def fused(self) -> int:
        """What crosses the border of the multiprocessors."""
        return self.loaded + self.stored


def forward(
    work: Workload,
    block_m: int,
    block_n: int,
    smem_bytes: int,
    *,
    boxes: bool = False,
    column_parts: int = 1,
) -> Traffic:
    """Bytes that a forward with lse and these tiles moves.

    ``boxes``: TMA brings whole tiles, zeros past the end of an array included. Others bring the
    keys that some query of the tile may see. ``column_parts`` blocks of threads share a tile, each
    with its own columns of v.
    """
    heads = work.batch * work.heads_q
    d, d_v = work.head_dim, work.head_dim_v
    seen, rows = seen_by(work, block_m), work.seqlen_q
    keys = seen.rows()
    if boxes:
        rows, keys = whole(rows, block_m), seen.in_blocks(block_n)
    read, written = least_parts(work, "forward")
    return Traffic(
        read_once=read,
        loaded=heads
        * (column_parts * (rows + keys) * d + keys * d_v)
        * DTYPES[work.dtype].itemsize,
        written_once=written,
        stored=written,
        asymptotic=asymptotic(work, smem_bytes),
    )


def asymptotic(work: Workload, smem_bytes: int) -> float:
    """N^2 d^2 / M of all heads, in bytes, for M elements in ``smem_bytes``."""
    size = DTYPES[work.dtype].itemsize
    pairs = work.batch * work.heads_q * work.seqlen_q * work.seqlen_k
    return pairs * work.head_dim * work.head_dim_v / (smem_bytes / size) * size


def unfused(work: Workload, pass_: str = "fwd") -> int:
    """Bytes of device memory where scores S and weights P are arrays, keys there for every head.

    Forward (Dao et al. 2022, algorithm 0): S and P are written and read, four arrays of pairs; q,
    k, v and out once. Gradient (algorithm 3), from P that the forward has left: dv = P^T dout
    reads P; dP = dout v^T is written; dS = P (dP - rowsum(P dP)) reads both and is written; dq =
    dS k and dk = dS^T q read it. These are seven arrays of pairs; q, k, v and their gradients
    once, dout twice. Both are Theta(N d + N^2), by theorems 2 and 5.
    """
    columns = work.head_dim + work.head_dim_v
    m, n = work.seqlen_q, work.seqlen_k
    if pass_ == "fwd":
        elements = (m + n) * columns + 4 * m * n
    else:
        elements = 2 * (m * work.head_dim + m * work.head_dim_v + n * columns) + 7 * m * n
    return work.batch * work.heads_q * elements * DTYPES[work.dtype].itemsize


def least_bytes(work: Workload, kernel: str, grads: str = "kv") -> int:
    """Every operand of a kernel of ``kernels_cu`` once: what is read, and what is written."""
    return sum(least_parts(work, kernel, grads))


def least_parts(work: Workload, kernel: str, grads: str = "kv") -> tuple[int, int]:
    """What :func:`least_bytes` says, of reading and of writing.

    ``grads`` are those of dk and dv that a pass for them computes: dv alone does not need v.
    """
    size, statistic = DTYPES[work.dtype].itemsize, lse_bytes(work)
    rows, keys = (
        work.batch * work.heads_q * work.seqlen_q,
        work.batch * work.heads_kv * work.seqlen_k,
    )
    d, d_v = work.head_dim, work.head_dim_v
    q, dout, k, v = rows * d * size, rows * d_v * size, keys * d * size, keys * d_v * size
    lse, sums = rows * statistic, 4 * rows * d
    if kernel.startswith("forward"):
        return q + k + v, dout + lse  # out has the size of dout
    if kernel == "backward_delta":
        return 2 * dout + lse, 2 * lse
    if kernel == "backward_convert":
        return sums, q
    read = q + dout + k + v + 2 * lse  # lse and delta
    if kernel in ONE_PASS:  # adds to float32 sums of dq
        return read, k + v + sums
    if "_dq_" in kernel:
        return read, q
    return (read - v, v) if grads == "v" else (read, k + v if grads == "kv" else k)


class Seen(NamedTuple):
    """Rows of the other side that each tile may see: from ``low`` to before ``high``."""

    low: np.ndarray
    high: np.ndarray

    def rows(self) -> int:
        """Those rows themselves, of all tiles."""
        return int((self.high - self.low).sum())

    def in_blocks(self, block: int, end: int | None = None) -> int:
        """The same in whole blocks, cut off at ``end``."""
        low, high = self.low // block * block, -(-self.high // block) * block
        if end is not None:
            high = np.minimum(high, end)
        return int(np.where(self.high > self.low, high - low, 0).sum())


def seen_by(work: Workload, own: int, *, keys: bool = False) -> Seen:
    """What each tile of ``own`` queries may see, or, of ``keys``, may be seen by."""
    rows, others = work.seqlen_q, work.seqlen_k
    left, right = work.bounds()
    if keys:  # a key sees queries as far ahead as a query sees keys behind
        rows, others, left, right = others, rows, right, left
    first = np.arange(0, rows, own)
    last = np.minimum(first + own, rows) - 1
    low, high = np.zeros_like(first), np.full_like(first, others)
    if left is not None:
        low = np.clip(first + others - rows - left, 0, others)
    if right is not None:
        high = np.clip(last + others - rows + right + 1, 0, others)
    return Seen(low, np.maximum(low, high))


def whole(rows: int, block: int) -> int:
    """Rows in whole blocks."""
    return -(-rows // block) * block
