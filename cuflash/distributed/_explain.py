"""Which method would a call take, what would it move, and why? Answered as text."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from cuflash._errors import wrong_value
from cuflash._problem.checks import dtype_of, shape_of
from cuflash._problem.foreign_keywords import ADVICE_FOR_RANKS, refuse_keywords
from cuflash._problem.operand import axes_without_values, core_axes
from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash._problem.problem import describe
from cuflash.distributed._layout import MOST_RANKS, chunks_of, counted, rows_of
from cuflash.distributed._run import refuse_8_bits
from cuflash.distributed._traffic import Extents, candidates, checked_method, chosen, table


def explain(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...] | None = None,
    /,
    *,
    size: int,
    dtype: Any = "bfloat16",
    method: str = "auto",
    memory: int | None = None,
    ranks_per_host: int | None = None,
    options: Options | None = None,
    axes: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> str:
    """Bytes and memory of each method for a call with these shapes, and which method is chosen.

    Parameters
    ----------
    q, k, v : tuple of int
        Shapes of the whole arrays; v has the shape of k unless it is given.
    size : int
        Number of ranks.
    dtype : dtype
        Dtype of the arrays.
    method : {"auto", "all_gather", "ring", "ulysses", "usp"}
        As in :func:`attention`.
    memory : int, optional
        Bytes that each rank can use beside inputs, for results, buffers and scratch memory.
    ranks_per_host : int, optional
        For ranks on several hosts; must divide ``size``.
    options, axes, **score_options
        As in :func:`cuflash.attention`.

    Returns
    -------
    str

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    >>> from cuflash import distributed
    >>> text = distributed.explain((32, 65536, 128), (8, 65536, 128), size=2, enable_gqa=True)
    >>> print(text.splitlines()[-1])
    auto: ring, keys travel while queries are multiplied
    """
    size = counted("size", size, 1, MOST_RANKS)
    if memory is not None:
        memory = counted("memory", memory, 0)
    if ranks_per_host is not None:
        together = counted("ranks_per_host", ranks_per_host, 1)
        if size % together:
            raise wrong_value("ranks_per_host", together, f"a divisor of the {size} ranks")
        ranks_per_host = together if together < size else None  # one host
    dtype = dtype_of("dtype", dtype, "a floating dtype")
    refuse_keywords(score_options, ADVICE_FOR_RANKS)
    found = resolve(options, score_options)
    pairs = axes_without_values(axes)
    arrays = []
    for name, given, pair in zip("qkv", (q, k, k if v is None else v), pairs, strict=False):
        shape = shape_of(name, given)
        core = core_axes(name, shape, pair)
        rest = [n for i, n in enumerate(shape) if i not in core]
        element = np.empty((1,) * len(shape), dtype)
        arrays.append(np.broadcast_to(element, (*rest, *(shape[i] for i in core))))
    refuse_8_bits(found, *arrays)
    first, second, third = arrays
    problem = describe(first, second, third, found)
    extents = Extents.of(problem, problem.seqlen_q, *(a.shape for a in arrays))
    own, why = chosen(checked_method(method), extents, size, memory, ranks_per_host)
    rows = max(map(rows_of, chunks_of(problem.seqlen_q, size, "zigzag")))
    lines = [f"{size} ranks, up to {rows} queries each, {problem.dtype}"]
    lines += table(candidates(extents, size, ranks_per_host), size, problem.seqlen_k)
    across = f" with {own.across} ranks that exchange heads" if own.method == "usp" else ""
    return "\n".join([*lines, f"{method}: {own.method}{across}, {why}"])
