"""How do kernels get the gradients of bias, slopes, sink and scale? By sums, which are added up."""

from __future__ import annotations

import math
from typing import NamedTuple

import cupy
import numpy as np

from cuflash._arrays import Array
from cuflash._config import GradOf, SumsTo
from cuflash._grid import Layout
from cuflash._problem import Problem, canonical_view, gradient_operand

#: Inputs whose gradients are sums of the scores' gradient.
SUMMED: tuple[GradOf, ...] = ("bias", "alibi_slopes", "scale")


class ScoreSums(NamedTuple):
    """What a kernel writes for one gradient: float32 sums, C-contiguous."""

    sums_to: SumsTo
    shape: tuple[int, ...]  # batch with extent 1 where the input is broadcast, queries, keys
    summed: tuple[bool, ...]  # batch axes that the kernel adds up

    def layout(self) -> Layout:
        """Where the sums of a batch entry lie."""
        steps = [4 * math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        ndim = len(self.summed)
        batch = tuple(0 if own else s for s, own in zip(steps, self.summed, strict=False))
        row = steps[ndim] if self.sums_to != "keys" else 0
        return Layout(4, batch, row, 0 if self.sums_to == "queries" else steps[-1])

    def tiles(self, problem: Problem, block_m: int, block_n: int) -> int:
        """Tiles of one owner."""
        rows, columns = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // block_n)
        return {"pairs": rows * columns, "keys": columns, "queries": rows}[self.sums_to]


def score_sums(problem: Problem, name: str, shape: tuple[int, ...]) -> ScoreSums:
    """The sums for the gradient of an input of this ``shape``."""
    sums_to: SumsTo = "queries"
    summed = (True,) * len(problem.batch)
    if name != "scale":
        summed = getattr(problem, name).summed
    if name == "bias" and shape[-1] == problem.seqlen_k:
        sums_to = "pairs" if shape[-2] == problem.seqlen_q else "keys"
    kept = tuple(1 if own else n for n, own in zip(problem.batch, summed, strict=True))
    extents = {"pairs": (problem.seqlen_q, problem.seqlen_k), "keys": (problem.seqlen_k,),
               "queries": (problem.seqlen_q,)}[sums_to]  # fmt: skip
    return ScoreSums(sums_to, kept + extents, summed)


def write(problem: Problem, name: str, own: ScoreSums, sums: Array, gradient: Array) -> None:
    """Add up what is left to add, and write it as the gradient of the input ``name``."""
    if name == "scale":
        gradient[...] = sums.sum()
        return
    view = canonical_view(gradient, gradient_operand(problem, name, gradient), keep_summed=True)
    if own.sums_to == "queries" and (name != "bias" or view.shape[-2] == 1):
        sums = sums.sum(-1)
    view[...] = sums.reshape(view.shape)


def write_sink(problem: Problem, rows: Array, sink: Array, gradient: Array) -> None:
    """Write the gradient of the sink, from lse and delta of every query."""
    statistics = rows[: 8 * math.prod(problem.batch) * problem.seqlen_q].view(np.float32)
    lse, delta = cupy.moveaxis(statistics.reshape(*problem.batch, problem.seqlen_q, 2), -1, 0)
    if sink.dtype == np.float64:  # what is finite stays so
        limit = float(np.finfo(np.float32).max)
        sink = cupy.where(cupy.isinf(sink), sink, cupy.clip(sink, -limit, limit))
    operand = gradient_operand(problem, "sink", sink)
    score = canonical_view(sink, operand, keep_summed=True).astype(np.float32)
    full = -(cupy.exp(score[..., None] - lse) * delta).sum(-1)
    view = canonical_view(gradient, gradient_operand(problem, "sink", gradient), keep_summed=True)
    axes = tuple(i for i, own in enumerate(operand.summed) if own)
    view[...] = full.sum(axes, keepdims=True) if axes else full
