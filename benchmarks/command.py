"""How fast is cuflash, compared with the alternatives?

A result is <device>-<topic>-<date>.json with a Markdown table beside it:
{"meta": {...}, "rows": [...], "notes": [...]}. A note names an absent implementation, a call that
an implementation refused, or the memory of a call. TFLOP/s count 2 * pairs * (head_dim +
head_dim_v) operations per head, with half of all pairs if causal, and 2.5 times as many for the
backward. cuflash-unordered is cuflash with deterministic=False.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import io_grid, memory
from benchmarks.bias_gradients import measure_bias_gradients
from benchmarks.cells import Run, measure_cell, measure_shapes
from benchmarks.decode import measure_decode
from benchmarks.everyday import EVERYDAY
from benchmarks.host_clock import HostClock
from benchmarks.machine import describe_machine, gpu_module
from benchmarks.option_costs import measure_options
from benchmarks.overhead import (
    CPU_SHAPES,
    measure_first_calls,
    measure_host,
    measure_memory,
    measure_naive,
)
from benchmarks.packed import measure_packed
from benchmarks.peers import IMPLEMENTATIONS
from benchmarks.plot import read_result
from benchmarks.report import markdown, write, write_json
from benchmarks.shapes import MODEL_WIDTH, TOKENS, square, training
from cuflash._cli.info import no_device
from cuflash._cli.problem_arguments import positive_number
from cuflash._errors import wrong_value
from cuflash._select import hardware
from cuflash._timing.clock import WITHIN_ROUNDS, DeviceClock
from cuflash._timing.machine import read_clocks
from cuflash.tuning._workload import (
    DTYPES,
    PASSES,
    Workload,
)

EXAMPLES = """\
examples:
  python -m cuflash bench                                     # what fits this machine
  python -m cuflash bench --set portable,short --impl cuflash,fa2,cudnn
  python -m cuflash bench --set training --pass bwd,fwd+bwd --impl cuflash,cuflash-unordered,fa4
  python -m cuflash bench --set host,compile --topic overhead --out results
  python -m cuflash bench --memory                            # read, write, L2, latency
  python -m cuflash bench --render results/overhead.json
"""


def measure_precisions(run: Run) -> None:
    """Time float32 and float64 with exact products, and float32 with one TF32 product."""
    kinds = (("float32", "ieee"), ("float32", "tf32"), ("float64", "ieee"))
    shapes = training((64, 128), (4096,))
    for dtype, precision in kinds:
        for work in shapes:
            for pass_ in run.passes:
                measure_cell(run, replace(work, dtype=dtype, precision=precision), pass_)


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
    "everyday": (
        "head sizes between tiles, shared heads, few tiles, short and odd lengths",
        measure_shapes([*itertools.chain.from_iterable(EVERYDAY.values())]),
    ),
    "bias": (
        "gradients of q, k, v and a bias that batch entries share, as in AlphaFold and T5",
        measure_bias_gradients,
    ),
    "precise": (
        "float32, that of TF32 and float64, head_dim 64 and 128, full and causal, seqlen 4096",
        measure_precisions,
    ),
    "packed": (
        "16 packed sequences of 65 to 4096 at head_dim 128, and dense calls, by executed tile",
        measure_packed,
    ),
    "decode": (
        "1 or 4 queries over 4096 to 131,072 keys, in order and in pages, beside a copy of 1 GiB",
        measure_decode,
    ),
    "window": (
        "window of 1024 at seqlen 16384, head_dim 64 and 128",
        measure_shapes(
            [
                replace(square(1, MODEL_WIDTH // d, TOKENS, d, causal=False), window=(1024, 0))
                for d in (64, 128)
            ]
        ),
    ),
    "host": ("host time of one call, batch 1, 8 heads, 128 x 128, head_dim 64", measure_host),
    "compile": ("fresh processes: import, cold first call, warm from disk", measure_first_calls),
    "options": (
        "each score option against none, batch 1, 16 heads, 4096 x 4096, head_dim 128",
        measure_options,
    ),
    "naive": ("factor and memory against unfused array operations", measure_naive),
    "memory": (
        "peak beside the inputs, head_dim 128, without a mask, seqlen 1024 to 16384",
        measure_memory,
    ),
    "cpu": (
        "batch 1, 8 heads, head_dim 64, seqlen 1024 and 2048, full and causal",
        measure_shapes(CPU_SHAPES),
    ),
}


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


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    sets = "\n".join(f"  {name:9} {text}" for name, (text, _) in SETS.items())
    p.description = __doc__.split("\n", maxsplit=1)[0]
    p.epilog = f"{EXAMPLES}\nsets:\n{sets}"
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    one = p.add_mutually_exclusive_group()
    one.add_argument(
        "--set", type=names_of(SETS), help="what to measure (default: portable, or cpu)"
    )
    one.add_argument("--memory", action="store_true", help="the device's memory, level by level")
    one.add_argument("--io", action="store_true", help="bytes of forwards, by the model and by ncu")
    one.add_argument(
        "--render", type=Path, metavar="JSON", help="print the tables of a result file"
    )
    p.add_argument("--topic", help="name of the result file (default: the names of the sets)")
    p.add_argument(
        "--dtype", type=names_of(DTYPES), help="default: bfloat16, or float32 on the CPU"
    )
    p.add_argument(
        "--pass",
        dest="passes",
        type=names_of(PASSES),
        default=["fwd", "bwd"],
        help=f"some of {', '.join(PASSES)} (default: fwd,bwd)",
    )
    p.add_argument(
        "--impl", type=names_of(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
        help=f"default: all of {', '.join(IMPLEMENTATIONS)} that can be imported",
    )  # fmt: skip
    p.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu where there is one")
    p.add_argument(
        "--portable", action="store_true", help="by the kernels of GPUs without tensor maps"
    )
    p.add_argument(
        "--budget-ms", type=positive_number, default=120.0,
        help=f"ms given to each implementation of a cell, within {WITHIN_ROUNDS} (default: 120)",
    )  # fmt: skip
    p.add_argument("--out", type=Path, help="folder of the result files (default: print only)")
    p.add_argument(
        "--json", action="store_true", help="print the result as JSON, remarks to stderr"
    )


def open_run(arguments: argparse.Namespace) -> Run:
    """Choose device, clock and the available implementations."""
    cupy = None if arguments.device == "cpu" else gpu_module()
    if cupy is None and arguments.device == "gpu":
        raise SystemExit(f"bench: {no_device()}; --device cpu measures NumPy arrays")
    xp = cupy or np
    run = Run(
        xp=xp,
        clock=HostClock() if cupy is None else DeviceClock(),
        implementations=[],
        dtypes=arguments.dtype or ["float32" if cupy is None else "bfloat16"],
        passes=arguments.passes,
        budget_ms=arguments.budget_ms,
        progress=sys.stderr if arguments.json else None,
    )
    for name in arguments.impl:
        reason = IMPLEMENTATIONS[name].absent(xp)
        if reason:
            run.note(f"absent: {name}: {reason}")
        else:
            run.implementations.append(IMPLEMENTATIONS[name])
    return run


def measure_levels(arguments: argparse.Namespace) -> int:
    """Measure levels of memory, or bytes that forwards move."""
    if arguments.device == "cpu":
        raise wrong_value("--device", "cpu", "gpu, of which --memory and --io are")
    cupy = gpu_module()
    if cupy is None:
        raise RuntimeError(f"bench: {no_device()}")
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    meta = describe_machine(cupy, name, command_line())
    topic = arguments.topic or ("memory" if arguments.memory else "io")
    if arguments.memory:
        rows = [level._asdict() for level in memory.measure()]
    else:
        rows = io_grid.rows()
    result = {"meta": meta, "rows": rows, "notes": []}
    if arguments.out is not None:
        write_json(result, arguments.out, topic)
    print(json.dumps(result) if arguments.json else rendered(result), end="")
    return 0


def rendered(result: dict[str, Any]) -> str:
    """A result of any kind as text."""
    from benchmarks import accuracy, float8, points  # they import this module

    first = result["rows"][0] if result["rows"] else {}
    if "rotated" in first:
        return float8.markdown(result) + "\n"
    if "family" in first:
        return accuracy.markdown(result) + "\n"
    if "points" in first:
        return points.markdown(result)
    if "unit" in first:
        return memory.table([memory.Level(**row) for row in result["rows"]]) + "\n"
    if "loaded" in first:
        return io_grid.table(result["rows"]) + "\n"
    return markdown(result)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or print a result file."""
    if arguments.render:
        result = read_result(arguments.render)
        print(json.dumps(result) if arguments.json else rendered(result), end="")
        return 0
    if arguments.memory or arguments.io:
        return measure_levels(arguments)
    if not arguments.portable:
        return measure_sets(arguments)
    device = hardware.present() if gpu_module() else None
    if device is None:
        raise RuntimeError(f"bench: {no_device()}")
    with hardware.assumed(device._replace(tensor_maps=False)):
        return measure_sets(arguments)


def command_line() -> str:
    """The command that a result records."""
    return f"python -m cuflash {' '.join(sys.argv[1:])}"


def measure_sets(arguments: argparse.Namespace) -> int:
    """Measure sets of shapes, print the result, and write it to ``--out``."""
    run = open_run(arguments)
    sets = arguments.set or ["cpu" if run.xp is np else "portable"]
    meta = describe_machine(run.xp, run.clock.device_name, command_line())
    result = {"meta": meta, "rows": run.rows, "notes": run.notes, "memory": run.memory}
    topic = arguments.topic or "-".join(sets)
    for name in sets:
        SETS[name][1](run)
        if run.xp is not np:
            meta["clocks"] = read_clocks()
        if arguments.out is not None:
            write(result, arguments.out, topic)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(markdown(result), end="")
    return 0
