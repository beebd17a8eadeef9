"""How many bytes does each method move, how much memory does it take, and which one is chosen?

Bytes are counted over all ranks that send. With a causal or window bound the ring sends
fewer gradients. The memory of a rank is the peak beside its inputs: results, buffers, and scratch
memory of a kernel. It does not grow with the number of ranks, except for a method that collects
the keys of all ranks. docs/distributed.md has the formulas in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._host.scores import arithmetic
from cuflash._problem.philox import BLOCK
from cuflash._problem.problem import Problem
from cuflash.distributed._all_gather import STAGES
from cuflash.distributed._layout import Chunks, of_groups

_MEMORY = 80 << 30  # bytes of the GPU for which the table gives the longest sequence
#: Queries of a rank, times query heads for each key head, from which products take longer than keys
#: travel within a host: about 600 TFLOP/s over 300 GB/s, under a causal mask.
_HIDING_ROWS = 4096
METHODS = ("auto", "all_gather", "ring", "ulysses", "usp")


@dataclass(frozen=True)
class Extents:
    """What the bytes and the possible groups of a whole call depend on."""

    seqlen_q: int
    seqlen_k: int
    q: tuple[int, ...]  # batch axes and features; so are k, v and out
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    dtype: np.dtype
    by_pair: tuple[str, ...] = ()  # options that hold a value for each query and key
    kernels: bool = True  # False: the CPU path, which takes no scratch memory
    #: With dropout on GPUs: each rank's queries, and its keys.
    drawn: tuple[tuple[Chunks, ...], tuple[Chunks, ...]] | None = None

    @classmethod
    def of(cls, problem: Problem, seqlen_q: int, *qkv: tuple[int, ...]) -> Extents:
        """From a problem with local queries and all keys; ``qkv`` are canonical shapes."""
        q, k, v = ((*shape[:-2], shape[-1]) for shape in qkv)
        pairwise = tuple(n for n in ("bias", "mask") if getattr(problem, n) is not None)
        out = (*problem.batch_shape, problem.head_dim_v)
        return cls(seqlen_q, problem.seqlen_k, q, k, v, out, problem.dtype, pairwise)

    @property
    def heads(self) -> int:
        """Number of query heads; 1 without such an axis."""
        return self.out[-2] if len(self.out) > 1 else 1

    @property
    def heads_kv(self) -> int:
        """Number of key/value heads; 1 if all query heads share them."""
        return max(a[-2] if len(a) > 1 else 1 for a in (self.k, self.v))

    def refusal(self, across: int) -> str:
        """What groups of ``across`` ranks (0: all keys are gathered) do not support; "" if nothing.

        Groups of several ranks exchange heads.
        """
        if self.drawn is not None:
            queries, keys = self.drawn
            parts = of_groups(queries, across or 1) + of_groups(keys, across or len(keys))
            if any(chunk.start % BLOCK for chunks in parts for chunk in chunks):
                return f"dropout on GPUs in parts that begin at no multiple of {BLOCK} rows"
        if across < 2:
            return ""
        heads, heads_kv = self.heads, self.heads_kv
        if self.by_pair:
            return f"{' and '.join(self.by_pair)} of local rows, since heads need all rows"
        if len(self.q) < 2 or self.q[-2] != heads or heads % across:
            return f"{heads} query heads, which {across} ranks cannot share evenly"
        same = all((a[-2] if len(a) > 1 else 1) == heads_kv for a in (self.k, self.v))
        if not same or (heads_kv % across and across % heads_kv):
            return f"{heads_kv} key/value heads, which {across} ranks cannot share evenly"
        return ""


class Cost(NamedTuple):
    """Bytes of a forward or of a gradient."""

    sent: int = 0  # by all ranks
    taken: int = 0  # by a rank, beside its inputs
    held: int = 0  # by the inputs of a rank


_NOTHING = Cost()


@dataclass(frozen=True)
class Candidate:
    """One way to run a call, or the reason why it is impossible."""

    method: str
    across: int  # number of ranks that exchange heads; 0 for all_gather
    refusal: str = ""
    forward: Cost = _NOTHING
    backward: Cost = _NOTHING

    @property
    def sent(self) -> int:
        """Bytes that all ranks send in a forward and its gradient."""
        return self.forward.sent + self.backward.sent

    @property
    def taken(self) -> int:
        """Bytes that a rank takes beside inputs, in the forward or in its gradient."""
        return max(self.forward.taken, self.backward.taken)


class _Rank(NamedTuple):
    """Elements of a rank's arrays; bytes of an element (e), of one of sums (f), of a workspace."""

    q: float
    kv: float
    out: float
    lse: float
    e: int
    f: int
    workspace: float  # of a gradient of all queries of the rank

    @classmethod
    def of(cls, extents: Extents, size: int) -> _Rank:
        """The mean of all ranks."""
        m, n = extents.seqlen_q / size, extents.seqlen_k / size
        q, k, v, out = (math.prod(a) for a in (extents.q, extents.k, extents.v, extents.out))
        rows, e = m * math.prod(extents.out[:-1]), extents.dtype.itemsize
        f = arithmetic(extents.dtype).itemsize
        # Hopper's kernels for 16 bits add dq in float32; all keep lse and delta of each row. Causal
        # calls of at most some thousand rows take up to twice as much.
        workspace = (m * q * (e == 2) + 2 * rows) * f * extents.kernels
        return cls(m * q, n * (k + v), m * out, rows, e, f, workspace)

    def costs(self, sent: tuple[float, float], taken: tuple[float, float]) -> tuple[Cost, Cost]:
        """Costs of the forward and of the gradient."""
        inputs = (self.q + self.kv) * self.e
        held = inputs, inputs + 2 * self.out * self.e + self.lse * self.f
        forward, backward = zip(sent, taken, held, strict=True)
        return Cost(*map(round, forward)), Cost(*map(round, backward))


def _all_gather(extents: Extents, size: int) -> Candidate:
    refusal = extents.refusal(0)
    if refusal:
        return Candidate("all_gather", 0, refusal)
    own = _Rank.of(extents, size)
    e, f = own.e, own.f
    stages = max(n for n in range(1, STAGES + 1) if extents.heads_kv % n == 0)
    kv, slots = size * own.kv / stages, min(2, stages)
    moved, back = (size * (size - 1) * own.kv * each for each in (e, f))
    # Forward: keys and values of all ranks, of two stages. The gradient adds dk and dv, one part of
    # them, those being sent and those received, and dq of two stages.
    forward = slots * kv * e + own.out * e + own.lse * f
    backward = kv * (slots * e + 4 * f) + slots * own.q / stages * f + own.workspace / stages
    backward += (own.q + own.kv) * e
    return Candidate("all_gather", 0, "", *own.costs((moved, moved + back), (forward, backward)))


def _two_level(method: str, extents: Extents, size: int, across: int) -> Candidate:
    refusal = extents.refusal(across)
    if refusal:
        return Candidate(method, across, refusal)
    own, ring = _Rank.of(extents, size), size // across
    q, o, e, f = own.q, own.out, own.e, own.f
    part = 1 if extents.heads_kv <= 1 else max(1 / across, 1 / extents.heads_kv)
    kv, rows = across * own.kv * part, own.lse  # all rows of the group, own heads
    others, exchanges = (across - 1) / across, across > 1
    to_heads = others * (q + kv) * e
    around, home = (ring - 1) * kv * e, (ring - 1) * kv * f
    sent = to_heads + around + others * (o * e + rows * f)
    sent_back = to_heads + around + home + others * (2 * o * e + rows * f + q * e + kv * f)
    # Memory while heads are exchanged, while blocks are computed, and while results are sent back.
    # A ring holds the sum so far and one part, and keys in use and keys that are being received.
    slots = min(ring - 1, 2) * kv * e
    collected = (q + kv) * e * exchanges
    sums = slots + ((e < f) * o * f + (o + rows) * f if ring > 1 else 0)
    results = o * e + rows * f
    forward = (
        (2 - 1 / across) * collected, collected + sums + results, (1 + 3 * exchanges) * results
    )  # fmt: skip
    # The gradient holds dq from own keys, dq from other keys and one part; and dk and dv from own
    # queries, one part, those being sent, those received and their sum.
    collected += (2 * o * e + rows * f) * exchanges
    sums = slots + min(ring, 3) * q * f + (1 if ring == 1 else min(ring + 1, 5)) * kv * f
    backward = (
        (2 - 1 / across) * collected,
        collected + sums + own.workspace,
        (4 * q * e + 2 * kv * f + own.kv * f) * exchanges,
    )
    taken = max(forward), max(backward)
    return Candidate(method, across, "", *own.costs((size * sent, size * sent_back), taken))


def candidates(extents: Extents, size: int, per_host: int | None = None) -> list[Candidate]:
    """Every method. ``per_host`` neighbouring ranks share a host; None if all ranks do."""
    divisors = [u for u in range(2, size) if size % u == 0]
    fitting = [u for u in divisors if not extents.refusal(u)]
    inner = per_host if per_host in divisors else max(fitting or divisors, default=0)
    found = [_all_gather(extents, size), _two_level("ulysses", extents, size, size)]
    found.append(_two_level("ring", extents, size, 1))
    if inner:
        found.append(_two_level("usp", extents, size, inner))
    else:
        text = f"{size} ranks, which cannot form equal groups"
        found.append(Candidate("usp", 0, text))
    return found


def chosen(
    method: str, extents: Extents, size: int, memory: int | None, per_host: int | None = None
) -> tuple[Candidate, str]:
    """The way to run a call, and the reason as text.

    On one host, of the methods whose forward and gradient fit into ``memory`` beside their inputs:
    the ring, where keys travel while queries are multiplied, else the one that sends the fewest
    bytes in both. On several hosts: usp, where heads are exchanged within a host, else ring.
    """
    found = candidates(extents, size, per_host)
    able = [c for c in found if not c.refusal]
    asked = next((c for c in found if c.method == method), None if able else found[0])
    if asked and asked.refusal:
        use = " or ".join([*(repr(c.method) for c in able), "'auto'"])
        if not able:  # all_gather refuses nothing but dropout
            use = "at least 32 rows on each rank, or NumPy arrays"
        raise NotImplementedError(f"method: {method!r} does not support {asked.refusal}; use {use}")
    if asked:
        return asked, "as asked for"
    within = [c for c in able if c.method == "usp" and c.across == per_host]
    own = within or [c for c in able if c.method == "ring"]
    if per_host is not None and own:
        text = "several hosts: heads are exchanged within a host, or keys go round all ranks"
        return own[0], text
    able = [c for c in able if c.method != "usp"] or able
    enough = [c for c in able if memory is None or c.taken <= memory]
    if not enough:
        return min(able, key=lambda c: c.taken), "no method fits: it takes least memory"
    hides = extents.seqlen_q * extents.heads >= _HIDING_ROWS * extents.heads_kv
    ring = [c for c in enough if c.method == "ring"]
    if ring and hides:
        return ring[0], "keys travel while queries are multiplied"
    return (
        min(enough, key=lambda c: (c.sent, c.method != "ring")),
        "the fewest bytes of the methods that fit into memory",
    )


def checked_method(method: object) -> str:
    """A checked name of a method, or "auto"."""
    expected = ", ".join(map(repr, METHODS))
    if not isinstance(method, str):
        raise wrong_type("method", shown(method), expected)
    if method not in METHODS:
        raise wrong_value("method", shown(method), expected)
    return method


def table(found: Sequence[Candidate], size: int, tokens: int) -> list[str]:
    """A line for each method: MiB that a rank sends and takes, longest sequence that fits."""
    fits = f"tokens in {_MEMORY >> 30} GiB a rank"
    heads = "sent by a rank, MiB", "taken beside inputs, MiB", fits
    lines = [" " * 12 + "".join(f"{head:>26}" for head in heads)]
    lines.append(f"{'method':12}" + f"{'forward':>14}{'gradient':>12}" * 3)
    for c in found:
        if c.refusal:
            lines.append(f"{c.method:12}  does not support {c.refusal}")
            continue
        costs = c.forward, c.backward
        columns = (
            [f"{cost.sent / size / 2**20:,.1f}" for cost in costs],
            [f"{cost.taken / 2**20:,.1f}" for cost in costs],
            [f"{tokens * _MEMORY // max(cost.taken + cost.held, 1):,}" for cost in costs],
        )
        lines.append(f"{c.method:12}" + "".join(f"{a:>14}{b:>12}" for a, b in columns))
    return lines
