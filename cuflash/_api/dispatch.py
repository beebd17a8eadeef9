"""Which path runs a validated call: the CPU path or the kernels?"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash._arrays import Array, Triple, is_cupy
from cuflash._errors import not_yet
from cuflash._host import cache as on_the_host
from cuflash._host.backward import backward
from cuflash._host.forward import forward
from cuflash._host.kept import Kept
from cuflash._problem.option_table import of_stages
from cuflash._problem.options import Options
from cuflash._problem.philox import BLOCK, WHOLE, Origin
from cuflash._problem.problem import Problem, changed
from cuflash._results import Saved


def run_forward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    out: Array,
    lse: Array | None,
    *,
    origin: Origin = WHOLE,
    memory: Kept | None = None,
    **for_kernels: Any,
) -> Any:
    """Fill ``out`` and, unless it is None, ``lse``.

    ``origin`` is the place of a part within its whole call. On the CPU, ``memory`` keeps
    probabilities for the gradient. ``for_kernels`` are further keywords of ``_launch.run.forward``.
    Returns the plan of the kernels if running it again repeats the call.
    """
    if _nothing_to_sum(problem):
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return None
    if is_cupy(out):
        problem = placed(problem, options, origin)
        return launch().forward(problem, qkv, options, out, lse, **for_kernels)
    forward(problem, qkv, options, out, lse, origin=origin, memory=memory)
    return None


def run_backward(
    problem: Problem,
    qkv: Triple,
    options: Options,
    saved: Saved,
    gradients: dict[str, Array],
    *,
    origin: Origin = WHOLE,
    memory: Kept | None = None,
    **for_kernels: Any,
) -> Any:
    """Fill ``gradients``, by input name; other arguments as for :func:`run_forward`.

    Returns the plan of the kernels if running it again repeats the call.
    """
    if _nothing_to_sum(problem):
        for gradient in gradients.values():
            gradient.fill(0)
        return None
    if is_cupy(saved.dout):
        problem = placed(problem, options, origin)
        return launch().backward(problem, qkv, options, saved, gradients, **for_kernels)
    backward(problem, qkv, options, saved, gradients, origin=origin, memory=memory)
    return None


def placed(problem: Problem, options: Options, origin: Origin) -> Problem:
    """The problem with its ``origin`` in the whole call, if dropout or a formula depends on it."""
    if not (options.dropout or options.score_mod or options.mask_mod):
        return problem
    if options.dropout and (origin.query % BLOCK or origin.key % BLOCK):
        raise not_yet(
            f"dropout on a GPU in a part of a call that begins at query {origin.query} and key "
            f"{origin.key}", "a later version",
            f"begin parts at multiples of {BLOCK}, or pass NumPy arrays",
        )  # fmt: skip
    return problem if origin == WHOLE else changed(problem, origin=origin)


def _nothing_to_sum(problem: Problem) -> bool:
    """Whether no row has a score: the results are then known, and nothing is launched."""
    no_scores = problem.seqlen_k == 0 and not any(map(problem.has, of_stages("row")))
    no_sequences = problem.cu_seqlens_q is not None and problem.cu_seqlens_q.shape == (1,)
    return no_scores or no_sequences or 0 in (*problem.batch, problem.seqlen_q)


def launch() -> Any:
    """The module that launches kernels; it imports CuPy."""
    from cuflash._launch import run

    return run


def cache_steps(array: Array) -> Any:
    """The module with the steps of caches and of rotary embedding for arrays like ``array``."""
    if not is_cupy(array):
        return on_the_host
    from cuflash._launch import cache

    return cache
