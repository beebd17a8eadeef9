"""How do all gradients come from one pass over the scores? Workspace, order of kernels.

``backward_sm90.cu`` adds to float32 sums of dq, ``backward_convert.cu`` scales and rounds them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from cuflash import _device, _launch_sm90, _params, _plan, _select, _select_one_pass
from cuflash._arguments import Starter
from cuflash._config import BackwardOnePassConfig
from cuflash._grid import Layout
from cuflash._launch_sm90 import MappedLaunch
from cuflash._plan import Launch
from cuflash._problem import Problem

_FLOAT_BYTES = 4
_SUMS_ALIGNMENT = 128
_SLICE_ROWS = 16
_NAMES = tuple(
    {"sums": "dq sums"}.get(name, name) for name in _params.pointer_names(_params.BACKWARD)
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
    if wanted >= ALL and _launch_sm90.available(device):
        chosen = _select_one_pass.config_of(problem, ordered=ordered)
    if override is None:
        if chosen is None or not _select_one_pass.wins(problem, chosen):
            return None
    elif chosen is None:
        raise _launch_sm90.unservable(override, problem, device)
    return _select.overridden(chosen, override, device)


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
    mapped = tuple(addresses[name] for name in _params.BACKWARD_MAPPED)
    maps = _launch_sm90.gradient_maps(problem, layouts, config, mapped, problem.k.summed)
    if maps is None:
        return None
    launch = _plan.plan_launch(
        _params.BACKWARD_SM90, config, problem, layouts, device,
        num_blocks=_plan.num_tiles(problem, problem.seqlen_k, config.own_rows),
        streamed_bytes=2 * problem.seqlen_q * (problem.head_dim + problem.head_dim_v),
        summed=problem.k.summed,
    )  # fmt: skip
    end = _params.maps_at(_params.BACKWARD) - launch.pointers.size
    blocks = _blocks_of_threads(launch.grid, config, device)
    gradients = MappedLaunch(launch.params[:end], maps, Starter(launch.kernel, blocks))
    convert = _plan.plan_launch(
        _params.BACKWARD, _select_one_pass.convert_config(config), problem, layouts, device,
        num_blocks=-(-problem.seqlen_q // config.block_m),
    )  # fmt: skip
    first = _clearing(delta, turns_size(problem, config) // _FLOAT_BYTES)
    return [(_params.pointer_names(_params.DELTA), first), (_NAMES, gradients), (_NAMES, convert)]


def _clearing(delta: Launch, turns: int) -> Launch:
    """The kernel of delta, which writes zeros at the turns, too: one thread, one turn."""
    if turns > delta.grid * delta.kernel.num_threads:
        raise AssertionError(f"{turns} turns, {delta.grid} blocks of threads")
    filled = np.frombuffer(bytearray(delta.pointers.size) + delta.params, _params.DELTA)[0]
    filled["num_turns"] = turns
    return delta._replace(params=filled.tobytes()[delta.pointers.size :])


def _blocks_of_threads(tiles: int, config: BackwardOnePassConfig, device: int) -> int:
    """Those of one draw tiles one after the other, a cluster computes one."""
    if config.cluster_blocks > 1:
        return tiles * config.cluster_blocks
    return min(tiles, _device.multiprocessors(device))


def _entry_bytes(problem: Problem) -> int:
    """Of the sums of one batch entry: whole slices of rows."""
    return _FLOAT_BYTES * -(-problem.seqlen_q // _SLICE_ROWS) * _SLICE_ROWS * problem.head_dim


def _sums_size(problem: Problem) -> int:
    return math.prod(problem.batch) * _entry_bytes(problem)


def _sums_layout(problem: Problem) -> Layout:
    """C order of batch entries; within them, that of ``kernels_cu/sm90/dq_sums.cuh``."""
    steps = itertools.accumulate(problem.batch[:0:-1], int.__mul__, initial=_entry_bytes(problem))
    return Layout(_FLOAT_BYTES, tuple(steps)[::-1] if problem.batch else ())
