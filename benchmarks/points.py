"""How long does a logsumexp over points in space take, with a bias of keys, compared with KeOps?

    python benchmarks/points.py                            # 262,144 points of each, 4,096 on a CPU
    python benchmarks/points.py --points 65536 --dtype float64

A Sinkhorn step is a call of this kind (examples/optimal_transport.py): the scores are
scale * x.y + bias, and no matrix of scores is written. The error is the largest difference to
float64, over 64 rows. A result is benchmarks/results/<device>-points-<date>.json, with a table
beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks.command import names_of  # noqa: E402
from benchmarks.host_clock import HostClock  # noqa: E402
from benchmarks.machine import describe_machine, gpu_module  # noqa: E402
from benchmarks.overhead import peak_bytes  # noqa: E402
from cuflash._cli.problem_arguments import positive  # noqa: E402
from cuflash._timing.clock import DeviceClock  # noqa: E402

Array = Any
SCALE = 1.8
CHECKED_ROWS = 64


def clouds(xp: ModuleType, points: int, dtype: str) -> tuple[Array, Array, Array]:
    """Draw x and y (points, 3), bias (1, points)."""
    rng = np.random.default_rng(0)
    shapes = (points, 3), (points, 3), (1, points)
    x, y, bias = (xp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes)
    return x, y, bias


def error(x: Array, y: Array, bias: Array, found: Array) -> float:
    """The largest error in the first rows of a logsumexp."""
    wide = (a if isinstance(a, np.ndarray) else a.get() for a in (x[:CHECKED_ROWS], y, bias))
    rows, keys, added = (a.astype(np.float64) for a in wide)
    scores = SCALE * rows @ keys.T + added
    largest = scores.max(-1, keepdims=True)
    exact = (largest + np.log(np.exp(scores - largest).sum(-1, keepdims=True)))[:, 0]
    first = found[:CHECKED_ROWS]
    return float(np.abs((first if isinstance(first, np.ndarray) else first.get()) - exact).max())


def keops_call(xp: ModuleType, x: Array, y: Array, bias: Array) -> Callable[[], Array]:
    """The same computation by KeOps; on a GPU it reads the memory of CuPy's arrays."""
    if xp is np:
        import pykeops.numpy as keops

        rows, keys, added = x, y, bias
    else:
        import pykeops.torch as keops
        import torch

        rows, keys, added = (torch.from_dlpack(a) for a in (x, y, bias))
    x_i, y_j = keops.LazyTensor(rows[:, None, :]), keops.LazyTensor(keys[None, :, :])
    scores = (x_i | y_j) * SCALE + keops.LazyTensor(added[0][None, :, None])
    if xp is np:
        return lambda: scores.logsumexp(axis=1)[:, 0]
    return lambda: xp.from_dlpack(scores.logsumexp(dim=1)[:, 0])


def measure(
    xp: ModuleType, clock: Any, points: int, dtype: str, notes: list[str]
) -> list[dict[str, Any]]:
    """One row for each installed implementation; missing ones are added to ``notes``."""
    x, y, bias = clouds(xp, points, dtype)
    calls = {"cuflash": lambda: cuflash.logsumexp(x, y, scale=SCALE, bias=bias)}
    try:
        calls["keops"] = keops_call(xp, x, y, bias)
    except ImportError as absent:
        notes.append(f"absent: keops: {absent}")
    rows = []
    with clock.scope():
        found = clock.measure(calls, 500.0)
    for name, call in calls.items():
        result = call()
        held = None if xp is np else peak_bytes(call) - result.nbytes
        row = {"impl": name, "dtype": dtype, "points": points, "ms": found[name].ms}
        row |= {"error": error(x, y, bias, result), "extra_bytes": held}
        rows.append(row)
    return rows


def markdown(result: dict[str, Any]) -> str:
    """One table, between the head and the notes of any benchmark's result."""
    table = [("implementation", "dtype", "pairs", "ms", "error of lse", "memory beside the result")]
    for row in result["rows"]:
        held = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:.1f} MB"
        pairs = f"{row['points']:,} x {row['points']:,}"
        values = pairs, f"{row['ms']:.3g}", f"{row['error']:.1e}", held
        table.append((row["impl"], row["dtype"], *values))
    head, notes, rest = report.markdown(result | {"rows": []}).partition("\n## Notes")
    return "\n".join([head, *report.grid(*table), notes + rest])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--points", type=positive, help="of each cloud (default: 262144, on a CPU 4096)")
    p.add_argument("--dtype", type=names_of(("float32", "float64")), default=["float32"])
    p.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu where there is one")
    p.add_argument("--out", type=Path, help="folder of the result file (default: print only)")
    arguments = p.parse_args(argv)
    xp = (None if arguments.device == "cpu" else gpu_module()) or np
    if arguments.device == "gpu" and xp is np:
        raise SystemExit("points: no NVIDIA device can be used")
    clock = HostClock() if xp is np else DeviceClock()
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    meta = describe_machine(xp, clock.device_name, f"python benchmarks/points.py {shown}".strip())
    points = arguments.points or (4096 if xp is np else 262_144)
    notes: list[str] = []
    rows = [row for kind in arguments.dtype for row in measure(xp, clock, points, kind, notes)]
    result = {"meta": meta, "rows": rows, "notes": sorted(set(notes))}
    if arguments.out is not None:
        path = report.write_json(result, arguments.out, "points")
        path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
