"""How exact is float32 attention if its products are computed from narrower factors?

    python benchmarks/factors.py

Emulated in NumPy without a GPU: each factor is a sum of parts in a format of tensor cores, products
of two small parts are left out, and everything else is exact (float64). Prints the tables of
docs/accuracy.md: errors of out by kind of factor, and by computation of exponents (with one
multiply-add, with two, and exactly).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

SEQLEN, HEAD_DIM = 2048, 64
LEAST_HALF, NORMAL_HALF, MOST_HALF = 2.0**-24, 2.0**-14, 65504.0
FITTING = 15  # numbers below 2^15 fit into float16 even after rounding

Matrix = Any


@dataclass(frozen=True)
class Factors:
    """A factor that is the sum of ``parts`` numbers of ``bits`` significant bits."""

    name: str
    bits: int
    parts: int
    half: bool = False  # whether parts have the range of float16
    lift: float = 1.0  # part i is stored times lift**i
    scaled: bool = False  # whether rows are scaled by powers of 2 to fit the range

    def split(self, x: Matrix) -> list[Matrix]:
        """The parts in float64, the largest first."""
        rest, found = x.astype(np.float64), []
        for number in range(self.parts):
            scale = self.lift**number
            part = significant(rest * scale, self.bits)
            found.append((in_range_of_half(part) if self.half else part) / scale)
            rest = rest - found[-1]
        return found

    def fitted(self, x: Matrix) -> list[Matrix]:
        """The parts of a matrix, whose rows are scaled before and after if ``scaled``."""
        if not self.scaled:
            return self.split(x)
        _, exponents = np.frexp(abs(x.astype(np.float64)).max(axis=1, keepdims=True))
        rows = np.ldexp(1.0, FITTING - exponents)
        return [part / rows for part in self.split(x * rows)]

    def product(self, a: Matrix, b: Matrix) -> Matrix:
        """The product of two matrices, without products of two small parts."""
        left, right = self.fitted(a), [part.T for part in self.fitted(b.T)]
        pairs = [(i, j) for i in range(self.parts) for j in range(self.parts) if i + j < self.parts]
        return sum((left[i] @ right[j] for i, j in pairs), np.zeros((len(a), b.shape[1])))


FACTORS = (
    Factors("one TF32", 11, 1),
    Factors("two TF32", 11, 2),
    Factors("two bfloat16", 8, 2),
    Factors("three bfloat16", 8, 3),
    Factors("two float16", 11, 2, half=True),
    Factors("two float16, the lower times 2^11", 11, 2, half=True, lift=2.0**11),
    Factors("the same, rows scaled to fit", 11, 2, half=True, lift=2.0**11, scaled=True),
    Factors("float32", 24, 1),
)


def significant(x: Matrix, bits: int) -> Matrix:
    """Round to a number of significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def in_range_of_half(x: Matrix) -> Matrix:
    """Round to the range of float16, with fixed steps below its normal numbers."""
    steps = np.round(x / LEAST_HALF) * LEAST_HALF
    return np.clip(np.where(abs(x) < NORMAL_HALF, steps, x), -MOST_HALF, MOST_HALF)


def families() -> dict[str, tuple[Matrix, Matrix, Matrix]]:
    """q, k and v in float32."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((SEQLEN, HEAD_DIM)).astype(np.float32) for _ in range(3))
    scales = np.logspace(-4, 4, HEAD_DIM).astype(np.float32)
    units = np.exp2(np.linspace(-20, 20, HEAD_DIM).round()).astype(np.float32)
    three = np.float32(3)
    return {
        "normal": (q, k, v),
        "normal times 3": (three * q, three * k, v),
        "values from 1e-4 to 1e4 by column": (q, k, v * scales),
        "features of q from 1e-6 to 1e6, of k the other way": (q * units, k / units, v),
    }


def attention(q: Matrix, k: Matrix, v: Matrix, factors: Factors | None) -> Matrix:
    """Attention with products of these factors; exact if None."""
    multiplied = np.matmul if factors is None else factors.product
    wide = (a.astype(np.float64) for a in (q, k, v))
    q, k, v = wide if factors is None else (q, k, v)
    s = multiplied(q, k.T) / np.sqrt(HEAD_DIM)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return multiplied(p if factors is None else p.astype(np.float32), v) / p.sum(1, keepdims=True)


def errors_by_factors(q: Matrix, k: Matrix, v: Matrix) -> dict[str, tuple[float, float]]:
    """Relative error of out, and of its worst column, by kind of factor."""
    exact = attention(q, k, v, None)
    found = {}
    for factors in FACTORS:
        off = attention(q, k, v, factors) - exact
        columns = np.linalg.norm(off, axis=0) / np.linalg.norm(exact, axis=0)
        whole = np.linalg.norm(off) / np.linalg.norm(exact)
        found[factors.name] = float(whole), float(columns.max())
    return found


def errors_by_exponents(q: Matrix, k: Matrix, v: Matrix) -> dict[str, float]:
    """Relative error of out by computation of exponents, from scores that were rounded once."""
    factor = np.log2(np.e) / np.sqrt(HEAD_DIM)
    high = np.float32(factor)
    low = np.float32(factor - np.float64(high))
    wide = q.astype(np.float64) @ k.T.astype(np.float64)
    s = wide.astype(np.float32)
    top = s.max(axis=1, keepdims=True)
    reference = (top * high).astype(np.float64)
    once = (s * np.float64(high) - reference).astype(np.float32)
    exponents = {
        "one multiply-add": once,
        "two": (once + s * np.float64(low)).astype(np.float32),
        "exact": (s - top.astype(np.float64)) * factor,
        "exact, scores summed in float32": (q @ k.T).astype(np.float64) * factor,
    }
    out = of_exponents(wide * factor, v)
    return {
        name: float(np.linalg.norm(of_exponents(e, v) - out) / np.linalg.norm(out))
        for name, e in exponents.items()
    }


def of_exponents(exponents: Matrix, v: Matrix) -> Matrix:
    """The output from scores in units of log 2."""
    wide = exponents.astype(np.float64)
    p = np.exp2(wide - wide.max(axis=1, keepdims=True))
    return p @ v.astype(np.float64) / p.sum(axis=1, keepdims=True)


def main() -> int:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0]).parse_args()
    inputs = families()
    tables = {name: errors_by_factors(*arrays) for name, arrays in inputs.items()}
    print("out, and its worst column:", *tables, sep="\n  ")
    for factors in FACTORS:
        cells = (tables[name][factors.name] for name in tables)
        print(f"{factors.name:34}", *(f"{out:.1e} {column:.1e}  " for out, column in cells))
    q, k, v = inputs["normal"]
    for size in (1, 3, 30):
        times = np.float32(size)
        found = errors_by_exponents(times * q, times * k, v)
        print(f"exponents, q and k times {size}:", {n: f"{e:.1e}" for n, e in found.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
