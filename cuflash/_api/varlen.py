"""How does attention run over packed sequences of different lengths?"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from cuflash._api.attention import gradient_buffers, gradient_names, result_pair
from cuflash._api.dispatch import check_common, operands, run_backward, run_forward
from cuflash._arrays import Array, allocate, native, on_own_device, same_module, write_rounded
from cuflash._errors import problem_with
from cuflash._host.scores import arithmetic
from cuflash._problem.checks import flag, require_float, require_shape
from cuflash._problem.destinations import check_destination
from cuflash._problem.option_table import FIELDS
from cuflash._problem.options import Options, ScoreOptions, resolve
from cuflash._problem.packed import describe_packed
from cuflash._problem.problem import Problem, describe
from cuflash._results import AttentionResult, Gradients
from cuflash._select import override

#: Which pair of ``axes`` a packed matrix has.
_PAIRS = {"q": 0, "k": 1, "v": 2, "out": 3, "dout": 3}
_CORES = {"bias": 2, "mask": 2, "segment_ids_q": 1, "segment_ids_k": 1}


@dataclass(frozen=True, slots=True)
class Sequence:
    """One packed sequence: where its queries and keys are, and its number."""

    index: int
    q: slice
    k: slice


@dataclass(frozen=True, slots=True)
class Call:
    """What one sequence computes: a checked problem on views of the packed matrices."""

    sequence: Sequence
    parts: dict[str, Array]
    options: Options
    problem: Problem


@on_own_device
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
        alike. Empty sequences are legal. On a GPU the host reads none of these numbers: rows
        that an array has not are left out, and numbers that decrease are undefined.
    options, axes, precision, deterministic, return_lse, out, workspace, config, **score_options
        As in :func:`attention`, of a batch (sequences,) + batch: per-sequence values have that
        axis first, positions count from the start of a sequence, and extents (m, n) of mask and
        bias are 1 or no less than the longest sequence. Lengths are none above that of their
        sequence; on a GPU they are compared with all packed rows, and end where it ends.

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
    given = {name: native(name, a) for name, a in (("q", q), ("k", k), ("v", v))}
    xp, q, k, v = operands(**given)
    check_common(xp, deterministic, workspace, config)
    config = override.of_forward(config)
    out, lse = result_pair(out, flag("return_lse", return_lse))
    whole = describe(q, k, v, _without_arrays(chosen), axes=axes, precision=precision, out=out)
    ends, inputs = _inputs(given, chosen, cu_seqlens_q, cu_seqlens_k)
    count = _check_ends(ends)
    if out is not None:
        check_destination("out", out, **inputs)
    if lse is not None:
        require_shape("lse", lse, whole.lse_shape, "batch + (total_q,)")
        if lse.dtype != whole.lse_dtype:
            raise problem_with(
                "out", TypeError, got=f"lse of dtype {lse.dtype}", expected=str(whole.lse_dtype)
            )
        check_destination("lse", lse, **inputs, out=out)
    if out is None:
        out = allocate(xp, "out", whole.out_shape, whole.dtype)
    if lse is None:
        lse = allocate(xp, "out", whole.lse_shape, whole.lse_dtype)
    if xp is not np:
        common: dict[str, Any] = {"axes": axes, "precision": precision, "out": out}
        problem = describe_packed(q, k, v, chosen, ends, **common)
        if count:
            run_forward(problem, q, k, v, chosen, out, lse, workspace, config, cu_seqlens=ends)
        else:
            out.fill(0)
            lse.fill(-np.inf)
        return AttentionResult(out, lse) if return_lse else out
    destinations = out, lse
    if chosen.score_mod is not None or chosen.mask_mod is not None:
        # A formula may raise in any sequence, and then nothing has been written.
        out, lse = np.empty_like(out), np.empty_like(lse)
    calls = _calls(whole, chosen, _sequences(whole, inputs), q=q, k=k, v=v, out=out)
    out.fill(0)
    lse.fill(-np.inf)
    for call in calls:
        s, parts = call.sequence, call.parts
        run_forward(
            call.problem, parts["q"], parts["k"], parts["v"], call.options, parts["out"],
            lse[..., s.q], workspace, config, first_entry=s.index * math.prod(whole.batch),
        )  # fmt: skip
    for destination, filled in zip(destinations, (out, lse), strict=True):
        if destination is not filled:
            destination[...] = filled
    out, lse = destinations
    return AttentionResult(out, lse) if return_lse else out


@on_own_device
@np.errstate(all="ignore")
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
    xp, q, k, v = operands(**given)
    dout, out, lse = native("dout", dout), native("out", out), native("lse", lse)
    dlse = None if dlse is None else native("dlse", dlse)
    same_module(q=q, dout=dout, out=out, lse=lse, dlse=dlse)
    check_common(xp, deterministic, workspace, config)
    config = override.of_backward(config)
    whole = describe(q, k, v, _without_arrays(chosen), axes=axes, precision=precision)
    ends, inputs = _inputs(given, chosen, cu_seqlens_q, cu_seqlens_k)
    count = _check_ends(ends)
    for name, array, shape in (
        ("dout", dout, whole.out_shape),
        ("out", out, whole.out_shape),
        ("lse", lse, whole.lse_shape),
        ("dlse", dlse, whole.lse_shape),
    ):
        if array is not None:
            require_float(name, array)
            require_shape(name, array, shape, "the result of attention_varlen")
    read = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    likes = inputs | {"scale": xp.empty(())} if "scale" in wanted else inputs
    gradients = gradient_buffers(xp, wanted, grads_out, likes, read)
    if xp is not np:
        problem = describe_packed(q, k, v, chosen, ends, axes=axes, precision=precision)
        for gradient in gradients.values():
            gradient.fill(0)
        if count:
            run_backward(
                problem, dout, q, k, v, out, lse, dlse, chosen, gradients, workspace, config,
                deterministic=bool(deterministic), cu_seqlens=ends,
            )  # fmt: skip
        return Gradients(**{FIELDS[name]: array for name, array in gradients.items()})
    sums = {name: np.zeros(a.shape, arithmetic(whole.dtype)) for name, a in gradients.items()}
    for call in _calls(whole, chosen, _sequences(whole, inputs), q=q, k=k, v=v):
        s, parts = call.sequence, call.parts
        targets = {
            name: _part(whole, name, a, s) if name in _PAIRS
            else a if name == "scale" else _own_part(whole, name, a, s)
            for name, a in sums.items()
        }  # fmt: skip
        results = {name: np.empty(a.shape, a.dtype) for name, a in targets.items()}
        run_backward(
            call.problem, _part(whole, "dout", dout, s), parts["q"], parts["k"], parts["v"],
            _part(whole, "out", out, s), lse[..., s.q], None if dlse is None else dlse[..., s.q],
            call.options, results, workspace, config,
            first_entry=s.index * math.prod(whole.batch),
        )  # fmt: skip
        for name, target in targets.items():
            target += results[name]
    with np.errstate(all="ignore"):
        for name, gradient in gradients.items():
            write_rounded(gradient, sums[name])
    return Gradients(**{FIELDS[name]: array for name, array in gradients.items()})


def _inputs(
    given: dict[str, Array], options: Options, cu_seqlens_q: Any, cu_seqlens_k: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Where sequences end, and every array that is read, by name: all of one library."""
    ends = {
        "cu_seqlens_q": native("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": native("cu_seqlens_k", cu_seqlens_k),
    }
    inputs = given | ends | options.arrays
    if same_module(**given, **ends) is np:
        same_module(**inputs)
    return ends, inputs


def _without_arrays(options: Options) -> Options:
    """What the packed operands can be checked with before sequences are cut out."""
    return Options(causal=bool(options.causal), enable_gqa=options.enable_gqa)


def _check_ends(ends: dict[str, Array]) -> int:
    """The number of sequences, after what can be checked without reading a value."""
    for name, array in ends.items():
        if array.dtype.kind not in "iu":
            raise problem_with(name, TypeError, got=f"dtype {array.dtype}", expected="integers")
        if array.ndim != 1 or array.size == 0:
            raise problem_with(
                name, ValueError, got=f"shape {array.shape}", expected="shape (sequences + 1,)"
            )
    counts = [array.size - 1 for array in ends.values()]
    if counts[0] != counts[1]:
        raise problem_with(
            "cu_seqlens_k", ValueError, got=f"{counts[1]} sequences",
            expected=f"{counts[0]} sequences as in cu_seqlens_q",
        )  # fmt: skip
    return int(counts[0])


def _sequences(whole: Problem, inputs: dict[str, Array]) -> tuple[Sequence, ...]:
    """The sequences, after every check of the values that end them."""
    ends = []
    for name, total in (("cu_seqlens_q", whole.seqlen_q), ("cu_seqlens_k", whole.seqlen_k)):
        values = inputs[name].tolist()
        if any(a > b for a, b in itertools.pairwise(values)):
            raise problem_with(
                name, ValueError, got="values that decrease", expected="none that do"
            )
        if not 0 <= values[0] <= values[-1] <= total:
            raise problem_with(
                name, ValueError, got=f"values from {values[0]} to {values[-1]}",
                expected=f"values from 0 to {total}, the number of packed rows",
            )  # fmt: skip
        ends.append(values)
    pairs = (itertools.pairwise(values) for values in ends)
    return tuple(
        Sequence(i, slice(*q), slice(*k)) for i, (q, k) in enumerate(zip(*pairs, strict=True))
    )


def _calls(
    whole: Problem, options: Options, sequences: tuple[Sequence, ...], **matrices: Array
) -> list[Call]:
    """The call of each sequence: a list, so that all are checked before anything is written."""
    for name, array in options.arrays.items():
        _check_axes(whole, name, array, len(sequences))
    calls = []
    for s in sequences:
        parts = {name: _part(whole, name, array, s) for name, array in matrices.items()}
        own = _own_options(whole, options, s)
        problem = describe(
            parts["q"], parts["k"], parts["v"], own, axes=whole.axes, precision=whole.precision,
            out=parts.get("out"),
        )  # fmt: skip
        calls.append(Call(s, parts, own, problem))
    return calls


def _part(whole: Problem, name: str, matrix: Array, s: Sequence) -> Array:
    """View of one sequence of a packed matrix."""
    index: list[Any] = [slice(None)] * matrix.ndim
    index[whole.axes[_PAIRS[name]][0]] = s.k if name in ("k", "v") else s.q
    return matrix[tuple(index)]


def _most_axes(whole: Problem, name: str) -> int:
    """As many as a score option's array has with sequences, batch and core."""
    return 1 + len(whole.batch_shape) + _CORES.get(name, 0)


def _check_axes(whole: Problem, name: str, array: Array, sequences: int) -> None:
    core, most = _CORES.get(name, 0), _most_axes(whole, name)
    if not core <= array.ndim <= most:
        raise problem_with(
            name, ValueError, got=f"shape {array.shape}",
            expected=f"{core} to {most} axes, sequences first" if core
            else f"at most {most} axes, sequences first",
        )  # fmt: skip
    if array.ndim == most and array.shape[0] not in (1, sequences):
        raise problem_with(
            name, ValueError, got=f"shape {array.shape}",
            expected=f"{sequences} or 1 sequences in the first axis",
        )  # fmt: skip


def _own_part(whole: Problem, name: str, array: Array, s: Sequence) -> Array:
    """View of what one sequence has of a score option's array."""
    core = _CORES.get(name, 0)
    if array.ndim == _most_axes(whole, name):
        array = array[0 if array.shape[0] == 1 else s.index, ...]  # no scalar: a view
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


def _own_options(whole: Problem, options: Options, s: Sequence) -> Options:
    """The options of one sequence."""
    own: dict[str, Any] = {
        name: _own_part(whole, name, array, s) for name, array in options.arrays.items()
    }
    if "segment_ids_q" in own:
        own["segment_ids"] = (own.pop("segment_ids_q"), own.pop("segment_ids_k"))
    return replace(options, **own) if own else options
