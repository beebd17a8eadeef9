"""Which kernels, with which tiles, does a call launch? The one choice: plans and launches ask it.

Each table below lists the kernels of one result, best first: the first that serves the problem on
the hardware, and can load the arrays where they lie, is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cuflash._errors import problem_with
from cuflash._kernels import segment_bounds
from cuflash._kernels.config import KernelConfig, TileConfig
from cuflash._problem.problem import HALVES, Problem
from cuflash._select import (
    eligibility,
    fused_backward,
    narrow,
    portable,
    portable_gradients,
    sm90,
    tf32_sm90,
)
from cuflash._select.access import Access, in_c_order, rows_fit_tensor_maps
from cuflash._select.hardware import Hardware
from cuflash._select.override import BackwardConfigs, with_override
from cuflash._select.pack_gqa import with_shared_rows
from cuflash._select.score_sums import SUMMED, ScoreSums, score_sums

#: The kernels of q, k and v that every architecture has.
PORTABLE = frozenset(("forward_sm80", "backward_dq_sm80", "backward_dkv_sm80"))
_ALL = frozenset("qkv")


class LaunchStep(NamedTuple):
    """One kernel that a call launches."""

    config: KernelConfig
    gradient: str = ""  # the input, other than q, k and v, whose gradient it sums
    sums: ScoreSums | None = None  # what it writes for that


class Wanted(NamedTuple):
    """The gradients that a call asks for."""

    shapes: Mapping[str, tuple[int, ...]]  # of the inputs by name; any for q, k and v
    out_dtype: np.dtype[Any] | None = None  # in which out is read; None: that of q
    grad_lse: bool = False  # is there a cotangent of lse?

    @classmethod
    def of(cls, names: str) -> Wanted:
        """The gradients of q, k and v: ``"qkv"``."""
        return cls(dict.fromkeys(names, ()))


class _Ask(NamedTuple):
    """What a candidate looks at."""

    problem: Problem
    hardware: Hardware
    access: Access
    copy_bytes: int
    deterministic: bool = True
    keys: frozenset[str] = frozenset()  # of "k" and "v", those whose gradient is wanted

    @property
    def cuda_cores(self) -> bool:
        return portable.on_cuda_cores(self.problem, self.hardware.capability)

    @property
    def smem(self) -> int:
        return self.hardware.limits.block_smem


#: What a candidate returns: its passes, or None where it does not serve.
_Passes = tuple[TileConfig, ...] | None
_Candidates = Mapping[str, Callable[[_Ask], _Passes]]


def _one(config: TileConfig | None) -> _Passes:
    return None if config is None else (config,)


def _fused(kernel: str) -> Callable[[_Ask], _Passes]:
    def candidate(ask: _Ask) -> _Passes:
        found = fused_backward.config_of(ask.problem, ordered=ask.deterministic)
        return None if found is None or found.kernel != kernel else (found,)

    return candidate


_FORWARD: _Candidates = {
    "forward_sm90": lambda ask: _one(
        sm90.forward_config(ask.problem, ask.hardware.multiprocessors)
    ),
    "forward_narrow": lambda ask: _one(
        narrow.forward_config(ask.problem, ask.copy_bytes, ask.hardware.multiprocessors)
    ),
    "forward_tf32_sm90": lambda ask: _one(tf32_sm90.forward_config(ask.problem, ask.copy_bytes)),
    "forward_sm80": lambda ask: _one(
        portable.forward_config(ask.problem, ask.smem, ask.copy_bytes, cuda_cores=ask.cuda_cores)
    ),
}
_ALL_GRADIENTS: _Candidates = {
    name: _fused(name) for name in ("backward_sm90", "backward_pair_sm90")
}
_GRADIENTS_OF_KEYS: _Candidates = {
    "backward_dkv_sm90": lambda ask: sm90.backward_kv_configs(ask.problem, ask.keys),
    "backward_dkv_tf32_sm90": lambda ask: tf32_sm90.backward_kv_configs(
        ask.problem, ask.copy_bytes, ask.keys
    ),
    "backward_dkv_partners": lambda ask: portable_gradients.backward_kv_partners(
        ask.problem, ask.smem, ask.copy_bytes, ask.keys, cuda_cores=ask.cuda_cores
    ),
    "backward_dkv_sm80": lambda ask: portable_gradients.backward_kv_configs(
        ask.problem, ask.smem, ask.copy_bytes, ask.keys, cuda_cores=ask.cuda_cores
    ),
}
_GRADIENT_OF_QUERIES: _Candidates = {
    "backward_dq_sm90": lambda ask: _one(sm90.backward_q_config(ask.problem)),
    "backward_dq_tf32_sm90": lambda ask: _one(
        tf32_sm90.backward_q_config(ask.problem, ask.copy_bytes)
    ),
    "backward_dq_partners": lambda ask: _one(
        portable_gradients.backward_q_partners(
            ask.problem, ask.smem, ask.copy_bytes, cuda_cores=ask.cuda_cores
        )
    ),
    "backward_dq_sm80": lambda ask: _one(
        portable_gradients.backward_q_config(
            ask.problem, ask.smem, ask.copy_bytes, cuda_cores=ask.cuda_cores
        )
    ),
}


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

    ``access`` is None for aligned arrays in C order. ``wanted`` makes it a call for gradients.
    ``override`` is the ``config=`` of the call, whose kernels serve or the call is an error.
    ``only`` names the kernels of q, k and v that may be taken.
    """
    access = access or in_c_order(problem, backward=wanted is not None)
    steps: list[LaunchStep] = []
    if problem.segment_ids_q is not None:
        steps.append(LaunchStep(segment_bounds.config_of(problem)))
    if wanted is None:
        problem, layouts = with_shared_rows(problem, dict(access.layouts))
        access = access._replace(layouts=layouts)
        ask = _Ask(problem, hardware, access, access.copy_bytes(problem, "q", "k", "v"))
        steps += map(LaunchStep, _chosen(_FORWARD, ask, override, only))
    else:
        given = override or BackwardConfigs()
        steps += _backward(problem, hardware, access, wanted, given, deterministic, only)
    return tuple(
        step._replace(config=portable.for_architecture(step.config, hardware.capability))
        for step in steps
    )


def _backward(
    problem: Problem,
    hardware: Hardware,
    access: Access,
    wanted: Wanted,
    override: BackwardConfigs,
    deterministic: bool,
    only: frozenset[str] | None,
) -> list[LaunchStep]:
    out_bytes = access.copy_bytes(problem, "dout", "out", address_bits=access.out_bits)
    delta = portable.delta_config(
        problem, wanted.out_dtype or problem.dtype, out_bytes, grad_lse=wanted.grad_lse
    )
    steps = [LaunchStep(delta)]
    width = access.copy_bytes(problem, "dout", "q", "k", "v")
    names = frozenset(wanted.shapes)
    if not problem.seqlen_k:
        names &= {"q"}  # zeros: there is nothing to sum
    keys = names & {"k", "v"}
    ask = _Ask(problem, hardware, access, width, deterministic, keys)
    together = _fused_config(ask, names, override, only)
    if together is not None:
        steps += [LaunchStep(together), LaunchStep(fused_backward.convert_config(together))]
    else:
        if keys:
            steps += map(LaunchStep, _chosen(_GRADIENTS_OF_KEYS, ask, override.kv, only))
        if "q" in names:
            steps += map(LaunchStep, _chosen(_GRADIENT_OF_QUERIES, ask, override.q, only))
    for name in SUMMED:
        if name in names:
            sums = score_sums(problem, name, wanted.shapes[name])
            config = portable_gradients.backward_score_config(
                problem, ask.smem, width, name, sums.sums_to, cuda_cores=ask.cuda_cores
            )
            steps.append(LaunchStep(config, name, sums))
    return steps


def _fused_config(
    ask: _Ask, names: frozenset[str], override: BackwardConfigs, only: frozenset[str] | None
) -> Any:
    """The kernel of all gradients in one pass; None where kernels of their own serve."""
    if override.qkv is None and (override.q or override.kv):
        return None
    if names >= _ALL:
        found: Any = _first(_ALL_GRADIENTS, ask, override.qkv, only)
        if found and (override.qkv is not None or fused_backward.wins(ask.problem, found[0])):
            return found[0]
    if override.qkv is not None:
        raise unservable(override.qkv, ask.problem, ask.hardware)
    return None


def _chosen(
    candidates: _Candidates, ask: _Ask, override: TileConfig | None, only: frozenset[str] | None
) -> tuple[TileConfig, ...]:
    found = _first(candidates, ask, override, only)
    if found is None:
        raise unservable(override, ask.problem, ask.hardware)
    return found


def _first(
    candidates: _Candidates, ask: _Ask, override: TileConfig | None, only: frozenset[str] | None
) -> _Passes:
    """The passes of the first kernel that serves."""
    for kernel, candidate in candidates.items():
        if kernel != (override.kernel if override is not None else kernel):
            continue
        if only is not None and kernel not in only:
            continue
        if kernel.endswith("_sm90") and not ask.hardware.hopper:
            continue
        passes = candidate(ask)
        if passes is None:
            continue
        passes = tuple(with_override(config, override, ask.hardware) for config in passes)
        has_maps, layouts = ask.access.has_maps, ask.access.layouts
        if all(not c.tensor_maps or has_maps(ask.problem, layouts, c) for c in passes):
            return passes
    return None


def unservable(config: TileConfig | None, problem: Problem, hardware: Hardware) -> Exception:
    """The error of a caller's ``config`` that cannot serve the call."""
    got = type(config).__name__
    fix = "leave it out, and the kernel that serves is chosen"
    if config is not None and config.kernel.endswith("_sm90") and not hardware.hopper:
        return problem_with(
            "config", ValueError, got=f"{got} on {hardware.name} ({hardware.arch})",
            expected="a device of sm_90, with a driver of CUDA 12", fix=fix,
        )  # fmt: skip
    reason = ""
    if config is not None and config.tensor_maps:
        reason = why_portable(problem, hardware, backward=config.computes != "out")
    return problem_with(
        "config", ValueError, got=got + (f" where {reason}" if reason else ""),
        expected="head sizes, options, strides and alignments that it can serve", fix=fix,
    )  # fmt: skip


def why_portable(problem: Problem, hardware: Hardware, *, backward: bool = False) -> str:
    """Why none of Hopper's kernels serves a problem in C order; empty where one does."""
    if hardware.arch != "sm_90":
        return f"{hardware.arch} has no wgmma as sm_90 has it"
    if problem.dtype in HALVES and not rows_fit_tensor_maps(problem):
        return "rows of q, k or v are not multiples of 16 bytes"
    if problem.dtype == np.float32:
        against = eligibility.against_tf32 if backward else eligibility.against_tf32_forward
    else:
        against = eligibility.against_gradient if backward else eligibility.against_forward
    return against(problem)
