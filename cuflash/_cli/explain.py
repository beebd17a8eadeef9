"""Which kernel runs for a call, why this one, and what bounds its time?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cuflash._cli import explained, from_checkout, io_model
from cuflash._cli.problem_arguments import add_problem, listed, positive, problem_of
from cuflash._errors import wrong_value
from cuflash._select import hardware
from cuflash.tuning._workload import Workload

SUMMARY = "which kernel and tiles run for a call, why, and what bounds them"
EXAMPLES = """\
examples:
  python -m cuflash explain --head-dim 128 --causal
  python -m cuflash explain --arrays bias,mask --arch sm_90a  # why not Hopper's kernel?
  python -m cuflash explain --seqlen 16384 --io               # bytes, predicted and, by ncu, moved
  python -m cuflash explain --causal --io --backward          # the same of the gradient's kernels
  python -m cuflash explain --seqlens 4096,1000,24 --causal   # packed sequences
  python -m cuflash explain --backward --json
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_problem(p)
    p.add_argument(
        "--seqlens", dest="packed", type=listed(positive), metavar="LENGTHS",
        help="of packed sequences, in place of --batch and --seqlen: attention_varlen",
    )  # fmt: skip
    p.add_argument("--arch", help="for devices of this architecture (default: the one here, sm_90)")
    p.add_argument("--backward", action="store_true", help="also the kernels of the gradient")
    p.add_argument(
        "--io", action="store_true",
        help="bytes by the IO model, of the forward, and with --backward of each kernel behind it",
    )  # fmt: skip
    p.add_argument("--no-compile", action="store_true", help="no registers: no NVRTC is needed")
    p.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Explain one call."""
    work = problem_of(arguments)
    if arguments.packed:
        total = sum(arguments.packed)
        lengths = tuple(arguments.packed)
        work = replace(work, batch=1, seqlen_q=total, seqlen_k=total, seqlens=lengths)
    if arguments.io and work.seqlens:
        got = f"{len(work.seqlens)} packed sequences with --io"
        raise wrong_value("--seqlens", got, "a batch: the IO model has no packed sequences")
    given: dict[str, Any] = {"arch": arguments.arch, "backward": arguments.backward}
    try:
        found = explained.explain(work, **given, compiled=not arguments.no_compile)
    except ImportError as error:
        print(f"cuflash: registers are unknown: {error}", file=sys.stderr)
        found = explained.explain(work, **given, compiled=False)
    if arguments.io:
        found |= _io(work, **given)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found)))
    return int(any("error" in own for own in found["kernels"]))


def _io(work: Workload, arch: str | None, *, backward: bool) -> dict[str, Any]:
    """What the IO model predicts, with what the counters of a device say where they can be read."""
    found = io_model.predicted(work, arch=arch, backward=backward)
    if arch is None and hardware.present() is not None:
        try:
            from_checkout.module("profiler").count(work, found)
        except (ImportError, RuntimeError) as reason:
            print(f"cuflash: not measured: {reason}", file=sys.stderr)
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['problem']}", f"for {found['device']} ({found['arch']})"]
    for own in found["kernels"]:
        gradient = f" ({own['gradient']})" if "gradient" in own else ""
        lines += ["", own["kernel"] + gradient]
        lines += [f"  {name:<15} {text}" for name, text in _rows(own, found["device"])]
    if "io" in found:
        arrays = found["workload"]["arrays"]
        without = f", as without {', '.join(arrays)}" if arrays else ""
        lines += ["", f"bytes of the forward (IO model{without})", *_io_lines(found["io"])]
        if "io_gradient" in found:
            lines += ["", f"MB of the gradient (IO model{without})"]
            lines += _gradient_lines(found["io_gradient"])
    return lines


def _rows(own: dict[str, Any], device: str) -> Iterator[tuple[str, str]]:
    """What is said of one kernel: name and text of each line."""
    if own["why"]:
        yield "why", own["why"]
    tile = ", ".join(f"{name} {value}" for name, value in own["tile"].items())
    yield "tile", tile or "fixed"
    if tile:
        yield "tile from", own["tile_from"]
    yield "shared memory", f"{own['smem_bytes'] / 1024:.1f} KiB a block"
    if "error" in own:
        yield "did not compile", own["error"]
    elif "registers" in own:
        registers = f"{own['registers']} a thread, {own['spill_bytes']} bytes spilled"
        threads = f"{own['blocks_per_multiprocessor']} x {own['num_threads']} threads"
        yield "registers", f"{registers}; {threads} an SM"
    else:
        yield "registers", "unknown: not compiled"
    if "tflop" in own:
        work = f"{own['tflop']:.4g} TFLOP on {own['once'] / 1e6:.4g} MB"
        yield "work", f"{work}: {own['intensity']:.4g} FLOP/byte"
    if "bound_ms" in own:
        yield "roofline", _bound(own, device)


def _bound(own: dict[str, Any], device: str) -> str:
    if own["bound_ms"] is None:
        return f"unknown: this library has no data sheet of {device}"
    others = [
        f"{ms:.4g} by {name}" for name, ms in own["least_ms"].items() if name != own["bound_by"]
    ]
    rate = f"{own['bound_tflops']:.4g} TFLOP/s"
    return f"{own['bound_ms']:.4g} ms at least, by {own['bound_by']} ({rate}); {', '.join(others)}"


def _io_lines(io: dict[str, Any]) -> list[str]:
    rows = [
        ("q, k and v once", io["read_once"], "the least that device memory is read"),
        ("loaded by tiles", io["loaded"], "q once, k and v once for each tile of queries"),
        ("stored", io["stored"], "out and lse"),
        ("unfused", io["unfused"], "device memory, with scores and weights as arrays"),
        ("N^2 d^2 / M", io["asymptotic"], "the theorem, without its constant"),
    ]
    for name, value in io.get("measured", {}).items():
        rows.append(
            (name, value, f"by ncu, {value / io[io_model.PREDICTED[name]]:.3f} of the model's")
        )
    return [_io_line(*row) for row in rows]


def _gradient_lines(io: dict[str, Any]) -> list[str]:
    """A row for each kernel and one for all; below it what was counted, and its share."""
    total, predicted = io["sum"], io_model.PREDICTED_OF_GRADIENT
    lines = [_table_row("", [field.replace("_", " ") for field in predicted.values()])]
    for row in (*io["kernels"], {"kernel": "all", **total}):
        cells = [f"{row[field] / 1e6:.2f}" for field in predicted.values()]
        lines.append(_table_row(row["kernel"], cells))
        if "measured" in row:
            shares = [(row["measured"][name], row[field]) for name, field in predicted.items()]
            cells = [f"{own / 1e6:.2f} ({own / model:.3f})" for own, model in shares]
            lines.append(_table_row("  by ncu (of the model's)", cells))
    rows = [
        ("unfused", total["unfused"], "device memory, with weights and their gradients as arrays"),
        ("N^2 d^2 / M", total["asymptotic"], "the theorem, of each pass, without its constant"),
    ]
    if total["added"]:
        text = "of what is stored: float32 additions to dq; L2 reads and writes as much"
        rows.insert(0, ("added", total["added"], text))
    return lines + [_io_line(*row) for row in rows]


def _io_line(name: str, size: float, text: str) -> str:
    return f"  {name:<20} {size / 1e6:12.2f} MB  {text}"


def _table_row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<25}" + "".join(f"{cell:>19}" for cell in cells)
