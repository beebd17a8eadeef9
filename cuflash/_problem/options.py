"""Which options may change a score? The frozen, validated set of score options."""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar

import numpy as np

from cuflash._arrays import Array, deeply_copied
from cuflash._errors import shown, wrong_type, wrong_value
from cuflash._problem.foreign_keywords import unknown_keyword
from cuflash._problem.option_table import FIELDS, OPTIONS
from cuflash._problem.score_mod import MaskMod, ScoreMod

Signature = tuple[Any, ...]
T = TypeVar("T")


def signature(array: Array | None) -> Signature | None:
    """(shape, strides, dtype) of an array: validation and kernels depend on nothing else."""
    return None if array is None else (array.shape, array.strides, array.dtype)


def _explain_unknown_keywords(cls: type[T]) -> type[T]:
    """Let the constructor of options say what to write instead of an unknown keyword."""
    build = cls.__init__

    @functools.wraps(build)
    def __init__(self: T, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in _DEFAULTS:
                raise unknown_keyword(name, OPTION_NAMES)
        build(self, *args, **keywords)

    cls.__init__ = __init__  # type: ignore[method-assign, assignment]
    return cls


@_explain_unknown_keywords
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Options:
    """Score options of one attention call, forward and backward.

    Build the options once and pass them as ``options=``: forward and backward then cannot disagree,
    and a repeated call costs one lookup. Or pass the same keywords to the functions directly.

    Parameters
    ----------
    causal : bool or {"top_left", "bottom_right"}
        Key ``n`` is visible to query ``m`` iff ``n <= m + offset``. ``True`` and
        ``"bottom_right"`` leave the offset at its default, ``"top_left"`` sets it to 0.
    offset : int, or integer array or list, core shape (), optional
        Position of query 0 among the keys, from -2^59 to 2^59. Default: kv_length - q_length of
        the batch entry. ``alibi_slopes`` lose digits if queries are far from the keys.
    window : (left, right), optional
        Key ``n`` is visible to query ``m`` iff ``m + offset - left <= n <= m + offset + right``.
        Each side is an int >= 0, or ``None`` for no bound. With ``causal``, ``right`` is 0.
    scale : float, optional
        Finite factor of ``q . k``. Default: ``1 / sqrt(head_dim)``.
    softcap : float, optional
        ``score = softcap * tanh(score / softcap)``; finite and positive.
    bias : floating array, core shape (m, n), optional
        Added to the score after softcap, in natural units. ``-inf`` hides the key. A finite number
        such as -1e9 does not: a row with only such scores has no digits left for a gradient.
    mask : bool array, core shape (m, n), optional
        ``True`` where the query may attend to the key.
    q_lengths, kv_lengths : int, or integer array or list, core shape (), optional
        Number of valid queries and keys of each batch entry. The others are ignored, whatever they
        hold: in rows beyond ``q_lengths`` out is 0, lse is -inf, and every gradient is 0.
    enable_gqa : bool
        Consecutive groups of query heads (the last batch axis) share a key/value head.
    alibi_slopes : floating array or, for NumPy, list of numbers, core shape (), optional
        ``slope * |m + offset - n|`` is subtracted from the score, usually with a slope for each
        head. The distance is float32 (float64 for float64): from 2^24 (2^53) on, neighbouring keys
        have the same distance, for example with an offset of 2^40 in bfloat16.
    segment_ids : (integer array (.., m), integer array (.., n)), optional
        A query sees a key only if their segment ids are equal.
    sink : floating array, core shape (), optional
        One more score for each query, as of a key without a value: it enters only the softmax and
        lse. A query that sees no key has the sink as its lse.
    dropout : float
        Probability, rounded to a multiple of 1/65536, that a weight is dropped after the softmax;
        kept weights are divided by ``1 - dropout``. lse does not change.
    seed : int, optional
        From 0 to 2^64 - 1, required with dropout. :func:`dropout_mask` shows what is kept.
    score_mod : ScoreMod, optional
        Your own formula for the score, applied after bias and ALiBi.
    mask_mod : MaskMod, optional
        Your own formula for visibility.
    q_scale, k_scale, v_scale : positive float, or floating array, core shape (b, 1), optional
        Factors of the elements of q, k and v with an 8-bit dtype: see :func:`quantize`. With b = 1
        there is one factor for a whole (sequence, feature) matrix. Otherwise there is one for each
        of b blocks of rows. The rows of a block are the smallest power of two with which b blocks
        cover all rows.

    Notes
    -----
    The core shape is the last axes of an array. Its other axes broadcast against the batch shape of
    ``q``, heads last: lengths that differ between the batch entries of a (batch, heads, m, d)
    problem have shape (batch, 1). Arrays are held by reference: two ``Options`` are equal if their
    plain values are equal and their arrays are the same objects. Numbers are read once, when
    ``Options`` are built; keywords build them in each call. The host does not read lengths and
    offsets in arrays on a GPU: kernels clamp them to their range.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.Options(causal=True, window=(128, None))
    Options(causal=True, window=(128, None))
    """

    causal: bool | str = False
    offset: Array | int | None = None
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: Array | None = None
    alibi_slopes: Array | None = None
    score_mod: ScoreMod | None = None
    mask: Array | None = None
    mask_mod: MaskMod | None = None
    segment_ids: Any = None
    q_lengths: Array | int | None = None
    kv_lengths: Array | int | None = None
    sink: Array | None = None
    dropout: float = 0.0
    seed: int | None = None
    enable_gqa: bool = False
    q_scale: Array | float | None = None
    k_scale: Array | float | None = None
    v_scale: Array | float | None = None
    #: Plain values and the layouts of arrays: a Problem depends on nothing else.
    signature: Any = field(init=False)
    #: The options that are arrays, by name.
    arrays: dict[str, Array] = field(init=False)
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        arrays: dict[str, Array] = {}
        plain = dict(_DEFAULTS)
        for option in OPTIONS:
            value = getattr(self, option.name)
            if value is _DEFAULTS[option.name]:
                continue
            value = option.check(option.name, value)
            set_(option.name, value)
            parts = zip(option.arrays, value if isinstance(value, tuple) else [value], strict=False)
            own = {name: part for name, part in parts if hasattr(part, "strides")}
            arrays |= own
            plain[option.name] = value if option.in_problem and not own else None
        if isinstance(self.causal, str) and self.offset is not None:
            got = f"offset={shown(self.offset)} with causal={self.causal!r}"
            expected = "an alignment in causal= or an offset, not both"
            raise wrong_value("offset", got, expected, "write causal=True with offset=")
        if self.dropout > 0 and self.seed is None:
            raise wrong_value(
                "seed", f"dropout={self.dropout} without seed", "an int from 0 to 2^64 - 1",
                "pass the same seed to forward and backward",
            )  # fmt: skip
        layouts = tuple((name, signature(array)) for name, array in arrays.items())
        set_("signature", OptionLayout._make((*plain.values(), layouts)))
        set_("_hash", hash(self.signature))  # computed once: a repeated call needs it
        set_("arrays", arrays)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        """Rebuild the options when unpickling, because string hashes differ between processes."""
        values = {name: getattr(self, name) for name in OPTION_NAMES}
        return functools.partial(type(self), **values), ()

    __deepcopy__ = deeply_copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return (
            self.signature == other.signature
            and all(getattr(self, name) == getattr(other, name) for name in _APART)
            and all(map(operator.is_, self.arrays.values(), other.arrays.values()))
        )

    def __repr__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, tuple):
                return f"({', '.join(map(text, value))})"
            return f"<{value.dtype} {value.shape}>" if hasattr(value, "strides") else repr(value)

        given = {name: text(getattr(self, name)) for name in OPTION_NAMES}
        shown = [f"{n}={given[n]}" for n, default in _DEFAULTS.items() if given[n] != repr(default)]
        return f"Options({', '.join(shown)})"


class ScoreOptions(TypedDict, total=False):
    """The keywords of :class:`Options`, for type checkers and editors."""

    causal: bool | str
    offset: Array | int | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    bias: Array | None
    alibi_slopes: Array | None
    score_mod: ScoreMod | None
    mask: Array | None
    mask_mod: MaskMod | None
    segment_ids: Any
    q_lengths: Array | int | None
    kv_lengths: Array | int | None
    sink: Array | None
    dropout: float
    seed: int | None
    enable_gqa: bool
    q_scale: Array | float | None
    k_scale: Array | float | None
    v_scale: Array | float | None


_DEFAULTS = {f.name: f.default for f in fields(Options) if f.init}
OPTION_NAMES = tuple(_DEFAULTS)
#: Options that no Problem depends on; a cached signature would keep a formula's arrays alive.
_APART = tuple(option.name for option in OPTIONS if not option.in_problem)
#: Immutable types that hash by value. Options are cached if all their values are of these types.
_VALUES = frozenset(
    {int, float, bool, str, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_}
)
#: Plain values (None for an option that has arrays), and the layouts of arrays by name.
OptionLayout: Any = namedtuple("OptionLayout", (*OPTION_NAMES, "arrays"))  # type: ignore[misc]


_NO_OPTIONS = Options()


@functools.lru_cache(maxsize=1024, typed=True)
def _of_values(
    names: tuple[str, ...],
    sides: tuple[type, ...],  # of the window: (True, 0) is illegal, but equals (1, 0)
    *values: Any,
) -> Options:
    kinds = [*map(type, values)]
    if sides:
        kinds.remove(tuple)
        kinds += sides
    if not _VALUES.issuperset(kinds):
        raise TypeError("no values alone")  # an exception is not cached
    return Options(**dict(zip(names, values, strict=True)))


def resolve(options: Options | None, keywords: ScoreOptions) -> Options:
    """Return ``options``, or the Options of ``keywords``; both at once is a TypeError."""
    if options is None:
        if not keywords:
            return _NO_OPTIONS
        window = keywords.get("window")
        sides = tuple(map(type, window)) if type(window) is tuple else ()
        try:
            return _of_values(tuple(keywords), sides, *keywords.values())
        except TypeError:  # a mutable or unhashable value; a genuine error is raised again
            return Options(**keywords)
    if not isinstance(options, Options):
        raise wrong_type("options", type(options).__name__, "a cuflash.Options")
    for name in keywords:
        if name not in OPTION_NAMES:
            raise unknown_keyword(name, OPTION_NAMES)
    if keywords:
        got, fix = f"options= together with {', '.join(keywords)}", "put them all into Options(...)"
        raise wrong_type("options", got, "either options= or keywords", fix)
    return options


def arrays_read(options: Options) -> dict[str, Array]:
    """The arrays that a call with these options reads, by name, including arrays of formulas."""
    mods = {"score_mod": options.score_mod, "mask_mod": options.mask_mod}
    return options.arrays | {
        f"{kind}.arrays[{name!r}]": array
        for kind, mod in mods.items()
        if mod is not None
        for name, array in mod.arrays.items()
    }


def gradient_names(wrt: Any, options: Options) -> tuple[str, ...]:
    """The inputs that ``wrt`` names, in the order of FIELDS."""
    expected = f"a tuple of {', '.join(map(repr, FIELDS))}"
    if not isinstance(wrt, tuple | list):
        raise wrong_type("wrt", shown(wrt), expected)
    for name in wrt:
        if not isinstance(name, str) or name not in FIELDS:
            raise wrong_value("wrt", shown(wrt), expected)
        if name not in ("q", "k", "v", "scale") and name not in options.arrays:
            raise wrong_value(
                "wrt", shown(wrt), f"names of inputs of the call, which has no {name}"
            )
    return tuple(name for name in FIELDS if name in wrt)


def with_arrays(options: Options, arrays: dict[str, Array]) -> Options:
    """The options with other arrays, which have the names in ``Options.arrays``."""
    changes: dict[str, Any] = {}
    for option in OPTIONS:
        own = tuple(arrays[name] for name in option.arrays if name in arrays)
        if own:
            changes[option.name] = own if len(option.arrays) > 1 else own[0]
    return replace(options, **changes) if changes else options
