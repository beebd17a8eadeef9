"""Is the CPU path faster than dense NumPy, and how much of BLAS's speed does it reach?

    python benchmarks/cpu.py                                 # all cells, 1 thread and 2
    python benchmarks/cpu.py --threads 1 --head-dim 64 --seqlen 2048

Batch 1, 8 heads, float32. cuflash, dense NumPy and a product of two 1024 x 1024 matrices (sgemm)
run interleaved, each three times in a row; best times count. One thread is timed by its thread
clock, which stops while others use the core; several threads by wall time. Passes: ``bwd`` is
attention_backward, ``pullback`` that of attention_vjp, ``fwd+bwd`` attention_vjp and its pullback.
The dense gradient receives the probabilities that its forward kept. The result is
benchmarks/results/cpu-dense-<date>.json.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402
from benchmarks.peers import naive_backward, naive_forward  # noqa: E402

HEADS = 8
SGEMM = 1024
IN_A_ROW = 3  # in the first, caches hold arrays of another call
PASSES = ("fwd", "bwd", "pullback", "fwd+bwd")
#: Operations of each pass, as a multiple of the forward's; kept probabilities save a product.
FLOPS = {"fwd": 1.0, "bwd": 2.5, "pullback": 2.0, "fwd+bwd": 3.0}

Call = Callable[[], Any]


def calls(seqlen: int, head_dim: int, causal: bool) -> dict[tuple[str, str], Call]:
    """Calls by implementation and pass."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, HEADS, seqlen, head_dim), dtype=np.float32)
    mask = ~np.tri(seqlen, dtype=bool) if causal else None
    scale = head_dim**-0.5
    options = cuflash.Options(causal=causal)
    out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
    p = naive_forward(q, k, v, mask, scale)[1]
    _, pullback = cuflash.attention_vjp(q, k, v, options=options)

    def ours() -> Any:
        return cuflash.attention_vjp(q, k, v, options=options)[1](dout)

    def dense() -> Any:
        return naive_backward(dout, q, k, v, naive_forward(q, k, v, mask, scale)[1], scale)

    return {
        ("cuflash", "fwd"): lambda: cuflash.attention(q, k, v, options=options),
        ("dense", "fwd"): lambda: naive_forward(q, k, v, mask, scale),
        ("cuflash", "bwd"): lambda: cuflash.attention_backward(
            dout, q, k, v, out, lse, options=options
        ),
        ("dense", "bwd"): lambda: naive_backward(dout, q, k, v, p, scale),
        ("cuflash", "pullback"): lambda: pullback(dout),
        ("dense", "pullback"): lambda: naive_backward(dout, q, k, v, p, scale),
        ("cuflash", "fwd+bwd"): ours,
        ("dense", "fwd+bwd"): dense,
    }


def best_times(timed: dict[Any, Call], clock: Callable[[], float], budget_s: float) -> Any:
    """Best seconds of each call, interleaved, after one warm-up round."""
    best = dict.fromkeys(timed, float("inf"))
    for call in timed.values():
        call()
    end = time.perf_counter() + budget_s
    for turn in itertools.count():
        if turn >= 2 and time.perf_counter() > end:
            return best
        for name, call in timed.items():
            for _ in range(IN_A_ROW):
                start = clock()
                call()
                best[name] = min(best[name], clock() - start)
    return best


def measure(seqlen: int, head_dim: int, causal: bool, threads: int, budget_s: float) -> Any:
    """Measure one cell; return a row for each pass."""
    a = np.random.default_rng(0).standard_normal((SGEMM, SGEMM), dtype=np.float32)
    product = np.empty_like(a)
    timed: dict[Any, Call] = {"sgemm": lambda: np.matmul(a, a, out=product)}
    timed |= calls(seqlen, head_dim, causal)
    with threadpool_limits(threads):
        clock = time.thread_time if threads == 1 else time.perf_counter
        best = best_times(timed, clock, budget_s)
    sgemm = 2 * SGEMM**3 / best["sgemm"] / 1e9
    forward = 4 * HEADS * head_dim * seqlen**2 / (2 if causal else 1) / 1e9
    rows = []
    for pass_ in PASSES:
        ours, dense = best["cuflash", pass_], best["dense", pass_]
        gflops = forward * FLOPS[pass_] / ours
        row = {"pass": pass_, "head_dim": head_dim, "seqlen": seqlen, "causal": causal}
        row |= {"threads": threads, "cuflash_ms": 1e3 * ours, "dense_ms": 1e3 * dense}
        row |= {"gflops": gflops, "sgemm_gflops": sgemm, "of_sgemm": gflops / sgemm}
        rows.append(row | {"dense_over_cuflash": dense / ours})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Dense time divided by cuflash's, and cuflash's share of sgemm's speed, by cell."""
    lines: list[tuple[str, ...]] = [
        ("threads", "mask", "head_dim", "seqlen", *PASSES, "fwd of sgemm", "bwd of sgemm")
    ]
    for _, group in itertools.groupby(
        rows, lambda row: (row["threads"], row["causal"], row["head_dim"], row["seqlen"])
    ):
        cell = {row["pass"]: row for row in group}
        first = cell["fwd"]
        ratios = (f"{cell[pass_]['dense_over_cuflash']:.2f}" for pass_ in PASSES)
        shares = (f"{cell[pass_]['of_sgemm']:.2f}" for pass_ in PASSES[:2])
        place = (first["threads"], "causal" if first["causal"] else "full")
        lines.append((*map(str, (*place, first["head_dim"], first["seqlen"])), *ratios, *shares))
    return "\n".join(report.grid(*lines)) + "\n"


def cpu_model() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def numbers(text: str) -> list[int]:
    """An argparse type: comma-separated integers."""
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--threads", type=numbers, default=[1, 2])
    p.add_argument("--head-dim", type=numbers, default=[32, 64, 128])
    p.add_argument("--seqlen", type=numbers, default=[128, 512, 1024, 2048])
    p.add_argument("--budget-s", type=float, default=3.0, help="seconds of a cell (default: 3)")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    p.add_argument("--no-write", action="store_true", help="print only")
    arguments = p.parse_args(argv)
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    meta = describe_machine(np, "cpu", f"python benchmarks/cpu.py {shown}".strip())
    meta |= {"cpu": cpu_model(), "numpy": np.__version__}
    cells = itertools.product(
        arguments.threads, (False, True), arguments.head_dim, arguments.seqlen
    )
    rows = [
        row
        for threads, causal, head_dim, seqlen in cells
        for row in measure(seqlen, head_dim, causal, threads, arguments.budget_s)
    ]
    if not arguments.no_write:
        report.write_json({"meta": meta, "rows": rows, "notes": []}, arguments.out, "dense")
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
