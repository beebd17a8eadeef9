"""How does attention run over packed sequences of different lengths?"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np

from cuflash._api import arguments, float8
from cuflash._api.arguments import QKV, CallKeywords, Keywords
from cuflash._api.dispatch import run_backward, run_forward
from cuflash._arrays import (
    Array,
    NativeT,
    Triple,
    array_module,
    is_cupy,
    on_own_device,
    refuse_capture,
    same_module,
    write_rounded,
)
from cuflash._errors import wrong_value
from cuflash._host.forward import written_at_the_end
from cuflash._host.scores import arithmetic
from cuflash._problem.checks import flag, integer_array
from cuflash._problem.option_table import ARRAYS
from cuflash._problem.options import (
    Options,
    ScoreOptions,
    arrays_read,
    gradient_names,
    resolve,
    with_arrays,
)
from cuflash._problem.packed import describe_packed
from cuflash._problem.philox import Origin
from cuflash._problem.problem import Problem, describe
from cuflash._results import AttentionResult, Gradients, Saved
from cuflash._select import override


class Sequence(NamedTuple):
    """One packed sequence: its number, the rows of its queries and the rows of its keys."""

    number: int
    q: slice
    k: slice


@overload
def attention_varlen(
    q: NativeT, k: NativeT, v: NativeT, cu_seqlens_q: Array, cu_seqlens_k: Array, /, *,
    return_lse: Literal[False] = ..., out: Array | None = ..., **others: Unpack[CallKeywords],
) -> NativeT: ...  # fmt: skip
@overload
def attention_varlen(
    q: NativeT, k: NativeT, v: NativeT, cu_seqlens_q: Array, cu_seqlens_k: Array, /, *,
    return_lse: Literal[True], out: tuple[Array, Array] | None = ...,
    **others: Unpack[CallKeywords],
) -> AttentionResult[NativeT]: ...  # fmt: skip
@overload
def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, /, *,
    return_lse: bool = ..., out: Any = ..., **others: Unpack[CallKeywords],
) -> Any: ...  # fmt: skip
@on_own_device
@arguments.explain_missing_arguments
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    /,
    *,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    out: Any = None,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Any:
    """Compute attention over packed sequences, each of which attends only to itself.

    Parameters
    ----------
    q : array, batch + (total_q, d)
        Queries of all sequences, one after the other.
    k : array, batch + (total_k, d)
        Keys.
    v : array, batch + (total_k, d_v)
        Values.
    cu_seqlens_q, cu_seqlens_k : integer array or list, (sequences + 1,)
        Sequence ``i`` has the queries from row ``cu_seqlens_q[i]`` up to, but not including, row
        ``cu_seqlens_q[i + 1]``, and likewise for its keys. Empty sequences are legal. On a GPU the
        host does not read these numbers: rows beyond an array are ignored, and the result of
        decreasing numbers is undefined.
    options, axes, precision, deterministic, return_lse, out, workspace, config, **score_options
        As in :func:`attention`, for the batch shape (sequences,) + batch. Arrays that differ
        between sequences have the axis of sequences first. Positions count from the start of a
        sequence. The extents (m, n) of mask and bias are 1 or at least the length of the longest
        sequence. ``q_lengths`` and ``kv_lengths`` are at most the length of their sequence; on a
        GPU they are clamped to it.

    Returns
    -------
    out : array, batch + (total_q, d_v)
        0 for queries that belong to no sequence.
    lse : array, batch + (total_q,)
        Only with ``return_lse``; -inf for queries that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 16))  # (heads, total, head_dim)
    >>> ends = np.array([0, 30, 100])
    >>> out = cuflash.attention_varlen(q, k, v, ends, ends, causal=True)
    >>> alone = cuflash.attention(q[:, :30], k[:, :30], v[:, :30], causal=True)
    >>> np.allclose(out[:, :30], alone)
    True
    """
    chosen = resolve(options, score_options)
    given = Keywords(axes, precision, deterministic, return_lse, out, workspace, config)
    compute = functools.partial(_attention_varlen, cu_seqlens_q, cu_seqlens_k)
    if float8.among(chosen, q, k, v):
        return float8.forward(compute, q, k, v, chosen, given)
    return compute(q, k, v, chosen, given)


@np.errstate(all="ignore")
def _attention_varlen(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    q: Array,
    k: Array,
    v: Array,
    chosen: Options,
    keywords: Keywords,
) -> Any:
    """Check and run one call."""
    axes, precision, deterministic, return_lse, out, workspace, config = keywords
    xp, given, qkv = arguments.operands(q, k, v)
    arguments.check_common(qkv[0], deterministic, workspace, config)
    config = override.of_forward(config)
    pair = arguments.result_pair(out, flag("return_lse", return_lse))
    ends = ends_of(given, cu_seqlens_q, cu_seqlens_k)
    problem = describe_packed(*qkv, chosen, ends, axes=axes, precision=precision, out=pair[0])
    inputs = given | ends | arrays_read(chosen)
    out, lse = arguments.results(xp, pair, problem, inputs, with_lse=True)
    if xp is np:
        _forward_on_the_host(problem, chosen, ends, qkv, out, lse)
    else:
        run_forward(
            problem, qkv, chosen, out, lse,
            workspace=workspace, config=config, cu_seqlens=ends,
        )  # fmt: skip
    return AttentionResult(out, lse) if return_lse else out


@overload
def attention_varlen_backward(
    dout: Array, q: NativeT, k: NativeT, v: NativeT, out: Array, lse: Array, cu_seqlens_q: Array,
    cu_seqlens_k: Array, /, *,
    dlse: Array | None = ..., grads_out: Gradients | None = ..., **others: Unpack[CallKeywords],
) -> Gradients[NativeT, None]: ...  # fmt: skip
@overload
def attention_varlen_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, cu_seqlens_q: Array,
    cu_seqlens_k: Array, /, *,
    dlse: Array | None = ..., wrt: tuple[str, ...] = ..., grads_out: Gradients | None = ...,
    **others: Unpack[CallKeywords],
) -> Gradients: ...  # fmt: skip
@on_own_device
@np.errstate(all="ignore")
@arguments.explain_missing_arguments
def attention_varlen_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    /,
    *,
    dlse: Array | None = None,
    wrt: tuple[str, ...] = QKV,
    grads_out: Gradients | None = None,
    options: Options | None = None,
    axes: Any = None,
    precision: str | None = None,
    deterministic: bool = True,
    workspace: Array | None = None,
    config: Any = None,
    **score_options: Unpack[ScoreOptions],
) -> Gradients:
    """Gradient of :func:`attention_varlen`.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, wrt, grads_out, config
        As in :func:`attention_backward`, packed.
    cu_seqlens_q, cu_seqlens_k : integer array, (sequences + 1,)
        As given to :func:`attention_varlen`.
    options, axes, precision, deterministic, workspace, **score_options
        As in :func:`attention_varlen`.

    Returns
    -------
    Gradients
        Each with exactly the shape and dtype of its input; 0 for rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As in :func:`attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> ends = np.array([0, 30, 100])
    >>> out, lse = cuflash.attention_varlen(q, k, v, ends, ends, return_lse=True)
    >>> cuflash.attention_varlen_backward(out, q, k, v, out, lse, ends, ends).dv.shape
    (100, 16)
    """
    chosen = resolve(options, score_options)
    if float8.among(chosen, q, k, v, dout):
        dout, q, k, v, chosen = float8.of_gradient(dout, q, k, v, out, chosen, axes)
    wanted = gradient_names(wrt, chosen)
    xp, given, qkv = arguments.operands(q, k, v)
    arguments.check_common(qkv[0], deterministic, workspace, config)
    config = override.of_backward(config)
    ends = ends_of(given, cu_seqlens_q, cu_seqlens_k)
    problem = describe_packed(*qkv, chosen, ends, axes=axes, precision=precision)
    saved = arguments.saved_arrays("attention_varlen", problem, given["q"], dout, out, lse, dlse)
    read = given | ends | arrays_read(chosen) | saved._asdict()
    gradients = arguments.gradient_buffers(xp, wanted, grads_out, read)
    if xp is np:
        _backward_on_the_host(problem, chosen, ends, qkv, saved, gradients)
    else:
        for gradient in gradients.values():
            gradient.fill(0)
        run_backward(
            problem, qkv, chosen, saved, gradients, deterministic=bool(deterministic),
            workspace=workspace, config=config, cu_seqlens=ends,
        )  # fmt: skip
    return arguments.by_field(gradients, wrt)


def ends_of(given: dict[str, Array], cu_seqlens_q: Any, cu_seqlens_k: Any) -> dict[str, Array]:
    """The two arrays of cumulative lengths, by name; checked, except for their values."""
    both = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    ends = {}
    for name, value in both.items():
        ends[name] = integer_array(name, value, "an integer array or a list of ints")
        if isinstance(value, list | tuple):
            if is_cupy(given["q"]):
                refuse_capture(name, "an array on the device")
            ends[name] = array_module(given["q"]).asarray(ends[name])
    same_module(**given, **ends)
    for name, array in ends.items():
        if array.ndim != 1 or array.size == 0:
            raise wrong_value(name, f"shape {array.shape}", "shape (sequences + 1,)")
    count_q, count_k = (array.size - 1 for array in ends.values())
    if count_q != count_k:
        expected = f"{count_q} sequences as in cu_seqlens_q"
        raise wrong_value("cu_seqlens_k", f"{count_k} sequences", expected)
    return ends


def _forward_on_the_host(
    whole: Problem, options: Options, ends: dict[str, Array], qkv: Triple, out: Array, lse: Array
) -> None:
    """Compute each sequence by itself."""
    with written_at_the_end(options, out, lse) as (out, lse):
        calls = _calls(whole, options, ends, qkv, out)
        out.fill(0)
        lse.fill(-np.inf)
        for s, call in calls:
            first = s.number * math.prod(whole.batch)
            run_forward(*call, _part(whole, "out", out, s), lse[..., s.q], origin=Origin(first))


def _backward_on_the_host(
    whole: Problem,
    options: Options,
    ends: dict[str, Array],
    qkv: Triple,
    saved: Saved,
    gradients: dict[str, Array],
) -> None:
    """Sum the gradients of all sequences, in the dtype of the arithmetic."""
    sums = {name: np.zeros(a.shape, arithmetic(whole.dtype)) for name, a in gradients.items()}
    for s, call in _calls(whole, options, ends, qkv):
        targets = {
            name: _part(whole, name, a, s) if name in QKV
            else a if name == "scale" else _own_part(whole, name, a, s)
            for name, a in sums.items()
        }  # fmt: skip
        parts = {name: np.empty(a.shape, a.dtype) for name, a in targets.items()}
        dout, out = (_part(whole, "out", a, s) for a in (saved.dout, saved.out))
        dlse = None if saved.dlse is None else saved.dlse[..., s.q]
        rows = Saved(dout, out, saved.lse[..., s.q], dlse)
        run_backward(*call, rows, parts, origin=Origin(s.number * math.prod(whole.batch)))
        for name, target in targets.items():
            target += parts[name]
    for name, gradient in gradients.items():
        write_rounded(gradient, sums[name])


def _sequences(whole: Problem, ends: dict[str, Array]) -> list[Sequence]:
    """The sequences; raise for values that decrease or lie outside the packed rows."""
    pairs = []
    for (name, array), total in zip(ends.items(), (whole.seqlen_q, whole.seqlen_k), strict=True):
        values = array.tolist()
        pairs.append([*itertools.pairwise(values)])
        if any(a > b for a, b in pairs[-1]):
            raise wrong_value(name, "decreasing values", "non-decreasing values")
        if not 0 <= values[0] <= values[-1] <= total:
            raise wrong_value(
                name, f"values from {values[0]} to {values[-1]}",
                f"values from 0 to {total}, the number of packed rows",
            )  # fmt: skip
    own = enumerate(zip(*pairs, strict=True))
    return [Sequence(i, slice(*q), slice(*k)) for i, (q, k) in own]


def _calls(
    whole: Problem,
    options: Options,
    ends: dict[str, Array],
    qkv: Triple,
    out: Array | None = None,
) -> list[tuple[Sequence, tuple[Problem, Triple, Options]]]:
    """The calls of the sequences. A list: all are checked before anything is written."""
    calls = []
    for s in _sequences(whole, ends):
        q, k, v = (_part(whole, name, array, s) for name, array in zip(QKV, qkv, strict=True))
        own_out = None if out is None else _part(whole, "out", out, s)
        arrays = {name: _own_part(whole, name, a, s) for name, a in options.arrays.items()}
        own = with_arrays(options, arrays)
        layout: dict[str, Any] = {"axes": whole.axes, "precision": whole.precision, "out": own_out}
        calls.append((s, (describe(q, k, v, own, **layout), (q, k, v), own)))
    return calls


def _part(whole: Problem, name: str, matrix: Array, s: Sequence) -> Array:
    """View of one sequence in a packed matrix: in q, k, v or an array shaped like out."""
    index: list[Any] = [slice(None)] * matrix.ndim
    pair = whole.axes[QKV.index(name) if name in QKV else 3]
    index[pair[0]] = s.k if name in ("k", "v") else s.q
    return matrix[tuple(index)]


def _own_part(whole: Problem, name: str, array: Array, s: Sequence) -> Array:
    """View of one sequence's part of a score option's array."""
    core = ARRAYS[name][1]
    if array.ndim == 1 + len(whole.batch_shape) + len(core):
        array = array[0 if array.shape[0] == 1 else s.number, ...]  # a view, not a scalar
    index: list[Any] = [...]
    for axis, extent in zip(core, array.shape[array.ndim - len(core) :], strict=True):
        part = s.q if axis == "m" else s.k
        length = part.stop - part.start
        if 1 != extent < length:
            expected = f"extent 1 or at least {length}, the length of sequence {s.number}"
            raise wrong_value(name, f"shape {array.shape}", expected)
        index.append(slice(0, max(length, int(extent == 1))))
    return array[tuple(index)]
