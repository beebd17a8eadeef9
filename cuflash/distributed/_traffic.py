"""Which method moves how many bytes, takes how much memory, and which is taken?

Bytes are those that all ranks together send, memory is what a rank takes beside inputs and results.
With n rows of W n on a rank, H query and K key/value heads of d features, e bytes an element and f
in float32 sums, a rank sends

    all_gather  (W - 1) 2 n K d e                               gradient  + (W - 1) 2 n K d f
    ring        (W - 1) 2 n K d e                               gradient  + (W - 1) 2 n K d f
    ulysses     (W - 1) / W n d (2 H + 2 K) e, and lse          gradient  about twice as much
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._host.scores import arithmetic
from cuflash._problem.problem import Problem
from cuflash.distributed._all_gather import STAGES

METHODS = ("auto", "all_gather", "ring", "ulysses", "usp")


@dataclass(frozen=True)
class Extents:
    """Of a whole call: what bytes and legal groups depend on."""

    seqlen_q: int
    seqlen_k: int
    q: tuple[int, ...]  # batch axes of each, and features
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    dtype: np.dtype
    by_pair: tuple[str, ...] = ()  # options that hold a value for each query and key

    @classmethod
    def of(cls, problem: Problem, seqlen_q: int, *qkv: tuple[int, ...]) -> Extents:
        """Of a problem of local queries and all keys; ``qkv`` are canonical shapes."""
        q, k, v = ((*shape[:-2], shape[-1]) for shape in qkv)
        pairwise = tuple(n for n in ("bias", "mask") if getattr(problem, n) is not None)
        out = (*problem.batch_shape, problem.head_dim_v)
        return cls(seqlen_q, problem.seqlen_k, q, k, v, out, problem.dtype, pairwise)

    @property
    def heads(self) -> int:
        """Query heads; 1 without an axis."""
        return self.out[-2] if len(self.out) > 1 else 1

    @property
    def heads_kv(self) -> int:
        """Key/value heads that can be told apart; 1 where all queries share them."""
        return max(a[-2] if len(a) > 1 else 1 for a in (self.k, self.v))

    def refusal(self, across: int) -> str:
        """Why heads cannot be exchanged in groups of so many ranks; "" if they can."""
        if across == 1:
            return ""
        heads, heads_kv = self.heads, self.heads_kv
        if self.by_pair:
            return f"{' and '.join(self.by_pair)} of the local rows, but heads of all rows"
        if len(self.q) < 2 or self.q[-2] != heads or heads % across:
            return f"{heads} query heads, which {across} ranks cannot share evenly"
        same = all((a[-2] if len(a) > 1 else 1) == heads_kv for a in (self.k, self.v))
        if not same or (heads_kv % across and across % heads_kv):
            return f"{heads_kv} key/value heads, which {across} ranks cannot share evenly"
        return ""


@dataclass(frozen=True)
class Candidate:
    """One way to run a call, or why it cannot be."""

    method: str
    across: int  # ranks that exchange heads; 0 for all_gather
    refusal: str
    forward_bytes: int
    backward_bytes: int
    forward_memory: int
    backward_memory: int


def _all_gather(extents: Extents, size: int) -> Candidate:
    e, f = extents.dtype.itemsize, arithmetic(extents.dtype).itemsize
    elements = extents.seqlen_k * (math.prod(extents.k) + math.prod(extents.v))
    parts = max(n for n in range(1, STAGES + 1) if extents.heads_kv % n == 0)
    held = min(2, parts) / parts
    moved, back = ((size - 1) * elements * each for each in (e, f))
    local_dq = extents.seqlen_q * math.prod(extents.q) * f // size
    return Candidate(
        "all_gather", 0, "", moved, moved + back, round(held * elements * e),
        round(held * elements * (e + 2 * f)) + local_dq,
    )  # fmt: skip


def _two_level(method: str, extents: Extents, size: int, across: int) -> Candidate:
    refusal = extents.refusal(across)
    if refusal:
        return Candidate(method, across, refusal, 0, 0, 0, 0)
    e, f = extents.dtype.itemsize, arithmetic(extents.dtype).itemsize
    m, n, ring = extents.seqlen_q, extents.seqlen_k, size // across
    q, out = m * math.prod(extents.q), m * math.prod(extents.out)
    rows = m * math.prod(extents.out[:-1])
    part = 1 if extents.heads_kv <= 1 else max(1 / across, 1 / extents.heads_kv)
    kv = n * (math.prod(extents.k) + math.prod(extents.v)) * part  # of own heads
    others = (across - 1) / across
    to_heads = others * q * e + (across - 1) * kv * e
    around = (ring - 1) * across * kv * e
    home = (ring - 1) * across * kv * f
    forward = to_heads + around + others * (out * e + rows * f)
    backward = to_heads + others * (2 * out * e + rows * f) + around + home
    backward += others * q * e + (across - 1) * kv * f
    slots = (2 if ring > 1 else 1) * kv * across / size
    taken = (out + rows) * f / size + slots * e
    exchanged = (q + out) * e / size if across > 1 else 0
    # Sums of dq and a part of it; of dk and dv own ones, a part, what is under way and what came.
    sums_of_keys = {1: 1, 2: 3}.get(ring, 5) * kv * across / size
    more = ((2 if ring > 1 else 1) * q / size + sums_of_keys) * f
    return Candidate(
        method, across, "", round(forward), round(backward), round(taken + exchanged),
        round(taken + 2 * exchanged + more - (out + rows) * f / size),
    )  # fmt: skip


def candidates(extents: Extents, size: int, per_host: int | None = None) -> list[Candidate]:
    """Every method; ``per_host`` ranks are neighbours on one host, None if all are."""
    divisors = [u for u in range(2, size) if size % u == 0]
    fitting = [u for u in divisors if not extents.refusal(u)]
    inner = per_host if per_host in divisors else max(fitting or divisors, default=0)
    found = [_all_gather(extents, size), _two_level("ulysses", extents, size, size)]
    found.append(_two_level("ring", extents, size, 1))
    if inner:
        found.append(_two_level("usp", extents, size, inner))
    else:
        text = f"{size} ranks, which are no groups of groups"
        found.append(Candidate("usp", 0, text, 0, 0, 0, 0))
    return found


def chosen(
    method: str, extents: Extents, size: int, memory: int | None, per_host: int | None = None
) -> tuple[Candidate, str]:
    """The way to run a call, and why in words.

    On one host the fewest bytes of forward and gradient whose memory there is; of two that are
    alike the ring, whose calls are few and large, before all others. On several hosts usp, else
    ring.
    """
    found = candidates(extents, size, per_host)
    able = [c for c in found if not c.refusal]
    if method != "auto":
        asked = next(c for c in found if c.method == method)
        if asked.refusal:
            others = " and ".join(repr(c.method) for c in able)
            raise NotImplementedError(
                f"method: {method!r} cannot serve {asked.refusal}; {others} can, and 'auto' chooses"
            )
        return asked, "as asked for"
    if per_host is not None:
        for wanted in ("usp", "ring"):
            if own := [c for c in able if c.method == wanted]:
                return own[0], "several hosts: heads stay within a host, or else keys go round"
    able = [c for c in able if c.method != "usp"]
    enough = [c for c in able if memory is None or c.backward_memory <= memory]
    if not enough:
        return min(able, key=lambda c: c.backward_memory), "the least memory, though more is taken"
    return (
        min(enough, key=lambda c: (c.forward_bytes + c.backward_bytes, c.method != "ring")),
        "the fewest bytes of the methods that fit into memory",
    )


def checked_method(method: object) -> str:
    """The name of a method, or "auto"."""
    expected = ", ".join(map(repr, METHODS))
    if not isinstance(method, str):
        raise wrong_type("method", shown(method), expected)
    if method not in METHODS:
        raise wrong_value("method", shown(method), expected)
    return method


def table(found: Sequence[Candidate], size: int) -> list[str]:
    """Lines of MiB that a rank sends, and takes, by method."""
    lines = [f"{'':12}{'sent by a rank, MiB':>24}{'taken, MiB':>24}"]
    lines.append(f"{'method':12}{'forward':>12}{'gradient':>12}{'forward':>12}{'gradient':>12}")
    for c in found:
        if c.refusal:
            lines.append(f"{c.method:12}  cannot serve {c.refusal}")
            continue
        sent = (c.forward_bytes / size, c.backward_bytes / size)
        numbers = (*sent, c.forward_memory, c.backward_memory)
        lines.append(f"{c.method:12}" + "".join(f"{n / 2**20:12,.1f}" for n in numbers))
    return lines
