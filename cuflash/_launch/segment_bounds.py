"""How do kernels learn the bounds of segment ids? From a kernel that runs before them."""

from __future__ import annotations

import struct

import numpy as np

from cuflash._jit.compilation import compile_kernel
from cuflash._kernels import params
from cuflash._kernels.segment_bounds import (
    IDS,
    Bounds,
    SegmentBoundsConfig,
    bounds_of,
    operands_of,
)
from cuflash._launch.grid import plan_grid
from cuflash._launch.kernel_launcher import Addresses, Starter
from cuflash._launch.plan import Launch
from cuflash._problem.problem import Problem

_LIMIT = 4096
_POINTERS = struct.Struct(f"<{len(params.SEGMENT_BOUNDS_POINTERS)}Q")
_FIRST = params.SCORE_POINTERS.index("segment_ids_q")
_IDS_AT, _BOUNDS_AT = slice(_FIRST, _FIRST + 2), slice(_FIRST + 2, _FIRST + 4)


def find(
    problem: Problem, score_pointers: Addresses, room: int, device: int, stream: int
) -> Addresses:
    """Start the kernel that writes bounds to memory at ``room``; ``score_pointers`` with them."""
    known = _plans.get((id(problem), device))
    if known is None:
        if len(_plans) >= _LIMIT:
            _plans.clear()
        bounds = bounds_of(problem)
        known = (problem, bounds.first_k, _plan(problem, bounds, device))
        _plans[id(problem), device] = known
    _, first_k, launch = known
    found = (room, room + first_k)
    if launch.grid:  # sequences that are packed may have no ids at all
        launch.run((*score_pointers[_IDS_AT], *found), stream)
    return (*score_pointers[: _BOUNDS_AT.start], *found, *score_pointers[_BOUNDS_AT.stop :])


# By identity, as plans are kept: hashing a Problem costs more than a launch.
_plans: dict[tuple[int, int], tuple[Problem, int, Launch]] = {}


def _plan(problem: Problem, bounds: Bounds, device: int) -> Launch:
    q, k = operands_of(problem)
    config = SegmentBoundsConfig.of(problem)
    num_q, num_k = q.shape[-1], k.shape[-1]
    blocks = sum(-(-n // (IDS * config.num_warps)) for n in (num_q, num_k))
    ndim = len(bounds.batch)
    strides = (
        q.strides[:ndim], k.strides[:ndim],
        bounds.strides(bounds.pairs_q), bounds.strides(bounds.pairs_k),
    )  # fmt: skip
    grid = plan_grid(bounds.batch, strides, (False,) * ndim, blocks)
    filled = np.zeros(1, params.SEGMENT_BOUNDS)[0]
    filled["batch"]["num_axes"] = len(grid.axes)
    filled["batch"]["extent"] = [e for e, _ in grid.axes] + [1] * (6 - len(grid.axes))
    filled["num_ids_q"], filled["num_ids_k"] = num_q, num_k
    sizes = (q.dtype.itemsize, k.dtype.itemsize, bounds.itemsize, bounds.itemsize)
    for column, name in enumerate(params.SEGMENT_BOUNDS_POINTERS):
        for axis, (_, steps) in enumerate(grid.axes):
            filled[f"{name}_strides"]["axis"][axis] = steps[column] // sizes[column]
    kernel = compile_kernel(config, device)
    return Launch(
        kernel=kernel,
        grid=blocks * grid.num_owners,
        pointers=_POINTERS,
        params=filled.tobytes()[_POINTERS.size :],
        offsets=grid.offsets(),
        starter=Starter(kernel, blocks * grid.num_owners),
    )
