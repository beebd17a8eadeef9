"""How far is each implementation from the exact result, by dtype and by kind of input?

    python benchmarks/accuracy.py                                  # defaults for this machine
    python benchmarks/accuracy.py --dtype bfloat16 --impl cuflash,fa2,cudnn
    python benchmarks/accuracy.py --widths --impl cuflash,naive,eff  # float32 by head size
    python benchmarks/accuracy.py --draw RESULT.json... --picture docs/accuracy.png

The error of out or of a gradient is the Frobenius norm of the difference to the exact result,
divided by the norm of the exact result. The exact result is dense attention of the same rounded
inputs in float64, or in 80-bit long double for float64. A result file is
<device>-accuracy-<date>.json; tools/readme_tables.py makes tables of docs/accuracy.md from it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.cells import Run, free_memory  # noqa: E402
from benchmarks.command import names_of, open_run  # noqa: E402
from benchmarks.machine import describe_machine, short_commit  # noqa: E402
from benchmarks.peers import IMPLEMENTATIONS, Array, Unsupported  # noqa: E402
from benchmarks.pictures import COLOURS, NAMES  # noqa: E402
from benchmarks.report import first_line, grid, write_json  # noqa: E402
from benchmarks.shapes import square  # noqa: E402
from cuflash.testing import _families as families  # noqa: E402
from cuflash.tuning._workload import DTYPES, PASSES, PRECISIONS, Workload  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TENSORS = ("out", "dq", "dk", "dv")
NOT_FINITE = "not finite"
VANISHES = "vanishes"  # the exact result is smaller than one rounding of the terms it sums
LONG_DOUBLE_SEQLEN = 512  # longest; long double has no BLAS


def values_plus_100(rng: np.random.Generator, q: Any, k: Any, v: Any) -> families.Inputs:
    """Values with a large mean: dout v^T minus its mean loses seven bits."""
    return rng.standard_normal(q), rng.standard_normal(k), 100 + rng.standard_normal(v)


#: Families of inputs, in the order of the tables.
FAMILIES: dict[str, Callable[..., families.Inputs]] = {
    **{
        name: families.FAMILIES[name]
        for name in (
            "normal", "uniform", "normal_times_3", "one_hot", "constant_rows", "sparse_integers",
            *families.SHIFTS, *families.ONE_SIGN,
        )
    },
    "values_plus_100": values_plus_100,
}  # fmt: skip
SEQLENS = (128, 256, 512, 1024, 2048, 4096, 8192)
SCALES_OF_LOGITS = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
HEAD_DIMS, SEQLEN_OF_HEAD_DIMS = (64, 128), 2048
WIDTHS, SEQLEN_OF_WIDTHS = (32, 64, 96, 128, 192, 256), 512
#: Number of heads in "width" cells. Near 100 all rows of a head attend to the same one or two keys,
#: so a head is one sample: errors of two heads are 0.1 to 4 times the bar of docs/accuracy.md.
HEADS_OF_WIDTHS = {"one_sign_near_100": 64}


def precisions(dtype: str) -> tuple[str, ...]:
    """The precisions in which products of a dtype can be computed."""
    return PRECISIONS if dtype == "float32" else PRECISIONS[:1]


@dataclass(frozen=True)
class Cell:
    """One kind of input: a family, or normal inputs with logits of a given standard deviation."""

    sweep: str  # "family", "seqlen", "logits", "head_dim" or "width"
    family: str
    seqlen: int
    logits: float
    head_dim: int

    @property
    def heads(self) -> int:
        """Number of heads."""
        return HEADS_OF_WIDTHS.get(self.family, 2) if self.sweep == "width" else 2

    def inputs(self, xp: ModuleType, work: Workload) -> tuple[Array, ...]:
        """q, k, v and dout, (batch, heads, seqlen, head_dim), rounded to the dtype."""
        rng = np.random.default_rng(0)
        shape = (work.batch, work.heads_q, self.seqlen, self.head_dim)
        q, k, v = FAMILIES[self.family](rng, shape, shape, shape)
        dout = families.make_dout(self.family, rng, np.float64, shape)
        arrays = (q * self.logits, k, v, dout)
        return tuple(xp.asarray(a.astype(DTYPES[work.dtype])) for a in arrays)


def cells(longest: int, head_dim: int) -> Iterator[Cell]:
    """Every cell up to a seqlen; ``head_dim`` is for sweeps that do not vary it."""
    for family in FAMILIES:
        yield Cell("family", family, min(1024, longest), 1.0, head_dim)
    for seqlen in SEQLENS:
        if seqlen <= longest:
            yield Cell("seqlen", "normal", seqlen, 1.0, head_dim)
    for logits in SCALES_OF_LOGITS:
        yield Cell("logits", "normal", min(1024, longest), logits, head_dim)
    for width in HEAD_DIMS:
        yield Cell("head_dim", "normal", min(SEQLEN_OF_HEAD_DIMS, longest), 1.0, width)


def cells_of_widths(longest: int) -> Iterator[Cell]:
    """Every family at every head size."""
    for width in WIDTHS:
        for family in FAMILIES:
            yield Cell("width", family, min(SEQLEN_OF_WIDTHS, longest), 1.0, width)


@dataclass(frozen=True)
class Exact:
    """Exact results, and the size of the terms of their sums: terms may cancel."""

    values: dict[str, Array]
    summed: dict[str, float]  # Frobenius norms of the sums of absolute values


def exact(q: Array, k: Array, v: Array, dout: Array) -> Exact:
    """Dense attention and its gradient in a format with at least ten more bits."""
    wide: Any = np.float64
    if q.dtype == np.float64:
        q, k, v, dout = (a if isinstance(a, np.ndarray) else a.get() for a in (q, k, v, dout))
        wide = np.longdouble
    q, k, v, dout = (a.astype(wide) for a in (q, k, v, dout))
    scale = 1 / np.sqrt(wide(q.shape[-1]))
    p = q @ transposed(k)
    p *= scale
    p -= p.max(axis=-1, keepdims=True)
    p = np.exp(p)
    p /= p.sum(axis=-1, keepdims=True)
    out = p @ v
    dp = dout @ transposed(v)
    delta = (dout * out).sum(axis=-1, keepdims=True)
    ds = scale * p * (dp - delta)
    values = {"out": out, "dq": ds @ k, "dk": transposed(ds) @ q, "dv": transposed(p) @ dout}
    ds = scale * p * (abs(dp) + abs(delta))
    summed = {
        "out": p @ abs(v), "dq": ds @ abs(k), "dk": transposed(ds) @ abs(q),
        "dv": transposed(p) @ abs(dout),
    }  # fmt: skip
    return Exact(values, {name: norm(array) for name, array in summed.items()})


def transposed(matrix: Array) -> Array:
    """Swap the last two axes."""
    return matrix.swapaxes(-1, -2)


def norm(array: Array) -> float:
    """Frobenius norm."""
    return float(np.sqrt((array**2).sum()))


def relative_error(found: Array, wanted: Exact, name: str, dtype: str) -> float | str:
    """Norm of the difference divided by that of the exact result, or the reason for none."""
    values = wanted.values[name]
    if norm(values) <= float(ml_dtypes.finfo(dtype).eps) * wanted.summed[name]:
        return VANISHES
    if isinstance(values, np.ndarray) and not isinstance(found, np.ndarray):
        found = found.get()
    error = norm(found.astype(values.dtype) - values) / norm(values)
    return error if math.isfinite(error) else NOT_FINITE


def unit_error(wanted: Exact, name: str) -> float:
    """The relative error if every element is off by one float32 unit of the largest element."""
    values = wanted.values[name]
    unit = float(np.spacing(np.float32(float(abs(values).max()))))
    return unit * math.sqrt(values.size) / norm(values)


def measure(run: Run, work: Workload, cell: Cell) -> None:
    """Add a row for each implementation that supports the cell."""
    inputs = cell.inputs(run.xp, work)
    wanted = exact(*inputs)
    for implementation in run.implementations:
        arithmetic = shown_arithmetic(work.dtype, work.precision)
        size = f"{cell.seqlen} d{cell.head_dim}"
        label = f"{implementation.name} {arithmetic} {cell.family} {size}"
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found = implementation.results(work, *inputs)
        except (Unsupported, NotImplementedError) as reason:
            run.note(f"{implementation.name} {arithmetic}: {reason}")
            continue
        except Exception as error:
            run.note(f"{label}: {type(error).__name__}: {first_line(error)}")
            continue
        errors = {n: relative_error(found[n], wanted, n, work.dtype) for n in TENSORS}
        run.rows.append(
            {
                "impl": implementation.name,
                "dtype": work.dtype,
                "precision": work.precision,
                "sweep": cell.sweep,
                "family": cell.family,
                "seqlen": cell.seqlen,
                "head_dim": cell.head_dim,
                "logits": cell.logits,
                **errors,
            }
        )
        if cell.sweep == "width":
            run.rows[-1]["unit"] = {name: unit_error(wanted, name) for name in TENSORS}
        shown = " ".join(f"{name} {largest(errors, [name])}" for name in TENSORS)
        print(f"{label:46} {cell.logits:6g}  {shown}", flush=True)


# --- tables and pictures -------------------------------------------------------------------------

ARITHMETIC = tuple((dtype, p) for dtype in DTYPES for p in precisions(dtype))


def shown_arithmetic(dtype: str, precision: str) -> str:
    """The name of an arithmetic in titles."""
    return dtype if precision == "ieee" else f"{dtype} by TF32"


def computed_in(rows: Sequence[dict[str, Any]], dtype: str, precision: str) -> list[dict[str, Any]]:
    """Rows with one dtype and precision."""
    return [row for row in rows if (row["dtype"], row["precision"]) == (dtype, precision)]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One Markdown table: a row for each family and each measured head size.

    The columns are errors of out, then the largest error of the gradients, by implementation.
    """
    kinds: dict[str, dict[str, dict[str, Any]]] = {family: {} for family in FAMILIES}
    for row in rows:
        if row["sweep"] == "family":
            kinds[row["family"]][row["impl"]] = row
        elif row["sweep"] in ("head_dim", "width"):
            kind = f"{row['family']}, seqlen {row['seqlen']}, head size {row['head_dim']}"
            kinds.setdefault(kind, {})[row["impl"]] = row
    names = [name for name in IMPLEMENTATIONS if any(name in found for found in kinds.values())]
    of = [(name, tensors) for tensors in (TENSORS[:1], TENSORS[1:]) for name in names]
    header = ["inputs", *(f"{name} {'gradients' if len(t) > 1 else 'out'}" for name, t in of)]
    return grid(
        header,
        *(
            [kind.replace("_", " "), *(largest(found.get(name), tensors) for name, tensors in of)]
            for kind, found in kinds.items()
            if found
        ),
    )


def largest(row: dict[str, Any] | None, tensors: Sequence[str]) -> str:
    """The largest of some errors, as text for a table."""
    if row is None:
        return ""
    errors = [row[name] for name in tensors if row[name] != VANISHES]
    if NOT_FINITE in errors:
        return NOT_FINITE
    return f"{max(errors):.1e}" if errors else VANISHES


def markdown(result: dict[str, Any]) -> str:
    """Tables of a result by dtype and precision."""
    meta = result["meta"]
    names = ", ".join(f"{key} {meta[key]}" for key in ("driver", "cupy", "nvrtc") if meta[key])
    lines = [
        f"{meta['device']}, {meta['date']}; {names or 'NumPy'}; {short_commit(meta['commit'])}."
    ]
    for arithmetic in ARITHMETIC:
        if rows := computed_in(result["rows"], *arithmetic):
            lines += ["", f"**{shown_arithmetic(*arithmetic)}**", "", *table(rows)]
    return "\n".join(lines)


#: The rows of panels of the picture.
DRAWN = ("float16", "bfloat16", "float32", "float64")


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw errors of out and dq against the size of logits, a row of panels for each dtype.

    If several results have a dtype, the first is drawn.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(DRAWN), 2, figsize=(7, 10), sharey="row", sharex=True, layout="constrained"
    )
    drawn = {}
    for line, dtype in zip(axes, DRAWN, strict=True):
        rows = next(
            (own for result in results if (own := _by_logits(result["rows"], dtype))), []
        )  # fmt: skip
        for axis, tensor in zip(line, ("out", "dq"), strict=True):
            for precision in ("ieee", "tf32"):
                for name in IMPLEMENTATIONS:
                    points = sorted(
                        (row["logits"], row[tensor]) for row in computed_in(rows, dtype, precision)
                        if row["impl"] == name and not isinstance(row[tensor], str)
                    )  # fmt: skip
                    if points:
                        label = name if precision == "ieee" else f"{name}, TF32"
                        width = 4 if label == "cuflash" else 1.6  # other lines show on top of it
                        style = "--" if precision == "tf32" else "-"
                        (drawn[label],) = axis.loglog(
                            *zip(*points, strict=True), style, color=COLOURS[name], linewidth=width
                        )
            axis.set_title(f"{tensor}, {dtype}", fontsize=11)
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("relative error")
    for axis in axes[-1]:
        axis.set_xlabel("standard deviation of logits")
    names = [NAMES.get(name, name) for name in drawn]
    figure.legend(drawn.values(), names, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _by_logits(rows: Sequence[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["sweep"], row["dtype"]) == ("logits", dtype)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--dtype", type=names_of(DTYPES), default=list(DTYPES))
    p.add_argument("--impl", type=names_of(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    p.add_argument("--device", choices=("gpu", "cpu"), help="default: gpu where there is one")
    p.add_argument("--head-dim", dest="width", type=int, default=64)
    p.add_argument(
        "--widths", action="store_true", help="float32: every family by head size, nothing else"
    )
    p.add_argument("--longest", type=int, help="seqlen (default: 8192, on a CPU 512)")
    p.add_argument("--out", type=Path, help="folder of the result file (default: print only)")
    p.add_argument("--draw", type=Path, metavar="JSON", nargs="+", help="draw result files")
    p.add_argument("--picture", type=Path, help="where --draw writes")
    p.set_defaults(passes=list(PASSES), budget_ms=0.0, json=False)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = parser().parse_args(argv)
    if arguments.draw:
        draw([json.loads(path.read_text()) for path in arguments.draw], arguments.picture)
        return 0
    run = open_run(arguments)
    on_gpu = run.xp is not np
    shown = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python benchmarks/accuracy.py {shown}".strip()
    meta = describe_machine(run.xp, run.clock.device_name, command)
    longest = arguments.longest or (SEQLENS[-1] if on_gpu else LONG_DOUBLE_SEQLEN)
    arithmetic = [(d, p) for d in arguments.dtype for p in precisions(d)]
    for dtype, precision in [("float32", "ieee")] if arguments.widths else arithmetic:
        limit = min(longest, LONG_DOUBLE_SEQLEN) if dtype == "float64" else longest
        if precision == "tf32" and not on_gpu:
            continue
        kinds = cells_of_widths(limit) if arguments.widths else cells(limit, arguments.width)
        for cell in kinds:
            shape = square(1, cell.heads, cell.seqlen, cell.head_dim, causal=False)
            work = replace(shape, dtype=dtype, precision=precision)
            with run.clock.scope():
                measure(run, work, cell)
            free_memory(run.xp)
    result = {"meta": meta, "rows": run.rows, "notes": run.notes}
    if arguments.out is not None:
        write_json(result, arguments.out, "widths" if arguments.widths else "accuracy")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
