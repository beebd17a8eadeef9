"""How do all gradients come from one pass over the scores? Workspace, order of kernels.

``backward_sm90.cu`` adds to float32 sums of dq, ``backward_convert.cu`` scales and rounds them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from cuflash._jit import device as jit_device
from cuflash._kernels import params
from cuflash._kernels.config import BackwardOnePassConfig
from cuflash._launch import plan as launch_plan
from cuflash._launch import sm90
from cuflash._launch.grid import Layout
from cuflash._launch.kernel_launcher import Starter
from cuflash._launch.plan import Launch
from cuflash._launch.sm90 import MappedLaunch
from cuflash._problem.problem import Problem
from cuflash._select import fused_backward, portable

_FLOAT_BYTES = 4
_SUMS_ALIGNMENT = 128
_SLICE_ROWS = 16
_NAMES = tuple(
    {"sums": "dq sums"}.get(name, name) for name in params.pointer_names(params.BACKWARD)
)


ALL = frozenset(("q", "k", "v"))
GradientLaunch = Launch | MappedLaunch
#: A launch of a gradient with the names of its pointers.
Step = tuple[tuple[str, ...], GradientLaunch]


def config_of(
    problem: Problem,
    device: int,
    wanted: frozenset[str] = ALL,
    config: Any = None,
    *,
    ordered: bool = True,
) -> BackwardOnePassConfig | None:
    """The kernel of all gradients; None where kernels of their own serve.

    A ``config``, the caller's ``BackwardConfigs``, that names others excludes it.
    """
    override, chosen = None if config is None else config.qkv, None
    if config is not None and override is None:
        return None
    if wanted >= ALL and sm90.available(device):
        chosen = fused_backward.config_of(problem, ordered=ordered)
    if override is None:
        if chosen is None or not fused_backward.wins(problem, chosen):
            return None
    elif chosen is None:
        raise sm90.unservable(override, problem, device)
    return portable.overridden(chosen, override, device)


def workspace_size(problem: Problem, config: BackwardOnePassConfig) -> int:
    """Bytes beside the row statistics: one float32 for each element of q, and turns."""
    return turns_size(problem, config) + _SUMS_ALIGNMENT + _sums_size(problem)


def addresses(problem: Problem, config: BackwardOnePassConfig, workspace: int) -> dict[str, int]:
    """Where turns and sums lie, from the end of the row statistics on."""
    end = workspace + turns_size(problem, config)
    return {"turns": workspace, "dq sums": sums_behind(end)}


def turns_size(problem: Problem, config: BackwardOnePassConfig) -> int:
    """The number of tiles drawn, and turns for each block of queries."""
    turns = -(-problem.seqlen_q // config.block_m) * config.cluster_blocks
    return _FLOAT_BYTES * (1 + math.prod(problem.batch) * turns)


def sums_behind(turns_end: int) -> int:
    """Where sums lie if the turns end there."""
    return -(-turns_end // _SUMS_ALIGNMENT) * _SUMS_ALIGNMENT


def plan(
    problem: Problem,
    device: int,
    layouts: dict[str, Layout],
    addresses: dict[str, int],
    config: BackwardOnePassConfig,
    delta: Launch,
) -> list[Step] | None:
    """Prepare all kernels, that of ``delta`` among them; None where a layout is not for them."""
    layouts = layouts | {"sums": _sums_layout(problem)}
    mapped = tuple(addresses[name] for name in params.BACKWARD_MAPPED)
    maps = sm90.gradient_maps(problem, layouts, config, mapped, problem.k.summed)
    if maps is None:
        return None
    launch = launch_plan.plan_launch(
        params.BACKWARD_SM90, config, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, problem.seqlen_k, config.own_rows),
        streamed_bytes=2 * problem.seqlen_q * (problem.head_dim + problem.head_dim_v),
        summed=problem.k.summed,
    )  # fmt: skip
    end = params.maps_at(params.BACKWARD) - launch.pointers.size
    blocks = _blocks_of_threads(launch.grid, config, device)
    gradients = MappedLaunch(launch.params[:end], maps, Starter(launch.kernel, blocks))
    convert = launch_plan.plan_launch(
        params.BACKWARD, fused_backward.convert_config(config), problem, layouts, device,
        num_blocks=-(-problem.seqlen_q // config.block_m),
    )  # fmt: skip
    first = _clearing(delta, turns_size(problem, config) // _FLOAT_BYTES)
    return [(params.pointer_names(params.DELTA), first), (_NAMES, gradients), (_NAMES, convert)]


def _clearing(delta: Launch, turns: int) -> Launch:
    """The kernel of delta, which writes zeros at the turns, too: one thread, one turn."""
    if turns > delta.grid * delta.kernel.num_threads:
        raise AssertionError(f"{turns} turns, {delta.grid} blocks of threads")
    filled = np.frombuffer(bytearray(delta.pointers.size) + delta.params, params.DELTA)[0]
    filled["num_turns"] = turns
    return delta._replace(params=filled.tobytes()[delta.pointers.size :])


def _blocks_of_threads(tiles: int, config: BackwardOnePassConfig, device: int) -> int:
    """Those of one draw tiles one after the other, a cluster computes one."""
    if config.cluster_blocks > 1:
        return tiles * config.cluster_blocks
    return min(tiles, jit_device.multiprocessors(device))


def _entry_bytes(problem: Problem) -> int:
    """Of the sums of one batch entry: whole slices of rows."""
    return _FLOAT_BYTES * -(-problem.seqlen_q // _SLICE_ROWS) * _SLICE_ROWS * problem.head_dim


def _sums_size(problem: Problem) -> int:
    return math.prod(problem.batch) * _entry_bytes(problem)


def _sums_layout(problem: Problem) -> Layout:
    """C order of batch entries; within them, that of ``kernels_cu/sm90/dq_sums.cuh``."""
    steps = itertools.accumulate(problem.batch[:0:-1], int.__mul__, initial=_entry_bytes(problem))
    return Layout(_FLOAT_BYTES, tuple(steps)[::-1] if problem.batch else ())
