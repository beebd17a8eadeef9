"""Which kernels, with which tiles, serve a problem on a device that is described and not at hand?

The same choices as ``_launch/run.py`` makes with the arrays before it, for arrays in C order.
"""

from __future__ import annotations

import numpy as np

from cuflash._kernels.config import ForwardConfig, ForwardSm90Config, KernelConfig, TileConfig
from cuflash._launch.grid import Layout
from cuflash._problem.problem import HALVES, Problem
from cuflash._select import (
    eligibility,
    fused_backward,
    measured,
    narrow,
    portable_gradients,
    sm90,
    tf32_sm90,
)
from cuflash._select import portable as select_portable
from cuflash._select.hardware import Hardware
from cuflash._select.pack_gqa import with_shared_rows

_TMA_BYTES = 16
_ARRAYS = ("offset", "kv_lengths", "sink")  # the others keep rows apart in any case


def forward(problem: Problem, hardware: Hardware, *, portable: bool = False) -> TileConfig:
    """The forward kernel; ``portable``: the one that every architecture has."""
    width = _copy_bytes(problem)
    problem, _ = with_shared_rows(problem, _layouts(problem))
    chosen: ForwardConfig | ForwardSm90Config | None = None
    if hardware.arch == "sm_90" and width == _TMA_BYTES and not portable:
        chosen = sm90.forward_config(problem, hardware.multiprocessors)
    if chosen is None and not portable:
        chosen = narrow.forward_config(problem, width, hardware.multiprocessors)
    if hardware.arch == "sm_90" and chosen is None and not portable:
        chosen = tf32_sm90.forward_config(problem, width)
    if chosen is None:
        chosen = select_portable.forward_config(
            problem,
            hardware.limits.block_smem,
            width,
            cuda_cores=select_portable.on_cuda_cores(problem, int(hardware.capability)),
        )
    return _for_device(
        measured.applied(chosen, hardware.name, hardware.limits.block_smem), hardware
    )


def backward(
    problem: Problem,
    hardware: Hardware,
    wanted: frozenset[str] = frozenset("qkv"),
    *,
    portable: bool = False,
    ordered: bool = True,
) -> list[KernelConfig]:
    """The kernels of the gradients of q, k and v, in order of launch.

    ``ordered`` is ``deterministic=`` of the call.
    """
    width, smem = _copy_bytes(problem), hardware.limits.block_smem
    cuda_cores = select_portable.on_cuda_cores(problem, int(hardware.capability))
    hopper = hardware.arch == "sm_90" and width == _TMA_BYTES and not portable
    tf32 = hardware.arch == "sm_90" and not portable
    rows_v = Layout.of(problem.v).copy_bytes(problem.head_dim_v, 0)  # those of dout and out, too
    steps: list[KernelConfig] = [
        select_portable.delta_config(problem, problem.dtype, rows_v, grad_lse=False)
    ]
    together = fused_backward.config_of(problem, ordered=ordered) if hopper else None
    wins = together is not None and fused_backward.wins(problem, together)
    if together is not None and wins and wanted >= {"q", "k", "v"}:
        together = measured.applied(together, hardware.name, smem)
        return [*steps, together, fused_backward.convert_config(together)]
    of_keys = wanted & {"k", "v"}
    tiled: list[TileConfig] = []
    if of_keys:
        passes: tuple[TileConfig, ...] | None = None
        if hopper:
            passes = sm90.backward_kv_configs(problem, of_keys)
        if tf32 and passes is None:
            passes = tf32_sm90.backward_kv_configs(problem, width, of_keys)
        tiled += passes or portable_gradients.backward_kv_configs(
            problem, smem, width, of_keys, cuda_cores=cuda_cores, partners=not portable
        )
    if "q" in wanted:
        of_q: TileConfig | None = sm90.backward_q_config(problem) if hopper else None
        if tf32 and of_q is None:
            of_q = tf32_sm90.backward_q_config(problem, width)
        of_q = of_q or portable_gradients.backward_q_config(
            problem, smem, width, cuda_cores=cuda_cores, partners=not portable
        )
        tiled.append(of_q)
    own = [measured.applied(config, hardware.name, smem) for config in tiled]
    return [*steps, *(_for_device(config, hardware) for config in own)]


def _layouts(problem: Problem) -> dict[str, Layout]:
    """Where operands lie, arrays of options included."""
    ndim = len(problem.batch)
    found = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v", "out")}
    for name in _ARRAYS:
        operand = getattr(problem, name)
        if operand is not None:
            found[name] = Layout(operand.dtype.itemsize, operand.strides[:ndim])
    return found


def _for_device(config: TileConfig, hardware: Hardware) -> TileConfig:
    return select_portable.for_architecture(config, int(hardware.capability))


def _copy_bytes(problem: Problem) -> int:
    """Widest copy that rows of q, k and v allow, whose first elements are aligned."""
    columns = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v}
    return min(
        Layout.of(getattr(problem, name)).copy_bytes(width, 0) for name, width in columns.items()
    )


def why_portable(problem: Problem, hardware: Hardware) -> str:
    """Why Hopper's forward does not serve a problem; empty where it does."""
    against = eligibility.against_forward
    if problem.dtype == np.float32:
        against = eligibility.against_tf32_forward
    return _why_not_here(problem, hardware) or against(problem)


def why_portable_gradient(problem: Problem, hardware: Hardware) -> str:
    """Why Hopper's gradient does not serve a problem; empty where it does."""
    against = eligibility.against_gradient
    if problem.dtype == np.float32:
        against = eligibility.against_tf32
    return _why_not_here(problem, hardware) or against(problem)


def _why_not_here(problem: Problem, hardware: Hardware) -> str:
    if hardware.arch != "sm_90":
        return f"{hardware.arch} has no wgmma as sm_90 has it"
    if problem.dtype in HALVES and _copy_bytes(problem) != _TMA_BYTES:
        return "rows of q, k or v are not multiples of 16 bytes"
    return ""
