"""How does each rank see all keys, collected a part of the heads at a time?

Keys and values of the next heads arrive while those of the last are used, so that a fraction of
the transfer is exposed and a fraction of the memory is taken. A row is computed at once, as on one
GPU. In the gradient each rank has dk and dv of all keys in float32, which go to the keys' ranks and
are summed there in order of ranks.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, rounded
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, blocks_of
from cuflash.distributed._communicator import Compute, Schedule, Wait
from cuflash.distributed._layout import Chunks, joined
from cuflash.distributed._share import (
    KV,
    OptionGradients,
    Share,
    gathering,
    returning,
    rows_back,
    rows_first,
)
from cuflash.distributed._stages import Stage, stages_of
from cuflash.distributed._sums import Summed

STAGES = 4  # at most


def _room(xp: ModuleType, shape: tuple[int, ...], dtype: np.dtype[Any], _: int) -> Array:
    """Memory for what any rank returns."""
    return xp.empty(shape, dtype)


def _begin(share: Share, stage: Stage, everything: Chunks) -> Schedule:
    """Begin to collect a stage's keys and values."""
    own = tuple(rows_first(stage.of_kv(a)) for a in (share.k, share.v))
    ranks = range(share.size)
    return (yield from gathering(share.rank, ranks, share.keys, everything, lambda _: own))


def forward(share: Share) -> Schedule:
    """``out`` and lse of own rows, canonical, in the dtypes of results."""
    xp, problem = share.xp, share.problem
    everything = joined(tuple(c for own in share.keys for c in own))
    queries = share.queries[share.rank]
    shape = (*problem.batch_shape, share.q.shape[-2])
    out = xp.zeros((*shape, problem.head_dim_v), problem.dtype)
    lse = xp.full(shape, -np.inf, problem.lse_dtype)
    stages = stages_of(share.all_heads(), share.q, share.k, share.v, most=STAGES)

    def compute(stage: Stage, block: Block, k: Array, v: Array) -> None:
        target = stage.of_q(out)[..., block.rows, :]
        of_rows = stage.of_q(lse, 0)[..., block.rows]
        q, parts = stage.of_q(share.q), share.parts(stage.heads)
        parts.forward(block, q, rows_back(k), rows_back(v), target, of_rows)

    ticket, kv = yield from _begin(share, stages[0], everything)
    for number, stage in enumerate(stages):
        if ticket is not None:
            yield Wait(ticket)
        here = kv
        if number + 1 < len(stages):
            ticket, kv = yield from _begin(share, stages[number + 1], everything)
        bounds, has_sink = share.parts(stage.heads).bounds, "sink" in share.options.arrays
        for block in blocks_of(queries, everything, bounds, sink=has_sink):
            yield Compute(partial(compute, stage, block, *here), block.pairs)
    return out, lse


def backward(share: Share, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Gradients of own rows, canonical, and of options, by name."""
    xp = share.xp
    everything = joined(tuple(c for own in share.keys for c in own))
    queries = share.queries[share.rank]
    of_options = OptionGradients(share, wanted)
    dq = xp.empty(share.q.shape, share.sums_dtype)
    names = [n for n in KV if n in wanted]
    sums = {n: xp.zeros(getattr(share, n).shape, share.sums_dtype) for n in names}
    stages = stages_of(share.all_heads(), share.q, share.k, share.v, most=STAGES)

    def compute(stage: Stage, block: Block, k: Array, v: Array, onto: dict[str, Summed]) -> None:
        parts, of_heads = share.parts(stage.heads), stage.of_saved(saved)
        qkv = stage.of_q(share.q), rows_back(k), rows_back(v)
        of_options.add(parts, block, parts.backward(block, *qkv, of_heads, wanted, onto))

    def taken(stage: Stage, returned: list[tuple[str, Any, dict[int, Array]]]) -> Schedule:
        for name, back, came in returned:
            if back is not None:
                yield Wait(back)
            target = stage.of_kv(sums[name])
            for rank in range(share.size):
                target += rows_back(came[rank])

    ticket, kv = yield from _begin(share, stages[0], everything)
    rows, before = share.k.shape[-2], None
    for number, stage in enumerate(stages):
        if ticket is not None:
            yield Wait(ticket)
        here = dict(zip(KV, kv, strict=True))
        if number + 1 < len(stages):
            ticket, kv = yield from _begin(share, stages[number + 1], everything)
        dkv = {n: xp.empty(here[n].shape, share.sums_dtype) for n in names}
        onto = {n: Summed(rows_back(a)) for n, a in dkv.items()}
        if "q" in wanted:
            onto["q"] = Summed(stage.of_q(dq))
        bounds, has_sink = share.parts(stage.heads).bounds, "sink" in share.options.arrays
        for block in blocks_of(queries, everything, bounds, sink=has_sink):
            work = partial(compute, stage, block, here["k"], here["v"], onto)
            yield Compute(work, block.pairs)
        for each in onto.values():
            each.finish()
        if before is not None:
            yield from taken(*before)
        returned = []
        for name, array in dkv.items():
            shape, dtype = (rows, *array.shape[1:]), array.dtype
            back, came = yield from returning(
                share.rank,
                range(share.size),
                share.keys,
                everything,
                array,
                partial(_room, xp, shape, dtype),
            )
            returned.append((name, back, came))
        before = stage, returned
    if before is not None:
        yield from taken(*before)
    result = {"q": rounded(dq, share.q.dtype)} if "q" in wanted else {}
    result |= {n: rounded(a, getattr(share, n).dtype) for n, a in sums.items()}
    return result | (yield from of_options.finished())
