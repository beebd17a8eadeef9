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
from cuflash._kernels import params
from cuflash._kernels import segment_bounds as kernel_segment_bounds
from cuflash._kernels.config import KernelConfig
from cuflash._launch import (
    dq_sums,
    fused_backward,
    repeat,
    score_gradients,
    score_params,
    segment_bounds,
    sm90,
)
from cuflash._launch import plan as launch_plan
from cuflash._launch.plan import Launch
from cuflash._launch.sm90 import MappedLaunch, Sm90Launch
from cuflash._problem.layout import Layout
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem, gradient_operand
from cuflash._select import hardware
from cuflash._select.access import Access, of_any_arrays
from cuflash._select.choose import LaunchStep, Wanted, choose
from cuflash._select.override import BackwardConfigs
from cuflash._select.pack_gqa import with_shared_rows
from cuflash._select.score_sums import SUMMED, score_sums

_PLAN_LIMIT = 4096
_NOT_PACKED: Mapping[str, Array] = {}
_FORWARD_POINTERS = params.pointer_names(params.FORWARD)
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
    config: KernelConfig | None = None,
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
    config: KernelConfig | None,
) -> Launch | Sm90Launch:
    layouts = _forward_layouts(problem, lse_strides) | score_params.layouts(problem)
    problem, layouts = with_shared_rows(problem, layouts)
    maps = sm90.MapsOf(pointers[: len(params.MAPPED)])
    bits = (pointers[0] | pointers[1] | pointers[2]) & 15
    steps = choose(
        problem, hardware.of_device(device), Access(layouts, maps, bits), override=config
    )
    chosen: Any = steps[-1].config
    launch = launch_plan.plan_launch(
        chosen, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, problem.seqlen_q, chosen.block_m),
        streamed_bytes=problem.seqlen_k * _row_bytes(problem),
    )  # fmt: skip
    if not chosen.tensor_maps:
        return launch
    filled = bytes(launch.pointers.size) + launch.params
    return sm90.persistent(launch.kernel, filled, maps.of(chosen), problem, chosen, device)


def statistics_bytes(problem: Problem) -> int:
    """Bytes of what the backward keeps of one query."""
    return 2 * problem.lse_dtype.itemsize


def _row_bytes(problem: Problem) -> int:
    """Bytes of one key and its value, or of one query and its gradient."""
    return problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)


def workspace_size(problem: Problem, pass_name: str) -> int:
    """Bytes of scratch memory that the ``"forward"`` or ``"backward"`` of a problem needs.

    With segments, bounds of their ids: see ``_kernels/segment_bounds.py``. The backward keeps lse
    and delta of each query before them; on the current device, where all gradients come from one
    pass, float32 sums of dq behind them.
    """
    size = _statistics_size(problem, pass_name) + kernel_segment_bounds.room_for(problem)
    if pass_name == "forward":
        return size
    steps = choose(
        problem, hardware.of_device(runtime.getDevice()), of_any_arrays(problem),
        wanted=Wanted.of("qkv"), deterministic=False,
    )  # fmt: skip
    fused = fused_of(steps)
    return size if fused is None else size + dq_sums.workspace_size(problem, fused)


def fused_of(steps: tuple[LaunchStep, ...]) -> Any:
    """The configuration of the kernel of all gradients in one pass, or None."""
    return next((step.config for step in steps if step.config.computes == "dqkv"), None)


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
            **dict(zip(params.SCORE_POINTERS, score_pointers, strict=True)),
            **{f"d{name}": array.data.ptr for name, array in written.items()},
        }  # fmt: skip
        sums = {
            name: score_sums(problem, name, gradients[name].shape)
            for name in SUMMED
            if name in gradients
        }
        if sums or "sink" in gradients:
            refuse_capture("wrt", "q, k and v alone: the others need memory of their own")
        sum_arrays = {name: cupy.zeros(own.shape, real) for name, own in sums.items()}
        addresses |= {_sums_of(name): array.data.ptr for name, array in sum_arrays.items()}
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
            fused = plan.fused
        else:
            layouts = _gradient_layouts(problem, dout, out, lse, dlse, written)
            layouts |= score_params.layouts(problem)
            maps = sm90.MapsOf(tuple(addresses[name] for name in params.BACKWARD_MAPPED))
            out_bits = (addresses["dout"] | addresses["out"]) & 15
            steps = choose(
                problem, hardware.of_device(device), Access(layouts, maps, bits & 15, out_bits),
                wanted=Wanted(
                    {name: array.shape for name, array in gradients.items()}, out.dtype,
                    dlse is not None,
                ),
                override=config, deterministic=deterministic,
            )  # fmt: skip
            fused = fused_of(steps)
        beside = 0 if fused is None else dq_sums.workspace_size(problem, fused)
        if rows is None:
            rows = _workspace(problem, "backward", workspace, beside)
        addresses["rows"] = rows.data.ptr
        if fused is not None:
            end = rows.data.ptr + _statistics_size(problem, "backward")
            addresses |= dq_sums.addresses(problem, fused, end)
        if plan is None:
            launch_plan.refuse_misaligned(layouts, addresses)
            launches = _plan_backward(problem, device, layouts, maps, steps)
            plan = _remember(_backward_plans, key, BackwardPlan(problem, launches, fused))
        for names, launch in plan.steps:
            launch.run(tuple(addresses[name] for name in names), stream)
        for name in (name for name in written if written[name] is not gradients[name]):
            write_rounded(gradients[name], written[name])
        ends, lengths = held.get("cu_seqlens_q"), held.get("q_lengths")
        for name, own in sums.items():
            score_gradients.write(problem, name, own, sum_arrays[name], gradients[name], ends)
        if "sink" in gradients:
            score_gradients.write_sink(
                problem, rows, lse, held["sink"], gradients["sink"], lengths, ends
            )
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
    fused: Any  # the configuration of the kernel of all gradients, or None


_backward_plans: dict[Any, BackwardPlan] = {}


def repeated_backward(
    plan: BackwardPlan, q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array
) -> Repeat | None:
    """What repeats a call for the gradients of q, k and v; None where alignment may differ."""
    problem, steps, fused = plan
    if (dout.data.ptr | out.data.ptr | lse.data.ptr) & 15:  # of the others a known call is sure
        return None
    turns = size = _statistics_size(problem, "backward")
    if fused is not None:
        size += dq_sums.workspace_size(problem, fused)
    return repeat.backward(
        q.data.device_id, steps, (q.shape, k.shape, v.shape), problem.dtype, size,
        turns, turns if fused is None else turns + dq_sums.turns_size(problem, fused),
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


def _gradient_layouts(
    problem: Problem,
    dout: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    gradients: dict[str, Array],
) -> dict[str, Layout]:
    """Layouts of all that the kernels of a gradient read and write but score arrays and sums."""
    layouts = {name: Layout.of(getattr(problem, name)) for name in ("q", "k", "v")}
    layouts["dout"] = Layout.of(gradient_operand(problem, "dout", dout))
    layouts["out"] = Layout.of(gradient_operand(problem, "dout", out))
    itemsize = problem.lse_dtype.itemsize
    layouts["lse"] = launch_plan.row_layout(problem, itemsize, lse.strides)
    layouts["rows"] = launch_plan.row_layout(problem, statistics_bytes(problem), None)
    if dlse is not None:
        layouts["dlse"] = launch_plan.row_layout(problem, itemsize, dlse.strides)
    for name in {"q", "k", "v"} & set(gradients):
        layouts[f"d{name}"] = Layout.of(gradient_operand(problem, name, gradients[name]))
    return layouts


def _plan_backward(
    problem: Problem,
    device: int,
    layouts: dict[str, Layout],
    maps: sm90.MapsOf,
    steps: tuple[LaunchStep, ...],
) -> tuple[fused_backward.Step, ...]:
    """The launches of one backward call, in order."""
    launches: list[fused_backward.Step] = []
    names = params.pointer_names(params.BACKWARD)
    for config, gradient, sums in steps:
        chosen: Any = config
        match config.computes:
            case "delta":
                delta = launch_plan.plan_launch(
                    chosen, problem, layouts, device,
                    num_blocks=-(-problem.seqlen_q // chosen.block_m),
                )  # fmt: skip
                launches.append((params.pointer_names(params.DELTA), delta))
            case "dqkv":
                launches = fused_backward.plan(problem, device, layouts, maps, chosen, delta)
            case "sums" if sums is not None:
                launch = launch_plan.plan_launch(
                    chosen, problem, layouts | {"sums": sums.layout()}, device,
                    num_blocks=sums.tiles(problem, chosen.block_m, chosen.block_n),
                    summed=sums.summed,
                )  # fmt: skip
                own = tuple(_sums_of(gradient) if name == "sums" else name for name in names)
                launches.append((own, launch))
            case "dq" | "dkv":
                launches.append((names, _plan_gradient(problem, device, layouts, maps, chosen)))
    return tuple(launches)


def _plan_gradient(
    problem: Problem, device: int, layouts: dict[str, Layout], maps: sm90.MapsOf, config: Any
) -> Launch | MappedLaunch:
    """The launch of a kernel of dq, or of dk, dv or both."""
    owned, streamed = problem.seqlen_q, problem.seqlen_k
    if config.computes == "dkv":
        owned, streamed = streamed, owned
    launch = launch_plan.plan_launch(
        config, problem, layouts, device,
        num_blocks=launch_plan.num_tiles(problem, owned, config.own_rows),
        streamed_bytes=streamed * _row_bytes(problem),
        summed=launch_plan.summed_axes(problem, config),
    )  # fmt: skip
    return sm90.mapped(launch, maps.of(config)) if config.tensor_maps else launch


def _sums_of(name: str) -> str:
    """Name of the address of the sums for one gradient."""
    return f"sums of {name}"
