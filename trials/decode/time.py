# ruff: noqa: D103, T201
"""Is it worth it? Every variant of every call in turns, each in a graph, beside a copy of 1 GiB.

python trials/decode/time.py [GROUP ..] [--seconds 300]
python trials/decode/time.py --plans       # without a GPU: which kernels the variants are
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from shapes import GROUPS, Trial, variant  # first: it says where cuflash is

from benchmarks import decode  # isort: skip
from cuflash._select import hardware  # isort: skip
from cuflash._select.choose import choose  # isort: skip
from cuflash._timing.clock import DeviceClock, Measurement  # isort: skip

GRAPH_MS = 1.0


def timed(clock: Any, trial: Trial) -> dict[str, Measurement]:
    """Time of a call of each variant."""
    xp, work, own = clock.cupy, trial.work, trial.implementation()
    copies = clock.copies_to_leave_l2(work.input_bytes("fwd"))
    inputs = work.inputs(xp, copies)
    graphs, held, truth = {}, [], None
    for name in trial.variants:
        with variant(name):
            prepared = own.prepare(work, "fwd", inputs)
            found = prepared.result().astype("float32")
            truth = found if truth is None else truth
            apart = float(abs(found - truth).max())
            clock.stream.synchronize()
            began = time.perf_counter()
            prepared.calls[0]()
            clock.stream.synchronize()
            about = 1e3 * (time.perf_counter() - began)
            times = max(1, math.ceil(GRAPH_MS / (max(about, 0.01) * copies)))
            graphs[name] = (clock.capture(prepared.calls * times), copies * times)
            held.append(prepared)
        if not apart < 0.02:
            print(f"  {name}: NOT THE SAME, {apart:.2g} apart")
    return clock.measure_graphs(graphs, 60.0)


def plans(trial: Trial) -> None:
    """Print which kernels each variant launches on an H100."""
    device = hardware.typical("sm_90")
    problem = trial.work.problem()
    if trial.page_size:
        problem = of_pages(trial)
    for name in trial.variants:
        with variant(name):
            steps = choose(problem, device)
        told = [
            f"{s.config.kernel} x{s.splits}"
            + "".join(f" {f}" for f in ("overlaps", "paged", "heads_in_rows")
                      if getattr(s.config, f, False))
            for s in steps
        ]  # fmt: skip
        print(f"  {name:24} {', '.join(told)}")


def of_pages(trial: Trial) -> Any:
    """The problem of a call over pages, without memory for them."""
    import numpy as np

    import cuflash
    from cuflash._problem.options import signature
    from cuflash._problem.problem import describe, in_pages

    work, size, strided = trial.work, trial.page_size, np.lib.stride_tricks.as_strided
    from cuflash.tuning._workload import DTYPES

    pages = np.zeros((2, work.heads_kv, size, work.head_dim), DTYPES[work.dtype])
    q = np.broadcast_to(pages[0, 0, 0], (work.batch, work.heads_q, work.seqlen_q, work.head_dim))
    whole = (work.batch, work.heads_kv, work.seqlen_k, work.head_dim)
    k = strided(pages, whole, (0, *pages.strides[1:]))
    lengths = np.full((work.batch, 1), work.seqlen_k, np.int32)
    options = cuflash.Options(**work.score_options(), kv_lengths=lengths)
    table = np.zeros((work.batch, 1, work.seqlen_k // size), np.int32)
    q = strided(np.zeros(1, q.dtype), q.shape, [
        s * q.itemsize for s in (math.prod(q.shape[1:]), math.prod(q.shape[2:]), q.shape[3], 1)
    ])  # fmt: skip
    return in_pages(describe(q, k, k, options), *map(signature, (pages, pages, table)))


def compile_ahead(groups: list[str], folder: Path) -> None:
    """Compile all kernels of these groups for an H200."""
    from cuflash.tuning._facts import compile_all

    device = hardware.typical("sm_90")._replace(name="NVIDIA H200")
    found = {}
    for group in groups:
        for trial in GROUPS[group]:
            problem = of_pages(trial) if trial.page_size else trial.work.problem()
            for name in trial.variants:
                with variant(name):
                    found |= dict.fromkeys(step.config for step in choose(problem, device))
    folder.mkdir(exist_ok=True)
    facts = compile_all(found, device, shared=folder)
    for config, own in facts.items():
        print(config.kernel, own.registers, own.spill_bytes, own.warnings, own.error)


def eager(clock: Any) -> None:
    """Time of the host for a call that is launched by itself, split and not."""
    import cuflash

    xp = clock.cupy
    for keys in (512, 1024, 2048):
        for name in ("unsplit", "least 128"):
            with variant(name):
                q, k, v = (xp.ones((1, 8, n, 64), xp.float16) for n in (1, keys, keys))
                best = 1e9
                for _ in range(5):
                    xp.cuda.Device().synchronize()
                    began = time.perf_counter()
                    for _ in range(1000):
                        cuflash.attention(q, k, v)
                    xp.cuda.Device().synchronize()
                    best = min(best, 1e3 * (time.perf_counter() - began))
                print(f"eager: 1 x {keys} {name}: {best:.1f} us a call", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("group", nargs="*", default=list(GROUPS), help=", ".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--compile", type=Path, help="put the kernels there; needs no GPU")
    parser.add_argument("--plans", action="store_true", help="print kernels; needs no GPU")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    if given.compile:
        compile_ahead(given.group, given.compile)
        return 0
    clock = None if given.plans else DeviceClock()
    if clock is not None:
        copy = decode.copier(clock.cupy, clock)
        with clock.scope():
            copy()
            ms = statistics.median(clock.once(copy) for _ in range(15))
        speed = 2 * decode.COPIED_BYTES / ms
        print(f"a copy moves {speed / 1e9:.2f} TB/s")
    for group in given.group:
        if group == "eager":
            eager(clock)
            continue
        for trial in GROUPS[group]:
            if time.monotonic() > end:
                print("no time is left")
                return 1
            print(f"{group}: {trial}", flush=True)
            if clock is None:
                plans(trial)
                continue
            with clock.scope():
                found = timed(clock, trial)
            first = found[trial.variants[0]].ms
            for name, own in found.items():
                share = trial.work.input_bytes("fwd") / own.ms / speed
                print(f"  {name:24} {1e3 * own.ms:8.2f} us  {first / own.ms:.2f} of the first's "
                      f"speed, {share:.2f} of the copy", flush=True)  # fmt: skip
            clock.cupy.get_default_memory_pool().free_all_blocks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
