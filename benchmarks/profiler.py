"""Count the bytes that kernels move, with NVIDIA's profiler ncu.

ncu runs this module as a program, which makes one call of each problem.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuflash.tuning._workload import Workload

#: Metric of ncu for each row that is reported.
METRICS = {
    "device memory read": "dram__bytes_read.sum",
    "device memory write": "dram__bytes_write.sum",
    "L2 to processors": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "processors to L2": "l1tex__m_l1tex2xbar_write_bytes.sum",
}
_TIME_LIMIT = 120.0
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


class NotProfiled(RuntimeError):
    """There is no profiler, or it cannot count here; the text says which."""


def count(work: Workload, found: dict[str, Any]) -> None:
    """Add the device's counters to the predictions of ``io_model.predicted``.

    Raises NotProfiled. The kernels of the gradient are counted one by one, and summed.
    """
    (found["io"]["measured"],) = moved_bytes([(work, None)])
    if "io_gradient" not in found:
        return
    own = found["io_gradient"]
    counted = gradient_bytes(work, [row["kernel"] for row in own["kernels"]])
    for row, counters in zip(own["kernels"], counted, strict=True):
        row["measured"] = counters
    own["sum"]["measured"] = {name: sum(c[name] for c in counted) for name in METRICS}


def moved_bytes(calls: Sequence[tuple[Workload, dict[str, int] | None]]) -> list[dict[str, float]]:
    """Bytes that each forward call moves, by the counters of the device.

    A call is a problem and a tile, or None for the default tile. Caches are emptied before each
    call.
    """
    found = _counted(calls, "cuflash_forward")
    if len(found) != len(calls):
        raise NotProfiled(f"ncu counted {len(found)} kernels of {len(calls)}")
    return [counters for _, counters in found]


def gradient_bytes(work: Workload, kernels: Sequence[str]) -> list[dict[str, float]]:
    """Bytes that each kernel of one gradient moves; ``kernels`` are the names in launch order.

    Caches are emptied before each kernel, so that it finds nothing of the kernel before in L2.
    """
    found = _counted([(work, None)], "cuflash_backward", "--backward")
    counted = [name.removeprefix("cuflash_") for name, _ in found]
    if counted != list(kernels):
        raise NotProfiled(
            f"ncu counted {', '.join(counted) or 'no kernel'}, expected {', '.join(kernels)}"
        )
    return [counters for _, counters in found]


def _counted(
    calls: Sequence[tuple[Workload, dict[str, int] | None]], kernels: str, *words: str
) -> list[tuple[str, dict[str, float]]]:
    """Names and counters of the kernels that match, in order of launch."""
    program = shutil.which("ncu")
    if program is None:
        raise NotProfiled("ncu is not on the PATH (Nsight Compute, part of the CUDA toolkit)")
    checkout = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((checkout, *sys.path))}
    command = [
        program, "--csv", "--page", "raw", "--kernel-name", f"regex:{kernels}",
        "--metrics", ",".join(METRICS.values()),
        sys.executable, "-m", "benchmarks.profiler", *words,
    ]  # fmt: skip
    given = json.dumps([[work.as_json(), tile] for work, tile in calls])
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, env=environment,
            timeout=_TIME_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotProfiled(f"ncu took longer than {_TIME_LIMIT:g} s") from None
    return read_counters(done.stdout)


def read_counters(text: str) -> list[tuple[str, dict[str, float]]]:
    """Parse ncu's table (names, units, a row for each kernel) into pairs of name and counters."""
    lines = text.splitlines()
    table = list(itertools.dropwhile(lambda line: not line.startswith('"ID"'), lines))
    if len(table) < 3:
        said = [line for line in lines if "==ERROR==" in line] or lines[-1:] or ["nothing"]
        raise NotProfiled(f"ncu says: {said[0].removeprefix('==ERROR== ')}")
    units, *rows = csv.DictReader(table)
    for metric in METRICS.values():
        if metric not in units:
            raise NotProfiled(f"ncu does not know {metric} of this device")
    found = []
    for row in rows:
        if None in row.values():  # a remark below the table
            continue
        counters = {
            label: float(row[metric].replace(",", "")) * _UNITS[units[metric]]
            for label, metric in METRICS.items()
        }
        found.append((row.get("Kernel Name", "").partition("(")[0], counters))  # types may follow
    return found


def run_calls(*, backward: bool) -> None:
    """Run calls from standard input: a list of pairs of a problem's fields and a tile or null.

    With ``backward``, each forward is followed by its gradient.
    """
    import cupy

    import cuflash
    from cuflash import tuning
    from cuflash.tuning._kernels import with_tile

    for given, tile in json.load(sys.stdin):
        work = Workload.from_json(given)
        ((q, k, v, dout),) = work.inputs(cupy)
        common: dict[str, Any] = {
            "options": cuflash.Options(**work.score_options(cupy)),
            "precision": "tf32" if work.precision == "tf32" else None,
            "deterministic": work.deterministic,
        }
        config = None
        if tile is not None:
            kernel = "forward_sm80" if "num_warps" in tile else None
            config = with_tile(tuning.space(work, kernel).default, tile)
        out, lse = cuflash.attention(q, k, v, return_lse=True, config=config, **common)
        if backward:
            cuflash.attention_backward(dout, q, k, v, out, lse, **common)
        cupy.cuda.Device().synchronize()
        del q, k, v, dout, out, lse
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    run_calls(backward="--backward" in sys.argv[1:])
