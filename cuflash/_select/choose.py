"""Which kernels, with which tiles, does a call launch? Plans and launches share this choice.

``cuflash/_kernels/registry.py`` lists the kernels of each result, best first. The first that serves
the problem on the hardware and can load the arrays without copies is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cuflash._errors import NoKernel, problem_with
from cuflash._kernels import fused_backward, split_keys, split_queries, wgmma
from cuflash._kernels.backward_combine import BackwardCombineConfig
from cuflash._kernels.backward_convert import BackwardConvertConfig
from cuflash._kernels.backward_delta import DeltaConfig
from cuflash._kernels.backward_dscore_sm80 import BackwardScoreConfig
from cuflash._kernels.config import KernelConfig
from cuflash._kernels.forward_combine import CombineConfig
from cuflash._kernels.registry import kernels_for
from cuflash._kernels.request import Request, needs_simt
from cuflash._kernels.segment_bounds import SegmentBoundsConfig
from cuflash._problem.float8 import E4M3
from cuflash._problem.problem import HALVES, Problem
from cuflash._select import measured
from cuflash._select.access import Access, in_c_order, rows_fit_tensor_maps
from cuflash._select.hardware import Hardware
from cuflash._select.override import BackwardConfigs, with_override
from cuflash._select.pack_gqa import with_shared_rows
from cuflash._select.score_sums import SUMMED, ScoreSums, score_sums

#: Kernels of out, dq, dk and dv on every architecture.
PORTABLE = frozenset(("forward_sm80", "backward_dq_sm80", "backward_dkv_sm80"))
_ALL = frozenset("qkv")


class LaunchStep(NamedTuple):
    """One kernel that a call launches."""

    config: KernelConfig
    gradient: str = ""  # "bias", "alibi_slopes" or "scale", if it writes sums for that gradient
    sums: ScoreSums | None = None  # these sums
    splits: int = 1  # parts of the keys (forward) or queries (gradient), combined in the end
    dq_sums: int = 1  # float32 sums of dq, which BackwardConvertConfig adds up


class Wanted(NamedTuple):
    """The gradients that a call asks for."""

    shapes: Mapping[str, tuple[int, ...]]  # of each input by name; not used for q, k and v
    out_dtype: np.dtype[Any] | None = None  # dtype of out; None: the dtype of q
    grad_lse: bool = False  # is there a cotangent of lse?
    dtype: np.dtype[Any] | None = None  # dtype of dq, dk and dv; None: the dtype of q

    @classmethod
    def of(cls, names: str) -> Wanted:
        """The gradients of q, k and v: ``"qkv"``."""
        return cls(dict.fromkeys(names, ()))


class _Call(NamedTuple):
    """What the choice of every step of a call depends on."""

    request: Request
    hardware: Hardware
    access: Access
    only: frozenset[str] | None  # names of the kernels of out, dq, dk and dv to choose from


def request_of(problem: Problem, hardware: Hardware, copy_bytes: int, **given: Any) -> Request:
    """The request for kernels for a problem on a device."""
    return Request(
        problem, hardware.capability, hardware.limits.block_smem, hardware.multiprocessors,
        copy_bytes, device=hardware.name, tensor_maps=hardware.tensor_maps,
        simt=needs_simt(problem, hardware.capability), **given,
    )  # fmt: skip


def choose(
    problem: Problem,
    hardware: Hardware,
    access: Access | None = None,
    *,
    wanted: Wanted | None = None,
    override: Any = None,
    deterministic: bool = True,
    only: frozenset[str] | None = None,
) -> tuple[LaunchStep, ...]:
    """Every kernel that a call launches, in order.

    ``access`` is None for aligned arrays in C order. With ``wanted`` the call is for gradients.
    ``override`` is the ``config=`` of the call: an error if its kernels cannot serve the call.
    ``only`` names the kernels of out, dq, dk and dv to choose from; None: all.
    """
    access = access or in_c_order(problem, backward=wanted is not None)
    steps: list[LaunchStep] = []
    if problem.segment_ids_q is not None:
        steps.append(LaunchStep(SegmentBoundsConfig.of(problem)))
    if wanted is None:
        problem, layouts = with_shared_rows(problem, dict(access.layouts))
        access = access._replace(layouts=layouts)
        request = request_of(
            problem, hardware, access.copy_bytes(problem, "q", "k", "v"),
            look_up_bits=access.look_up_bits,
        )  # fmt: skip
        call = _Call(request, hardware, access, only)
        return (*steps, *_forward(call, override))
    names = frozenset(wanted.shapes)
    if not problem.seqlen_k:
        names &= {"q"}  # the others are zeros, with nothing to sum
    request = request_of(
        problem, hardware, access.copy_bytes(problem, "dout", "q", "k", "v"),
        deterministic=deterministic, keys=names & {"k", "v"}, grad_dtype=wanted.dtype,
        look_up_bits=access.look_up_bits,
    )  # fmt: skip
    call = _Call(request, hardware, access, only)
    return (*steps, *_backward(call, wanted, names, override or BackwardConfigs()))


def _forward(call: _Call, override: KernelConfig | None) -> list[LaunchStep]:
    config: Any
    (config,) = _passes_of("out", call, override)
    if not getattr(config, "split_keys", False):
        return [LaunchStep(config)]
    problem = call.request.problem
    parts = split_keys.parts_of(problem, config, call.request.num_sms)
    if parts == 1 and config.of_few_rows:
        of_parts = dict.fromkeys(("split_keys", "clusters", "overlaps"), False)
        return [LaunchStep(config.replace(**of_parts, out_dtype=problem.out.dtype.name))]
    if not config.leaves_parts:
        return [LaunchStep(config, splits=parts)]
    combining = CombineConfig.after(config, problem, parts, call.request.num_sms)
    return [LaunchStep(config, splits=parts), LaunchStep(combining, splits=parts)]


def _backward(
    call: _Call, wanted: Wanted, names: frozenset[str], override: BackwardConfigs
) -> list[LaunchStep]:
    request, access = call.request, call.access
    problem = request.problem
    out_bytes = access.copy_bytes(problem, "dout", "out", address_bits=access.out_bits)
    out_dtype = wanted.out_dtype or problem.dtype
    sums = {
        name: score_sums(problem, name, wanted.shapes[name], request.num_sms)
        for name in SUMMED if name in names
    }  # fmt: skip
    fused: Any = _fused(call, names, override)
    delta = DeltaConfig.of(
        problem, out_dtype, out_bytes, grad_lse=wanted.grad_lse, overlaps=fused is not None
    )
    steps = [LaunchStep(delta)]
    if fused is not None:
        if "bias" in sums and sums["bias"].is_of_single_pairs(problem) and fused.can_write_bias:
            fused = fused.replace(grad_bias=True)
            del sums["bias"]
        steps += _in_one_pass(fused, request, access)
    else:
        if request.keys:
            steps += map(LaunchStep, _passes_of("dkv", call, override.kv))
        if "q" in names:
            steps += map(LaunchStep, _passes_of("dq", call, override.q))
    for name, own in sums.items():
        config = BackwardScoreConfig.of(request, name, own.sums_to, own.dtype)
        steps.append(LaunchStep(config, name, own))
    return steps


def _in_one_pass(config: Any, request: Request, access: Access) -> list[LaunchStep]:
    """The one-pass kernel, and the kernels that add up its sums."""
    problem, num_sms = request.problem, request.num_sms
    parts = split_queries.parts_of(problem, config, num_sms)
    sums = split_queries.sums_of_dq(problem, config, num_sms)
    rows = parts > split_queries.entries_that_share(problem)
    if split_queries.finishes_dq(problem, config, num_sms) and not (rows and config.head_dim > 96):
        finishing = config.replace(finishes_dq=True)
        if access.has_maps(problem, access.layouts, finishing):
            config = finishing
        elif not request.deterministic:
            config = config.replace(deterministic=False)
    convert = LaunchStep(BackwardConvertConfig.after(config), dq_sums=sums)
    if parts == 1:
        return [LaunchStep(config, dq_sums=sums), convert]
    config = config.replace(split_queries=True, split_rows=rows)
    combine = LaunchStep(BackwardCombineConfig.after(config), splits=parts)
    return [LaunchStep(config, splits=parts, dq_sums=sums), combine, convert]


def _fused(call: _Call, names: frozenset[str], override: BackwardConfigs) -> KernelConfig | None:
    """The one-pass kernel of dq, dk and dv; None where separate kernels compute them."""
    asked = override.qkv is not None
    if not asked and (override.q or override.kv):
        return None
    if names >= _ALL:
        found = _first_passes("dqkv", call, override.qkv)
        if found and (asked or fused_backward.wins(found[0])):
            return found[0]
    if asked:
        raise unusable_config(override.qkv, call.request.problem, call.hardware)
    return None


def _passes_of(result: str, call: _Call, override: KernelConfig | None) -> tuple[KernelConfig, ...]:
    found = _first_passes(result, call, override)
    if not found and override is None:
        raise NoKernel(f"no kernel for {call.request.problem.dtype} on {call.hardware.name}")
    if not found:
        raise unusable_config(override, call.request.problem, call.hardware)
    return found


def _first_passes(
    result: str, call: _Call, override: KernelConfig | None
) -> tuple[KernelConfig, ...]:
    """The passes of the first kernel that can compute a result; empty if no kernel can."""
    request, hardware, access, only = call
    merges = request.problem.merges_partial
    few = split_keys.has_tiles_of_few_rows(request)
    splits = result == "out" and override is None and (few or split_keys.wanted(request))
    for kernel in kernels_for(result):
        asked = override is None or kernel.kernel == override.kernel
        if not asked or (only is not None and kernel.kernel not in only):
            continue
        if kernel.float8 != (request.problem.dtype == E4M3):
            continue
        if request.problem.has_8_bit_keys and not kernel.converts_keys:
            continue
        if merges and not kernel.can_merge_partial:
            continue
        if splits and not split_keys.suits(kernel, request):
            continue
        if override is None and kernel.for_sm90 and wgmma.leaves_tiles_empty(request.problem):
            continue
        if kernel.eligible(request) or (request.problem.pages and not kernel.reads_pages):
            continue
        passes = of_any_device = kernel.chosen(request)
        if request.measured and measured.in_use():
            of_any_device = kernel.chosen(request._replace(device=""))
        passes = tuple(
            with_override(config, override, hardware, plain)
            for config, plain in zip(passes, of_any_device, strict=True)
        )
        maps = (access.has_maps(request.problem, access.layouts, c) for c in passes)
        if passes and (not kernel.tensor_maps or all(maps)):
            return passes
    return ()


def unusable_config(config: KernelConfig | None, problem: Problem, hardware: Hardware) -> Exception:
    """The error of a caller's ``config`` that cannot serve the call."""
    got = config.__class__.__name__
    fix = "without config= the library chooses a kernel"
    if config is not None and config.for_sm90 and not hardware.hopper:
        return problem_with(
            "config", ValueError, got=f"{got} on {hardware.name} ({hardware.arch})",
            expected="a device of sm_90, with a driver of CUDA 12", fix=fix,
        )  # fmt: skip
    reason = ""
    if config is not None and config.tensor_maps:
        reason = why_portable(problem, hardware, config.computes)
    return problem_with(
        "config", ValueError, got=got + (f" where {reason}" if reason else ""),
        expected="head sizes, options, strides and alignments that it supports", fix=fix,
    )  # fmt: skip


def why_portable(problem: Problem, hardware: Hardware, result: str = "out") -> str:
    """Why no Hopper kernel of a result serves a problem in C order; empty where one does."""
    request = request_of(problem, hardware, 16)
    for_float32 = problem.dtype == np.float32
    reasons = [kernel.eligible(request) for kernel in kernels_for(result) if kernel.for_sm90]
    if hardware.arch == "sm_90" and problem.dtype in HALVES and not rows_fit_tensor_maps(problem):
        return "rows of q, k or v are not multiples of 16 bytes"
    if not all(reasons):
        return ""
    return reasons[1 if for_float32 and len(reasons) > 1 else 0]
