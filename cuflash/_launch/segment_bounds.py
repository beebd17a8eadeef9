"""How do kernels learn the bounds of segment ids? From a kernel that runs before them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash._jit.compilation import compile_kernel
from cuflash._kernels import params
from cuflash._kernels.segment_bounds import IDS, bounds_of, operands_of
from cuflash._launch.grid import plan_grid
from cuflash._launch.kernel_launcher import KernelLauncher
from cuflash._launch.plan import fill_strides
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem

_NAMES = tuple(params.SCORE_POINTERS[params.SCORE_POINTERS.index("segment_ids_q") :][:4])


def plan_bounds(config: Any, problem: Problem, device: int) -> KernelLauncher | None:
    """Prepare the launch; None for packed sequences without any id."""
    bounds, (q, k) = bounds_of(problem), operands_of(problem)
    num_q, num_k = q.shape[-1], k.shape[-1]
    blocks = sum(-(-n // (IDS * config.num_warps)) for n in (num_q, num_k))
    ndim = len(bounds.batch)
    strides = (
        q.strides[:ndim], k.strides[:ndim],
        bounds.strides(bounds.pairs_q), bounds.strides(bounds.pairs_k),
    )  # fmt: skip
    sizes = (q.dtype.itemsize, k.dtype.itemsize, bounds.itemsize, bounds.itemsize)
    grid = plan_grid(bounds.batch, strides, (False,) * ndim, blocks)
    if not blocks * grid.num_owners:
        return None
    filled = np.zeros(1, params.SEGMENT_BOUNDS)[0]
    layouts = map(Layout, sizes, strides)
    ordered = dict(zip(params.SEGMENT_BOUNDS_POINTERS, layouts, strict=True))
    fill_strides(filled, grid, ordered, packed=False)  # sequences are a batch axis here
    filled["num_ids_q"], filled["num_ids_k"] = num_q, num_k
    return KernelLauncher(
        compile_kernel(config, device), blocks * grid.num_owners, _NAMES,
        filled.tobytes()[8 * len(_NAMES) :], grid.offsets(),
    )  # fmt: skip
