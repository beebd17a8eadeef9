"""How much longer does a call take with each score option?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cells import Run, free_memory
from benchmarks.peers import IMPLEMENTATIONS
from benchmarks.shapes import square
from cuflash.tuning import Workload

PLAIN = square(1, 16, 4096, 128, False)
#: Changes to the plain call, by name.
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (511, 0)},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout": 0.1},
    **{
        name: {"arrays": (name,)}
        for name in ("alibi_slopes", "sink", "bias", "mask", "segment_ids", "kv_lengths")
    },
}


def measure_options(run: Run) -> None:
    """Time cuflash without options and with each option, interleaved."""
    if run.xp is np:
        run.note("options: it needs a GPU")
        return
    ours = IMPLEMENTATIONS["cuflash"]
    for plain, pass_ in run.workloads([PLAIN]):
        works: dict[str, Workload] = {n: replace(plain, **c) for n, c in CHANGES.items()}
        with run.clock.scope():
            inputs = plain.inputs(run.xp)
            prepared = {name: ours.prepare(work, pass_, inputs) for name, work in works.items()}
            calls = {name: candidate.calls[0] for name, candidate in prepared.items()}
            found = run.clock.measure(calls, run.budget_ms)
        for name, work in works.items():
            ratio = found[name].ms / found["none"].ms
            run.add(ours, work, pass_, found[name], options=f"takes {ratio:.2f} of none")
        prepared.clear()
        free_memory(run.xp)
