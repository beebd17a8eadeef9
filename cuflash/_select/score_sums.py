"""Which sums does a kernel write for the gradient of bias, slopes or scale?"""

from __future__ import annotations

import math
from typing import NamedTuple

from cuflash._kernels.backward_dscore_sm80 import GradOf, SumsTo
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.problem import Problem

#: Inputs whose gradients are sums of the scores' gradient.
SUMMED: tuple[GradOf, ...] = ("bias", "alibi_slopes", "scale")


class ScoreSums(NamedTuple):
    """What a kernel writes for one gradient: sums in the dtype of lse, C-contiguous.

    Their axes are sequences, where they are packed and have a bias, batch, queries, keys; with
    extent 1 where the input is broadcast.
    """

    sums_to: SumsTo
    shape: tuple[int, ...]
    summed: tuple[bool, ...]  # batch axes that the kernel adds up
    sequences: int  # with sums of their own; 0: no such axis
    itemsize: int

    def layout(self) -> Layout:
        """Where the sums of a batch entry lie."""
        steps = [self.itemsize * math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        sequence = steps.pop(0) if self.sequences else 0
        batch = tuple(0 if own else s for s, own in zip(steps, self.summed, strict=False))
        row = steps[len(batch)] if self.sums_to != "keys" else 0
        column = 0 if self.sums_to == "queries" else steps[-1]
        return Layout(self.itemsize, batch, row, column, sequence if self.sequences > 1 else 0)

    def tiles(self, problem: Problem, block_m: int, block_n: int) -> int:
        """Tiles of one owner."""
        if problem.cu_seqlens_q is not None and not self.sequences:  # of packed rows
            return problem.seqlen_q // block_m + problem.cu_seqlens_q.shape[0] - 1
        rows, columns = _extents(problem)
        tiles_m, tiles_n = -(-rows // block_m), -(-columns // block_n)
        own = {"pairs": tiles_m * tiles_n, "keys": tiles_n, "queries": tiles_m}[self.sums_to]
        return own * max(self.sequences, 1)


def score_sums(problem: Problem, name: GradOf, shape: tuple[int, ...]) -> ScoreSums:
    """The sums for the gradient of an input of this ``shape``."""
    packed, itemsize = problem.cu_seqlens_q is not None, problem.lse_dtype.itemsize
    summed = (True,) * len(problem.batch)
    if name != "scale":
        summed = getattr(problem, name).summed[packed:]
    kept = tuple(1 if own else n for n, own in zip(problem.batch, summed, strict=True))
    if name != "bias":
        return ScoreSums("queries", (*kept, problem.seqlen_q), summed, 0, itemsize)
    rows, columns = _extents(problem)
    sums_to: SumsTo = "queries"
    extents: tuple[int, ...] = (rows,)
    if shape[-1] != 1:
        sums_to, extents = ("keys", (columns,)) if shape[-2] == 1 else ("pairs", (rows, columns))
    if not packed:
        return ScoreSums(sums_to, kept + extents, summed, 0, itemsize)
    bias: Operand = getattr(problem, name)
    sequences = 1 if bias.summed[0] else bias.shape[0]
    return ScoreSums(sums_to, (sequences, *kept, *extents), summed, sequences, itemsize)


def _extents(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a bias; of packed sequences, only what kernels look at."""
    if problem.cu_seqlens_q is None:
        return problem.seqlen_q, problem.seqlen_k
    return problem.q_length_value or 0, problem.kv_length_value or 0
