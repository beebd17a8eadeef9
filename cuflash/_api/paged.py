"""How is attention computed over keys and values in pages, which a table puts in order?"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from cuflash._api import arguments, float8
from cuflash._api.arguments import Keywords, PagedKeywords
from cuflash._api.dispatch import launch, run_forward
from cuflash._arrays import (
    Array,
    NativeT,
    array_module,
    native,
    on_own_device,
    refuse_capture,
    same_module,
    to_int64,
)
from cuflash._errors import wrong_type, wrong_value
from cuflash._host.cache import pages_within
from cuflash._host.forward import written_at_the_end
from cuflash._problem.checks import flag, integers, require_float
from cuflash._problem.float8 import FLOAT8
from cuflash._problem.foreign_keywords import ADVICE_FOR_PAGES, refuse_keywords
from cuflash._problem.operand import CANONICAL, Axes, checked_axes, core_axes
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import (
    Options,
    ScoreOptions,
    arrays_read,
    resolve,
    signature,
    with_arrays,
)
from cuflash._problem.philox import Origin
from cuflash._problem.problem import Problem, describe, in_pages
from cuflash._results import AttentionResult
from cuflash._select import override

#: The CPU path takes a multiple of this number of keys, which the sizes of its blocks divide: a
#: row then has the same bits as without pages.
_KEYS_AT_ONCE = 4096
_NAMES = ("q", "k_pages", "v_pages")
_MOST_KEYS = 4 * _KEYS_AT_ONCE  # of all sequences that the CPU path computes together


class _Paged(NamedTuple):
    """Checked arrays in canonical order: the last two axes are (sequence, feature)."""

    q: Array  # (sequences,) + heads + (m, d)
    k_pages: Array  # (pages,) + heads + (page_size, d)
    v_pages: Array
    page_table: Array  # (sequences, pages of a sequence)
    kv_lengths: Array  # (sequences,)

    @property
    def keys(self) -> int:
        """The number of keys that a sequence's row of the table has room for."""
        return int(self.page_table.shape[1] * self.k_pages.shape[-2])


@overload
def attention_paged(
    q: NativeT, k_pages: Array, v_pages: Array, page_table: Array, kv_lengths: Any, /, *,
    return_lse: Literal[False] = ..., out: Array | None = ..., **others: Unpack[PagedKeywords],
) -> NativeT: ...  # fmt: skip
@overload
def attention_paged(
    q: NativeT, k_pages: Array, v_pages: Array, page_table: Array, kv_lengths: Any, /, *,
    return_lse: Literal[True], out: tuple[Array, Array] | None = ...,
    **others: Unpack[PagedKeywords],
) -> AttentionResult[NativeT]: ...  # fmt: skip
@overload
def attention_paged(
    q: Array, k_pages: Array, v_pages: Array, page_table: Array, kv_lengths: Any, /, *,
    return_lse: bool = ..., out: Any = ..., **others: Unpack[PagedKeywords],
) -> Any: ...  # fmt: skip
@on_own_device
@arguments.explain_missing_arguments
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    kv_lengths: Any,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Compute attention over keys and values in pages, which a table puts in order.

    Key ``n`` of sequence ``s`` is row ``n % page_size`` of page ``page_table[s, n // page_size]``.

    Parameters
    ----------
    q : array, (sequences, .., heads, m, d)
        Queries of each sequence.
    k_pages : array, (pages, .., heads, page_size, d)
        Keys, with the dtype of ``q`` and as many axes. The axes between the first and the last two
        broadcast against the same axes of ``q``.
    v_pages : array, (pages, .., heads, page_size, d_v)
        Values.
    page_table : integer array, (sequences, pages of a sequence)
        The numbers of each sequence's pages, in order. Several sequences may name one page. Numbers
        beyond the length of a sequence are not used. The other numbers of a NumPy table are
        checked. On a GPU the host does not read them: kernels clamp them to the existing pages.
    kv_lengths : int, or integer array (sequences,)
        The number of keys of each sequence, from 0 to ``N``, which is the number of pages of a
        sequence times ``page_size``. The contents of pages beyond the length have no effect.
    options, precision, return_lse, out, workspace, config, **score_options
        As in :func:`attention` with N keys. ``causal`` and ``window`` align at the end of each
        sequence: the last query sees the last key. ``kv_lengths`` is not an option here.
    axes : four pairs, optional
        (sequence, feature) axes of ``q``, ``k_pages``, ``v_pages`` and the result.
        ``[(-3, -1)] * 4`` is for queries (sequences, m, heads, d) and pages (pages, page_size,
        heads, d).

    Returns
    -------
    out : array, (sequences, .., heads, m, d_v)
    lse : array, (sequences, .., heads, m)
        Only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.
    RuntimeError
        If a call that a CUDA graph captures would allocate memory. Such a call needs ``out``, an
        int32 table, int32 or int64 lengths on the device, and ``workspace`` if
        :func:`workspace_size` with ``page_table=`` returns more than 0.

    Notes
    -----
    On a GPU kernels read the pages without copying them, and split the keys if there are few
    queries (split-KV). The portable kernel supports every dtype and option. The Hopper kernel
    supports more than 64 queries of 16 bits, if a page has a multiple of 8 rows.

    There is no gradient with respect to pages. For gradients call :func:`attention_vjp` on keys
    and values in order.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 8, 4, 16, 32))  # 8 pages of 16 keys, 4 heads
    >>> q = rng.standard_normal((2, 4, 1, 32))  # one query of 2 sequences
    >>> table = np.array([[5, 0, 3], [5, 7, -1]])  # they share page 5
    >>> cuflash.attention_paged(q, k, v, table, [40, 20], causal=True).shape
    (2, 4, 1, 32)
    """
    refuse_keywords(score_options, ADVICE_FOR_PAGES)
    chosen = resolve(options, score_options)
    keywords = Keywords(axes, precision, True, return_lse, out, workspace, config)
    compute = functools.partial(_attention_paged, page_table, kv_lengths)
    if float8.among(chosen, q, k_pages, v_pages):
        return float8.forward(compute, q, k_pages, v_pages, chosen, keywords, names=_NAMES)
    return compute(q, k_pages, v_pages, chosen, keywords)


def _attention_paged(
    page_table: Array,
    kv_lengths: Any,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    chosen: Options,
    keywords: Keywords,
) -> Any:
    """Check and run one call."""
    axes, precision, _, return_lse, out, workspace, config = keywords
    pairs = checked_axes(axes)
    given = _native(q, k_pages, v_pages, page_table)
    xp = same_module(**given)
    arguments.check_common(given["q"], True, workspace, config)
    config = override.of_forward(config)
    pair = arguments.result_pair(out, flag("return_lse", return_lse))
    lengths = _lengths(xp, given, kv_lengths)
    paged, like, every, problem = _described(given, lengths, chosen, pairs, precision, pair[0])
    if xp is np:
        size, pages = paged.k_pages.shape[-2], len(paged.k_pages)
        pages_within(paged.page_table, paged.kv_lengths, size, pages)
    inputs = given | arrays_read(every)
    out, lse = arguments.results(xp, pair, problem, inputs, with_lse=return_lse or xp is np)
    if xp is np:
        _on_the_host(problem, paged, chosen, out, lse)
    else:
        problem, table = _for_kernels(problem, paged)
        run_forward(
            problem, (given["q"], *like), every, out, lse,
            workspace=workspace, config=config, page_table=table,
        )  # fmt: skip
    return AttentionResult(out, lse) if return_lse else out


def workspace_of_pages(
    q: Any, k_pages: Any, v_pages: Any, page_table: Any, options: Options, axes: Any, precision: Any
) -> int:
    """Bytes of ``workspace=`` that :func:`attention_paged` needs, whatever the lengths."""
    given = _native(q, k_pages, v_pages, page_table)
    lengths = np.zeros(len(given["q"]), np.int64)
    paged, *_, problem = _described(given, lengths, options, checked_axes(axes), precision, None)
    if same_module(**given) is np:
        return 0
    problem, _ = _for_kernels(problem, paged)
    return int(launch().workspace_size(problem, "forward"))


def _described(
    given: dict[str, Array],
    lengths: Array,
    options: Options,
    pairs: Axes,
    precision: str | None,
    out: Array | None,
) -> tuple[_Paged, tuple[Array, Array], Options, Problem]:
    """Arrays in canonical order, stand-ins for k and v in order, options with lengths, problem."""
    if options.kv_lengths is not None:
        fix = "pass kv_lengths as the fifth argument"
        raise wrong_type("options", "kv_lengths", "no kv_lengths among the score options", fix)
    paged = _canonical(given, pairs, lengths)
    like = _of_all_keys(paged)
    every = replace(options, kv_lengths=lengths.reshape(-1, *(1 for _ in paged.q.shape[1:-2])))
    layout = (pairs[0], *CANONICAL[1:3], pairs[3])
    problem = describe(given["q"], *like, every, axes=layout, precision=precision, out=out)
    return paged, like, every, problem


def _native(q: Any, k_pages: Any, v_pages: Any, page_table: Any) -> dict[str, Array]:
    """The checked arrays by name: matrices of one dtype, and a table of integers."""
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    given = {name: native(name, array) for name, array in arrays.items()}
    *matrices, table = given.items()
    for name, array in matrices:
        if array.dtype not in FLOAT8:
            require_float(name, array)
    keys_of_8_bits = arguments.has_8_bit_keys(*(array for _, array in matrices))
    for name, array in matrices:
        if array.dtype != given["k_pages"].dtype and not keys_of_8_bits:
            fix = f"convert {name} before the call"
            expected = f"dtype {given['k_pages'].dtype} as in k_pages"
            raise wrong_type(name, f"dtype {array.dtype}", expected, fix)
        if array.ndim < 4 or array.ndim != given["q"].ndim:
            rows = "(sequences, heads, m, d)" if name == "q" else "(pages, heads, page_size, d)"
            expected = f"as many axes as q, and at least four: {rows}"
            raise wrong_value(name, f"shape {array.shape}", expected)
    if table[1].dtype.kind not in "iu":
        raise wrong_type("page_table", f"dtype {table[1].dtype}", "an integer dtype")
    sequences = given["q"].shape[0]
    if table[1].ndim != 2 or table[1].shape[0] != sequences:
        expected = f"shape ({sequences}, pages of a sequence), one row for each sequence of q"
        raise wrong_value("page_table", f"shape {table[1].shape}", expected)
    if table[1].size and not len(given["k_pages"]):
        raise wrong_value("k_pages", "no pages", "at least one page")
    return given


def _lengths(xp: ModuleType, given: dict[str, Array], kv_lengths: Any) -> Array:
    """The number of keys of each sequence, (sequences,)."""
    sequences = given["q"].shape[0]
    if isinstance(kv_lengths, tuple):
        kv_lengths = list(kv_lengths)
    value = integers("kv_lengths", kv_lengths, optional=False)
    if isinstance(value, int):
        return np.full(sequences, value)
    if value.shape != (sequences,):
        raise wrong_value("kv_lengths", f"shape {value.shape}", f"shape ({sequences},)")
    if xp is np:
        same_module(q=given["q"], kv_lengths=value)
    return value


def _canonical(given: dict[str, Array], pairs: Axes, lengths: Array) -> _Paged:
    """Views with (sequence, feature) last; raise if k, v and q do not fit each other."""
    for name, pair in zip(_NAMES, pairs, strict=False):
        if 0 in core_axes(name, given[name].shape, pair):
            fix = f"axis 0 of {name} counts {'sequences' if name == 'q' else 'pages'}"
            got = f"{pair} for {name} of shape {given[name].shape}"
            raise wrong_value("axes", got, "axes other than 0", fix)
    q, k, v = (_with_core_last(n, given[n], p) for n, p in zip(_NAMES, pairs, strict=False))
    if k.shape[-1] != q.shape[-1]:
        expected = f"head_dim {q.shape[-1]} as in q of shape {given['q'].shape}"
        raise wrong_value("k_pages", f"head_dim {k.shape[-1]}", expected)
    if (v.shape[0], v.shape[-2]) != (k.shape[0], k.shape[-2]):
        expected = f"{k.shape[0]} pages of {k.shape[-2]} rows as in k_pages"
        raise wrong_value("v_pages", f"{v.shape[0]} pages of {v.shape[-2]} rows", expected)
    if not k.shape[-2]:
        raise wrong_value("k_pages", "pages of no rows", "a page size of at least 1")
    return _Paged(q, k, v, given["page_table"], lengths)


def _with_core_last(name: str, array: Array, pair: tuple[int, int]) -> Array:
    core = core_axes(name, array.shape, pair)
    kept = [i for i in range(array.ndim) if i not in core]
    return array.transpose(*kept, *core)


def _of_all_keys(paged: _Paged) -> tuple[Array, Array]:
    """Views with the shapes of k and v in order, for their layouts: they must not be read."""
    as_strided = array_module(paged.q).lib.stride_tricks.as_strided
    k, v = (
        as_strided(
            a,
            (len(paged.q), *a.shape[1:-2], paged.keys, a.shape[-1]),
            (0, *a.strides[1:]),
        )
        for a in (paged.k_pages, paged.v_pages)
    )
    return k, v


def _for_kernels(problem: Problem, paged: _Paged) -> tuple[Problem, Array]:
    """The problem with pages, and the table as kernels read it: int32, with axes for heads."""
    table, pages = paged.page_table, (paged.k_pages, paged.v_pages)
    if table.dtype != np.int32:
        refuse_capture("page_table", "an int32 array")
        last = max(len(paged.k_pages) - 1, 0)
        table = to_int64(table).clip(0, last).astype(np.int32)
    table = table.reshape(len(table), *(1 for _ in problem.batch_shape[1:]), table.shape[1])
    return in_pages(problem, *map(signature, (*pages, table))), table


def _in_order(pages: Array, table: Array) -> Array:
    """Rows of pages copied in order: (sequences,) + heads + (keys, d)."""
    rows = np.moveaxis(pages[table.astype(np.int64)], 1, -3)
    *heads, columns, size, d = rows.shape
    return np.ascontiguousarray(rows.reshape(*heads, columns * size, d))


def _on_the_host(problem: Problem, paged: _Paged, options: Options, out: Array, lse: Array) -> None:
    """Compute a few sequences of equal length at a time, from a copy of their keys and values."""
    with written_at_the_end(options, out, lse) as (out, lse):
        rows = _with_core_last("out", out, problem.axes[3])
        for some in _of_one_length(paged):
            q, k, v, own = _part(problem, paged, options, some)
            part = describe(q, k, v, own, precision=problem.precision, out=rows[some])
            first = some.start * math.prod(problem.batch_shape[1:])
            run_forward(part, (q, k, v), own, rows[some], lse[some], origin=Origin(first))


def _of_one_length(paged: _Paged) -> Iterator[slice]:
    """Groups of consecutive sequences of equal length: one, or at most ``_MOST_KEYS`` keys."""
    lengths, first = [int(n) for n in paged.kv_lengths], 0
    while first < len(lengths):
        keys, end = max(_keys_of(paged, lengths[first]), 1), first + 1
        while end < len(lengths) and lengths[end] == lengths[first]:
            if (end - first + 1) * keys > _MOST_KEYS:
                break
            end += 1
        yield slice(first, end)
        first = end


def _keys_of(paged: _Paged, length: int) -> int:
    """The number of keys that the CPU path takes for a sequence of this length."""
    return min(-(-length // _KEYS_AT_ONCE) * _KEYS_AT_ONCE, paged.keys)


def _part(
    problem: Problem, paged: _Paged, options: Options, some: slice
) -> tuple[Array, Array, Array, Options]:
    """Queries, keys, values and options of consecutive sequences of equal length."""
    size, length = paged.k_pages.shape[-2], int(paged.kv_lengths[some.start])
    keys = _keys_of(paged, length)
    table = paged.page_table[some, : -(-keys // size)].copy()
    table[:, -(-length // size) :] = table[:, :1]  # unread pages must exist
    k, v = (_in_order(a, table)[..., :keys, :] for a in (paged.k_pages, paged.v_pages))
    arrays = {name: _own_part(problem, name, a, some, keys) for name, a in options.arrays.items()}
    own = replace(with_arrays(options, arrays), kv_lengths=np.asarray(length))
    return paged.q[some], k, v, own


def _own_part(problem: Problem, name: str, array: Array, some: slice, keys: int) -> Array:
    """View of a score option's array for some sequences and the first ``keys`` keys."""
    core = ARRAYS[name][1]
    if array.ndim == len(problem.batch_shape) + len(core) and array.shape[0] != 1:
        array = array[some]
    if core.endswith("n"):
        array = array[..., :keys]
    return array
