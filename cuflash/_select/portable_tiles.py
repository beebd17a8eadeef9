"""Which tile does a portable kernel take for float32, TF32 and float64? Rows as in _select.

Registers decide: of accumulators of 4 and 8 bytes, one slice of 16 rows fits a warp, and of wide
results a part of the columns. All rows are free of spills by NVRTC 12.9 and 13.5.

Timed on an H100 SXM (D36, D35, D60) were the first tile of each row of float32 where a
score is a product, of TF32 the forward at 64 and 128, of float64 what serves at 64 and 128 there,
the latest of it by benchmarks/sweeps. All others are what registers and shared memory hold.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """One row of a table: the tile and how many blocks of threads share a multiprocessor."""

    block_m: int
    block_n: int
    num_warps: int
    blocks_per_sm: int


#: Keyed by the larger padded head size. Of a row's tiles the first is taken that leaves room in
#: shared memory for its blocks_per_sm: the first serves sm_90, the last the 99 KiB of sm_86, sm_89
#: and sm_120.
Tiles = dict[int, tuple[Tile, ...]]


class Tables(NamedTuple):
    """The tables of one arithmetic; ``general`` ones where a score is more than a product."""

    forward: Tiles
    forward_general: Tiles
    backward_q: Tiles
    backward_q_general: Tiles
    backward_kv: Tiles
    backward_kv_general: Tiles
    backward_score: Tiles
    widest_pair: int  # padded head size up to which registers hold dk and dv in one pass
    own_columns: int  # of out that registers hold
    own_columns_general: int
    own_columns_backward: int  # of a gradient
    own_columns_backward_general: int
    forward_stages: int = 2  # buffers of k and v
    forward_one_stage: Tiles | None = None  # go before those of forward
    forward_one_stage_general: Tiles | None = None
    partners_q: Tiles | None = None  # of gradients whose warps share rows; a score is a product
    partners_kv: Tiles | None = None  # D58


# Of the parts of k and v one stage: two would leave no room for their low parts. (D36)
_FORWARD_FLOAT32: Tiles = {
    32: (Tile(128, 32, 4, 2),),  # D124
    64: (Tile(128, 64, 8, 1),),
    96: (Tile(64, 48, 4, 2), Tile(64, 32, 4, 2), Tile(64, 48, 4, 1)),
    128: (Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
    192: (Tile(128, 32, 8, 1), Tile(128, 16, 8, 1), Tile(48, 16, 3, 1)),
    256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
}
_FORWARD_GENERAL_FLOAT32: Tiles = {
    32: (Tile(64, 64, 4, 2),),
    64: (Tile(128, 32, 8, 1),),
    96: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    192: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
}
_BACKWARD_Q_FLOAT32: Tiles = {
    32: (Tile(64, 32, 4, 2),),
    64: (Tile(128, 32, 8, 1),),
    96: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(128, 16, 8, 1), Tile(64, 16, 4, 1)),
    192: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    256: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}
_BACKWARD_Q_GENERAL_FLOAT32: Tiles = _BACKWARD_Q_FLOAT32 | {
    32: (Tile(64, 16, 4, 2),),
    64: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
}
_BACKWARD_KV_FLOAT32: Tiles = {
    32: (Tile(32, 64, 4, 2),),
    64: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1)),
    96: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1)),
    128: (Tile(16, 128, 8, 1), Tile(16, 64, 4, 1), Tile(16, 32, 2, 1)),
    192: (Tile(16, 64, 4, 1), Tile(16, 32, 2, 1)),
    256: (Tile(16, 64, 4, 1), Tile(16, 32, 2, 1), Tile(16, 16, 1, 1)),
}
# With all options 32 queries are more than registers hold.
_BACKWARD_KV_GENERAL_FLOAT32: Tiles = _BACKWARD_KV_FLOAT32 | {32: (Tile(16, 64, 4, 2),)}
_BACKWARD_SCORE_FLOAT32: Tiles = {
    32: (Tile(64, 16, 4, 2),),
    64: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    96: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    192: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    256: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}
FLOAT32 = Tables(
    _FORWARD_FLOAT32,
    _FORWARD_GENERAL_FLOAT32,
    _BACKWARD_Q_FLOAT32,
    _BACKWARD_Q_GENERAL_FLOAT32,
    _BACKWARD_KV_FLOAT32,
    _BACKWARD_KV_GENERAL_FLOAT32,
    _BACKWARD_SCORE_FLOAT32,
    widest_pair=64,
    own_columns=128,
    own_columns_general=128,
    own_columns_backward=128,
    own_columns_backward_general=96,
    forward_stages=1,
)
_FORWARD_TF32: Tiles = {
    32: (Tile(64, 64, 4, 2),),
    64: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 1)),
    96: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    128: (Tile(256, 32, 8, 1), Tile(128, 32, 8, 1), Tile(64, 16, 4, 1)),
    192: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    256: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
}
_FORWARD_GENERAL_TF32: Tiles = _FORWARD_TF32 | {
    32: (Tile(64, 32, 4, 2),),
    64: (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
    96: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
}
_BACKWARD_Q_TF32: Tiles = _BACKWARD_Q_FLOAT32 | {
    64: (Tile(128, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
}
_BACKWARD_Q_GENERAL_TF32: Tiles = _BACKWARD_Q_GENERAL_FLOAT32 | {128: _BACKWARD_Q_TF32[128]}
_BACKWARD_KV_TF32: Tiles = _BACKWARD_KV_FLOAT32 | {
    32: (Tile(16, 64, 4, 2),),
    128: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1), Tile(16, 32, 2, 1)),
}
TF32 = FLOAT32._replace(
    forward=_FORWARD_TF32,
    forward_general=_FORWARD_GENERAL_TF32,
    backward_q=_BACKWARD_Q_TF32,
    backward_q_general=_BACKWARD_Q_GENERAL_TF32,
    backward_kv=_BACKWARD_KV_TF32,
    backward_kv_general=_BACKWARD_KV_TF32,
    forward_stages=2,
)

_FORWARD_FLOAT64: Tiles = {
    32: (Tile(64, 32, 4, 2),),
    64: (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),  # D60
    96: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    128: (Tile(128, 16, 8, 1), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    192: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
    256: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}
# By benchmarks/sweeps; of the general one at 8192 keys alone. (D102)
_FORWARD_ONE_STAGE_FLOAT64: Tiles = {128: (Tile(128, 16, 8, 1),)}
_FORWARD_ONE_STAGE_GENERAL_FLOAT64: Tiles = {128: (Tile(128, 32, 8, 1),)}
_FORWARD_GENERAL_FLOAT64: Tiles = _FORWARD_FLOAT64 | {
    64: (Tile(128, 32, 8, 1), Tile(64, 32, 4, 1)),
    128: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
}
_BACKWARD_Q_FLOAT64: Tiles = {
    32: (Tile(64, 16, 4, 2),),
    64: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    96: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    128: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
    192: (Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
    256: (Tile(16, 16, 1, 1),),
}
_BACKWARD_KV_FLOAT64: Tiles = {
    32: (Tile(16, 64, 4, 2),),
    64: (Tile(16, 64, 4, 2), Tile(16, 64, 4, 1), Tile(16, 32, 2, 1)),
    96: (Tile(16, 64, 4, 1), Tile(16, 32, 2, 1), Tile(16, 16, 1, 1)),
    128: (Tile(16, 64, 4, 1), Tile(16, 32, 2, 1), Tile(16, 16, 1, 1)),
    192: (Tile(16, 32, 2, 1), Tile(16, 16, 1, 1)),
    256: (Tile(16, 16, 1, 1),),
}
_BACKWARD_SCORE_FLOAT64: Tiles = {
    32: (Tile(64, 16, 4, 2),),
    64: (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1)),
    96: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    128: (Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    192: (Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
    256: (Tile(32, 16, 2, 1), Tile(16, 16, 1, 1)),
}
_PARTNERS_Q_FLOAT64: Tiles = {
    64: (Tile(64, 64, 8, 1),),
    96: (Tile(64, 32, 8, 1),),
    128: (Tile(64, 32, 8, 1),),
}
_PARTNERS_KV_FLOAT64: Tiles = {
    64: (Tile(64, 64, 8, 1),),
    96: (Tile(32, 64, 8, 1),),
    128: (Tile(32, 64, 8, 1),),
}
FLOAT64 = Tables(
    _FORWARD_FLOAT64,
    _FORWARD_GENERAL_FLOAT64,
    _BACKWARD_Q_FLOAT64,
    _BACKWARD_Q_FLOAT64,
    _BACKWARD_KV_FLOAT64,
    _BACKWARD_KV_FLOAT64,
    _BACKWARD_SCORE_FLOAT64,
    widest_pair=32,
    own_columns=128,
    own_columns_general=64,
    own_columns_backward=128,
    own_columns_backward_general=64,
    forward_one_stage=_FORWARD_ONE_STAGE_FLOAT64,
    forward_one_stage_general=_FORWARD_ONE_STAGE_GENERAL_FLOAT64,
    partners_q=_PARTNERS_Q_FLOAT64,
    partners_kv=_PARTNERS_KV_FLOAT64,
)


_WIDTHS = (16, 32, 64, 96, 128, 192, 256)


def _on_cuda_cores(block: int, own_columns: int, widest_pair: int) -> Tables:
    """Tiles of 64 rows and ``block`` rows of what is streamed; operands lie in no shared memory."""
    of_queries: Tiles = dict.fromkeys(_WIDTHS, (Tile(64, block, 4, 1),))
    of_keys: Tiles = dict.fromkeys(_WIDTHS, (Tile(block, 64, 4, 1),))
    return Tables(
        of_queries,
        of_queries,
        of_queries,
        of_queries,
        of_keys,
        of_keys,
        of_queries,
        widest_pair=widest_pair,
        own_columns=own_columns,
        own_columns_general=own_columns,
        own_columns_backward=own_columns,
        own_columns_backward_general=own_columns,
    )


#: By the bytes of a sum.
CUDA_CORES = {4: _on_cuda_cores(32, 128, 64), 8: _on_cuda_cores(16, 64, 32)}
