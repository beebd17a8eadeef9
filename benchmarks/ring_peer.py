"""The schedule of another library, run with the kernels of this one, for comparison.

ring-flash-attention (github.com/zhuzilin/ring-flash-attention, `zigzag_ring_flash_attn.py` and
`ring_flash_attn.py`) passes keys and values from neighbour to neighbour. Each step is a one-GPU
call with results in the dtype of the inputs. A separate pass merges them in float32, and float32
gradients of keys follow the keys around the ring. cuflash sends keys directly from their owner and
merges in the kernel.

Arrays are (heads, rows, features) with an even number of rows, in the zigzag layout.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np

import cuflash
from cuflash._arrays import array_module
from cuflash.distributed._communicator import Communicator, Compute, Exchange, Wait, drive

Array = Any
Schedule = Generator[Any, Any, Any]
METHOD = "ring_flash_attention"


def attention(
    comm: Communicator, q: list[Array], k: list[Array], v: list[Array], *, causal: bool
) -> list[tuple[Array, Array]]:
    """Out and lse of each rank of this process; arguments are lists with an array per rank."""
    own = zip(comm.ranks, q, k, v, strict=True)
    found = drive(comm, {r: _forward(r, comm.size, *qkv, causal=causal) for r, *qkv in own})
    return [found[rank] for rank in comm.ranks]


def attention_backward(
    comm: Communicator,
    dout: list[Array],
    q: list[Array],
    k: list[Array],
    v: list[Array],
    out: list[Array],
    lse: list[Array],
    *,
    causal: bool,
) -> list[tuple[Array, Array, Array]]:
    """dq, dk and dv of each rank of this process."""
    own = zip(comm.ranks, dout, q, k, v, out, lse, strict=True)
    found = drive(comm, {r: _backward(r, comm.size, *rest, causal=causal) for r, *rest in own})
    return [found[rank] for rank in comm.ranks]


def _part(rank: int, step: int, rows: int, causal: bool) -> tuple[slice, slice, bool]:
    """Which queries see which keys in a step, and whether with a causal mask."""
    half = rows // 2
    if not causal or step == 0:
        return slice(0, rows), slice(0, rows), causal
    if step <= rank:
        return slice(0, rows), slice(0, half), False
    return slice(half, rows), slice(0, rows), False


def _round(rank: int, size: int, arrays: list[Array]) -> tuple[Exchange, list[Array]]:
    """Send arrays to the next rank; return the exchange and the arrays to receive."""
    coming = [array_module(a).empty(a.shape, a.dtype) for a in arrays]
    sends = tuple(((rank + 1) % size, a) for a in arrays)
    return Exchange(sends, tuple(((rank - 1) % size, a) for a in coming)), coming


def _forward(rank: int, size: int, q: Array, k: Array, v: Array, *, causal: bool) -> Schedule:
    xp, rows = array_module(q), q.shape[-2]
    options = {c: cuflash.Options(causal=c, enable_gqa=True) for c in (False, True)}
    out = xp.zeros(q.shape, np.float32)
    lse = xp.full(q.shape[:-1], -np.inf, np.float32)

    def compute(step: int, k: Array, v: Array) -> None:
        own, keys, bounded = _part(rank, step, rows, causal)
        part, its_lse = cuflash.attention(
            q[:, own], k[:, keys], v[:, keys], options=options[bounded], return_lse=True
        )
        if step == 0:
            out[...], lse[...] = part, its_lse
            return
        share = 1 / (1 + xp.exp(lse[:, own] - its_lse))  # a sigmoid, as in the peer's code
        out[:, own] -= share[..., None] * (out[:, own] - part.astype(np.float32))
        lse[:, own] = xp.logaddexp(lse[:, own], its_lse)

    for step in range(size):
        ticket = None
        if step + 1 < size:
            exchange, coming = _round(rank, size, [k, v])
            ticket = yield exchange
        yield Compute(partial(compute, step, k, v))
        if ticket is not None:
            yield Wait(ticket)
            k, v = coming
    return out.astype(q.dtype), lse


def _backward(
    rank: int,
    size: int,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool,
) -> Schedule:
    rows = q.shape[-2]
    options = {c: cuflash.Options(causal=c, enable_gqa=True) for c in (False, True)}

    def compute(step: int, k: Array, v: Array) -> tuple[Any, slice, slice]:
        own, keys, bounded = _part(rank, step, rows, causal)
        found = cuflash.attention_backward(
            dout[:, own], q[:, own], k[:, keys], v[:, keys], out[:, own], lse[:, own],
            options=options[bounded],
        )  # fmt: skip
        return found, own, keys

    dq: Array = None
    dkv: list[Array] = []
    going: Any = None
    for step in range(size):
        ticket = None
        if step + 1 < size:
            exchange, coming = _round(rank, size, [k, v])
            ticket = yield exchange
        found, own, keys = yield Compute(partial(compute, step, k, v))
        if step == 0:
            dq, *dkv = (a.astype(np.float32) for a in (found.dq, found.dk, found.dv))
        else:
            dq[:, own] += found.dq.astype(np.float32)
            yield Wait(going[0])
            dkv = going[1]
            for total, part in zip(dkv, (found.dk, found.dv), strict=True):
                total[:, keys] += part.astype(np.float32)
        if ticket is not None:
            yield Wait(ticket)
            k, v = coming
        exchange, home = _round(rank, size, dkv)
        going = (yield exchange), home
    yield Wait(going[0])
    return tuple(a.astype(q.dtype) for a in (dq, *going[1]))
