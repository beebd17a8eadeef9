"""How does each rank collect all keys, one stage (some of the heads) at a time?

Keys and values of the next stage arrive while the current stage is computed, so that only a
fraction of the transfer is exposed and only a fraction of the memory is taken. A row is computed in
one pass over all keys, as on one GPU. In the gradient each rank computes dk and dv of all keys in
float32. They are sent to the ranks that hold the keys and are summed there in order of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cuflash._api.arguments import QKV
from cuflash._arrays import Array
from cuflash._launch.one_pass import write_sum
from cuflash._results import Saved
from cuflash.distributed._blocks import Block, blocks_of
from cuflash.distributed._communicator import Compute, Schedule, Wait
from cuflash.distributed._layout import in_a_row
from cuflash.distributed._parts import Parts, Stage, stages_of
from cuflash.distributed._share import (
    KV,
    Group,
    OptionGradients,
    Share,
    begun,
    rows_back,
)
from cuflash.distributed._sums import Rows, Summed

STAGES = 4  # at most


class _Gathered:
    """Keys and values of all ranks, stage by stage; the next stage is already on its way."""

    def __init__(self, share: Share) -> None:
        self._share = share
        bounds = share.parts(share.heads).bounds
        anywhere = bounds.alone and bounds.left is None and bounds.right is None
        # Where positions have no meaning, keys are ordered by rank: each rank's are one piece.
        keys = in_a_row(share.keys) if anywhere else share.keys
        self.group = Group(share.rank, range(share.size), keys)
        self.stages = stages_of(share.heads, share.q, share.k, share.v, most=STAGES)
        self.kv: tuple[Array, Array]  # k and v of the last stage that was taken, canonical
        self._coming: Any = None

    def take(self, number: int) -> Schedule:
        """Wait until ``kv`` holds a stage, then begin to collect the next stage."""
        ticket, (k, v) = self._coming or (yield from self._begin(0))
        self.kv, self._coming = (rows_back(k), rows_back(v)), None
        yield Wait(ticket)
        if number + 1 < len(self.stages):
            self._coming = yield from self._begin(number + 1)

    def _begin(self, number: int) -> Schedule:
        stage, share = self.stages[number], self._share
        kv = (share.xp.moveaxis(stage.of_kv(a), -2, 0) for a in (share.k, share.v))
        return (yield from begun([self.group.spread(rows) for rows in kv]))

    def blocks(self, parts: Parts) -> tuple[Block, ...]:
        """The blocks of this rank's queries against all keys."""
        queries, has_sink = self._share.queries[self._share.rank], "sink" in parts.options.arrays
        return blocks_of(queries, self.group.holder, parts.bounds, sink=has_sink)


def forward(share: Share) -> Schedule:
    """Return ``out`` and lse of this rank's rows, canonical, in the dtypes of results."""
    xp, problem, gathered = share.xp, share.problem, _Gathered(share)
    shape = (*problem.batch_shape, share.q.shape[-2])
    out = xp.empty((*shape, problem.head_dim_v), problem.dtype)
    lse, written = xp.empty(shape, problem.lse_dtype), Rows(shape[-1])

    def compute(stage: Stage, parts: Parts, block: Block) -> None:
        written.add(block.rows)
        rows = stage.of_q(out)[..., block.rows, :], stage.of_lse(lse)[..., block.rows]
        parts.forward(block, (stage.of_q(share.q), *gathered.kv), *rows)

    for number, stage in enumerate(gathered.stages):
        yield from gathered.take(number)
        parts = share.parts(stage.heads)
        for block in gathered.blocks(parts):
            yield Compute(partial(compute, stage, parts, block), parts.scores(block))
    for unseen in written.runs(present=False):
        out[..., unseen, :] = 0
        lse[..., unseen] = -np.inf
    return out, lse


def backward(share: Share, saved: Saved, wanted: tuple[str, ...]) -> Schedule:
    """Return gradients by name: of this rank's rows (canonical), and of options."""
    xp, dtype, gathered = share.xp, share.sums_dtype, _Gathered(share)
    of_options = OptionGradients(share, wanted)
    of_qkv = ((n, getattr(share, n)) for n in QKV if n in wanted)
    result = {n: xp.empty(a.shape, a.dtype) for n, a in of_qkv}

    def compute(stage: Stage, parts: Parts, block: Block, onto: dict[str, Summed]) -> None:
        qkv, of_heads = (stage.of_q(share.q), *gathered.kv), stage.of_saved(saved)
        of_options.add(parts, block, parts.backward(block, qkv, of_heads, wanted, onto))

    def send_home(stage: Stage, dkv: dict[str, Array]) -> Schedule:
        """Begin to send dk and dv to the ranks that hold the keys. Returns the rest of the work."""
        rows, ranks, found = share.k.shape[-2], gathered.group.ranks, []
        for array in dkv.values():
            came = {r: xp.empty((rows, *array.shape[1:]), dtype) for r in ranks}
            found.append(gathered.group.give_back(array, came))
        ticket, brought = yield from begun(found)
        return take_home(stage, ticket, dict(zip(dkv, brought, strict=True)))

    def take_home(stage: Stage, ticket: Any, brought: dict[str, dict[int, Array]]) -> Schedule:
        yield Wait(ticket)
        for name, came in brought.items():
            total, *others = (came[rank] for rank in range(share.size))
            for part in others[:-1]:
                write_sum(total, total, part)
            own = stage.of_kv(result[name])  # the last sum is rounded and transposed
            write_sum(own, *map(rows_back, (total, *others[-1:])))

    under_way: Any = ()
    for number, stage in enumerate(gathered.stages):
        yield from gathered.take(number)
        parts = share.parts(stage.heads)
        onto, dkv = {}, {}
        for name, array in zip(KV, gathered.kv, strict=True):
            if name in wanted:
                dkv[name] = xp.empty(xp.moveaxis(array, -2, 0).shape, dtype)
                onto[name] = Summed(rows_back(dkv[name]))
        if "q" in wanted:
            dq = xp.empty(stage.of_q(share.q).shape, dtype)
            onto["q"] = Summed(dq)
        for block in gathered.blocks(parts):
            yield Compute(partial(compute, stage, parts, block, onto), parts.scores(block))
        for each in onto.values():
            each.finish()
        if "q" in wanted:
            write_sum(stage.of_q(result["q"]), dq)
        yield from under_way
        under_way = (yield from send_home(stage, dkv)) if dkv else ()
        del onto, dkv
    yield from under_way
    return result | (yield from of_options.finished())
