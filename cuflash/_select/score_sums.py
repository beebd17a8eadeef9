"""Which sums does a kernel write for the gradient of bias, slopes or scale?"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from cuflash._kernels.backward_dscore_sm80 import GradOf, SumsTo
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.problem import HALVES, Problem

_TILE = 64  # queries, and keys, of a tile of 16 bits
_TILES_OF_SM = 3  # that run at once
_MOST_PARTS = 4  # copies of a bias in float32 that its gradient may take
#: Inputs whose gradients are sums of the scores' gradient.
SUMMED: tuple[GradOf, ...] = ("bias", "alibi_slopes", "scale")


class ScoreSums(NamedTuple):
    """What a kernel writes for one gradient: sums in the dtype of lse, C-contiguous.

    Their axes are sequences, where they are packed and have a bias, or parts of the entries that
    are added up; batch, queries, keys; with extent 1 where the input is broadcast.
    """

    sums_to: SumsTo
    shape: tuple[int, ...]
    summed: tuple[bool, ...]  # batch axes that the kernel adds up
    sequences: int  # with sums of their own; 0: no such axis
    itemsize: int
    parts: int = 1  # of the entries of ``part_axis``, with sums of their own
    part_axis: int = 0
    dtype: Literal["none", "float16", "bfloat16", "float32"] = "none"  # none: sums of their own

    @property
    def is_gradient(self) -> bool:
        """Is nothing left to do with them: does the kernel write the gradient itself?"""
        return self.dtype != "none"

    def is_of_single_pairs(self, problem: Problem) -> bool:
        """Is each the gradient of one pair's score, in the dtype of q, and none a sum?"""
        added = any(own and n > 1 for own, n in zip(self.summed, problem.batch, strict=True))
        return self.sums_to == "pairs" and self.dtype == problem.dtype.name and not added

    def layout(self) -> Layout:
        """Where the sums of a batch entry lie."""
        steps = [self.itemsize * math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        sequence = steps.pop(0) if self.sequences else 0
        part = steps.pop(0) if self.parts > 1 else 0
        batch = tuple(0 if own else s for s, own in zip(steps, self.summed, strict=False))
        row = steps[len(batch)] if self.sums_to != "keys" else 0
        column = 0 if self.sums_to == "queries" else steps[-1]
        if part:
            batch = (*batch[: self.part_axis], part, *batch[self.part_axis :])
        return Layout(self.itemsize, batch, row, column, sequence if self.sequences > 1 else 0)

    def axes(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Extents of the batch axes, parts of the one that is dealt out before the rest of it."""
        if self.parts == 1:
            return extents
        at = self.part_axis
        return (*extents[:at], self.parts, extents[at] // self.parts, *extents[at + 1 :])

    def strides(self, batch: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of an operand along these axes."""
        if self.parts == 1:
            return batch
        at = self.part_axis
        step = batch[at] * (extents[at] // self.parts)
        return (*batch[:at], step, *batch[at:])

    def summed_axes(self) -> tuple[bool, ...]:
        """Which of these axes the kernel adds up."""
        at = self.part_axis
        return (*self.summed[:at], False, *self.summed[at:]) if self.parts > 1 else self.summed

    def tiles(self, problem: Problem, block_m: int, block_n: int) -> int:
        """Tiles of one owner."""
        if problem.cu_seqlens_q is not None and not self.sequences:  # of packed rows
            return problem.seqlen_q // block_m + problem.cu_seqlens_q.shape[0] - 1
        rows, columns = _extents(problem)
        tiles_m, tiles_n = -(-rows // block_m), -(-columns // block_n)
        own = {"pairs": tiles_m * tiles_n, "keys": tiles_n, "queries": tiles_m}[self.sums_to]
        return own * max(self.sequences, 1)


def score_sums(
    problem: Problem, name: GradOf, shape: tuple[int, ...], num_sms: int = 0
) -> ScoreSums:
    """The sums for the gradient of an input of this ``shape``, on a device of ``num_sms``."""
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
        own = ScoreSums(sums_to, kept + extents, summed, 0, itemsize)
        return _dealt_out(problem, own, num_sms) if sums_to == "pairs" else own
    bias: Operand = getattr(problem, name)
    sequences = 1 if bias.summed[0] else bias.shape[0]
    return ScoreSums(sums_to, (sequences, *kept, *extents), summed, sequences, itemsize)


def _dealt_out(problem: Problem, own: ScoreSums, num_sms: int) -> ScoreSums:
    """Sums of pairs of 16 bits: of parts of the entries where tiles are few, else the gradient."""
    bias = problem.bias
    if problem.dtype not in HALVES or bias is None or bias.dtype.itemsize > 4:
        return own
    tiles = own.tiles(problem, _TILE, _TILE) * math.prod(own.shape[:-2])
    entries, axis = max(
        ((n, i) for i, (n, is_summed) in enumerate(zip(problem.batch, own.summed, strict=True))
         if is_summed),
        default=(1, 0),
    )  # fmt: skip
    for parts in range(_MOST_PARTS, 1, -1):
        if tiles < _TILES_OF_SM * num_sms and entries % parts == 0 and entries >= 8 * parts:
            return own._replace(shape=(parts, *own.shape), parts=parts, part_axis=axis)
    return own._replace(dtype=bias.dtype.name, itemsize=bias.dtype.itemsize)


def _extents(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a bias; of packed sequences, only what kernels look at."""
    if problem.cu_seqlens_q is None:
        return problem.seqlen_q, problem.seqlen_k
    return problem.q_length_value or 0, problem.kv_length_value or 0
