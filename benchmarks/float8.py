"""How far are results of 8-bit operands from exact ones, by how the operands were quantised?

    python benchmarks/float8.py --out benchmarks/results

No GPU: what the kernel does (``kernels_cu/forward_fp8_sm90.cu``) is emulated in NumPy. Exact is
dense attention in float64 of the numbers before they were quantised. A result file is
cpu-float8-<date>.json; tools/readme_tables.py makes tables of docs/accuracy.md from it, and
tools/draw_pictures.py a picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402
from benchmarks.report import grid, write_json  # noqa: E402
from benchmarks.sweep_pictures import LEVELS, Figure, new_figure  # noqa: E402
from cuflash import reference  # noqa: E402
from cuflash.testing import FAMILIES  # noqa: E402

Array = Any
E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)

# ----------------------------------------------------------------------------------- the kernel
BLOCK_N = 128
STEP = 32  # products that a tensor core sums at once
KEPT_BITS = 13  # behind the leading one of the largest of them
WEIGHT_EXPONENT, MOST_GROWTH = 8.0, 0.75  # as in kernels_cu/sm90/softmax.cuh
_CUT = 2.0**-KEPT_BITS
_SMALLEST = 2.0**-100  # sums below it are 0
_AT_ONCE = 1 << 19  # products


class Quantized(NamedTuple):
    """Matrices of 8 bits, and what they are multiplied by."""

    q: Array
    k: Array
    v: Array
    factors: tuple[Array, Array, Array]


def quantized(inputs: Sequence[Array], rotation: int | None) -> Quantized:
    """As `cuflash.quantize` does; v is not turned."""
    q, k = (cuflash.quantize(x, rotation=rotation) for x in inputs[:2])
    v = cuflash.quantize(inputs[2])
    return Quantized(q.array, k.array, v.array, (q.scale, k.scale, v.scale))


def cut_product(a: Array, b: Array, acc: Array | None = None) -> Array:
    """Products as a tensor core sums e4m3: acc + a . b, in float32.

    It aligns 32 products and the sum so far to the largest of them, and cuts each off.
    """
    a, b = (x.astype(np.float32) for x in (a, b.T))
    total = np.zeros((len(a), len(b)), np.float32) if acc is None else acc.copy()
    rows = max(_AT_ONCE // (STEP * len(b)), 1)
    for first in range(0, len(a), rows):
        own = slice(first, first + rows)
        for k in range(0, a.shape[1], STEP):
            products = a[own, None, k : k + STEP] * b[None, :, k : k + STEP]
            largest = np.maximum(abs(products).max(-1), abs(total[own]))
            least = np.maximum(largest, np.float32(_SMALLEST))
            unit = (least.view(np.uint32) & 0xFF800000).view(np.float32) * np.float32(_CUT)
            products *= (1 / unit)[..., None]
            kept = products.astype(np.int32).sum(-1) + (total[own] / unit).astype(np.int32)
            total[own] = kept * unit
            total[own].view(np.uint32)[...] &= 0xFFFFFC00
    return total


def emulated(
    q: Array,
    k: Array,
    v: Array,
    factors: Sequence[float],
    *,
    promotes: bool = True,
    weight_exponent: float = WEIGHT_EXPONENT,
    weights: Any = E4M3,
) -> tuple[Array, Array]:
    """``out`` in bfloat16 and ``lse`` of one head, without options.

    ``promotes``: the sum over a block is added in float32. Weights are rounded to ``weights``,
    2^``weight_exponent`` times as large.
    """  # fmt: skip
    unit = np.float32(np.log2(np.e) / np.sqrt(q.shape[-1]) * factors[0] * factors[1])
    reference_, total = np.full((2, len(q), 1), -np.inf, np.float32)
    total[:] = 0
    o = np.zeros((len(q), v.shape[-1]), np.float32)
    for first in reversed(range(0, len(k), BLOCK_N)):
        keys = slice(first, first + BLOCK_N)
        s = cut_product(q, k[keys].T) * unit
        largest = s.max(-1, keepdims=True)
        new = np.where(largest - reference_ > MOST_GROWTH, largest, reference_)
        rescale = np.exp2(reference_ - new)
        reference_ = new
        p = np.exp2(s - reference_ + np.float32(weight_exponent))
        total = total * rescale + p.sum(-1, keepdims=True)
        rounded = np.minimum(p, np.float32(ml_dtypes.finfo(weights).max)).astype(weights)
        o *= rescale
        o = o + cut_product(rounded, v[keys]) if promotes else cut_product(rounded, v[keys], o)
    lse = (reference_ - weight_exponent + np.log2(total)) * np.log(2)
    return (o * np.float32(factors[2]) / total).astype(BF16), lse[:, 0].astype(np.float32)


# ------------------------------------------------------------------------------------- measured
SEQLEN, HEAD_DIM, SEED = 1024, 64, 0
SHOWN = (
    "normal", "outliers", "uniform", "normal_times_3", "one_hot", "constant_rows",
    "sparse_integers", "lse_minus_120", "lse_plus_200",
)  # fmt: skip
DEQUANTISED = "dequantised to bfloat16"
KERNEL, ONE_LEVEL = "e4m3 kernel", "e4m3 kernel, sums in tensor cores"
#: Of a table: what attends, and whether q and k were turned before they were quantised.
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
    """Relative to the exact result by Frobenius norms, and the root mean square itself."""
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
    """Rows by what they are of."""
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
