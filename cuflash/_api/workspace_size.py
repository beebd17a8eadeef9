"""How much scratch memory does a call need?"""

from __future__ import annotations

import itertools
from typing import Any, Unpack

import numpy as np

from cuflash._api import float8
from cuflash._api.arguments import explain_missing_arguments, operands
from cuflash._api.dispatch import launch
from cuflash._api.paged import workspace_of_pages
from cuflash._api.varlen import ends_of
from cuflash._arrays import Array, on_own_device
from cuflash._errors import wrong_type, wrong_value
from cuflash._problem.checks import flag
from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import describe


@on_own_device
@explain_missing_arguments
def workspace_size(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    backward: bool = False,
    page_table: Array | None = None,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    **score_options: Unpack[ScoreOptions],
) -> int:
    """Return how many bytes of ``workspace=`` a call needs; 0 for NumPy arrays.

    Parameters
    ----------
    q, k, v, options, axes, precision, **score_options
        As in :func:`attention`. For 8-bit operands the size is for a bfloat16 result: ``out`` of
        another dtype may need another size.
    cu_seqlens_q, cu_seqlens_k : integer array or list, (sequences + 1,), optional
        As in :func:`attention_varlen`, for a call with packed sequences.
    backward : bool
        Return the size for :func:`attention_backward` instead of :func:`attention`.
    page_table : integer array, (sequences, pages of a sequence), optional
        Return the size for :func:`attention_paged` with any lengths; k and v are then pages.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((8, 16, 4))
    >>> cuflash.workspace_size(q, q, q, backward=True)
    0
    """
    chosen = resolve(options, score_options)
    backward = flag("backward", backward)
    calls = [float8.Plain(q, k, v, chosen)]
    if float8.among(chosen, q, k, v):
        calls = float8.without_memory(q, k, v, chosen, axes)
    if page_table is not None:
        if backward:
            fix = "call attention_vjp on keys and values without pages"
            raise wrong_value("backward", True, "False: pages have no gradient", fix)
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            got = "page_table together with cu_seqlens_q or cu_seqlens_k"
            raise wrong_type("page_table", got, "pages or packed sequences, not both")
        return max(
            workspace_of_pages(*c[:3], page_table, c.options, axes, precision) for c in calls
        )

    def size(q: Array, k: Array, v: Array, chosen: Options) -> int:
        xp, given, qkv = operands(q, k, v)
        if cu_seqlens_q is None and cu_seqlens_k is None:
            problem = describe(*qkv, chosen, axes=axes, precision=precision)
        else:
            ends = ends_of(given, cu_seqlens_q, cu_seqlens_k)
            problem = describe_packed(*qkv, chosen, ends, axes=axes, precision=precision)
        if xp is np:
            return 0
        return int(launch().workspace_size(problem, "backward" if backward else "forward"))

    return max(itertools.starmap(size, calls[:1] if backward else calls))
