"""How does attention scale over GPUs? Weak and strong scaling, and the longest sequence.

    python benchmarks/scale_out.py --devices 0 1                  # one process drives both
    torchrun --nproc-per-node 2 benchmarks/scale_out.py           # a process for each
    python benchmarks/scale_out.py --simulate 2 --tokens 128      # no GPU: do all cells run?

Weak scaling: each GPU has ``--tokens`` tokens, and its speed is compared with a one-GPU call with
as many queries and keys, interleaved in one run. Strong scaling: one sequence of ``--total`` tokens
on one GPU and on all. Efficiency and speed-up are medians of rounds. The longest sequence is
doubled until memory or ``--longest-seconds`` ends it; its `pool_bytes` are the most that CuPy's
memory pool held on each GPU during the last call, with its inputs. The method
`ring_flash_attention` is the schedule of a peer (`ring_peer.py`). ``--split`` divides the time of
weak scaling into its parts (`rank_split.py`). `dead_rank.py` adds its figures to the same file.

A run takes at most ``--seconds``. Cells that are already in the file are not run again, so the same
command continues a run. Exit status 0: all cells are there; 3: run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from benchmarks import rank_split, ring_peer  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402
from cuflash import distributed  # noqa: E402

Array = Any
ROUNDS = 5
LEAST_MS = 100.0  # of a round of repeated calls: the start of a call is hidden by the call before
LONG = 2.0  # seconds; a longer call is timed once
HEAD_DIM = 128
HEADS = {"GQA 32/8": (32, 8), "MHA 32": (32, 32), "GQA 32/4": (32, 4)}
TOKENS = (8192, 2048, 4096, 16384)  # of each GPU; the first is the target's
TOTALS = (65536, 131072, 1048576)
METHODS = ("auto", "all_gather", "ring", "ulysses", "usp", ring_peer.METHOD)
AGAIN = 3


@dataclass(frozen=True)
class Cell:
    """One measurement: the kind of scaling, and the call."""

    kind: str  # weak, strong or longest
    heads: str
    causal: bool
    gradient: bool
    method: str
    tokens: int  # weak: of each GPU; strong: of all; longest: of the first try

    @property
    def name(self) -> str:
        """The cell's name in the file."""
        mask = "causal" if self.causal else "full"
        what = "gradient" if self.gradient else "forward"
        return f"{self.kind} {self.heads} {mask} {what} {self.method} {self.tokens}"


def cells(tokens: Sequence[int], totals: Sequence[int], methods: Sequence[str]) -> Iterator[Cell]:
    """Every cell; cells of the target come first."""
    both = (False, True)
    for rows, heads, causal in itertools.product(tokens, HEADS, (True, False)):
        for gradient, method in itertools.product(both, methods):
            yield Cell("weak", heads, causal, gradient, method, rows)
    for total, gradient, method in itertools.product(totals, both, methods):
        yield Cell("strong", "GQA 32/8", True, gradient, method, total)
    ours = [method for method in methods if method != ring_peer.METHOD]
    for heads, gradient, method in itertools.product(("GQA 32/8", "MHA 32"), both, ours):
        yield Cell("longest", heads, True, gradient, method, totals[0])


class Ranks:
    """The ranks of this process, one or all; arrays are in lists with one for each rank."""

    def __init__(self, comm: Any, xp: Any) -> None:
        self.comm, self.xp = comm, xp

    def each(self, make: Callable[[int], Any]) -> list[Any]:
        """Results of ``make``, called on the device of each rank."""
        found = []
        for rank in self.comm.ranks:
            with self.comm.on(rank):
                found.append(make(rank))
        return found

    def arrays(self, heads: int, rows: int, seed: int) -> list[Array]:
        """Random arrays (heads, rows, 128), one for each rank."""

        def make(rank: int) -> Array:
            if self.xp is np:
                rng = np.random.default_rng(seed + rank)
                return rng.standard_normal((heads, rows, HEAD_DIM), dtype=np.float32)
            rng = self.xp.random.default_rng(seed + rank)
            drawn = rng.standard_normal((heads, rows, HEAD_DIM), dtype=np.float32)
            return drawn.astype(ml_dtypes.bfloat16)

        return self.each(make)

    def given(self, arrays: list[Any]) -> Any:
        """The arrays in the form that functions with this communicator take."""
        return arrays if self.comm.in_lists else arrays[0]

    def listed(self, found: Any) -> list[Any]:
        """Their result as a list."""
        return found if self.comm.in_lists else [found]

    def synchronize(self) -> None:
        """Wait until every device of this process is done and every process has come here."""
        if self.xp is not np:
            self.each(lambda _: self.xp.cuda.get_current_stream().synchronize())
        self.comm.agree(dict.fromkeys(self.comm.ranks, b""))

    def empty_pools(self) -> None:
        """Give unused memory of CuPy's pool back, on each device."""
        if self.xp is not np:
            self.each(lambda _: self.xp.get_default_memory_pool().free_all_blocks())

    def pool_bytes(self) -> list[int]:
        """The most that CuPy's pool has held on each rank's device since it was emptied."""
        if self.xp is np:
            return []
        own = self.each(lambda _: self.xp.get_default_memory_pool().total_bytes())
        named = zip(self.comm.ranks, own, strict=True)
        return list(map(int, self.comm.agree({rank: str(n).encode() for rank, n in named})))

    def slowest(self, seconds: float) -> float:
        """The largest value over all processes."""
        told = self.comm.agree({rank: repr(seconds).encode() for rank in self.comm.ranks})
        return max(float(text) for text in told)

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """Seconds of one call, averaged over ``repeats`` calls in a row."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        if self.xp is not np:
            self.each(lambda _: self.xp.cuda.get_current_stream().synchronize())
        return self.slowest(time.perf_counter() - begin) / repeats

    def median(self, call: Callable[[], Any]) -> float:
        """Median seconds of one call, measured as in :meth:`compared`."""
        once = self.seconds(call, 1)
        repeats = 1 if self.xp is np else max(1, round(LEAST_MS * 1e-3 / once))
        return statistics.median(self.seconds(call, repeats) for _ in range(ROUNDS))

    def compared(self, ours: Callable[[], Any], one: Callable[[], Any]) -> tuple[float, float]:
        """Median seconds of both, interleaved."""
        for call in (ours, one):
            self.seconds(call, 1)  # the first call may compile
        once = [self.seconds(call, 1) for call in (ours, one)]
        if max(once) > LONG:
            return once[0], once[1]
        repeats = [1 if self.xp is np else max(1, round(LEAST_MS * 1e-3 / each)) for each in once]
        samples = [
            (self.seconds(ours, repeats[0]), self.seconds(one, repeats[1])) for _ in range(ROUNDS)
        ]
        first, second = zip(*samples, strict=True)
        return statistics.median(first), statistics.median(second)


def call_on_all(ranks: Ranks, cell: Cell, rows: int) -> Callable[[], Any]:
    """A call of attention, or its gradient, with ``rows`` tokens on each rank."""
    heads, heads_kv = HEADS[cell.heads]
    drawn = [ranks.arrays(n, rows, i) for i, n in enumerate((heads, heads_kv, heads_kv, heads))]
    if cell.method == ring_peer.METHOD:
        return call_of_peer(ranks, cell, *drawn)
    q, k, v, dout = map(ranks.given, drawn)
    options = cuflash.Options(causal=cell.causal, enable_gqa=True)
    how = {"comm": ranks.comm, "method": cell.method, "options": options}
    if not cell.gradient:
        return lambda: distributed.attention(q, k, v, **how)
    found = ranks.listed(distributed.attention(q, k, v, return_lse=True, **how))
    out, lse = (ranks.given([r[i] for r in found]) for i in range(2))
    return lambda: distributed.attention_backward(dout, q, k, v, out, lse, **how)


def call_of_peer(
    ranks: Ranks, cell: Cell, q: list[Array], k: list[Array], v: list[Array], dout: list[Array]
) -> Callable[[], Any]:
    """The same call with the schedule of ring-flash-attention."""
    how = {"causal": cell.causal}
    if not cell.gradient:
        return lambda: ring_peer.attention(ranks.comm, q, k, v, **how)
    found = zip(*ring_peer.attention(ranks.comm, q, k, v, **how), strict=True)
    out, lse = map(list, found)
    return lambda: ring_peer.attention_backward(ranks.comm, dout, q, k, v, out, lse, **how)


def call_on_one(ranks: Ranks, cell: Cell, rows: int, only_first: bool) -> Callable[[], Any]:
    """A one-GPU call with ``rows`` tokens, on each rank or on rank 0 alone."""
    heads, heads_kv = HEADS[cell.heads]
    options = cuflash.Options(causal=cell.causal, enable_gqa=True)

    def prepare(rank: int) -> Callable[[], Any]:
        if only_first and rank > 0:
            return lambda: None
        own = Ranks(distributed.simulated(1), ranks.xp)
        q, k, v, dout = (
            own.arrays(n, rows, seed)[0]
            for seed, n in enumerate((heads, heads_kv, heads_kv, heads))
        )
        if not cell.gradient:
            return lambda: cuflash.attention(q, k, v, options=options)
        out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
        return lambda: cuflash.attention_backward(dout, q, k, v, out, lse, options=options)

    calls = ranks.each(prepare)

    def run() -> None:
        for rank, call in zip(ranks.comm.ranks, calls, strict=True):
            with ranks.comm.on(rank):
                call()

    return run


def measured(ranks: Ranks, cell: Cell, longest_seconds: float, *, split: bool) -> dict[str, Any]:
    """Measure a cell: its efficiency, speed-up or longest sequence."""
    size = ranks.comm.size
    try:
        if cell.kind == "weak":
            call = call_on_all(ranks, cell, cell.tokens)
            one_call = call_on_one(ranks, cell, cell.tokens, only_first=False)
            ours, one = ranks.compared(call, one_call)
            # Each rank computes `size` times as many scores as the one-GPU call.
            found = {"ms": 1e3 * ours, "block_ms": 1e3 * one, "efficiency": size * one / ours}
            if split and cell.method != ring_peer.METHOD:
                found |= rank_split.split(ranks.comm, call, ranks.median, ranks.synchronize)
            return found
        if cell.kind == "strong":
            ours, one = ranks.compared(
                call_on_all(ranks, cell, cell.tokens // size),
                call_on_one(ranks, cell, cell.tokens, only_first=True),
            )
            return {"ms": 1e3 * ours, "one_ms": 1e3 * one, "speed_up": one / ours}
        return longest(ranks, cell, longest_seconds)
    except NotImplementedError as error:
        return {"refused": str(error)}
    except MemoryError as error:
        return {"refused": type(error).__name__}


def longest(ranks: Ranks, cell: Cell, most_seconds: float) -> dict[str, Any]:
    """Double the sequence until a call takes too long or memory ends."""
    total = cell.tokens
    found: dict[str, Any] = {}
    while True:
        call = None
        error = ""
        try:
            call = call_on_all(ranks, cell, total // ranks.comm.size)
            ranks.synchronize()
            ranks.empty_pools()  # of what made the inputs
            seconds = ranks.seconds(call, 1)
            if seconds < LONG:
                seconds = ranks.seconds(call, 1)
        except MemoryError as raised:
            error = type(raised).__name__
        del call  # frees its arrays before larger ones are made
        if error:
            return found | {"ended_by": f"{error} at {total} tokens"}
        found = {"tokens": total, "seconds": seconds, "pool_bytes": ranks.pool_bytes()}
        if 4.5 * seconds > most_seconds:
            return found | {"ended_by": f"the limit of {most_seconds:g} s"}
        total *= 2


def joined(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A communicator and the array library."""
    if arguments.simulate:
        return distributed.simulated(arguments.simulate), np
    import cupy

    if arguments.devices:
        return distributed.from_devices(arguments.devices, transport=arguments.transport), cupy
    return distributed.from_environment(), cupy


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Scaling of attention over GPUs.")
    parser.add_argument("--devices", type=int, nargs="+", help="GPUs that this process drives")
    parser.add_argument(
        "--transport", choices=("auto", "copy", "nccl"), default="auto", help="between --devices"
    )
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="on the CPU, over NumPy")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of each GPU, weak")
    parser.add_argument("--total", type=int, nargs="+", help=f"of all, strong (default: {TOTALS})")
    parser.add_argument(
        "--methods", nargs="+", default=["ring", "all_gather", "ulysses"], choices=METHODS
    )
    parser.add_argument("--split", action="store_true", help="where the time of weak cells goes")
    parser.add_argument("--seconds", type=float, default=520.0, help="of this run")
    parser.add_argument("--longest-seconds", type=float, default=60.0, help="of one longest call")
    parser.add_argument("--file", type=Path, default=Path("scale-out.json"))
    parser.add_argument("--only", default="", help="cells with this text in their names")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run cells until the time is over; 0: all are there, 3: run it again."""
    begin, arguments = time.monotonic(), parse(argv)
    comm, xp = joined(arguments)
    with contextlib.closing(comm):
        ranks, first = Ranks(comm, xp), 0 in comm.ranks
        totals = arguments.total or (TOTALS if xp is not np else [comm.size * arguments.tokens[0]])
        every = cells(arguments.tokens, totals, arguments.methods)
        wanted = [c for c in every if arguments.only in c.name]
        told = json.dumps(read_state(arguments.file) if first else {})
        state = json.loads(comm.agree(dict.fromkeys(comm.ranks, told.encode()))[0])
        name = "a CPU" if xp is np else xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        state.setdefault("machine", describe_machine(xp, name, " ".join(sys.argv)))
        state.setdefault("ranks", comm.size)
        state.setdefault("transport", type(comm).__name__)
        done = state.setdefault("cells", {})
        for cell in wanted:
            if cell.name in done:
                continue
            if ranks.slowest(time.monotonic() - begin) > arguments.seconds:
                break
            limit = 0.0 if xp is np else arguments.longest_seconds
            done[cell.name] = asdict(cell) | measured(ranks, cell, limit, split=arguments.split)
            if first:
                save(state, arguments.file)
                figures = {k: v for k, v in done[cell.name].items() if k not in asdict(cell)}
                print(cell.name, json.dumps(figures), flush=True)
    return 0 if all(c.name in done for c in wanted) else AGAIN


def read_state(path: Path) -> dict[str, Any]:
    """Results of earlier runs."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def save(state: dict[str, Any], path: Path) -> None:
    """Replace the file atomically."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


if __name__ == "__main__":
    sys.exit(main())
