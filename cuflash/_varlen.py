"""How does attention run over packed sequences of different lengths?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from cuflash._arrays import Array, is_cupy, native, same_module
from cuflash._attention import (
    FIELDS,
    check_gradient,
    gradient_names,
    result_pair,
)
from cuflash._dispatch import check_common, operands, run_backward, run_forward
from cuflash._errors import not_yet, problem_with
from cuflash._options import Options, ScoreOptions, resolve
from cuflash._problem import Problem, check_destination, describe, require_float, require_shape
from cuflash._results import AttentionResult, Gradients
from cuflash._scores import arithmetic

_MATRICES = ("q", "k", "v", "dout")
_CORES = {"bias": 2, "mask": 2, "segment_ids_q": 1, "segment_ids_k": 1}


@dataclass(frozen=True, slots=True)
class Sequence:
    """One packed sequence: where its queries and keys are, and its number."""

    index: int
    q: slice
    k: slice


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
    """Attention over packed sequences: each attends within itself only.

    Parameters
    ----------
    q : array, batch + (total_q, d)
        Queries of all sequences, one after the other.
    k : array, batch + (total_k, d)
        Keys.
    v : array, batch + (total_k, d_v)
        Values.
    cu_seqlens_q, cu_seqlens_k : integer array, (sequences + 1,)
        Sequence ``i`` has the queries ``cu_seqlens_q[i]`` up to ``cu_seqlens_q[i + 1]``, and keys
        alike. Empty sequences are legal.
    options, axes, precision, deterministic, return_lse, out, workspace, config, **score_options
        As in :func:`attention`, of a batch (sequences,) + batch: per-sequence values have that
        axis first, positions count from the start of a sequence, and extents (m, n) of mask and
        bias are 1 or no less than the longest sequence.

    Returns
    -------
    out : array, batch + (total_q, d_v)
        0 for queries that belong to no sequence.
    lse : array, batch + (total_q,)
        Only with ``return_lse``; -inf for queries that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

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
    xp, q, k, v = operands(q, k, v)
    check_common(xp, deterministic, workspace, config)
    out, lse = result_pair(out, return_lse)
    whole = describe(q, k, v, _without_arrays(chosen), axes=axes, precision=precision, out=out)
    sequences = _sequences(whole, cu_seqlens_q, cu_seqlens_k)
    _require_numpy(q)
    if lse is not None:
        require_shape("lse", lse, whole.lse_shape, "batch + (total_q,)")
        check_destination("lse", lse, q=q, k=k, v=v, **chosen.arrays)
    if out is None:
        out = xp.empty(whole.out_shape, whole.dtype)
    if lse is None:
        lse = xp.empty(whole.lse_shape, whole.lse_dtype)
    out.fill(0)
    lse.fill(-np.inf)
    for s in sequences:
        parts = _parts(whole, s, q=q, k=k, v=v, dout=out)
        own = _own_options(whole, chosen, s)
        problem = describe(
            parts["q"], parts["k"], parts["v"], own, axes=axes, precision=precision,
            out=parts["dout"],
        )  # fmt: skip
        run_forward(
            problem, parts["q"], parts["k"], parts["v"], own, parts["dout"], lse[..., s.q],
            workspace, config, first_entry=s.index * math.prod(whole.batch),
        )  # fmt: skip
    return AttentionResult(out, lse) if return_lse else out


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
    wrt: tuple[str, ...] = ("q", "k", "v"),
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
    dout, q, k, v, out, lse, dlse, wrt, grads_out
        As in :func:`attention_backward`, packed.
    cu_seqlens_q, cu_seqlens_k : integer array, (sequences + 1,)
        As given to :func:`attention_varlen`.
    options, axes, precision, deterministic, workspace, config, **score_options
        As in :func:`attention_varlen`.

    Returns
    -------
    Gradients
        Each with exactly the shape and dtype of its input; 0 for rows that belong to no sequence.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

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
    wanted = gradient_names(wrt, chosen)
    given = {name: native(name, a) for name, a in (("q", q), ("k", k), ("v", v))}
    given |= {name: a for name, a in chosen.arrays.items() if name in FIELDS}
    given["scale"] = np.zeros(())
    xp, q, k, v = operands(q, k, v)
    dout, out, lse = native("dout", dout), native("out", out), native("lse", lse)
    dlse = None if dlse is None else native("dlse", dlse)
    same_module(q=q, dout=dout, out=out, lse=lse, dlse=dlse)
    check_common(xp, deterministic, workspace, config)
    whole = describe(q, k, v, _without_arrays(chosen), axes=axes, precision=precision)
    sequences = _sequences(whole, cu_seqlens_q, cu_seqlens_k)
    _require_numpy(q)
    for name, array, shape in (
        ("dout", dout, whole.out_shape),
        ("out", out, whole.out_shape),
        ("lse", lse, whole.lse_shape),
        ("dlse", dlse, whole.lse_shape),
    ):
        if array is not None:
            require_float(name, array)
            require_shape(name, array, shape, "the result of attention_varlen")
    sums, gradients = {}, {}
    for name in wanted:
        buffer = None if grads_out is None else getattr(grads_out, FIELDS[name])
        if buffer is None:
            buffer = xp.empty(given[name].shape, given[name].dtype)
        else:
            check_gradient(name, buffer, given, dout=dout, out=out, lse=lse)
        gradients[name] = buffer
        sums[name] = np.zeros(given[name].shape, arithmetic(whole.dtype))
    for s in sequences:
        parts = _parts(whole, s, q=q, k=k, v=v, dout=dout)
        own = _own_options(whole, chosen, s)
        targets = _parts(whole, s, **{n: a for n, a in sums.items() if n in _MATRICES})
        targets |= {
            name: a if name == "scale" else _own_part(whole, name, a, s)
            for name, a in sums.items()
            if name not in _MATRICES
        }
        results = {name: np.empty(a.shape, a.dtype) for name, a in targets.items()}
        problem = describe(parts["q"], parts["k"], parts["v"], own, axes=axes, precision=precision)
        run_backward(
            problem, parts["dout"], parts["q"], parts["k"], parts["v"],
            _parts(whole, s, dout=out)["dout"], lse[..., s.q],
            None if dlse is None else dlse[..., s.q], own, results, workspace, config,
            first_entry=s.index * math.prod(whole.batch),
        )  # fmt: skip
        for name, target in targets.items():
            target += results[name]
    for name, gradient in gradients.items():
        gradient[...] = sums[name]
    return Gradients(**{FIELDS[name]: array for name, array in gradients.items()})


def _require_numpy(q: Array) -> None:
    if is_cupy(q):
        raise not_yet(
            "attention_varlen on a GPU", "the kernels of every score option",
            "a padded batch with q_lengths= and kv_lengths= works",
        )  # fmt: skip


def _without_arrays(options: Options) -> Options:
    """What the packed operands can be checked with before sequences are cut out."""
    return Options(causal=bool(options.causal), enable_gqa=options.enable_gqa)


def _sequences(whole: Problem, cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Sequence, ...]:
    """The sequences, after every check of the two arrays."""
    ends = []
    for name, array, total in (
        ("cu_seqlens_q", cu_seqlens_q, whole.seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, whole.seqlen_k),
    ):
        array = native(name, array)
        if array.dtype.kind not in "iu":
            raise problem_with(name, TypeError, got=f"dtype {array.dtype}", expected="integers")
        if array.ndim != 1 or array.size == 0:
            raise problem_with(
                name, ValueError, got=f"shape {array.shape}", expected="shape (sequences + 1,)"
            )
        values = [int(n) for n in array.tolist()] if not is_cupy(array) else []
        if any(a > b for a, b in itertools.pairwise(values)):
            raise problem_with(
                name, ValueError, got="values that decrease", expected="none that do"
            )
        if values and not 0 <= values[0] <= values[-1] <= total:
            raise problem_with(
                name, ValueError, got=f"values from {values[0]} to {values[-1]}",
                expected=f"values from 0 to {total}, the number of packed rows",
            )  # fmt: skip
        ends.append((array.size, values))
    if ends[0][0] != ends[1][0]:
        raise problem_with(
            "cu_seqlens_k", ValueError, got=f"{ends[1][0] - 1} sequences",
            expected=f"{ends[0][0] - 1} sequences as in cu_seqlens_q",
        )  # fmt: skip
    pairs = (itertools.pairwise(values) for _, values in ends)
    return tuple(
        Sequence(i, slice(*q), slice(*k)) for i, (q, k) in enumerate(zip(*pairs, strict=True))
    )


def _parts(whole: Problem, s: Sequence, **matrices: Array) -> dict[str, Array]:
    """Views of one sequence of the packed operands."""
    parts = {}
    for name, array in matrices.items():
        index: list[Any] = [slice(None)] * array.ndim
        axis = whole.axes[_MATRICES.index(name)][0]
        index[axis] = s.k if name in ("k", "v") else s.q
        parts[name] = array[tuple(index)]
    return parts


def _own_part(whole: Problem, name: str, array: Array, s: Sequence) -> Array:
    """View of what one sequence has of a score option's array."""
    core = _CORES.get(name, 0)
    if array.ndim > len(whole.batch_shape) + 1 + core:
        raise problem_with(
            name, ValueError, got=f"shape {array.shape}",
            expected=f"at most {len(whole.batch_shape) + 1 + core} axes, sequences first",
        )  # fmt: skip
    if array.ndim == len(whole.batch_shape) + 1 + core:
        array = array[0 if array.shape[0] == 1 else _number(name, array, s)]
    lengths = {"segment_ids_q": (s.q,), "segment_ids_k": (s.k,)}.get(name, (s.q, s.k))
    for axis, part in zip(range(-core, 0), lengths, strict=False):
        extent = part.stop - part.start
        if array.shape[axis] != 1:
            if array.shape[axis] < extent:
                raise problem_with(
                    name, ValueError, got=f"shape {array.shape}",
                    expected=f"extent 1 or at least {extent}, that of sequence {s.index}",
                )  # fmt: skip
            index: list[Any] = [slice(None)] * array.ndim
            index[axis] = slice(0, extent)
            array = array[tuple(index)]
    return array


def _number(name: str, array: Array, s: Sequence) -> int:
    if s.index >= array.shape[0]:
        raise problem_with(
            name, ValueError, got=f"{array.shape[0]} sequences", expected=f"more than {s.index}"
        )
    return s.index


def _own_options(whole: Problem, options: Options, s: Sequence) -> Options:
    """The options of one sequence."""
    own = dict(_cut(whole, options, s))
    for name, part in (("q_lengths", s.q), ("kv_lengths", s.k)):
        length = own.get(name, getattr(options, name))
        if length is not None:
            own[name] = np.minimum(length, part.stop - part.start)
    if "segment_ids_q" in own:
        own["segment_ids"] = (own.pop("segment_ids_q"), own.pop("segment_ids_k"))
    return replace(options, **own) if own else options


def _cut(whole: Problem, options: Options, s: Sequence) -> Iterator[tuple[str, Any]]:
    for name, array in options.arrays.items():
        yield name, _own_part(whole, name, array, s)
