"""Which bytes do the kernels of the gradient move? The IO model, kernel by kernel.

A tile of keys brings its k and v once, and q, dout, lse and delta of every query that may see it:
one pass for dk and dv, or for all gradients, which then adds to float32 sums of dq. A tile of
queries brings its q and dout once, and k and v of every key that it may see: a pass for dq. Each
of these is Theta(N^2 d^2 / M), as the forward is (Dao et al. 2022, theorem 5); what is done row by
row, before and after them, is Theta(N d).

Additions cross the border of the multiprocessors as stores do. L2 then reads the sums and writes
them: neither crosses the border, and device memory has no part in it where L2 keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cuflash._cli import io_model
from cuflash._cli.io_model import Traffic
from cuflash._errors import problem_with
from cuflash._kernels.config import (
    BackwardConvertConfig,
    BackwardKVConfig,
    BackwardKVSm90Config,
    BackwardOnePassConfig,
    BackwardPairConfig,
    BackwardQConfig,
    BackwardQSm90Config,
    BackwardSm90Config,
    DeltaConfig,
    KernelConfig,
    TileConfig,
)
from cuflash.tuning._kernels import kernel_name
from cuflash.tuning._workload import DTYPES, Workload

_FLOAT_BYTES = 4
_SLICE_ROWS = 16  # sums of dq have whole slices of rows: kernels_cu/sm90/dq_sums.cuh


def gradient(work: Workload, config: KernelConfig) -> Traffic:
    """Bytes that one kernel of the gradient moves.

    As in :func:`io_model.forward` every tile loads its own rows, even if it sees nothing. What the
    two blocks of threads of a pair get by multicast enters both multiprocessors, and counts twice;
    ds, which they exchange, does not count: it comes from no memory.
    """
    refuse_cuda_cores(config)
    if isinstance(config, DeltaConfig | BackwardConvertConfig):
        return _by_rows(work, config)
    if isinstance(config, BackwardQConfig | BackwardQSm90Config):
        loaded = _loaded_by_queries(work, config)
    elif isinstance(config, BackwardKVConfig | BackwardKVSm90Config | BackwardOnePassConfig):
        loaded = _loaded_by_keys(work, config)
    else:
        raise problem_with(
            "kernel", ValueError, got=kernel_name(config),
            expected="one of the gradients of q, k and v: the IO model has no other",
        )  # fmt: skip
    read, written = io_model.least_parts(work, kernel_name(config), grads_of(config))
    stored, added = written, 0
    if isinstance(config, BackwardOnePassConfig):
        summed, first = _sums(work, config)
        stored += summed - _FLOAT_BYTES * work.batch * work.heads_q * work.seqlen_q * work.head_dim
        added = summed - first
    smem = config.smem_bytes * getattr(config, "cluster_blocks", 1)
    return Traffic(read, loaded, written, stored, io_model.asymptotic(work, smem), added)


def together(parts: Sequence[Traffic]) -> Traffic:
    """The sum of kernels that run one after the other, each of which starts with empty caches."""
    return Traffic(*map(sum, zip(*parts, strict=True)))


def grads_of(config: KernelConfig) -> str:
    """Those of dk and dv that a pass computes, as ``io_model.least_bytes`` has them."""
    return "".join(key for key in "kv" if getattr(config, f"grad_{key}", True))


def refuse_cuda_cores(config: KernelConfig) -> None:
    """Raise for a kernel that reads operands where they lie, once for every product."""
    if isinstance(config, TileConfig) and config.cuda_cores:
        raise problem_with(
            "--io", ValueError, got=f"{kernel_name(config)} on CUDA cores",
            expected="kernels that bring tiles into shared memory: the IO model has no others",
        )  # fmt: skip


def _by_rows(work: Workload, config: DeltaConfig | BackwardConvertConfig) -> Traffic:
    """Every operand once; the sums of dq in slices, where a query sees any key."""
    read, written = io_model.least_parts(work, kernel_name(config))
    loaded = read
    if isinstance(config, BackwardConvertConfig):
        loaded = _first_sums(work, config.block_m)
    return Traffic(read, loaded, written, written, 0.0)


def _loaded_by_queries(work: Workload, config: TileConfig) -> int:
    """A tile owns queries and streams keys."""
    seen, rows = io_model.seen_by(work, config.block_m), work.seqlen_q
    keys = seen.rows()
    if isinstance(config, BackwardSm90Config):
        rows, keys = io_model.whole(rows, config.block_m), seen.in_blocks(config.block_n)
    own = (rows + keys) * _row_bytes(work) + work.seqlen_q * _statistics(work)
    return config.column_parts * work.batch * work.heads_q * own


def _loaded_by_keys(work: Workload, config: TileConfig) -> int:
    """A tile owns keys, which the heads of a group share, and streams queries of each head."""
    tile = config.own_rows if isinstance(config, BackwardSm90Config) else config.block_n
    seen, keys = io_model.seen_by(work, tile, keys=True), work.seqlen_k
    rows = known = seen.rows()  # of q and dout; of lse and delta
    if isinstance(config, BackwardSm90Config):
        keys, rows = io_model.whole(keys, tile), seen.in_blocks(config.block_m)
        known = seen.in_blocks(config.block_m, work.seqlen_q)
    size = DTYPES[work.dtype].itemsize
    key_bytes = _row_bytes(work) if getattr(config, "grad_k", True) else size * work.head_dim
    if isinstance(config, BackwardPairConfig):  # half of the columns of the other's k
        key_bytes += size * 64 * -(-work.head_dim // 128)
    owners = work.heads_kv if getattr(config, "shared_keys", True) else work.heads_q
    streamed = work.heads_q * (rows * _row_bytes(work) + known * _statistics(work))
    loaded = owners * keys * key_bytes + getattr(config, "cluster_blocks", 1) * streamed
    return work.batch * config.column_parts * loaded


def _sums(work: Workload, config: BackwardOnePassConfig) -> tuple[int, int]:
    """Bytes that all tiles of keys store of dq or add to it; those that the first of them store."""
    seen, end = io_model.seen_by(work, config.own_rows, keys=True), _slices(work)
    rows = work.batch * work.heads_q * seen.in_blocks(config.block_m, end)
    return _FLOAT_BYTES * rows * work.head_dim, _first_sums(work, config.block_m)


def _first_sums(work: Workload, block_m: int) -> int:
    """Bytes of the sums of those blocks of queries that see any key."""
    seen = io_model.seen_by(work, block_m)
    blocks = (seen.high > seen.low).nonzero()[0].tolist()
    rows = sum(min(block_m, _slices(work) - block_m * block) for block in blocks)
    return _FLOAT_BYTES * work.batch * work.heads_q * rows * work.head_dim


def _slices(work: Workload) -> int:
    return io_model.whole(work.seqlen_q, _SLICE_ROWS)


def _row_bytes(work: Workload) -> int:
    """Of q and dout, or of k and v."""
    return DTYPES[work.dtype].itemsize * (work.head_dim + work.head_dim_v)


def _statistics(work: Workload) -> int:
    """Of a query: lse and delta."""
    return 2 * io_model.lse_bytes(work)
