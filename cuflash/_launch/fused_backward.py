"""How do all gradients come from one pass over the scores? Three kernels, in order.

The kernel of delta also clears the turns, ``backward_sm90.cu`` or ``backward_pair_sm90.cu`` adds to
float32 sums of dq, ``backward_convert.cu`` scales and rounds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash._kernels import params
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._launch import dq_sums, sm90
from cuflash._launch import plan as launch_plan
from cuflash._launch.plan import Launch
from cuflash._launch.sm90 import MappedLaunch
from cuflash._problem.layout import Layout
from cuflash._problem.problem import Problem
from cuflash._select import hardware

_NAMES = tuple(
    {"sums": "dq sums"}.get(name, name) for name in params.pointer_names(params.BACKWARD)
)
#: A launch of a gradient with the names of its pointers.
Step = tuple[tuple[str, ...], Launch | MappedLaunch]


def plan(
    problem: Problem,
    device: int,
    layouts: dict[str, Layout],
    maps: sm90.MapsOf,
    config: Any,
    delta: Launch,
) -> list[Step]:
    """Prepare all kernels, that of ``delta`` among them."""
    layouts = layouts | {"sums": dq_sums.layout(problem)}
    launch = launch_plan.plan_launch(
        config, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, problem.seqlen_k, config.own_rows),
        streamed_bytes=2 * problem.seqlen_q * (problem.head_dim + problem.head_dim_v),
        summed=problem.k.summed,
    )  # fmt: skip
    gradients = sm90.mapped(launch, maps.of(config), _thread_blocks(launch.grid, config, device))
    convert = launch_plan.plan_launch(
        BackwardConvertConfig.after(config), problem, layouts, device,
        num_blocks=-(-problem.seqlen_q // config.block_m),
    )  # fmt: skip
    first = _clearing(delta, dq_sums.turns_size(problem, config) // dq_sums.FLOAT_BYTES)
    return [(params.pointer_names(params.DELTA), first), (_NAMES, gradients), (_NAMES, convert)]


def _clearing(delta: Launch, turns: int) -> Launch:
    """The kernel of delta, which writes zeros at the turns, too: one thread, one turn."""
    if turns > delta.grid * delta.kernel.num_threads:
        raise AssertionError(f"{turns} turns, {delta.grid} blocks of threads")
    filled = np.frombuffer(bytearray(delta.pointers.size) + delta.params, params.DELTA)[0]
    filled["num_turns"] = turns
    return delta._replace(params=filled.tobytes()[delta.pointers.size :])


def _thread_blocks(tiles: int, config: Any, device: int) -> int:
    """Thread blocks of one CTA draw tiles one after the other; a cluster computes one tile."""
    if config.cluster_blocks > 1:
        return int(tiles * config.cluster_blocks)
    return min(tiles, hardware.of_device(device).multiprocessors)
