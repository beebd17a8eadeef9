"""Which path runs a validated call: the CPU path or the kernels?"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, array_module, converted, is_cupy, native, same_module
from cuflash._errors import problem_with, shown
from cuflash._host import attention
from cuflash._problem.checks import flag
from cuflash._problem.options import Options
from cuflash._problem.problem import Problem, common_dtype


def operands(q: Any, k: Any, v: Any) -> tuple[ModuleType, Array, Array, Array]:
    """q, k, v as arrays of one library and one dtype."""
    q, k, v = native("q", q), native("k", k), native("v", v)
    xp = same_module(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        dtype = common_dtype({"q": q.dtype, "k": k.dtype, "v": v.dtype})
        q, k, v = converted("q", q, dtype), converted("k", k, dtype), converted("v", v, dtype)
    return xp, q, k, v


def check_common(xp: ModuleType, deterministic: Any, workspace: Any, config: Any) -> None:
    """Raise for a wrong value of what says how to compute."""
    flag("deterministic", deterministic)
    if workspace is not None and native("workspace", workspace).dtype != np.uint8:
        raise problem_with(
            "workspace", TypeError, got=f"dtype {workspace.dtype}",
            expected="a uint8 array of workspace_size(...) bytes",
        )  # fmt: skip
    if workspace is not None and array_module(workspace) is not xp:
        raise problem_with(
            "workspace", TypeError, got=f"a {array_module(workspace).__name__} array",
            expected=f"a {xp.__name__} array like q",
        )  # fmt: skip
    if xp is np and config is not None:
        raise problem_with(
            "config", TypeError, got=shown(config), expected="None for NumPy arrays",
            fix="it selects the tiles of a GPU kernel",
        )  # fmt: skip


def run_forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    options: Options,
    out: Array,
    lse: Array | None,
    workspace: Array | None,
    config: Any,
    *,
    first_entry: int = 0,
    **of_packed: Any,
) -> Any:
    """Fill ``out`` and, unless None, ``lse``; ``first_entry`` numbers the batch for dropout.

    ``of_packed`` says to kernels where packed sequences end. Returns the plan that kernels ran by.
    """
    if _nothing_to_sum(problem):
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return None
    path: Any = attention
    extra: dict[str, Any] = {"first_entry": first_entry}
    if is_cupy(q):
        path, extra = launch(), {"workspace": workspace, "config": config, **of_packed}
    return path.forward(problem, q, k, v, options, out, lse, **extra)


def run_backward(
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
    workspace: Array | None,
    config: Any,
    *,
    deterministic: bool = True,
    first_entry: int = 0,
    **of_packed: Any,
) -> Any:
    """Fill ``gradients``, by input name; the rest as for :func:`run_forward`.

    Returns the plan of kernels, where it repeats the call.
    """
    if _nothing_to_sum(problem):
        for gradient in gradients.values():
            gradient.fill(0)
        return None
    path: Any = attention
    extra: dict[str, Any] = {"first_entry": first_entry}
    if is_cupy(q):
        path, extra = launch(), {"workspace": workspace, "config": config, **of_packed}
        extra["deterministic"] = deterministic
    return path.backward(problem, dout, q, k, v, out, lse, dlse, options, gradients, **extra)


def _nothing_to_sum(problem: Problem) -> bool:
    """Whether no row has a score: the results are then known, and nothing is launched."""
    no_scores = problem.seqlen_k == 0 and problem.sink is None
    return no_scores or 0 in (*problem.batch, problem.seqlen_q)


def launch() -> Any:
    """The module that launches kernels; it imports CuPy."""
    from cuflash._launch import run

    return run
