"""How do kernels run? The choice among them, workspaces, the order of kernels, the stream.

What depends only on layouts is planned once: a call looks its plan up, writes its pointers into a
copy of the prepared parameters and launches on the current stream. Nothing is shared between two
launches but counters that streams own; nothing synchronises.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._api.recall import Repeat
from cuflash._arrays import Array, converted, refuse_capture, write_rounded
from cuflash._errors import problem_with
from cuflash._jit import device as jit_device
from cuflash._kernels import params as kernel_params
from cuflash._kernels import segment_bounds as kernel_segment_bounds
from cuflash._kernels.config import (
    BackwardKVConfig,
    BackwardOnePassConfig,
    BackwardQConfig,
    BackwardSm90Config,
    ForwardConfig,
    ForwardSm90Config,
    GradOf,
)
from cuflash._launch import (
    fused_backward,
    repeat,
    score_gradients,
    score_params,
    segment_bounds,
    sm90,
)
from cuflash._launch import plan as launch_plan
from cuflash._launch.grid import Layout
from cuflash._launch.plan import Launch
from cuflash._launch.score_gradients import ScoreSums
from cuflash._launch.sm90 import MappedLaunch, Sm90Launch
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem, gradient_operand
from cuflash._select import narrow, portable, portable_gradients, tf32_sm90
from cuflash._select import sm90 as select_sm90
from cuflash._select.override import BackwardConfigs
from cuflash._select.pack_gqa import with_shared_rows

_PLAN_LIMIT = 4096
_NOT_PACKED: Mapping[str, Array] = {}
_FORWARD_POINTERS = kernel_params.pointer_names(kernel_params.FORWARD)
_ALIGNMENT = 16  # of the bounds of segments: a pair of the largest ids is read at once


def _on_device(device: int) -> Any:
    """Context in which ``device`` is current, free of charge where it is already."""
    if runtime.getDevice() == device:
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    out: Array,
    lse: Array | None,
    *,
    workspace: Array | None = None,
    config: ForwardConfig | ForwardSm90Config | None = None,
    cu_seqlens: Mapping[str, Array] = _NOT_PACKED,
) -> None:
    """Write ``out`` and, unless None, ``lse``; extents are positive but that of keys.

    A ``config`` decides which kernel runs, too. The portable one leaves out rows that belong to no
    packed sequence.
    """
    problem, score_pointers, held = score_params.arrays_of(problem, options, q, cu_seqlens)
    lse_strides = None if lse is None else lse.strides
    device = q.data.device_id
    if problem.segment_ids_q is not None:
        room = held["bounds"] = _workspace(problem, "forward", workspace)
        score_pointers = _with_bounds(problem, score_pointers, room, 0, device)
    pointers = (
        q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0 if lse is None else lse.data.ptr,
        *score_pointers,
    )  # fmt: skip
    address_bits = (pointers[0] | pointers[1] | pointers[2]) & 15
    arrays = pointers[3 : -len(score_params.NUMBERS)]
    if (address_bits | functools.reduce(int.__or__, arrays)) & 7:
        layouts = _forward_layouts(problem, lse_strides) | score_params.layouts(problem)
        launch_plan.refuse_misaligned(layouts, dict(zip(_FORWARD_POINTERS, pointers, strict=True)))
    # By identity: hashing a Problem costs more than a launch, and the plan keeps its problem alive.
    key = (id(problem), device, address_bits, pointers[3] & 15, lse_strides, config)
    plan = _forward_plans.get(key)
    with _on_device(device):
        if plan is None:
            launch = _plan_forward(problem, device, pointers, lse_strides, config)
            plan = _remember(_forward_plans, key, (problem, launch))
        stream = cupy.cuda.get_current_stream()
        if cu_seqlens and isinstance(plan[1], Launch):
            out.fill(0)
            if lse is not None:
                lse.fill(-np.inf)
        plan[1].run(pointers, stream.ptr, stream.is_capturing())
    del held  # no sooner: another thread could be given its memory on this stream


_forward_plans: dict[Any, tuple[Problem, Launch | Sm90Launch]] = {}


def repeated_forward(
    problem: Problem, q: Array, k: Array, v: Array, lse: Array | None
) -> Repeat | None:
    """What repeats the call of :func:`forward` just made; None if it was no launch."""
    device, address_bits = q.data.device_id, (q.data.ptr | k.data.ptr | v.data.ptr) & 15
    lse_strides = None if lse is None else lse.strides
    # Out is new and thus aligned.
    plan = _forward_plans.get((id(problem), device, address_bits, 0, lse_strides, None))
    return None if plan is None else repeat.forward(*plan, device, return_lse=lse is not None)


def _forward_layouts(problem: Problem, lse_strides: tuple[int, ...] | None) -> dict[str, Layout]:
    layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v", "out")}
    if lse_strides is not None:
        layouts["lse"] = launch_plan.row_layout(problem, problem.lse_dtype.itemsize, lse_strides)
    return layouts


def _remember(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    if len(plans) >= _PLAN_LIMIT:
        plans.clear()
    plans[key] = plan
    return plan


def _plan_forward(
    problem: Problem,
    device: int,
    pointers: tuple[int, ...],
    lse_strides: tuple[int, ...] | None,
    config: ForwardConfig | ForwardSm90Config | None,
) -> Launch | Sm90Launch:
    layouts = _forward_layouts(problem, lse_strides) | score_params.layouts(problem)
    problem, layouts = with_shared_rows(problem, layouts)
    if not isinstance(config, ForwardConfig):
        launch = _plan_forward_sm90(problem, device, pointers, layouts, config)
        if launch is not None:
            return launch
    if isinstance(config, ForwardSm90Config):
        raise sm90.unservable(config, problem, device)
    address_bits = (pointers[0] | pointers[1] | pointers[2]) & 15
    copy_bytes = launch_plan.copy_bytes(problem, layouts, ("q", "k", "v"), address_bits)
    chosen: ForwardConfig | None = None
    if type(config) is not ForwardConfig:
        chosen = narrow.forward_config(problem, copy_bytes, jit_device.multiprocessors(device))
    if type(config) is not ForwardConfig and chosen is None and sm90.available(device):
        chosen = tf32_sm90.forward_config(problem, copy_bytes)
    if chosen is None:
        chosen = portable.forward_config(
            problem, jit_device.smem_limit(device), copy_bytes,
            cuda_cores=portable.on_cuda_cores(problem, jit_device.capability(device)),
        )  # fmt: skip
    config = portable.overridden(chosen, config, device)
    return launch_plan.plan_launch(
        kernel_params.FORWARD, config, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, problem.seqlen_q, config.block_m),
        streamed_bytes=problem.seqlen_k * _row_bytes(problem),
    )  # fmt: skip


def _plan_forward_sm90(
    problem: Problem,
    device: int,
    pointers: tuple[int, ...],
    layouts: dict[str, Layout],
    override: ForwardSm90Config | None,
) -> Sm90Launch | None:
    """Prepare Hopper's forward; None where the device, the problem or a layout is not for it."""
    if not sm90.available(device):
        return None
    chosen = select_sm90.forward_config(problem, jit_device.multiprocessors(device))
    if chosen is None:
        return None
    config = portable.overridden(chosen, override, device)
    maps = sm90.tensor_maps(problem, layouts, config, pointers)
    if maps is None:
        return None
    launch = launch_plan.plan_launch(
        kernel_params.FORWARD_SM90, config, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, problem.seqlen_q, config.block_m),
    )  # fmt: skip
    params = bytes(launch.pointers.size) + launch.params
    return sm90.persistent(launch.kernel, params, maps, problem, config, device)


def statistics_bytes(problem: Problem) -> int:
    """Bytes of what the backward keeps of one query."""
    return 2 * problem.lse_dtype.itemsize


def _row_bytes(problem: Problem) -> int:
    """Bytes of one key and its value, or of one query and its gradient."""
    return problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)


def workspace_size(problem: Problem, pass_name: str) -> int:
    """Bytes of scratch memory that the ``"forward"`` or ``"backward"`` of a problem needs.

    With segments, bounds of their ids: see ``_kernels/segment_bounds.py``. The backward keeps lse and delta of
    each query before them; on the current device, where all gradients come from one pass, float32
    sums of dq behind them.
    """
    size = _statistics_size(problem, pass_name) + kernel_segment_bounds.room_for(problem)
    if pass_name == "forward":
        return size
    one_pass = fused_backward.config_of(problem, runtime.getDevice(), ordered=False)  # the most
    return size if one_pass is None else size + fused_backward.workspace_size(problem, one_pass)


def _statistics_size(problem: Problem, pass_name: str) -> int:
    """Bytes of scratch memory before the bounds of segments."""
    if pass_name == "forward":
        return 0
    size = statistics_bytes(problem) * math.prod(problem.batch) * problem.seqlen_q
    return size if problem.segment_ids_q is None else -(-size // _ALIGNMENT) * _ALIGNMENT


def backward(
    problem: Problem,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    options: Options,
    gradients: dict[str, Array],
    *,
    workspace: Array | None = None,
    config: BackwardConfigs | None = None,
    deterministic: bool = True,
    cu_seqlens: Mapping[str, Array] = _NOT_PACKED,
) -> BackwardPlan | None:
    """Write the ``gradients`` asked for, by input name; extents are positive but that of keys.

    Returns what was done; None where nothing was, or operands were converted before it.
    """
    if not gradients:
        return None
    problem, score_pointers, held = score_params.arrays_of(problem, options, q, cu_seqlens)
    device = q.data.device_id
    with _on_device(device):
        stream = cupy.cuda.get_current_stream().ptr
        given = id(dout), id(out), id(lse)
        dout = converted("dout", dout, problem.dtype)
        real = problem.lse_dtype
        if np.float64 in (real, out.dtype):
            out = converted("out", out, real)
        lse = converted("lse", lse, real)
        dlse = None if dlse is None else converted("dlse", dlse, real)
        rows = None
        if problem.segment_ids_q is not None:
            rows = _workspace(problem, "backward", workspace)
            start = _statistics_size(problem, "backward")
            score_pointers = _with_bounds(problem, score_pointers, rows, start, device)
        written = _written(problem, gradients)
        addresses = {
            "dout": dout.data.ptr, "q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr,
            "out": out.data.ptr, "lse": lse.data.ptr,
            "dlse": 0 if dlse is None else dlse.data.ptr,
            "dq": 0, "dk": 0, "dv": 0, "sums": 0, "turns": 0,
            **dict(zip(kernel_params.SCORE_POINTERS, score_pointers, strict=True)),
            **{f"d{name}": array.data.ptr for name, array in written.items()},
        }  # fmt: skip
        plans = {
            name: score_gradients.score_sums(problem, name, gradients[name].shape)
            for name in score_gradients.SUMMED
            if name in gradients
        }
        if plans or "sink" in gradients:
            refuse_capture("wrt", "q, k and v alone: the others need memory of their own")
        sums = {name: cupy.zeros(plan.shape, real) for name, plan in plans.items()}
        addresses |= {_sums_of(name): array.data.ptr for name, array in sums.items()}
        aligned = (a for name, a in addresses.items() if name not in score_params.NUMBERS)
        bits = functools.reduce(int.__or__, (addresses[n] for n in ("dout", "q", "k", "v")))
        key = (
            id(problem), device, bits & 15, addresses["out"] & 15, config, deterministic,
            functools.reduce(int.__or__, aligned) & 7,
            dout.strides, out.strides, out.dtype, lse.strides,
            None if dlse is None else dlse.strides,
            *((name, array.strides, array.dtype) for name, array in written.items()),
        )  # fmt: skip
        plan = _backward_plans.get(key)
        if plan is not None:
            one_pass = plan.one_pass
        else:
            wanted = frozenset(gradients)
            one_pass = fused_backward.config_of(
                problem, device, wanted, config, ordered=deterministic
            )
        beside = 0 if one_pass is None else fused_backward.workspace_size(problem, one_pass)
        if rows is None:
            rows = _workspace(problem, "backward", workspace, beside)
        addresses["rows"] = rows.data.ptr
        if one_pass is not None:
            end = rows.data.ptr + _statistics_size(problem, "backward")
            addresses |= fused_backward.addresses(problem, one_pass, end)
        if plan is None:
            layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v")}
            layouts["dout"] = Layout.of(gradient_operand(problem, "dout", dout))
            layouts["out"] = Layout.of(gradient_operand(problem, "dout", out))
            layouts["lse"] = launch_plan.row_layout(problem, real.itemsize, lse.strides)
            layouts["rows"] = launch_plan.row_layout(problem, statistics_bytes(problem), None)
            if dlse is not None:
                layouts["dlse"] = launch_plan.row_layout(problem, real.itemsize, dlse.strides)
            for name in {"q", "k", "v"} & set(gradients):
                layouts[f"d{name}"] = Layout.of(gradient_operand(problem, name, written[name]))
            launch_plan.refuse_misaligned(layouts | score_params.layouts(problem), addresses)
            steps = _plan_backward(
                problem, device, layouts, out.dtype, frozenset(gradients), addresses,
                config or BackwardConfigs(), plans, one_pass,
            )  # fmt: skip
            plan = _remember(_backward_plans, key, BackwardPlan(problem, steps, one_pass))
        for names, launch in plan.steps:
            launch.run(tuple(addresses[name] for name in names), stream)
        for name in (name for name in written if written[name] is not gradients[name]):
            write_rounded(gradients[name], written[name])
        ends = held.get("cu_seqlens_q")
        for name, own in plans.items():
            score_gradients.write(problem, name, own, sums[name], gradients[name], ends)
        if "sink" in gradients:
            score_gradients.write_sink(problem, rows, lse, held["sink"], gradients["sink"], ends)
    del held  # no sooner: another thread could be given its memory on this stream
    return plan if given == (id(dout), id(out), id(lse)) else None


def _written(problem: Problem, gradients: dict[str, Array]) -> dict[str, Array]:
    """What kernels write: ``gradients``, but new zeros where q, k or v was promoted to their dtype.

    Zeros, since kernels write no row that belongs to no packed sequence.
    """
    other = [n for n in ("q", "k", "v") if n in gradients and gradients[n].dtype != problem.dtype]
    if other:
        refuse_capture("wrt", f"gradients of {problem.dtype} alone, those of q, k, v as promoted")
    return gradients | {n: cupy.zeros(gradients[n].shape, problem.dtype) for n in other}


class BackwardPlan(NamedTuple):
    """What calls with the same layouts share."""

    problem: Problem  # kept alive: the key holds its identity
    steps: tuple[fused_backward.Step, ...]
    one_pass: BackwardOnePassConfig | None


_backward_plans: dict[Any, BackwardPlan] = {}


def repeated_backward(
    plan: BackwardPlan, q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array
) -> Repeat | None:
    """What repeats a call for the gradients of q, k and v; None where alignment may differ."""
    problem, steps, one_pass = plan
    if (dout.data.ptr | out.data.ptr | lse.data.ptr) & 15:  # of the others a known call is sure
        return None
    turns = size = _statistics_size(problem, "backward")
    if one_pass is not None:
        size += fused_backward.workspace_size(problem, one_pass)
    return repeat.backward(
        q.data.device_id, steps, (q.shape, k.shape, v.shape), problem.dtype, size,
        turns, turns if one_pass is None else turns + fused_backward.turns_size(problem, one_pass),
    )  # fmt: skip


def forget_plans() -> None:
    """Choose anew for every call from now on."""
    _forward_plans.clear()
    _backward_plans.clear()


def _workspace(problem: Problem, pass_name: str, workspace: Array | None, sums: int = 0) -> Array:
    """Scratch memory of a call, with ``sums`` bytes behind: the caller's, or new."""
    size = _statistics_size(problem, pass_name) + kernel_segment_bounds.room_for(problem) + sums
    alignment = statistics_bytes(problem) if problem.segment_ids_q is None else _ALIGNMENT
    if workspace is not None:
        fits = workspace.nbytes >= size and workspace.data.ptr % alignment == 0
        if not fits or not workspace.flags.c_contiguous:
            raise problem_with(
                "workspace", ValueError,
                got=f"{workspace.nbytes} bytes at strides {workspace.strides}",
                expected=f"at least {size} contiguous bytes, aligned to {alignment}",
            )  # fmt: skip
        return workspace
    refuse_capture("workspace", f"a uint8 array of {size} bytes that outlives the graph")
    return cupy.empty(size, np.uint8)


def _with_bounds(
    problem: Problem, score_pointers: tuple[int, ...], room: Array, start: int, device: int
) -> tuple[int, ...]:
    """``score_pointers`` with the bounds of segment ids, written to ``room`` from ``start`` on."""
    with _on_device(device):
        stream = cupy.cuda.get_current_stream().ptr
        address = room.data.ptr + start
        return segment_bounds.find(problem, score_pointers, address, device, stream)


def _plan_backward(
    problem: Problem,
    device: int,
    layouts: dict[str, Layout],
    out_dtype: np.dtype[Any],
    wanted: frozenset[str],
    addresses: dict[str, int],
    config: BackwardConfigs,
    sums: dict[GradOf, ScoreSums],
    one_pass: BackwardOnePassConfig | None,
) -> tuple[fused_backward.Step, ...]:
    """The launches of one backward call."""
    cuda_cores = portable.on_cuda_cores(problem, jit_device.capability(device))
    layouts = layouts | score_params.layouts(problem)
    address_bits = functools.reduce(int.__or__, (addresses[n] for n in ("dout", "q", "k", "v")))
    copy_bytes = launch_plan.copy_bytes(
        problem, layouts, ("dout", "q", "k", "v"), address_bits & 15
    )
    given = problem, jit_device.smem_limit(device), copy_bytes
    out_bits = (address_bits | addresses["out"]) & 15
    delta = portable.delta_config(
        problem, out_dtype, launch_plan.copy_bytes(problem, layouts, ("dout", "out"), out_bits),
        grad_lse="dlse" in layouts,
    )  # fmt: skip
    launch = launch_plan.plan_launch(
        kernel_params.DELTA, delta, problem, layouts, device,
        num_blocks=-(-problem.seqlen_q // delta.block_m),
    )  # fmt: skip
    steps: list[fused_backward.Step] = [(kernel_params.pointer_names(kernel_params.DELTA), launch)]
    names = kernel_params.pointer_names(kernel_params.BACKWARD)
    of_keys = wanted & {"k", "v"} if problem.seqlen_k else frozenset[str]()  # they may be empty
    together = None
    if one_pass is not None:
        together = fused_backward.plan(problem, device, layouts, addresses, one_pass, launch)
        if together is None and config.qkv is not None:  # strides, or alignments
            raise sm90.unservable(config.qkv, problem, device)
    if together is not None:
        steps = together
        wanted, of_keys = wanted - fused_backward.ALL, frozenset()
    hopper = _plan_backward_sm90(problem, device, layouts, of_keys, addresses, config)
    if hopper is None:
        passes: tuple[BackwardKVConfig, ...] | None = None
        if type(config.kv) is not BackwardKVConfig and sm90.available(device):
            passes = tf32_sm90.backward_kv_configs(problem, copy_bytes, of_keys)
        if passes is None:
            passes = portable_gradients.backward_kv_configs(
                *given, of_keys, cuda_cores=cuda_cores,
                partners=type(config.kv) is not BackwardKVConfig,
            )  # fmt: skip
        for chosen in passes:
            kv_config = portable.overridden(chosen, config.kv, device)
            launch = launch_plan.plan_launch(
                kernel_params.BACKWARD, kv_config, problem, layouts, device,
                num_blocks=launch_plan.num_tiles(problem, problem.seqlen_k, kv_config.block_n),
                streamed_bytes=problem.seqlen_q * _row_bytes(problem),
                summed=(problem.k if kv_config.grad_k else problem.v).summed,
            )  # fmt: skip
            steps.append((names, launch))
    else:
        steps += [(names, launch) for launch in hopper]
    hopper = _plan_backward_sm90(problem, device, layouts, wanted & {"q"}, addresses, config)
    if hopper is None:
        chosen_q: BackwardQConfig | None = None
        if type(config.q) is not BackwardQConfig and sm90.available(device):
            chosen_q = tf32_sm90.backward_q_config(problem, copy_bytes)
        if chosen_q is None:
            chosen_q = portable_gradients.backward_q_config(
                *given, cuda_cores=cuda_cores, partners=type(config.q) is not BackwardQConfig
            )
        q_config = portable.overridden(chosen_q, config.q, device)
        launch = launch_plan.plan_launch(
            kernel_params.BACKWARD, q_config, problem, layouts, device,
            num_blocks=launch_plan.num_tiles(problem, problem.seqlen_q, q_config.block_m),
            streamed_bytes=problem.seqlen_k * _row_bytes(problem),
            summed=problem.q.summed,
        )  # fmt: skip
        steps.append((names, launch))
    else:
        steps += [(names, launch) for launch in hopper]
    for name, own in sums.items() if problem.seqlen_k else ():
        chosen_sums = portable_gradients.backward_score_config(
            *given, name, own.sums_to, cuda_cores=cuda_cores
        )
        launch = launch_plan.plan_launch(
            kernel_params.BACKWARD, chosen_sums, problem, layouts | {"sums": own.layout()}, device,
            num_blocks=own.tiles(problem, chosen_sums.block_m, chosen_sums.block_n),
            summed=own.summed,
        )  # fmt: skip
        steps.append((tuple(_sums_of(name) if n == "sums" else n for n in names), launch))
    return tuple(steps)


def _sums_of(name: str) -> str:
    """Name of the address of the sums for one gradient."""
    return f"sums of {name}"


def _plan_backward_sm90(
    problem: Problem,
    device: int,
    layouts: dict[str, Layout],
    wanted: frozenset[str],
    addresses: dict[str, int],
    override: BackwardConfigs,
) -> list[MappedLaunch] | None:
    """Launches of Hopper's kernels for dq, or for dk and dv; None where the portable ones serve."""
    if not wanted:
        return []
    given = override.q if "q" in wanted else override.kv
    if isinstance(given, BackwardQConfig | BackwardKVConfig):
        return None
    chosen: tuple[BackwardSm90Config | None, ...] | None
    if "q" in wanted:
        chosen = (select_sm90.backward_q_config(problem),)
    else:
        chosen = select_sm90.backward_kv_configs(problem, wanted)
    launches = [
        sm90.plan_gradient(problem, device, layouts, addresses, config, given)
        for config in chosen or (None,)
    ]
    found = [launch for launch in launches if launch is not None]
    if len(found) == len(launches):
        return found
    if given is not None:
        raise sm90.unservable(given, problem, device)
    return None
