"""Which sums does a kernel write for the gradient of bias, slopes or scale?"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from cuflash._kernels.backward_dscore_sm80 import GradOf, SumsTo
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.problem import HALVES, Problem

_TILE = 64  # queries of a tile of 16-bit elements, and keys
_TILES_OF_SM = 3  # tiles that run on an SM at once
_MOST_PARTS = 4  # most parts: each takes the memory of a bias in float32
#: Inputs whose gradients are sums of the scores' gradient.
SUMMED: tuple[GradOf, ...] = ("bias", "alibi_slopes", "scale")


class ScoreSums(NamedTuple):
    """The sums that a kernel writes for one gradient, C-contiguous.

    Axes: packed sequences, for a bias only, or parts of the entries that are added up; batch axes;
    queries; keys. Where the input is broadcast the extent is 1.
    """

    sums_to: SumsTo
    shape: tuple[int, ...]
    summed: tuple[bool, ...]  # batch axes that the kernel adds up
    sequences: int  # packed sequences with their own sums; 0: no such axis
    itemsize: int  # bytes of a sum
    parts: int = 1  # parts of the entries along ``part_axis``, each with its own sums
    part_axis: int = 0  # batch axis that is divided into parts
    #: Dtype of the gradient if the kernel writes it itself; "none": sums in the dtype of lse.
    dtype: Literal["none", "float16", "bfloat16", "float32"] = "none"

    @property
    def is_gradient(self) -> bool:
        """Does the kernel write the gradient itself, so that nothing is left to add?"""
        return self.dtype != "none"

    def is_of_single_pairs(self, problem: Problem) -> bool:
        """Is each element the gradient of one pair's score, in the dtype of q?"""
        added = any(own and n > 1 for own, n in zip(self.summed, problem.batch, strict=True))
        return self.sums_to == "pairs" and self.dtype == problem.dtype.name and not added

    def layout(self) -> Layout:
        """Layout of the sums, in bytes."""
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
        """Extents of the batch axes, with ``part_axis`` as two axes: parts, entries of a part."""
        if self.parts == 1:
            return extents
        at = self.part_axis
        return (*extents[:at], self.parts, extents[at] // self.parts, *extents[at + 1 :])

    def strides(self, batch: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of an operand along these axes, from its strides along the batch axes."""
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
        """Tiles of one owner: of the batch entries that share a sum."""
        if problem.cu_seqlens_q is not None and not self.sequences:  # the most of packed rows
            return problem.seqlen_q // block_m + problem.cu_seqlens_q.shape[0] - 1
        rows, columns = _extents(problem)
        tiles_m, tiles_n = -(-rows // block_m), -(-columns // block_n)
        own = {"pairs": tiles_m * tiles_n, "keys": tiles_n, "queries": tiles_m}[self.sums_to]
        return own * max(self.sequences, 1)


def score_sums(
    problem: Problem, name: GradOf, shape: tuple[int, ...], num_sms: int = 0
) -> ScoreSums:
    """The sums for the gradient of an input of this ``shape``, on a device with ``num_sms`` SMs."""
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
    """For 16 bits: sums of parts of the entries where tiles are few, else the gradient itself."""
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
    """Rows and columns of a bias; for packed sequences only those that kernels read."""
    if problem.cu_seqlens_q is None:
        return problem.seqlen_q, problem.seqlen_k
    return problem.q_length_value or 0, problem.kv_length_value or 0
