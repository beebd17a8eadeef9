"""Which kernel configuration serves a problem on a device? Tile choices as tables.

``block_n`` and the order of keys depend on head sizes and options alone, never on batch, heads or
seqlen_q, so that the bits of a row do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash._config import (
    HEAD_DIMS,
    BackwardKVConfig,
    BackwardQConfig,
    DeltaConfig,
    ForwardConfig,
)
from cuflash._errors import not_yet, problem_with
from cuflash._problem import HALVES, Operand, Problem


@dataclass(frozen=True, slots=True)
class Tile:
    """One row of a table: the tile and how many blocks of threads share a multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    blocks_per_sm: int


# Keyed by the larger padded head size.
_FORWARD = {
    32: Tile(128, 64, 4, 2),
    64: Tile(128, 64, 4, 2),
    96: Tile(64, 64, 4, 2),
    128: Tile(64, 64, 4, 2),
    192: Tile(64, 64, 4, 1),
    256: Tile(64, 64, 4, 1),
}
_BACKWARD_Q = {
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    96: Tile(64, 64, 4, 1),
    128: Tile(64, 64, 4, 1),
    192: Tile(64, 32, 4, 1),
    256: Tile(64, 32, 4, 1),
}
_BACKWARD_KV = {
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    96: Tile(64, 64, 4, 1),
    128: Tile(64, 64, 4, 1),
    192: Tile(32, 64, 4, 1),
    256: Tile(32, 64, 4, 1),
}


def padded(head_dim: int) -> int:
    """The tile width that holds ``head_dim`` columns."""
    for width in HEAD_DIMS:
        if head_dim <= width:
            return width
    raise not_yet(
        f"head_dim {head_dim} on a GPU", "a later version", f"up to {HEAD_DIMS[-1]} works"
    )


def forward_config(problem: Problem, smem_limit: int, copy_bytes: int) -> ForwardConfig:
    """Choose the forward kernel."""
    return ForwardConfig(**_tile_fields(problem, _FORWARD, copy_bytes, problem.out.dtype))


def backward_q_config(problem: Problem, smem_limit: int, copy_bytes: int) -> BackwardQConfig:
    """Choose the kernel of dq."""
    return BackwardQConfig(**_tile_fields(problem, _BACKWARD_Q, copy_bytes, problem.dtype))


def backward_kv_configs(
    problem: Problem, smem_limit: int, copy_bytes: int, wanted: frozenset[str]
) -> tuple[BackwardKVConfig, ...]:
    """Choose the passes that compute dk, dv or both.

    One pass computes both if k and v are summed over the same batch axes, so that it walks the same
    queries for both, and if registers hold both sums.
    """
    fields = _tile_fields(problem, _BACKWARD_KV, copy_bytes, problem.dtype)
    sums = [name for name in ("k", "v") if name in wanted]
    together = (
        problem.k.summed == problem.v.summed
        and max(fields["head_dim"], fields["head_dim_v"]) <= 128
    )
    passes = [sums] if together and sums else [[name] for name in sums]
    return tuple(
        BackwardKVConfig(
            **fields,
            shared_keys=_shares_keys(problem, names),
            grad_k="k" in names,
            grad_v="v" in names,
        )
        for names in passes
    )


def _shares_keys(problem: Problem, names: list[str]) -> bool:
    """Whether the batch entries summed into one result have the same k, and v where it is read."""
    summed = problem.k.summed if "k" in names else problem.v.summed
    read = [problem.k.summed, problem.v.summed] if "k" in names else [problem.k.summed]
    return all(own[i] for own in read for i, is_summed in enumerate(summed) if is_summed)


def delta_config(
    problem: Problem, out_dtype: np.dtype[Any], copy_bytes: int, *, grad_lse: bool
) -> DeltaConfig:
    """Choose the kernel of delta = rowsum(dout * out) - dlse."""
    return DeltaConfig(
        dtype=problem.dtype.name,
        out_dtype=out_dtype.name,
        copy_bytes=16 if copy_bytes == 16 else 2,
        head_dim_v=padded(problem.head_dim_v),
        num_warps=4,
        block_m=64,
        grad_lse=grad_lse,
    )


def _tile_fields(
    problem: Problem, tiles: dict[int, Tile], copy_bytes: int, out_dtype: np.dtype[Any]
) -> dict[str, Any]:
    head_dim, head_dim_v = padded(problem.head_dim), padded(problem.head_dim_v)
    tile = tiles[max(head_dim, head_dim_v)]
    return {
        "dtype": problem.dtype.name,
        "out_dtype": out_dtype.name,
        "copy_bytes": copy_bytes,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "blocks_per_sm": tile.blocks_per_sm,
        **score_fields(problem),
    }


def score_fields(problem: Problem) -> dict[str, Any]:
    """The configuration fields that say which score options are present."""
    if problem.dtype not in HALVES:
        raise not_yet(
            f"dtype {problem.dtype} on a GPU", "the release that adds it",
            "float16 and bfloat16 work",
        )  # fmt: skip
    if max(problem.seqlen_q, problem.seqlen_k) >= 1 << 29:
        raise problem_with(
            "q, k", ValueError, got=f"{problem.seqlen_q} queries, {problem.seqlen_k} keys",
            expected="fewer than 2^29 of each",
        )  # fmt: skip
    plain = problem.softcap is None and problem.bias is None
    # Beyond these bounds scale * log2(e) leaves the normal range of float32.
    scale_in_exponent = plain and 1e-30 < problem.scale < 1e30
    return {
        "window_left": problem.window_left is not None,
        "window_right": problem.window_right is not None,
        "scale_in_exponent": scale_in_exponent,
        "softcap": problem.softcap is not None,
        "bias": "none" if problem.bias is None else problem.bias.dtype.name,
        "mask": problem.mask is not None,
        "offset": _offset_field(problem),
        "q_lengths": _integer_field(problem.q_lengths),
        "kv_lengths": _integer_field(problem.kv_lengths),
    }


def _integer_field(operand: Operand | None) -> str:
    return "none" if operand is None else operand.dtype.name


def _offset_field(problem: Problem) -> str:
    if problem.window_left is None and problem.window_right is None:
        return "value"
    if problem.offset is not None:
        return problem.offset.dtype.name
    if problem.offset_value is None and (problem.q_lengths or problem.kv_lengths):
        return "lengths"
    return "value"
