"""Which kernel runs for a call, why this one, and what limits its time?"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cuflash._ahead import steps_of
from cuflash._cli import from_checkout, io_model
from cuflash._cli.problem_arguments import add_problem, listed, positive, problem_of
from cuflash._errors import wrong_value
from cuflash._kernels import wgmma
from cuflash._select import hardware as select_hardware
from cuflash._select import measured as select_measured
from cuflash._select.choose import LaunchStep, why_portable
from cuflash._select.hardware import Hardware
from cuflash.tuning._facts import Facts, compile_all
from cuflash.tuning._kernels import tile_of
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
#: Descriptions of the kernels without tiles.
_STEPS = {
    "segment_bounds": "the smallest and the largest of every 64 ids, to skip blocks",
    "backward_delta": "rowsum(dout * out), which the gradients' kernels read",
    "forward_combine": "combines the results of the parts of the keys",
    "backward_combine": "adds up dk and dv of parts of the queries",
    "backward_convert": "scales and rounds the sums of dq, which tiles of keys add to",
}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command."""
    add_problem(p)
    p.add_argument(
        "--seqlens", dest="packed", type=listed(positive), metavar="LENGTHS",
        help="lengths of packed sequences (attention_varlen), instead of --batch and --seqlen",
    )  # fmt: skip
    p.add_argument("--arch", help="for devices of this architecture (default: the one here, sm_90)")
    p.add_argument("--backward", action="store_true", help="also the kernels of the gradient")
    p.add_argument(
        "--io", action="store_true",
        help="bytes of the forward by the IO model, with --backward also of each gradient kernel",
    )  # fmt: skip
    p.add_argument(
        "--no-compile", action="store_true", help="leave out registers, which need NVRTC"
    )
    p.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Explain one call."""
    work = problem_of(arguments)
    if arguments.packed:
        lengths, total = tuple(arguments.packed), sum(arguments.packed)
        work = replace(work, batch=1, seqlen_q=total, seqlen_k=total, seqlens=lengths)
    if arguments.io and work.seqlens:
        got = f"{len(work.seqlens)} packed sequences with --io"
        raise wrong_value("--seqlens", got, "a batch, since the IO model has no packed sequences")
    given: dict[str, Any] = {"arch": arguments.arch, "backward": arguments.backward}
    try:
        found = explain(work, **given, compiled=not arguments.no_compile)
    except ImportError as error:
        print(f"cuflash: registers are unknown: {error}", file=sys.stderr)
        found = explain(work, **given, compiled=False)
    if arguments.io:
        found |= _io(work, **given)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found)))
    return int(any("error" in own for own in found["kernels"]))


def _io(work: Workload, arch: str | None, *, backward: bool) -> dict[str, Any]:
    """Predictions of the IO model, with the counters of the device if they can be read."""
    found = io_model.predicted(work, arch=arch, backward=backward)
    if arch is None and select_hardware.present() is not None:
        try:
            from_checkout.module("profiler").count(work, found)
        except (ImportError, RuntimeError) as reason:
            print(f"cuflash: not measured: {reason}", file=sys.stderr)
    return found


def explain(
    work: Workload, *, arch: str | None = None, backward: bool = False, compiled: bool = True
) -> dict[str, Any]:
    """Describe the kernels of one problem in values that JSON supports.

    ``compiled`` adds registers and occupancy, which need NVRTC.
    """
    hardware = select_hardware.wanted(arch)
    steps = steps_of(work, hardware, backward=backward)
    facts = compile_all([*steps], hardware) if compiled else {}
    words = [work.dtype] + ["tf32"] * (work.precision == "tf32")
    words += ["unordered"] * (not work.deterministic)
    return {
        "problem": " ".join((f"{work}", *words)),
        "workload": work.as_json(),
        "device": hardware.name,
        "arch": hardware.arch,
        "kernels": [
            _described(work, config, hardware, facts.get(config), step)
            for config, step in steps.items()
        ],
    }


def _described(
    work: Workload, config: Any, hardware: Hardware, facts: Facts | None, step: LaunchStep
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kernel": config.kernel,
        "why": _why(work, config, hardware, step),
        "tile": {},
        "num_threads": config.num_threads,
        "smem_bytes": config.smem_bytes,
    }
    if facts is not None:
        names = ("registers", "spill_bytes", "blocks_per_multiprocessor")
        found |= {name: getattr(facts, name) for name in names}
        found |= {"error": facts.error} if facts.error else {}
    if config.computes not in ("out", "dq", "dkv", "dqkv"):
        return found
    found["tile"] = tile_of(config) or {"block_m": config.block_m, "block_n": config.block_n}
    row = select_measured.row_behind(config, hardware.name)
    measured = None if row is None else row.measured or "a table in use"
    found["tile_from"] = measured or f"cuflash/_kernels/{config.kernel}.py"
    grads = io_model.grads_of(config)
    if len(grads) == 1:  # dk and dv are separate passes
        found["gradient"] = f"d{grads}"
    once = sum(io_model.least_bytes(work, config.kernel, grads)) + work.option_bytes()
    flops = work.kernel_flops(config.kernel, grads)
    found |= {"tflop": flops / 1e12, "once": once, "intensity": flops / once}
    return found | _roofline(work, config, flops, once, hardware.peak)


def _roofline(
    work: Workload, config: Any, flops: float, once: int, peak: select_hardware.Peak | None
) -> dict[str, Any]:
    """The least time by the data sheet, and what limits it; None without a data sheet.

    Each pass computes one exponential per query-key pair (in float64 by multiply-adds, which are
    not counted). Products on CUDA cores are not counted.
    """
    if peak is None:
        return dict.fromkeys(("bound_ms", "bound_by", "bound_tflops"))
    least_ms = {"device memory": once / peak.gbytes / 1e6}
    if not (config.simt or config.row_numbers):
        tflops, products = select_hardware.peak_products(peak, work.dtype, work.precision)
        least_ms[products] = flops / tflops / 1e9
    if work.dtype != "float64":
        pairs = work.batch * work.heads_q * work.visible_pairs()
        least_ms["exponentials"] = pairs / peak.texp2 / 1e9
    by, bound = max(least_ms.items(), key=operator.itemgetter(1))
    return {
        "bound_ms": bound,
        "bound_by": by,
        "bound_tflops": flops / bound / 1e9,
        "least_ms": least_ms,
    }


def _why(work: Workload, config: Any, hardware: Hardware, step: LaunchStep) -> str:
    if config.kernel in _STEPS:
        return _STEPS[config.kernel]
    problem = work.problem()
    if getattr(config, "split_keys", False):
        parts = f"few tiles of many keys: {step.splits} parts of the keys, one thread block each"
        return parts if config.leaves_parts else f"{parts}; a cluster combines them"
    shares = []
    if getattr(config, "split_queries", False):
        shares.append(f"{step.splits} parts of the queries, one thread block each")
    if step.dq_sums > 1 and config.computes == "dqkv":
        shares.append(f"{step.dq_sums} partial sums of dq, each over other keys")
    if shares:
        return f"few tiles: {', and '.join(shares)}"
    portable = why_portable(problem, hardware, config.computes)
    portable = portable or ("" if config.for_sm90 else wgmma.leaves_tiles_empty(problem))
    if not portable and config.kernel == "forward_sm80":
        portable = "few queries of many keys leave the tiles of Hopper's kernels mostly empty"
    if getattr(config, "simt", False):
        portable += (
            "; CUDA cores multiply: tensor cores are no faster here, or their tiles do not fit"
        )
    return portable or "Hopper's instructions support this problem"


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['problem']}", f"for {found['device']} ({found['arch']})"]
    for own in found["kernels"]:
        gradient = f" ({own['gradient']})" if "gradient" in own else ""
        lines += ["", own["kernel"] + gradient]
        lines += [f"  {name:<15} {text}" for name, text in _rows(own, found["device"])]
    if "io" in found:
        arrays = found["workload"]["arrays"]
        without = f", which ignores {', '.join(arrays)}" if arrays else ""
        lines += ["", f"bytes of the forward (IO model{without})", *_io_lines(found["io"])]
        if "io_gradient" in found:
            lines += ["", f"MB of the gradient (IO model{without})"]
            lines += _gradient_lines(found["io_gradient"])
    return lines


def _rows(own: dict[str, Any], device: str) -> Iterator[tuple[str, str]]:
    """Lines about one kernel, as pairs of name and text."""
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
        ("q, k and v once", io["read_once"], "the minimum that is read from device memory"),
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
    """A row for each kernel and one for all; below each the counters, relative to the model."""
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
        text = "the stored bytes that are float32 additions to dq; L2 reads and writes as many"
        rows.insert(0, ("added", total["added"], text))
    return lines + [_io_line(*row) for row in rows]


def _io_line(name: str, size: float, text: str) -> str:
    return f"  {name:<20} {size / 1e6:12.2f} MB  {text}"


def _table_row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<25}" + "".join(f"{cell:>19}" for cell in cells)
