"""How many bytes does attention move? The IO model of FlashAttention, kernel by kernel.

Standard attention writes and reads the matrices of scores and weights: Theta(N d + N^2) bytes of
device memory. In the forward, a tile of queries loads its q once, and k and v of every key that it
may see. With M elements of on-chip memory a tile has Theta(M / d) rows, so that Theta(N^2 d^2 / M)
bytes are loaded (Dao et al. 2022, theorem 2). Theorem 5 is the same for the gradient. In a pass for
dk and dv, or for all gradients, a tile of keys loads its k and v once, and q, dout, lse and delta
of every query that may see it. In a pass for dq, a tile of queries loads its q and dout once, and k
and v of every key that it may see. Kernels that work row by row move Theta(N d).

The model counts bytes that enter the SMs, through L2. Device memory moves fewer bytes if L2 keeps
operands, but at least every operand once. One pass for all gradients adds to float32 sums of dq:
additions leave an SM as stores do, and L2 reads and writes the sums itself. Options that are arrays
are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cuflash._ahead import steps_of
from cuflash._errors import wrong_value
from cuflash._select.hardware import wanted
from cuflash.tuning._workload import DTYPES, ONE_PASS, Workload, seen_by

#: The field of the model that is compared with each counter of a device, for the forward.
PREDICTED = {
    "device memory read": "read_once",
    "device memory write": "stored",
    "L2 to processors": "loaded",
    "processors to L2": "stored",
}
#: The same for a kernel of the gradient, which may add to a result many times.
PREDICTED_OF_GRADIENT = {
    "device memory read": "read_once",
    "L2 to processors": "loaded",
    "device memory write": "written_once",
    "processors to L2": "stored",
}
_FLOAT_BYTES = 4
_SLICE_ROWS = 16  # sums of gradients have whole slices of rows: kernels_cu/sm90/dq_accum.cuh


class Traffic(NamedTuple):
    """Bytes of one kernel, or of several."""

    read_once: int  # every operand: the least that device memory is read
    loaded: int  # operands that the SMs load, through L2 (D108)
    written_once: int  # every result: the least that device memory is written
    stored: int  # results that the SMs store, and additions to results
    asymptotic: float  # N^2 d^2 / M of all heads, in bytes, without its constant
    added: int = 0  # part of stored: additions, for which L2 itself reads and writes as much

    @property
    def fused(self) -> int:
        """Bytes that the SMs load and store."""
        return self.loaded + self.stored


def predicted(work: Workload, *, arch: str | None = None, backward: bool = False) -> dict[str, Any]:
    """Bytes of the forward, and of each kernel of the gradient, in values that JSON supports."""
    steps = steps_of(work, wanted(arch), backward=backward)
    configs: list[Any] = [*steps]
    (index,) = (i for i, config in enumerate(configs) if config.computes == "out")
    own = configs[index]
    _refuse_simt(own)
    model = forward(
        work, own.block_m, own.block_n, own.smem_bytes,
        boxes=own.tensor_maps, split_columns=own.split_columns,
    )  # fmt: skip
    found: dict[str, Any] = {"io": model._asdict() | {"unfused": unfused(work)}}
    if backward:
        parts = {
            config: gradient(work, config, steps[config].splits, steps[config].dq_sums)
            for config in configs[index + 1 :]
        }
        total = together([*parts.values()])._asdict() | {"unfused": unfused(work, "bwd")}
        rows = [{"kernel": config.kernel, **part._asdict()} for config, part in parts.items()]
        found["io_gradient"] = {"kernels": rows, "sum": total}
    return found


def forward(
    work: Workload,
    block_m: int,
    block_n: int,
    smem_bytes: int,
    *,
    boxes: bool = False,
    split_columns: int = 1,
) -> Traffic:
    """Bytes that a forward with lse and these tiles moves.

    With ``boxes`` TMA loads whole tiles, with zeros past the end of an array. Other kernels load
    only keys that some query of the tile may see. ``split_columns`` thread blocks share a tile,
    each with its own columns of v.
    """
    d, d_v = work.head_dim, work.head_dim_v
    rows, keys, _ = _rows_loaded(work, block_m, block_n, boxes=boxes)
    elements = split_columns * (rows + keys) * d + keys * d_v
    loaded = work.batch * work.heads_q * elements * _size(work)
    read, written = least_bytes(work, "forward")
    return Traffic(read, loaded, written, written, _asymptotic(work, smem_bytes))


def gradient(work: Workload, config: Any, splits: int = 1, dq_sums: int = 1) -> Traffic:
    """Bytes that one kernel of the gradient moves, with the queries in ``splits`` parts.

    As in :func:`forward` every tile loads its own rows, even if it sees nothing. Data that the two
    thread blocks of a pair receive by multicast enters both SMs and counts twice. ds, which they
    exchange, does not count, because it does not come from memory.
    """
    _refuse_simt(config)
    read, written = least_bytes(work, config.kernel, grads_of(config))
    loaded, stored, added = read, written, 0
    finishes = getattr(config, "finishes_dq", False)
    if config.computes == "convert":
        # Where tiles have stored dq, it reads one number for 16 rows: not counted.
        loaded = 0 if finishes else _first_sums(work, config, dq_sums)
        read, written, stored = (0, 0, 0) if finishes else (read, written, stored)
    elif config.computes == "parts":
        read = loaded = _parts(work, config, splits)
    elif config.computes == "dq":
        loaded = _loaded_by_queries(work, config)
    elif config.computes in ("dkv", "dqkv"):
        loaded = _loaded_by_keys(work, config, splits)
    elif config.computes != "delta":
        raise wrong_value(
            "kernel", config.kernel, "one of the gradients of q, k and v: the IO model has no other"
        )
    if config.computes == "dqkv":
        summed, keys = _sums(work, config), least_bytes(work, "backward_combine")[1]
        if config.split_queries:
            written += _parts(work, config, splits) - keys
            keys = _parts(work, config, splits)
        first = _first_sums(work, config, dq_sums)
        if finishes:  # the last tile of a block loads the sum of the others, and stores dq
            heads, sums = work.batch * work.heads_q, least_bytes(work, "backward_convert")[0]
            dq = _size(work) * heads * work.head_dim * _rows_that_see(work, config)
            written += dq - sums
            several = _first_sums(work, config, 2) - first  # blocks with more than one tile
            loaded, summed = loaded + several, summed - first
            keys, first = keys + dq, several
        stored, added = keys + summed, summed - first
    asymptotic = 0.0
    if config.computes not in ("delta", "convert", "parts"):
        asymptotic = _asymptotic(work, config.smem_bytes * config.cluster_blocks)
    return Traffic(read, loaded, written, stored, asymptotic, added)


def together(parts: Sequence[Traffic]) -> Traffic:
    """The sum over kernels that run one after the other, each beginning with empty caches."""
    return Traffic(*map(sum, zip(*parts, strict=True)))


def grads_of(config: Any) -> str:
    """Which of dk and dv a pass computes, as for :func:`least_bytes`: "kv", "k" or "v"."""
    return "".join(key for key in "kv" if getattr(config, f"grad_{key}", True))


def unfused(work: Workload, pass_: str = "fwd") -> int:
    """Bytes of device memory if scores S and weights P are arrays, with keys for every query head.

    Forward (Dao et al. 2022, algorithm 0): S and P are written and read, four arrays of pairs; q,
    k, v and out once. Gradient (algorithm 3), with P stored by the forward: dv = P^T dout reads P;
    dP = dout v^T is written; dS = P (dP - rowsum(P dP)) reads both and is written; dq = dS k and
    dk = dS^T q read dS. These are seven arrays of pairs; q, k, v and their gradients once, dout
    twice. Both are Theta(N d + N^2), by theorems 2 and 5.
    """
    columns = work.head_dim + work.head_dim_v
    m, n = work.seqlen_q, work.seqlen_k
    factor, arrays = (1, 4) if pass_ == "fwd" else (2, 7)
    elements = factor * (m + n) * columns + arrays * m * n
    return work.batch * work.heads_q * elements * _size(work)


def least_bytes(work: Workload, kernel: str, grads: str = "kv") -> tuple[int, int]:
    """Bytes that a kernel reads and writes, with every operand and result counted once.

    ``grads`` says which of dk and dv a pass computes: a pass for dv alone does not need v.
    """
    rows, keys = work.heads_q * work.seqlen_q, work.heads_kv * work.seqlen_k
    size = work.batch * _size(work)
    q, dout = size * rows * work.head_dim, size * rows * work.head_dim_v
    k, v = size * keys * work.head_dim, size * keys * work.head_dim_v
    lse, sums = work.batch * rows * _statistic(work), 4 * work.batch * rows * work.head_dim
    if kernel.startswith("forward"):
        return q + k + v, dout + lse  # out has the size of dout
    if kernel == "backward_delta":
        return 2 * dout + lse, 2 * lse
    if kernel == "backward_convert":
        return sums, q
    if kernel == "backward_combine":  # gradient() adds the parts that it reads
        return 0, k + v
    read = q + dout + k + v + 2 * lse  # lse and delta
    if kernel in ONE_PASS:  # adds to float32 sums of dq
        return read, k + v + sums
    if "_dq_" in kernel:
        return read, q
    return (read - v, v) if grads == "v" else (read, k + v if grads == "kv" else k)


def _rows_loaded(
    work: Workload, tile: int, block: int, *, boxes: bool, keys: bool = False
) -> tuple[int, int, int]:
    """Rows that tiles load: own rows, rows of the other side, and the number of the latter.

    The last number does not count rows past the end of an array.
    """
    seen, own = seen_by(work, tile, keys=keys), work.seqlen_k if keys else work.seqlen_q
    if not boxes:
        return own, seen.rows(), seen.rows()
    others = work.seqlen_q if keys else work.seqlen_k
    return _whole(own, tile), seen.in_blocks(block), seen.in_blocks(block, others)


def _loaded_by_queries(work: Workload, config: Any) -> int:
    """Bytes that tiles load if a tile owns queries and streams keys."""
    tile, block = config.block_m, config.block_n
    rows, keys, _ = _rows_loaded(work, tile, block, boxes=config.tensor_maps)
    loaded = (rows + keys) * _row_bytes(work) + 2 * work.seqlen_q * _statistic(work)
    return int(config.split_columns * work.batch * work.heads_q * loaded)


def _loaded_by_keys(work: Workload, config: Any, splits: int) -> int:
    """Bytes that tiles load if a tile owns keys and streams the queries of each head.

    The heads of a group share the keys. Each part of the queries loads the keys again.
    """
    tile, block = config.own_rows, config.block_m
    keys, rows, present = _rows_loaded(work, tile, block, boxes=config.tensor_maps, keys=True)
    size = _size(work)
    key_bytes = _row_bytes(work) if getattr(config, "grad_k", True) else size * work.head_dim
    if config.cluster_blocks == 2:  # a block loads half of the columns of the other block's k
        key_bytes += size * 64 * -(-work.head_dim // 128)
    owners = work.heads_kv if getattr(config, "shared_keys", True) else work.heads_q
    streamed = rows * _row_bytes(work) + 2 * present * _statistic(work)
    loaded = owners * splits * keys * key_bytes + config.cluster_blocks * work.heads_q * streamed
    return int(work.batch * config.split_columns * loaded)


def _sums(work: Workload, config: Any) -> int:
    """Bytes of dq that all tiles of keys store or add."""
    seen = seen_by(work, config.own_rows, keys=True)
    rows = seen.in_blocks(config.block_m, _whole(work.seqlen_q, _SLICE_ROWS))
    return int(_FLOAT_BYTES * work.batch * work.heads_q * rows * config.head_dim)


def _first_sums(work: Workload, config: Any, dq_sums: int) -> int:
    """Bytes of dq sums that are stored, not added: by the first tiles of keys of each query block.

    Blocks of queries that see no key have no sum.
    """
    block_m, tile = config.block_m, config.block_n  # a pair of thread blocks has one sum
    seen, end = seen_by(work, block_m), _whole(work.seqlen_q, _SLICE_ROWS)
    rows = 0
    for block in (seen.high > seen.low).nonzero()[0].tolist():
        tiles = -(-int(seen.high[block]) // tile) - int(seen.low[block]) // tile
        rows += min(block_m, end - block_m * block) * min(dq_sums, tiles)
    return int(_FLOAT_BYTES * work.batch * work.heads_q * rows * config.head_dim)


def _rows_that_see(work: Workload, config: Any) -> int:
    """Rows of the blocks of queries that see a key."""
    seen, block_m = seen_by(work, config.block_m), config.block_m
    blocks = (seen.high > seen.low).nonzero()[0].tolist()
    return sum(min(block_m, work.seqlen_q - block_m * block) for block in blocks)


def _parts(work: Workload, config: Any, splits: int) -> int:
    """Bytes of dk and dv for all parts of the queries."""
    rows = work.batch * work.heads_kv * _whole(work.seqlen_k, _SLICE_ROWS)
    return int(_FLOAT_BYTES * splits * rows * (config.head_dim + config.head_dim_v))


def _asymptotic(work: Workload, smem_bytes: int) -> float:
    """N^2 d^2 / M of all heads, in bytes, for M elements in ``smem_bytes``."""
    pairs = work.batch * work.heads_q * work.seqlen_q * work.seqlen_k
    size = _size(work)
    return pairs * work.head_dim * work.head_dim_v / (smem_bytes / size) * size


def _refuse_simt(config: Any) -> None:
    """Raise for a kernel that reads operands from global memory, once for every product."""
    if getattr(config, "simt", False):
        got = f"{config.kernel} on CUDA cores"
        raise wrong_value(
            "--io", got, "kernels that have tiles in shared memory: the IO model has no others"
        )


def _size(work: Workload) -> int:
    """Bytes of an element of q, k and v."""
    return DTYPES[work.dtype].itemsize


def _statistic(work: Workload) -> int:
    """Bytes of one lse or delta."""
    return max(4, _size(work))


def _row_bytes(work: Workload) -> int:
    """Bytes of one row of q and dout, or of k and v."""
    return _size(work) * (work.head_dim + work.head_dim_v)


def _whole(rows: int, block: int) -> int:
    """Rows in whole blocks."""
    return -(-rows // block) * block
