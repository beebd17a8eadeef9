"""How long does each implementation take on one shape? Interleaved, and only if results agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any, TextIO

import numpy as np

from benchmarks.peers import Implementation, Unsupported
from benchmarks.report import first_line, shape_text
from cuflash._timing.clock import SHORT_MS, Call, DeviceClock, Measurement
from cuflash.tuning._checking import AGREEMENT, difference
from cuflash.tuning._workload import Workload

#: Up to this length a graph is timed, for any number of sequences. (D111)
SHORT_SEQLEN = 1024
GRAPH_MS = 2.0  # least time of the calls in a graph, so that its own launch does not matter
NOTHING: Mapping[str, Call] = MappingProxyType({})


@dataclass
class Run:
    """One benchmark run: where it measures, and its results so far."""

    xp: ModuleType
    clock: Any
    implementations: list[Implementation]
    dtypes: list[str]
    passes: list[str]
    budget_ms: float
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)  # peaks: see overhead.py
    progress: TextIO | None = None  # None: standard output

    def note(self, text: str) -> None:
        """Keep a remark and print it, once."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"note: {text}", file=self.progress, flush=True)

    def add(
        self, impl: Implementation | None, work: Workload, pass_: str, found: Measurement,
        *, options: str = "", flops: bool = True,
    ) -> None:  # fmt: skip
        """Keep one row and print it."""
        name = "cuflash" if impl is None else impl.name
        tflops = work.flops(pass_) / found.ms / 1e9 if flops else None
        row = {"impl": name, "pass": pass_} | asdict(work)
        row |= {
            "options": options,
            "deterministic": impl is None or pass_ in impl.deterministic,
            "timing": found.timing,
            "ms": found.ms,
            "tflops": tflops,
        }
        self.rows.append(row)
        speed = "" if tflops is None else f"{tflops:8.3g} TFLOP/s"
        detail = f"{found.timing} {options}".strip()
        print(
            f"{name:8} {pass_} {work.dtype:8} {shape_text(row):34} {found.ms:10.4g} ms {speed}"
            f"  ({detail})",
            file=self.progress,
            flush=True,
        )

    def workloads(self, shapes: Iterable[Workload]) -> Iterator[tuple[Workload, str]]:
        """Every shape in every chosen dtype and pass."""
        for dtype in self.dtypes:
            for shape in shapes:
                for pass_ in self.passes:
                    yield replace(shape, dtype=dtype), pass_


def free_memory(xp: ModuleType) -> None:
    """Free the unused blocks of memory pools, so that earlier cells do not exhaust memory."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.cuda.empty_cache()


def prepare_all(
    run: Run, work: Workload, pass_: str, implementations: Iterable[Implementation]
) -> dict[str, Any]:
    """Calls of every implementation that supports the cell and agrees with the first one."""
    inputs = work.inputs(run.xp)
    prepared: dict[str, Any] = {}
    truth = None
    for implementation in implementations:
        cell = f"{implementation.name} {pass_} {work.dtype} {work}"
        try:
            candidate = implementation.prepare(work, pass_, inputs)
            result = candidate.result()
            if truth is None:
                truth = result.copy()
            elif not difference(result, truth) <= AGREEMENT[work.dtype]:
                run.note(
                    f"{cell}: not timed, its result differs by {difference(result, truth):.2g}"
                )
                continue
        except Unsupported as reason:
            run.note(f"{implementation.name}: {reason}, not timed where that matters")
            continue
        except Exception as error:
            run.note(f"{cell}: {type(error).__name__}: {first_line(error)}")
            continue
        prepared[implementation.name] = candidate
    return prepared


def measure_cell(
    run: Run, work: Workload, pass_: str, beside: Mapping[str, Call] = NOTHING
) -> dict[str, Measurement]:
    """Keep a row for each implementation on one shape; return :func:`time_cell` of all."""
    found = time_cell(run, work, pass_, run.implementations, beside)
    for implementation in run.implementations:
        if implementation.name in found:
            run.add(implementation, work, pass_, found[implementation.name])
    return found


def time_cell(
    run: Run,
    work: Workload,
    pass_: str,
    implementations: Sequence[Implementation],
    beside: Mapping[str, Call] = NOTHING,
) -> dict[str, Measurement]:
    """Time implementations and the calls in ``beside``, all interleaved."""
    with run.clock.scope():
        prepared = prepare_all(run, work, pass_, implementations)
        calls = {name: candidate.calls[0] for name, candidate in prepared.items()}
        found: dict[str, Measurement] = run.clock.measure({**calls, **beside}, run.budget_ms)
        of_few_rows = not work.seqlens and max(work.seqlen_q, work.seqlen_k) <= SHORT_SEQLEN
        short = {
            own: found[own.name].ms
            for own in implementations
            if own.name in prepared and (of_few_rows or found[own.name].ms < SHORT_MS)
        }
        if short and isinstance(run.clock, DeviceClock):
            found |= measure_short(run, work, pass_, short)
    prepared.clear()
    free_memory(run.xp)
    return found


def measure_short(
    run: Run, work: Workload, pass_: str, short: Mapping[Implementation, float]
) -> dict[str, Measurement]:
    """Time the short calls of a cell with CUDA graphs; ``short`` has their approximate ms.

    Calls that cannot be captured keep their times from events.
    """
    clock = run.clock
    copies = clock.copies_to_leave_l2(work.input_bytes(pass_))
    inputs = work.inputs(run.xp, copies)
    graphs, held = {}, []
    for own in sorted(short, key=lambda own: own.name):
        try:
            candidate = own.prepare(work, pass_, inputs)
            times = math.ceil(GRAPH_MS / (short[own] * copies))
            graphs[own.name] = (candidate.capture(clock, candidate.calls * times), copies * times)
            held.append(candidate)  # a graph does not keep the arrays of its calls alive
        except Exception as error:
            run.note(
                f"{own.name} {pass_} {work}: no CUDA graph, timed by events "
                f"({type(error).__name__}: {first_line(error)})"
            )
    found = clock.measure_graphs(graphs, run.budget_ms)
    del held
    return found


def measure_shapes(shapes: Sequence[Workload]) -> Callable[[Run], None]:
    """The function of a set that is a list of shapes."""

    def measure(run: Run) -> None:
        for work, pass_ in run.workloads(shapes):
            measure_cell(run, work, pass_)

    return measure
