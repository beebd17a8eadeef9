"""What does a call cost apart from device time: host time, the first call, memory?"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Run, free_memory, measure_cell
from benchmarks.host_clock import host_microseconds
from benchmarks.peers import Implementation
from benchmarks.report import first_line
from benchmarks.shapes import square, training
from cuflash._timing.clock import Measurement
from cuflash.tuning import Workload

SMALL = Workload(1, 8, 8, 128, 128, 64, 64, "bfloat16")
#: Processes with cached kernels; their median and their slowest are reported.
WARM_PROCESSES = 7
CPU_SHAPES = [square(1, 8, n, 64, causal) for n in (1024, 2048) for causal in (False, True)]


def measure_host(run: Run) -> None:
    """Host time of a call that only enqueues, with arrays seen before and with new arrays."""
    if run.xp is np:
        run.note("host: it needs a GPU; on NumPy arrays the call is the computation")
        return
    synchronize = run.clock.stream.synchronize
    for work, pass_ in run.workloads([SMALL]):
        with run.clock.scope():
            for implementation in run.implementations:
                for label, count in (("known arrays", 1), ("new arrays", 1000)):
                    inputs = work.inputs(run.xp, count)
                    try:
                        calls = host_calls(implementation, work, pass_, inputs)
                        us = host_microseconds(calls, synchronize)
                    except Exception as error:
                        run.note(f"{implementation.name} host {pass_}: {first_line(error)}")
                        break
                    found = Measurement(us / 1e3, "host")
                    run.add(implementation, work, pass_, found, options=label, flops=False)
        free_memory(run.xp)


def host_calls(
    implementation: Implementation, work: Workload, pass_: str, inputs: Sequence[tuple[Any, ...]]
) -> list[Callable[[], Any]]:
    """The call as a user writes it; the library allocates the results."""
    if implementation.name != "cuflash":
        return implementation.prepare(work, pass_, inputs).calls
    import cuflash

    options = cuflash.Options(**work.score_options())

    def call_of(q: Any, k: Any, v: Any, dout: Any) -> Callable[[], Any]:
        forward = functools.partial(cuflash.attention, q, k, v, options=options)
        if pass_ == "fwd":
            return forward
        pair = functools.partial(forward, return_lse=True)
        backward = functools.partial(cuflash.attention_backward, dout, q, k, v, options=options)
        return functools.partial(backward, *pair()) if pass_ == "bwd" else lambda: backward(*pair())

    return [call_of(*arrays) for arrays in inputs]


def measure_first_calls(run: Run) -> None:
    """Import time, cold first call and first call from the disk cache, in fresh processes."""
    on_gpu = run.xp is not np
    if not on_gpu:
        run.note("compile: without a GPU only the import is measured")
    for work, pass_ in run.workloads([replace(SMALL, causal=True)]):
        with tempfile.TemporaryDirectory() as cache:
            arguments = (work.dtype, pass_) if on_gpu else ()
            runs = [fresh_process(arguments, cache) for _ in range(1 + WARM_PROCESSES)]
        if on_gpu:
            warm = [one["first"] for one in runs[1:]]
            for label, ms in (
                ("cold", runs[0]["first"]),
                ("warm from disk", statistics.median(warm)),
                (f"warm from disk, slowest of {WARM_PROCESSES}", max(warm)),
                ("second call", statistics.median(one["second"] for one in runs)),
            ):
                found = Measurement(ms, "process")
                run.add(None, work, pass_, found, options=label, flops=False)
        importing = Measurement(statistics.median(one["import"] for one in runs), "process")
        run.add(None, work, pass_, importing, options="import", flops=False)
        if not on_gpu:
            return


def fresh_process(arguments: Sequence[str], cache: str) -> dict[str, float]:
    """Run first_call.py with its own kernel cache, and with byte code, as after pip install."""
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join((package, *sys.path))
    environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONPATH": path}
    for name in ("PYTHONDONTWRITEBYTECODE", "CUFLASH_KERNELS"):
        environment.pop(name, None)
    command = [sys.executable, str(Path(__file__).with_name("first_call.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"first_call.py failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure_naive(run: Run) -> None:
    """Compare with the unfused computation: time, and memory beyond the inputs."""
    shapes = training((64, 128), (2048, 8192)) if run.xp is not np else CPU_SHAPES
    chosen = [i for i in run.implementations if i.name in ("cuflash", "naive")]
    narrowed = replace(run, implementations=chosen)
    narrowed.rows, narrowed.notes, narrowed.memory = run.rows, run.notes, run.memory
    for work, pass_ in run.workloads(shapes):
        measure_cell(narrowed, work, pass_)
        if run.xp is not np:
            for implementation in chosen:
                note_memory(run, implementation, work, pass_)


def measure_memory(run: Run) -> None:
    """Peak memory of every implementation beyond the inputs, over lengths."""
    if run.xp is np:
        run.note("memory: it needs a GPU")
        return
    shapes = training((128,), (1024, 2048, 4096, 8192, 16_384))
    for work, pass_ in run.workloads([work for work in shapes if not work.causal]):
        for implementation in run.implementations:
            note_memory(run, implementation, work, pass_)


def note_memory(run: Run, implementation: Implementation, work: Workload, pass_: str) -> None:
    """Note the peak memory that forward and (by ``pass_``) backward allocate beyond the inputs.

    The inputs are in the implementation's own layout, so that no copy into it is counted.
    """
    with run.clock.scope():
        inputs = [implementation.laid_out(arrays) for arrays in work.inputs(run.xp)]
        try:
            peak = peak_bytes(lambda: implementation.prepare(work, pass_, inputs).calls[0]())
        except Exception as error:
            run.note(f"{implementation.name} {pass_} {work}: {first_line(error)}")
            return
    kept = {"impl": implementation.name, "pass": pass_, "bytes": peak}
    run.memory.append({**work.as_json(), **kept})
    run.note(
        f"memory beyond the inputs: {implementation.name} {pass_} {work.dtype} {work}: "
        f"{peak / 1e9:.3f} GB"
    )
    free_memory(run.xp)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak bytes of CuPy's and torch's pools during a call, with its results."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):
        name = "peak"
        now = most = 0

        def malloc_postprocess(self, **event: int) -> None:
            self.now += event["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **event: int) -> None:
            self.now -= event["mem_size"]

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Peak() as hook:
        call()
    if torch is None:
        return hook.most
    return hook.most + int(torch.cuda.max_memory_allocated()) - int(before)
