"""How far are results of 8-bit operands from exact ones, for each way to quantise the operands?

    python benchmarks/float8.py --out benchmarks/results

Needs no GPU: the kernel is emulated (``tests/support/float8_kernel.py``). The exact result is dense
attention in float64 of the numbers before they were quantised. A result file is
cpu-float8-<date>.json; tools/readme_tables.py makes tables of docs/accuracy.md from it, and
tools/draw_pictures.py a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cuflash  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402
from benchmarks.report import grid, write_json  # noqa: E402
from benchmarks.sweep_pictures import LEVELS, Figure, new_figure  # noqa: E402
from cuflash import reference  # noqa: E402
from cuflash.testing import FAMILIES  # noqa: E402
from support.float8_kernel import BF16, emulated, quantized  # noqa: E402

Array = Any

SEQLEN, HEAD_DIM, SEED = 1024, 64, 0
SHOWN = (
    "normal", "outliers", "uniform", "normal_times_3", "one_hot", "constant_rows",
    "sparse_integers", "lse_minus_120", "lse_plus_200",
)  # fmt: skip
DEQUANTISED = "dequantised to bfloat16"
KERNEL, ONE_LEVEL = "e4m3 kernel", "e4m3 kernel, sums in tensor cores"
#: Columns of a table: the computation, and whether q and k were rotated before quantisation.
METHODS = {
    "bfloat16": ("bfloat16", False),
    DEQUANTISED: (DEQUANTISED, False),
    "the same, rotated": (DEQUANTISED, True),
    KERNEL: (KERNEL, False),
    "e4m3 kernel, rotated": (KERNEL, True),
    ONE_LEVEL: (ONE_LEVEL, False),
}
SEQLENS_OF_OUTLIERS, SEQLENS_OF_SUMS = (512, 1024, 2048, 4096), (256, 1024, 4096, 8192)


def attended(how: str, inputs: Sequence[Array], turned: bool) -> Array:
    """``out`` of one head."""
    if how == "bfloat16":
        return cuflash.attention(*(x.astype(BF16) for x in inputs))
    q, k, v, scales = quantized(inputs, SEED if turned else None)
    if how == DEQUANTISED:
        names = ("q_scale", "k_scale", "v_scale")
        return cuflash.attention(q, k, v, **dict(zip(names, scales, strict=True)))
    factors = [float(scale.item()) for scale in scales]
    return emulated(q, k, v, factors, promotes=how != ONE_LEVEL)[0]


def errors(found: Array, exact: Array) -> dict[str, float]:
    """The relative error by Frobenius norms, and the root mean square of the error."""
    off = found.astype(np.float64) - exact
    relative = np.linalg.norm(off) / np.linalg.norm(exact)
    return {"out": float(relative), "rmse": float(np.sqrt((off**2).mean()))}


def inputs_of(family: str, rows: int, seqlen: int, head_dim: int) -> list[Array]:
    """q, k and v of a family."""
    rng = np.random.default_rng(SEED)
    return list(FAMILIES[family](rng, (rows, head_dim), (seqlen, head_dim), (seqlen, head_dim)))


def measured() -> list[dict[str, Any]]:
    """Rows of a result."""
    rows = []

    def add(sweep: str, family: str, inputs: list[Array], how: str, rotated: bool) -> None:
        found = errors(attended(how, inputs, rotated), reference.attention(*inputs))
        seqlen, head_dim = inputs[1].shape
        cell = {"sweep": sweep, "family": family, "seqlen": seqlen, "head_dim": head_dim}
        rows.append({**cell, "how": how, "rotated": rotated, **found})
        print(rows[-1], flush=True)

    for family in SHOWN:
        inputs = inputs_of(family, SEQLEN, SEQLEN, HEAD_DIM)
        for how, rotated in METHODS.values():
            add("family", family, inputs, how, rotated)
    for seqlen in SEQLENS_OF_OUTLIERS:
        inputs = inputs_of("outliers", seqlen, seqlen, 2 * HEAD_DIM)
        for rotated in (False, True):
            add("outliers", "outliers", inputs, DEQUANTISED, rotated)
    for family in ("normal", "uniform"):
        for seqlen in SEQLENS_OF_SUMS:
            inputs = inputs_of(family, HEAD_DIM, seqlen, HEAD_DIM)
            for how in (KERNEL, ONE_LEVEL):
                add("sums", family, inputs, how, False)
    return rows


def by_cell(result: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by cell."""
    names = ("sweep", "family", "seqlen", "how", "rotated")
    return {tuple(row[name] for name in names): row for row in result["rows"]}


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    by = by_cell(result)
    families = [
        [family.replace("_", " "), *(
            f"{by['family', family, SEQLEN, *method]['out']:.1e}" for method in METHODS.values()
        )]
        for family in SHOWN
    ]  # fmt: skip
    of_outliers = []
    for seqlen in SEQLENS_OF_OUTLIERS:
        plain, turned = (
            by["outliers", "outliers", seqlen, DEQUANTISED, rotated]["rmse"]
            for rotated in (False, True)
        )
        of_outliers.append([str(seqlen), f"{plain:.1e}", f"{turned:.1e}", f"{plain / turned:.2f}"])
    sums = [
        [f"{family}, {how}", *(
            f"{by['sums', family, n, how, False]['out']:.1e}" for n in SEQLENS_OF_SUMS
        )]
        for family in ("normal", "uniform") for how in (KERNEL, ONE_LEVEL)
    ]  # fmt: skip
    head = ["outliers, keys", "as they are", "rotated", "factor"]
    return "\n".join(
        [
            f"Emulated in NumPy, {result['meta']['date']}.", "",
            *grid(["inputs", *METHODS], *families), "",
            *grid(head, *of_outliers), "",
            *grid(["inputs, sums", *(f"{n} keys" for n in SEQLENS_OF_SUMS)], *sums),
        ]
    )  # fmt: skip


def picture(result: dict[str, Any], families: Sequence[str] = SHOWN[:5]) -> Figure:
    """Draw errors by method, a colour for each family of inputs."""
    by = by_cell(result)
    figure = new_figure(7.2, 3.6)
    axes = figure.add_subplot()
    places = range(len(METHODS))
    for family, colour in zip(families, LEVELS, strict=False):
        found = [by["family", family, SEQLEN, *method]["out"] for method in METHODS.values()]
        axes.plot(found, places, "o", color=colour, label=family.replace("_", " "))
    axes.set_yticks(places, METHODS)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"relative error of out, {SEQLEN} keys, head size {HEAD_DIM}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(families), fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="folder of the result file")
    arguments = parser.parse_args(argv)
    meta = describe_machine(np, "cpu", "python benchmarks/float8.py")
    result = {"meta": meta, "rows": measured(), "notes": []}
    if arguments.out is not None:
        write_json(result, arguments.out, "float8")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
