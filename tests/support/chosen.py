"""Which configurations does a call in C order get, and which does one kernel choose by itself?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cuflash._kernels.backward_dscore_sm80 import BackwardScoreConfig
from cuflash._kernels.registry import KERNELS
from cuflash._kernels.request import Request
from cuflash._problem.problem import Problem
from cuflash._select.choose import PORTABLE, Wanted, choose
from cuflash._select.hardware import Hardware


def forward_of(problem: Problem, hardware: Hardware, *, portable: bool = False) -> Any:
    """Return the forward; with ``portable`` the kernel that every architecture has."""
    steps = choose(problem, hardware, only=PORTABLE if portable else None)
    return next(step.config for step in steps if step.config.computes == "out")


def backward_of(
    problem: Problem,
    hardware: Hardware,
    names: frozenset[str] | str = "qkv",
    *,
    portable: bool = False,
    deterministic: bool = True,
) -> list[Any]:
    """Return the kernels of the gradients, beginning with that of delta."""
    steps = choose(
        problem, hardware, wanted=Wanted.of("".join(sorted(names))), deterministic=deterministic,
        only=PORTABLE if portable else None,
    )  # fmt: skip
    return [step.config for step in steps if step.config.computes != "bounds"]


def passes(name: str, problem: Problem, keys: Iterable[str] = "", **given: Any) -> Any:
    """Return the passes of one kernel (on an H100 by default), or None if it refuses."""
    request = Request(problem, keys=frozenset(keys) & {"k", "v"}, **given)
    kernel = KERNELS[name]
    found = () if kernel.eligible(request) else kernel.chosen(request)
    return found if found or (not request.keys and not kernel.eligible(request)) else None


def one(name: str, problem: Problem, **given: Any) -> Any:
    """Return the only pass of one kernel, or None if it refuses."""
    found = passes(name, problem, **given)
    return found[0] if found else None


def fused(problem: Problem, *, deterministic: bool) -> Any:
    """Return the kernel of all gradients in one pass, or None if both such kernels refuse."""
    kernels = ("backward_sm90", "backward_pair_sm90")
    found = [one(name, problem, deterministic=deterministic) for name in kernels]
    return found[0] or found[1]


def portable(name: str, problem: Problem, smem_limit: int, copy_bytes: int, **given: Any) -> Any:
    """Return one pass of a portable kernel, with ``smem_limit`` bytes of shared memory."""
    return one(name, problem, smem_limit=smem_limit, copy_bytes=copy_bytes, **_of_sm80(given))


def portable_kv(
    problem: Problem, smem_limit: int, copy_bytes: int, keys: Iterable[str], **given: Any
) -> Any:
    """Return the passes of the portable kernel of dk and dv."""
    return passes(
        "backward_dkv_sm80", problem, keys, smem_limit=smem_limit, copy_bytes=copy_bytes,
        **_of_sm80(given),
    )  # fmt: skip


def scores(
    problem: Problem, smem_limit: int, copy_bytes: int, grad_of: Any, sums_to: Any, **given: Any
) -> Any:
    """Return the kernel of the gradients of bias, slopes and scale."""
    request = Request(problem, smem_limit=smem_limit, copy_bytes=copy_bytes, **_of_sm80(given))
    return BackwardScoreConfig.of(request, grad_of, sums_to)


def _of_sm80(given: dict[str, Any]) -> dict[str, Any]:
    return {"capability": 80} | given
