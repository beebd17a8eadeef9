"""How does a call run on a GPU? Its plan, scratch memory, the order of kernels, the stream.

What depends only on layouts is planned once: a call looks its plan up, writes its pointers into a
copy of the prepared parameters and launches on the current stream. Two launches share nothing
except counters that streams own. Nothing synchronises.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import cupy
import numpy as np
from cupy_backends.cuda.api import runtime

from cuflash._arrays import Array, Triple, converted, refuse_capture, write_rounded
from cuflash._errors import NoKernel, wrong_value
from cuflash._kernels.config import KernelConfig
from cuflash._launch import plan_cache, score_gradients, score_params, tensor_map
from cuflash._launch.kernel_launcher import current_stream
from cuflash._launch.plan import (
    map_layouts_of,
    maps_of,
    plan_steps,
    refuse_misaligned,
    row_layout,
    sums_of,
)
from cuflash._launch.plan_cache import Repeat
from cuflash._launch.repeat import Plan, repeat
from cuflash._launch.workspace import Workspace, statistics_bytes
from cuflash._problem.formulas import formulas_of
from cuflash._problem.layout import Layout
from cuflash._problem.operand import Operand
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem, changed, gradient_operand
from cuflash._results import AttentionResult, Gradients, Saved
from cuflash._select import hardware
from cuflash._select.access import Access, forward_of_any_arrays, of_any_arrays
from cuflash._select.choose import LaunchStep, Wanted, choose
from cuflash._select.override import BackwardConfigs
from cuflash._select.score_sums import SUMMED, score_sums

_NOT_PACKED: Mapping[str, Array] = {}


def _on_device(device: int) -> Any:
    """Context in which ``device`` is current; it does nothing where that holds already."""
    if runtime.getDevice() == device:
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)


def forward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    out: Array,
    lse: Array | None,
    *,
    workspace: Array | None = None,
    config: KernelConfig | None = None,
    cu_seqlens: Mapping[str, Array] = _NOT_PACKED,
    so_far: Array | None = None,
    page_table: Array | None = None,
) -> Plan | None:
    """Write ``out`` and, unless None, ``lse``; only the extent of keys may be 0.

    ``so_far`` and ``lse`` may hold a result over other keys, which is then merged: where
    :func:`can_merge_partial`. ``so_far`` has the dtype of lse and rows at multiples of 16 bytes,
    and may be ``out``. A ``config`` also decides which kernel runs. The portable kernel does not
    write rows of no packed sequence, which are filled before. Returns the plan that was run; None
    if an option's array was copied.
    """
    if so_far is not None:
        problem = changed(problem, merges_partial=True)
    q, k, v = qkv
    problem, held = score_params.arrays_of(problem, options, q, cu_seqlens)
    addresses = _addresses(
        held, q=q, k=k, v=v, out=out, lse=lse, page_table=page_table, so_far=so_far
    ) | _first_entry(problem)
    device = q.data.device_id
    with _on_device(device):
        stream, captured = current_stream()
        plan, memory = _prepared(
            problem, device, addresses, lambda: _forward_layouts(problem, lse, so_far),
            workspace, None if lse is None else lse.strides,
            None if so_far is None else so_far.strides, override=config,
        )  # fmt: skip
        if cu_seqlens and plan.workspace.lse_parts and memory is not None:
            plan.workspace.of_lse_parts(memory).view(problem.lse_dtype).fill(-np.inf)
        elif cu_seqlens and plan.launchers[-1].maps is None:
            out.fill(0)
            if lse is not None:
                lse.fill(-np.inf)
        addresses["dropout_seed"] = options.seed or 0
        plan.run(addresses, stream, captured)
    same = _as_given(options, held)
    del held, memory  # not before: another thread on this stream could get the memory
    return plan if same else None


def _as_given(options: Options, held: Mapping[str, Array]) -> bool:
    """Whether kernels read the caller's own option arrays, and no copies."""
    return all(held[name] is array for name, array in options.arrays.items())


def repeated_forward(
    plan: Plan, problem: Problem, q: Array, options: Options, lse: Array | None
) -> Repeat:
    """A function that repeats a call of :func:`forward`, on a new and thus aligned ``out``."""
    results = [("out", problem.out_shape, problem.out.dtype)]
    if lse is not None:
        results.append(("lse", problem.lse_shape, problem.lse_dtype))
    returned = (lambda out: out) if lse is None else AttentionResult
    given = ("q", "k", "v", *options.arrays)
    return repeat(plan, q.data.device_id, given, tuple(results), returned)


def backward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    saved: Saved,
    gradients: dict[str, Array],
    *,
    workspace: Array | None = None,
    config: BackwardConfigs | None = None,
    deterministic: bool = True,
    cu_seqlens: Mapping[str, Array] = _NOT_PACKED,
) -> Plan | None:
    """Write the ``gradients``, by input name; only the extent of keys may be 0.

    Returns the plan that was run; None if nothing was run, or an array was converted before it.
    """
    if not gradients:
        return None
    q, k, v = qkv
    problem, held = score_params.arrays_of(problem, options, q, cu_seqlens)
    device, real = q.data.device_id, problem.lse_dtype
    with _on_device(device):
        stream, _ = current_stream()
        dout, out, lse, dlse = read = _read(problem, saved)
        written = _written(problem, gradients)
        results = {f"d{name}": array for name, array in written.items()}
        num_sms = hardware.of_device(device).multiprocessors
        sums = {
            n: score_sums(problem, n, gradients[n].shape, num_sms) for n in SUMMED if n in gradients
        }
        if sums or "sink" in gradients:
            refuse_capture("wrt", "q, k and v alone: other gradients need scratch memory")
        totals = {
            sums_of(n): gradients[n] if own.is_gradient else cupy.zeros(own.shape, real)
            for n, own in sums.items()
        }
        laid_out = {
            sums_of(n): score_gradients.layout(problem, gradients[n])
            for n, own in sums.items() if own.is_gradient
        }  # fmt: skip
        addresses = _addresses(
            held, q=q, k=k, v=v, **read._asdict(), **results, **totals
        ) | _first_entry(problem)
        plan, memory = _prepared(
            problem, device, addresses,
            lambda: _gradient_layouts(problem, read, written) | laid_out,
            workspace, dout.strides, out.strides, out.dtype, lse.strides,
            None if dlse is None else dlse.strides,
            *((name, a.shape, a.strides, a.dtype) for name, a in written.items()),
            wanted=Wanted(
                {n: a.shape for n, a in gradients.items()}, out.dtype, dlse is not None,
                next((written[n].dtype for n in ("q", "k", "v") if n in written), None),
            ),
            override=config, deterministic=deterministic,
        )  # fmt: skip
        addresses["dropout_seed"] = options.seed or 0
        plan.run(addresses, stream)
        for name in (name for name in written if written[name] is not gradients[name]):
            write_rounded(gradients[name], written[name])
        ends, lengths = held.get("cu_seqlens_q"), held.get("q_lengths")
        for name in (n for n, own in sums.items() if not own.is_gradient):
            own = sums[name]
            score_gradients.write(problem, name, own, totals[sums_of(name)], gradients[name], ends)
        if "sink" in gradients:
            score_gradients.write_sink(
                problem, memory, lse, held["sink"], gradients["sink"], lengths, ends
            )
    same = all(map(operator.is_, saved, read)) and _as_given(options, held)
    del held, memory  # not before: another thread on this stream could get the memory
    return plan if same else None


def _read(problem: Problem, saved: Saved) -> Saved:
    """``saved`` as kernels read it: dout in the dtype of q, lse and dlse in the dtype of lse."""
    real = problem.lse_dtype
    dout, out, lse, dlse = saved
    return Saved(
        converted("dout", dout, problem.dtype),
        converted("out", out, real) if np.float64 in (real, out.dtype) else out,
        converted("lse", lse, real),
        None if dlse is None else converted("dlse", dlse, real),
    )


def repeated_backward(
    plan: Plan, problem: Problem, qkv: Triple, options: Options, saved: Saved
) -> Repeat | None:
    """A function that repeats a call for dq, dk and dv; None where alignment may differ."""
    if any(a.data.ptr & 15 for a in saved[:3]):  # a plain call's key has their alignments or-ed
        return None
    results = tuple(
        (f"d{name}", a.shape, problem.dtype) for name, a in zip("qkv", qkv, strict=True)
    )
    names = ("q", "k", "v", "dout", "out", "lse", *options.arrays)
    return repeat(plan, qkv[0].data.device_id, names, results, Gradients)


def workspace_size(problem: Problem, pass_name: str) -> int:
    """Bytes of scratch memory that the ``"forward"`` or ``"backward"`` of a problem needs.

    They suffice for any layout of its arrays: for as many parts of the keys as any forward kernel
    may take, and for float32 sums of dq if a one-pass kernel may compute the gradients.
    """
    own = hardware.of_device(runtime.getDevice())
    if pass_name == "forward":
        try:
            splits = max(
                _splits_of(choose(problem, own, access))
                for access in forward_of_any_arrays(problem)
            )
        except NoKernel:
            if not problem.has_8_bit_keys:
                raise
            return 0  # keys are dequantised first
        return Workspace.of(problem, backward=False, splits=splits).size
    access = of_any_arrays(problem)
    return max(
        _backward_workspace(
            problem,
            choose(problem, own, access, wanted=Wanted.of("qkv"), deterministic=deterministic),
        ).size
        for deterministic in (False, True)
    )


def _backward_workspace(problem: Problem, steps: tuple[LaunchStep, ...]) -> Workspace:
    fused = next((step for step in steps if step.config.computes == "dqkv"), None)
    if fused is None:
        return Workspace.of(problem, backward=True)
    splits = fused.splits if fused.config.split_queries else 0
    return Workspace.of(problem, True, fused.config, splits, fused.dq_sums)


def _splits_of(steps: tuple[LaunchStep, ...]) -> int:
    """Parts of the keys that a step combines; 0 where there is no such step."""
    return next((step.splits for step in steps if step.config.computes == "combine"), 0)


def _addresses(held: Mapping[str, Array], **operands: Array | None) -> dict[str, int]:
    """Addresses of the operands of a call, by the names of the kernels' pointers."""
    if held:
        operands |= held
    return {name: array.data.ptr for name, array in operands.items() if array is not None}


def _first_entry(problem: Problem) -> dict[str, int]:
    """The number of the first batch entry of a part of a call, passed like an address."""
    return {"entry_number": problem.origin.entry} if problem.origin.entry else {}


def can_merge_partial(problem: Problem, qkv: Triple, options: Options) -> bool:
    """Whether the kernel of a call can merge its result with a result over other keys.

    Result arrays are in C order, so that any kernel can write them.
    """
    problem = changed(problem, formulas=formulas_of(options))
    aligned = not any(a.data.ptr % tensor_map.ALIGNMENT for a in qkv)
    return _can_merge_partial(problem, runtime.getDevice(), aligned)


@functools.lru_cache(maxsize=1024)
def _can_merge_partial(problem: Problem, device: int, aligned: bool) -> bool:
    layouts = layouts_of(problem, {"out": problem.out})

    def has_maps(_problem: Problem, _layouts: Mapping[str, Layout], config: KernelConfig) -> bool:
        # Layouts of single entries: ``pack_gqa.py`` leaves partial results as they are.
        return aligned and map_layouts_of(problem, layouts, config) is not None

    steps = choose(problem, hardware.of_device(device), Access(layouts, has_maps))
    (config,) = (step.config for step in steps if step.config.computes == "out")
    return bool(config.can_merge_partial and not getattr(config, "split_keys", False))


def _prepared(
    problem: Problem,
    device: int,
    addresses: dict[str, int],
    lay_out: Callable[[], dict[str, Layout]],
    workspace: Array | None,
    *laid_out: Any,
    wanted: Wanted | None = None,
    override: Any = None,
    deterministic: bool = True,
) -> tuple[Plan, Array | None]:
    """The plan of a call, cached or new, and its scratch memory, which is added to ``addresses``.

    The key of a plan is made of the problem, the alignments and ``laid_out``.
    """
    bits, out_bits = addresses["q"] | addresses["k"] | addresses["v"], addresses["out"] & 15
    bits = (bits if wanted is None else bits | addresses["dout"]) & 15
    look_up_bits = (addresses.get("bias", 0) | addresses.get("mask", 0)) & 15
    key = (
        wanted is None, problem, device, override, deterministic, bits, out_bits, look_up_bits,
        addresses.get("dq", 0) & 15, *laid_out,
    )  # fmt: skip
    plan = plan_cache.find(key)
    layouts = lay_out() if plan is None else plan.layouts
    if plan is None or functools.reduce(operator.or_, addresses.values()) & 7:
        refuse_misaligned(layouts, addresses)
    if plan is not None:
        return plan, _memory(plan.workspace, workspace, addresses)
    own = hardware.of_device(device)
    access = Access(
        layouts,
        lambda call, at, config: maps_of(call, at, config, addresses) is not None,
        address_bits=bits,
        out_bits=0 if wanted is None else (addresses["dout"] | addresses["out"]) & 15,
        look_up_bits=look_up_bits,
    )
    steps = choose(
        problem, own, access, wanted=wanted, override=override, deterministic=deterministic
    )
    if wanted is None:
        scratch = Workspace.of(problem, backward=False, splits=_splits_of(steps))
    else:
        scratch = _backward_workspace(problem, steps)
    memory = _memory(scratch, workspace, addresses)  # before anything is compiled
    launchers = plan_steps(steps, problem, layouts, own, device, addresses, scratch.num_turns)
    return plan_cache.keep(key, Plan.of(launchers, scratch, layouts, addresses)), memory


def _memory(scratch: Workspace, workspace: Array | None, addresses: dict[str, int]) -> Array | None:
    """Scratch memory of a call, the caller's or new; its parts are added to ``addresses``."""
    if not scratch.size:
        return None
    if workspace is None:
        refuse_capture(
            "workspace", f"a uint8 array of {scratch.size} bytes that outlives the graph"
        )
        workspace = cupy.empty(scratch.size, np.uint8)
    elif (
        workspace.nbytes < scratch.size
        or workspace.data.ptr % scratch.alignment
        or not workspace.flags.c_contiguous
    ):
        raise wrong_value(
            "workspace", f"{workspace.nbytes} bytes at strides {workspace.strides}",
            f"at least {scratch.size} contiguous bytes, aligned to {scratch.alignment}",
        )  # fmt: skip
    addresses |= scratch.addresses(workspace.data.ptr)
    return workspace


def _written(problem: Problem, gradients: dict[str, Array]) -> dict[str, Array]:
    """Arrays for kernels to write: ``gradients``, or new zeros where q, k or v was promoted.

    Zeros, since kernels do not write rows that belong to no packed sequence.
    """
    dtypes = {n: gradients[n].dtype for n in ("q", "k", "v") if n in gradients}
    if set(dtypes.values()) == {problem.lse_dtype}:  # kernels write sums without rounding
        return gradients
    other = [n for n, dtype in dtypes.items() if dtype != problem.dtype]
    if other:
        refuse_capture("wrt", f"q, k and v of {problem.dtype}, to which they are promoted")
    return gradients | {n: cupy.zeros(gradients[n].shape, problem.dtype) for n in other}


def layouts_of(
    problem: Problem, others: Mapping[str, Operand], **rows: Array | None
) -> dict[str, Layout]:
    """Layouts of all arrays that the kernels of a call read and write, except sums.

    ``others`` are matrices beside q, k and v. ``rows`` are arrays with one number for each query.
    """
    matrices = {"q": problem.q, "k": problem.k, "v": problem.v, **others}
    if problem.pages is not None:
        matrices["page_table"] = problem.pages.table
    layouts = {name: Layout.of(operand) for name, operand in matrices.items()}
    for name, array in rows.items():
        if array is not None:
            layouts[name] = row_layout(problem, problem.lse_dtype.itemsize, array.strides)
    return layouts | score_params.layouts(problem)


def _forward_layouts(
    problem: Problem, lse: Array | None, so_far: Array | None
) -> dict[str, Layout]:
    others = {"out": problem.out}
    if so_far is not None:
        others["so_far"] = gradient_operand(problem, "dout", so_far)
    return layouts_of(problem, others, lse=lse)


def _gradient_layouts(
    problem: Problem, read: Saved, written: Mapping[str, Array]
) -> dict[str, Layout]:
    others = {n: gradient_operand(problem, "dout", getattr(read, n)) for n in ("dout", "out")}
    for name in {"q", "k", "v"} & set(written):
        others[f"d{name}"] = gradient_operand(problem, name, written[name])
    layouts = layouts_of(problem, others, lse=read.lse, dlse=read.dlse)
    return layouts | {"rows": row_layout(problem, statistics_bytes(problem), None)}
