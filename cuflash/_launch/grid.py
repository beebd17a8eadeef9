"""How does a launch walk batch entries? Merged axes, byte strides, axes that the host walks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from cuflash._errors import problem_with
from cuflash._kernels import params
from cuflash._problem.problem import Problem

Axis = tuple[int, tuple[int, ...]]  # extent, byte stride of each operand
_GRID_LIMIT = 2**31 - 1  # thread blocks


class Grid(NamedTuple):
    """How the batch axes of one launch are walked: see ``schedule/scheduler.cuh``."""

    axes: tuple[Axis, ...]  # walked by the kernel: axes of owners, then summed axes
    peeled: tuple[Axis, ...]  # walked by the host, one launch for each index
    num_owners: int  # batch entries, or groups of entries that share a result
    entries_per_owner: int  # batch entries that are summed into one result

    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Byte offsets of each operand, one row per launch; an empty row is no offset."""
        columns = [*zip(*(strides for _, strides in self.peeled), strict=True)]
        return tuple(
            tuple(sum(map(operator.mul, index, column)) for column in columns)
            for index in itertools.product(*(range(extent) for extent, _ in self.peeled))
        )


def plan_grid(
    batch: tuple[int, ...],
    strides: Sequence[tuple[int, ...]],
    summed: tuple[bool, ...],
    tiles_per_owner: int,
    max_axes: int = params.MAX_BATCH_AXES,
) -> Grid:
    """Merge batch axes along which all operands have even steps; ``summed`` axes vary fastest."""
    columns = list(zip(*strides, strict=True)) if batch else []
    axes = list(zip(batch, columns, summed, strict=True))
    owned = _merged([(extent, column) for extent, column, s in axes if not s])
    looped = _merged([(extent, column) for extent, column, s in axes if s])
    peeled = []
    while owned and (
        len(owned) + len(looped) > max_axes
        or math.prod(extent for extent, _ in owned) * tiles_per_owner > _GRID_LIMIT
    ):
        peeled.append(owned.pop(0))
    if len(looped) > max_axes:
        raise problem_with(
            "q, k, v", NotImplementedError,
            got=f"{len(looped)} separate broadcast batch axes",
            expected=f"at most {max_axes} that cannot be merged",
            fix="copy the operands that are not broadcast to C order",
        )  # fmt: skip
    return Grid(
        axes=(*owned, *looped),
        peeled=tuple(peeled),
        num_owners=math.prod(extent for extent, _ in owned),
        entries_per_owner=math.prod(extent for extent, _ in looped),
    )


def num_tiles(problem: Problem, rows: int, block: int) -> int:
    """Tiles of one owner; for packed sequences the most there can be: ``Packing::first_rank``."""
    if problem.cu_seqlens_q is None:
        return -(-rows // block)
    return rows // block + problem.cu_seqlens_q.shape[0] - 1


def _merged(axes: list[Axis]) -> list[Axis]:
    merged: list[Axis] = []
    for extent, strides in axes:
        if extent == 1:
            continue
        if merged and all(
            outer == inner * extent for outer, inner in zip(merged[-1][1], strides, strict=True)
        ):
            merged[-1] = (merged[-1][0] * extent, strides)
        else:
            merged.append((extent, strides))
    return merged
