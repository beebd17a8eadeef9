"""How fast is cuflash, next to what a user would take instead?

Examples
--------
    python benchmarks/bench.py                             # what fits this machine
    python benchmarks/bench.py --set portable,short --impl cuflash,fa2,cudnn
    python benchmarks/bench.py --set host,compile --topic overhead
    python benchmarks/bench.py --render benchmarks/results/h100-portable-2026-11-21.json

A result is benchmarks/results/<device>-<topic>-<date>.json with a Markdown table beside it:
{"meta": {...}, "rows": [...], "notes": [...]}, where a note names what is absent, what an
implementation refused, or memory. TFLOP/s: 2 * pairs * (head_dim + head_dim_v) a head, causal
counted as half of all pairs, backward as 2.5 times forward.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "tools")]

from baselines import (  # noqa: E402
    AGREEMENT,
    DTYPES,
    IMPLEMENTATIONS,
    PASSES,
    Implementation,
    Unsupported,
    Workload,
    difference,
)
from timing import (  # noqa: E402
    SHORT_MS,
    DeviceClock,
    HostClock,
    Measurement,
    host_microseconds,
)

RESULTS = Path(__file__).parent / "results"
TOKENS = 16_384
MODEL_WIDTH = 2048  # heads * head_dim
META_KEYS = ("device", "driver", "cupy", "nvrtc", "clocks", "date", "commit", "command")
SMALL = Workload(1, 8, 8, 128, 128, 64, 64, "bfloat16")


def square(batch: int, heads: int, seqlen: int, head_dim: int, causal: bool) -> Workload:
    """Self-attention without groups; the dtype is set by --dtype."""
    return Workload(
        batch, heads, heads, seqlen, seqlen, head_dim, head_dim, "bfloat16", causal=causal
    )


def training(head_dims: Iterable[int], seqlens: Iterable[int]) -> list[Workload]:
    """16,384 tokens, heads * head_dim = 2048, full and causal."""
    return [
        square(TOKENS // seqlen, MODEL_WIDTH // head_dim, seqlen, head_dim, causal)
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    ]


@dataclass
class Run:
    """One benchmark run: where it measures, what it has found so far."""

    xp: ModuleType
    clock: Any
    implementations: list[Implementation]
    dtypes: list[str]
    passes: list[str]
    budget_ms: float
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a remark once and print it."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"note: {text}", flush=True)

    def add(
        self, impl: Implementation | None, work: Workload, pass_: str, found: Measurement,
        *, options: str = "", flops: bool = True,
    ) -> None:  # fmt: skip
        """Keep one row and print it."""
        name = "cuflash" if impl is None else impl.name
        tflops = work.flops(pass_) / found.ms / 1e9 if flops else None
        row = {
            "impl": name,
            "pass": pass_,
            "dtype": work.dtype,
            "precision": work.precision,
            "batch": work.batch,
            "heads_q": work.heads_q,
            "heads_kv": work.heads_kv,
            "seqlen_q": work.seqlen_q,
            "seqlen_k": work.seqlen_k,
            "head_dim": work.head_dim,
            "head_dim_v": work.head_dim_v,
            "causal": work.causal,
            "window": work.window,
            "options": options,
            "layout": work.layout,
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
            flush=True,
        )

    def workloads(self, shapes: Iterable[Workload]) -> Iterator[tuple[Workload, str]]:
        """Every shape in every dtype and pass that was asked for."""
        for dtype in self.dtypes:
            for shape in shapes:
                for pass_ in self.passes:
                    yield replace(shape, dtype=dtype), pass_


def free_memory(xp: ModuleType) -> None:
    """Give the pools' unused blocks back, so that no cell runs out of memory by an earlier one."""
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.cuda.empty_cache()


def prepare_all(run: Run, work: Workload, pass_: str) -> dict[str, Any]:
    """Calls of every implementation that can do the cell and agrees with the first one."""
    inputs = work.inputs(run.xp)
    prepared: dict[str, Any] = {}
    truth = None
    for implementation in run.implementations:
        cell = f"{implementation.name} {pass_} {work.dtype} {describe(work)}"
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


def measure_cell(run: Run, work: Workload, pass_: str) -> None:
    """Time all implementations on one shape, in turns."""
    with run.clock.scope():
        prepared = prepare_all(run, work, pass_)
        calls = {name: candidate.calls[0] for name, candidate in prepared.items()}
        found = run.clock.measure(calls, run.budget_ms)
        short = {name for name, measured in found.items() if measured.ms < SHORT_MS}
        if short and isinstance(run.clock, DeviceClock):
            found |= measure_short(run, work, pass_, short)
    for implementation in run.implementations:
        if implementation.name in found:
            run.add(implementation, work, pass_, found[implementation.name])
    prepared.clear()
    free_memory(run.xp)


def measure_short(run: Run, work: Workload, pass_: str, names: set[str]) -> dict[str, Measurement]:
    """Time the short calls of a cell by CUDA graphs; what cannot be captured keeps its events."""
    clock = run.clock
    copies = clock.copies_to_leave_l2(work.input_bytes(pass_))
    inputs = work.inputs(run.xp, copies)
    graphs, held = {}, []
    for name in sorted(names):
        try:
            candidate = IMPLEMENTATIONS[name].prepare(work, pass_, inputs)
            graphs[name] = (candidate.capture(clock, candidate.calls), copies)
            held.append(candidate)  # a graph does not keep the arrays of its calls alive
        except Exception as error:
            run.note(
                f"{name} {pass_} {describe(work)}: no CUDA graph, timed by events "
                f"({type(error).__name__}: {first_line(error)})"
            )
    found = clock.measure_graphs(graphs, run.budget_ms)
    del held
    return found


def measure_shapes(shapes: Sequence[Workload]) -> Callable[[Run], None]:
    """A set that is a list of shapes."""

    def measure(run: Run) -> None:
        for work, pass_ in run.workloads(shapes):
            measure_cell(run, work, pass_)

    return measure


def measure_host(run: Run) -> None:
    """Host time of a call that only enqueues; arrays known to the library, and new ones."""
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
    """The call as a user writes it, results allocated by the library."""
    if implementation.name != "cuflash":
        return implementation.prepare(work, pass_, inputs).calls
    import cuflash

    options = cuflash.Options(**work.score_options())
    calls: list[Callable[[], Any]] = []
    for q, k, v, dout in inputs:
        if pass_ == "fwd":
            calls.append(lambda q=q, k=k, v=v: cuflash.attention(q, k, v, options=options))
            continue
        out, lse = cuflash.attention(q, k, v, options=options, return_lse=True)
        calls.append(
            lambda dout=dout, q=q, k=k, v=v, out=out, lse=lse: cuflash.attention_backward(
                dout, q, k, v, out, lse, options=options
            )
        )
    return calls


def measure_first_calls(run: Run) -> None:
    """Import time, cold first call and first call from the disk cache, in fresh processes."""
    on_gpu = run.xp is not np
    if not on_gpu:
        run.note("compile: without a GPU only the import is measured")
    for work, pass_ in run.workloads([replace(SMALL, causal=True)]):
        with tempfile.TemporaryDirectory() as cache:
            arguments = (work.dtype, pass_) if on_gpu else ()
            runs = [fresh_process(arguments, cache) for _ in range(3 if on_gpu else 5)]
        if on_gpu:
            for label, ms in (
                ("cold", runs[0]["first"]),
                ("warm from disk", min(r["first"] for r in runs[1:])),
                ("second call", min(r["second"] for r in runs)),
            ):
                found = Measurement(ms, "process")
                run.add(None, work, pass_, found, options=label, flops=False)
        importing = Measurement(min(r["import"] for r in runs), "process")
        run.add(None, work, pass_, importing, options="import", flops=False)
        if not on_gpu:
            return


def fresh_process(arguments: Sequence[str], cache: str) -> dict[str, float]:
    """Run first_call.py with a kernel cache of its own, and with byte code, as pip installs it."""
    environment = {**os.environ, "CUPY_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(Path(__file__).with_name("first_call.py")), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"first_call.py failed: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure_naive(run: Run) -> None:
    """Against the unfused computation: time, and the memory that each takes beyond its inputs."""
    shapes = training((64, 128), (2048, 8192)) if run.xp is not np else CPU_SHAPES
    chosen = [i for i in run.implementations if i.name in ("cuflash", "naive")]
    narrowed = replace(run, implementations=chosen)
    narrowed.rows, narrowed.notes = run.rows, run.notes
    for work, pass_ in run.workloads(shapes):
        measure_cell(narrowed, work, pass_)
        if run.xp is not np:
            for implementation in chosen:
                note_memory(run, implementation, work, pass_)


def note_memory(run: Run, implementation: Implementation, work: Workload, pass_: str) -> None:
    """Note the peak of what forward and, where asked, backward allocate beyond the inputs."""
    with run.clock.scope():
        inputs = work.inputs(run.xp)
        try:
            peak = peak_bytes(lambda: implementation.prepare(work, pass_, inputs).calls[0]())
        except Exception as error:
            run.note(f"{implementation.name} {pass_} {describe(work)}: {first_line(error)}")
            return
    run.note(
        f"memory beyond the inputs: {implementation.name} {pass_} {work.dtype} {describe(work)}: "
        f"{peak / 1e9:.3f} GB"
    )
    free_memory(run.xp)


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes of CuPy's pool that a call holds at one time, its results included."""
    import cupy

    class Peak(cupy.cuda.MemoryHook):
        name = "peak"
        now = most = 0

        def malloc_postprocess(self, **event: int) -> None:
            self.now += event["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **event: int) -> None:
            self.now -= event["mem_size"]

    with Peak() as hook:
        call()
    return hook.most


CPU_SHAPES = [square(1, 8, n, 64, causal) for n in (1024, 2048) for causal in (False, True)]
SETS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "portable": (
        "head_dim 64 and 128, full and causal, seqlen 2048 and 8192, 16,384 tokens",
        measure_shapes(training((64, 128), (2048, 8192))),
    ),
    "widths": (
        "the same at head_dim 96 and 256",
        measure_shapes(training((96, 256), (2048, 8192))),
    ),
    "short": (
        "batch 1, 8 heads, head_dim 64, causal, seqlen 128, 512, 1024",
        measure_shapes([square(1, 8, seqlen, 64, True) for seqlen in (128, 512, 1024)]),
    ),
    "training": (
        "head_dim 64, 128 and 256, full and causal, seqlen 512 to 16384, 16,384 tokens",
        measure_shapes(training((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16_384))),
    ),
    "shapes": (
        "grouped heads 32/8, head_dim 192/128, 1000 x 3000 at head_dim 96",
        measure_shapes(
            [
                Workload(2, 32, 8, 4096, 4096, 128, 128, "bfloat16", causal=True),
                Workload(2, 16, 16, 4096, 4096, 192, 128, "bfloat16", causal=True),
                Workload(4, 32, 32, 1000, 3000, 96, 96, "bfloat16"),
            ]
        ),
    ),
    "host": ("host time of one call, batch 1, 8 heads, 128 x 128, head_dim 64", measure_host),
    "compile": ("fresh processes: import, cold first call, warm from disk", measure_first_calls),
    "naive": ("factor and memory against unfused array operations", measure_naive),
    "cpu": (
        "batch 1, 8 heads, head_dim 64, seqlen 1024 and 2048, full and causal",
        measure_shapes(CPU_SHAPES),
    ),
}


def describe(work: Workload) -> str:
    """A shape in a few words."""
    heads = (
        str(work.heads_q) if work.heads_q == work.heads_kv else f"{work.heads_q}/{work.heads_kv}"
    )
    dims = str(work.head_dim)
    if work.head_dim_v != work.head_dim:
        dims += f"/{work.head_dim_v}"
    return (
        f"b{work.batch} h{heads} {work.seqlen_q}x{work.seqlen_k} d{dims} "
        f"{'causal' if work.causal else 'full'}"
        f"{'' if work.window is None else f' window {work.window}'}"
    )


def shape_text(row: dict[str, Any]) -> str:
    """The same of a result row."""
    fields = {
        name: row[name]
        for name in Workload.__dataclass_fields__
        if name in row and name != "window"
    }
    return describe(Workload(**fields, window=row["window"]))


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def device_slug(name: str) -> str:
    """The model of a device as part of a file name: 'NVIDIA H100 80GB HBM3' is 'h100'."""
    words = []
    for word in re.split(r"[ -]+", name):
        if word in ("NVIDIA", "GeForce", "Tesla", "Quadro"):
            continue
        if re.fullmatch(r"\d+GB|SXM\d*|PCI[eE]|HBM\d*\w*|Laptop", word):
            break
        words.append(word.lower())
    return "-".join(words) or "unknown"


def query_driver(*fields: str) -> list[str]:
    """What nvidia-smi says about device 0; nothing where it is absent."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "-i", "0", "--format=csv,noheader,nounits"]
    command.append(f"--query-gpu={','.join(fields)}")
    done = subprocess.run(command, capture_output=True, text=True)
    return [value.strip() for value in done.stdout.split(",")] if done.returncode == 0 else []


def read_clocks() -> dict[str, str] | None:
    """Clocks in MHz and power in W, now and at most."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
    return dict(zip(names, query_driver(*names), strict=False)) or None


def commit() -> str:
    """The commit that was measured, marked where files differ; without git, the sources' digest."""
    git = ("git", "-C", str(ROOT))
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "cuflash", "kernels_cu", "benchmarks"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        import gpu_digest

        return f"sources {gpu_digest.digest()}"
    return head + ("-dirty" if changed.strip() else "")


def describe_machine(run: Run, command: str) -> dict[str, Any]:
    """The meta part of a result."""
    meta: dict[str, Any] = dict.fromkeys(META_KEYS)
    meta |= {"device": run.clock.device_name, "command": command, "commit": commit()}
    meta["date"] = dt.datetime.now(dt.UTC).date().isoformat()
    if run.xp is not np:
        import cupy
        from cupy_backends.cuda.libs import nvrtc

        driver = query_driver("driver_version")
        meta["driver"] = driver[0] if driver else str(cupy.cuda.runtime.driverGetVersion())
        meta["cupy"] = cupy.__version__
        meta["nvrtc"] = ".".join(map(str, nvrtc.getVersion()))
        meta["clocks"] = read_clocks()
    return meta


def markdown(result: dict[str, Any]) -> str:
    """Tables of a result: one row for each shape, one column for each implementation."""
    meta = result["meta"]
    names = ", ".join(f"{key} {meta[key]}" for key in ("driver", "cupy", "nvrtc") if meta[key])
    lines = [
        f"# {meta['device']}, {meta['date']}",
        "",
        f"{names or 'NumPy'}; commit {meta['commit']}; clocks {meta['clocks'] or 'not read'}.",
        f"`{meta['command']}`",
    ]
    tables: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        kind = "speed" if row["tflops"] is not None else "overhead"
        tables[kind, row["pass"], row["dtype"]].append(row)
    for (kind, pass_, dtype), rows in tables.items():
        unit = "TFLOP/s (ms)" if kind == "speed" else "microseconds of waiting"
        lines += ["", f"## {pass_}, {dtype}: {unit}", "", *table(rows, kind)]
    if result.get("notes"):
        lines += ["", "## Notes", "", *(f"* {note}" for note in result["notes"])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """One Markdown table; the last column compares cuflash with the best of the others."""
    order = [name for name in IMPLEMENTATIONS if any(row["impl"] == name for row in rows)]
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[shape_text(row), row["options"]][row["impl"]] = row
    compared = kind == "speed" and "cuflash" in order and len(order) > 1
    header = ["shape", "timing", *order, *(["cuflash / best other"] if compared else [])]
    lines = ["| " + " | ".join(header) + " |", "|" + "--|" * len(header)]
    for (shape, options), found in cells.items():
        timing = sorted({row["timing"] for row in found.values()})
        texts = [f"{shape} {options}".strip(), ", ".join(timing)]
        for name in order:
            row = found.get(name)
            if row is None:
                texts.append("")
            elif kind == "speed":
                texts.append(f"{row['tflops']:.3g} ({row['ms']:.3g})")
            else:
                texts.append(f"{1e3 * row['ms']:.4g}")
        if compared:
            others = [row["ms"] for name, row in found.items() if name != "cuflash"]
            ours = found.get("cuflash")
            ratio = f"{min(others) / ours['ms']:.2f}" if ours and others else ""
            texts.append(ratio)
        lines.append("| " + " | ".join(texts) + " |")
    return lines


def write(result: dict[str, Any], folder: Path, topic: str) -> Path:
    """Write JSON and Markdown; return the path of the JSON."""
    meta = result["meta"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device_slug(meta['device'])}-{topic}-{meta['date']}.json"
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    path.write_text(
        f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{rows}\n],\n'
        f'"notes": {json.dumps(result["notes"], indent=1)}}}\n'
    )
    path.with_suffix(".md").write_text(markdown(result))
    return path


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated choice of known names."""
    known = list(known)

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected one or more of {', '.join(known)}"
            )
        return chosen

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    sets = "\n".join(f"  {name:9} {text}" for name, (text, _) in SETS.items())
    p = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0],
        epilog=f"sets:\n{sets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--set", type=names_of(SETS), help="what to measure (default: portable, or cpu)")
    p.add_argument("--topic", help="name of the result file (default: the names of the sets)")
    p.add_argument(
        "--dtype", type=names_of(DTYPES), help="default: bfloat16, or float32 on the CPU"
    )
    p.add_argument(
        "--pass",
        dest="passes",
        type=names_of(PASSES),
        default=list(PASSES),
        help="default: fwd,bwd",
    )
    p.add_argument(
        "--impl", type=names_of(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
        help=f"default: all of {', '.join(IMPLEMENTATIONS)} that can be imported",
    )  # fmt: skip
    p.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu where there is one")
    p.add_argument(
        "--budget-ms", type=float, default=120.0,
        help="time given to each implementation of a cell, within 5 to 60 rounds (default: 120)",
    )  # fmt: skip
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    p.add_argument("--no-write", action="store_true", help="print only")
    p.add_argument("--render", type=Path, metavar="JSON", help="print the tables of a result file")
    return p


def gpu_module() -> ModuleType | None:
    """CuPy, where it has a device."""
    try:
        import cupy

        return cupy if cupy.cuda.runtime.getDeviceCount() else None
    except (ImportError, RuntimeError):
        return None


def open_run(arguments: argparse.Namespace) -> Run:
    """Choose device, clock and the implementations that can be had."""
    cupy = None if arguments.device == "cpu" else gpu_module()
    if cupy is None and arguments.device == "gpu":
        raise SystemExit("bench: no NVIDIA device can be used; --device cpu measures NumPy arrays")
    xp = cupy or np
    run = Run(
        xp=xp,
        clock=HostClock() if cupy is None else DeviceClock(),
        implementations=[],
        dtypes=arguments.dtype or ["float32" if cupy is None else "bfloat16"],
        passes=arguments.passes,
        budget_ms=arguments.budget_ms,
    )
    for name in arguments.impl:
        reason = IMPLEMENTATIONS[name].absent(xp)
        if reason:
            run.note(f"absent: {name}: {reason}")
        else:
            run.implementations.append(IMPLEMENTATIONS[name])
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = parser().parse_args(argv)
    if arguments.render:
        print(markdown(json.loads(arguments.render.read_text())), end="")
        return 0
    run = open_run(arguments)
    sets = arguments.set or ["cpu" if run.xp is np else "portable"]
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    meta = describe_machine(run, f"python benchmarks/bench.py {shown}".strip())
    result = {"meta": meta, "rows": run.rows, "notes": run.notes}
    topic = arguments.topic or "-".join(sets)
    for name in sets:
        SETS[name][1](run)
        if run.xp is not np:
            meta["clocks"] = read_clocks()
        if not arguments.no_write:
            write(result, arguments.out, topic)
    print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
