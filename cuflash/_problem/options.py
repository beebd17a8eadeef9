"""What may change the meaning of a score? The frozen, validated set of score options."""

from __future__ import annotations

import functools
import math
import operator
from collections import namedtuple
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import numpy as np

from cuflash._arrays import Array, native
from cuflash._errors import problem_with, shown
from cuflash._problem.score_mod import MaskMod, ScoreMod

Signature = tuple[Any, ...]
#: The farthest that offsets go: with the widest window, twice as wide, no sum of 64 bits wraps and
#: every query of an array sees as far as the array goes.
FARTHEST = 2**59
_WIDEST = 2 * FARTHEST


def signature(array: Array | None) -> Signature | None:
    """(shape, strides, dtype) of an array: all that validation and kernels depend on."""
    return None if array is None else (array.shape, array.strides, array.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Options:
    """Score options of one attention call, forward and backward alike.

    Build it once and pass it as ``options=`` so that forward and backward cannot disagree and a
    repeated call costs one lookup; or pass the same keywords to the functions directly.

    Parameters
    ----------
    causal : bool or {"top_left", "bottom_right"}
        Key ``n`` is visible to query ``m`` iff ``n <= m + offset``. ``True`` and
        ``"bottom_right"`` leave the offset at its default, ``"top_left"`` sets it to 0.
    offset : int or integer array, core shape (), optional
        Position of query 0 among the keys, from -2^59 to 2^59. Default: kv_length - q_length of
        that batch entry. Far from the keys ``alibi_slopes`` lose their digits.
    window : (left, right), optional
        Each side ``None`` or an int >= 0: ``m + offset - left <= n <= m + offset + right``.
        ``causal`` caps ``right`` at 0.
    scale : float, optional
        Factor of ``q . k``; finite. Default ``1 / sqrt(head_dim)``.
    softcap : float, optional
        ``score = softcap * tanh(score / softcap)``; finite and positive.
    bias : floating array, core shape (m, n), optional
        Added to the score after softcap, in natural units. ``-inf`` means invisible; a finite
        number such as -1e9 does not, and leaves a row of such scores without digits for a gradient.
    mask : bool array, core shape (m, n), optional
        ``True`` where the query may attend to the key.
    q_lengths, kv_lengths : int or integer array, core shape (), optional
        Number of valid queries and keys of each batch entry; the rest is invisible. Rows beyond
        are no queries: out 0, lse -inf, no gradient to anything, whatever they hold.
    enable_gqa : bool
        Query heads (the last batch axis) come in consecutive groups that share a key/value head.
    alibi_slopes : floating array, core shape (), optional
        ``- slope * |m + offset - n|`` is added to the score, per head as a rule. The distance is
        float32 (float64 for float64): from 2^24 (2^53) on neighbouring keys are equally far, as
        under an offset of 2^40 in bfloat16.
    segment_ids : (integer array (.., m), integer array (.., n)), optional
        A query sees a key only if their numbers are equal.
    sink : floating array, core shape (), optional
        One more score per query, of a key without a value: it takes part in the softmax and in lse
        only. It is the lse of a query that sees no key.
    dropout : float
        Probability, rounded to a multiple of 1/65536, that a score's weight is dropped after the
        softmax; what is kept is divided by ``1 - dropout``. lse knows nothing of it.
    seed : int, optional
        From 0 to 2^64 - 1, required with dropout. :func:`dropout_mask` shows what it keeps.
    score_mod : ScoreMod, optional
        A formula of your own for the score, after bias and ALiBi.
    mask_mod : MaskMod, optional
        A formula of your own for visibility.

    Notes
    -----
    Arrays broadcast against the batch shape of ``q``, heads last: lengths that differ per batch
    entry of a (batch, heads, m, d) problem have shape (batch, 1). They are held by reference:
    two options are equal when their plain values are equal and their arrays are the same objects.
    Numbers are read once, when the options are built: by keywords, that is in each call. Lengths
    and offsets in arrays on a GPU are not read by the host: one out of range counts as the nearest
    that is in range.

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
    #: Plain values and the layouts of arrays, without what no Problem depends on.
    signature: Any = field(init=False)
    #: The options that are arrays, by name.
    arrays: dict[str, Array] = field(init=False)
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        set_("causal", _causal(self.causal))
        set_("window", _window(self.window))
        set_("scale", _number("scale", self.scale))
        set_("softcap", _number("softcap", self.softcap, positive=True))
        set_("offset", _integers("offset", self.offset))
        if isinstance(self.offset, int) and abs(self.offset) > FARTHEST:
            raise problem_with(
                "offset", ValueError, got=f"an int of {self.offset.bit_length()} bits",
                expected="an int from -2^59 to 2^59",
            )  # fmt: skip
        set_("q_lengths", _integers("q_lengths", self.q_lengths))
        set_("kv_lengths", _integers("kv_lengths", self.kv_lengths))
        if isinstance(self.causal, str) and self.offset is not None:
            raise problem_with(
                "offset",
                ValueError,
                got=f"offset={shown(self.offset)} with causal={self.causal!r}",
                expected="an alignment word or an offset, not both",
                fix="write causal=True with offset=",
            )
        set_("bias", None if self.bias is None else native("bias", self.bias))
        set_("mask", None if self.mask is None else native("mask", self.mask))
        for name, kind in (("score_mod", ScoreMod), ("mask_mod", MaskMod)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise problem_with(
                    name, TypeError, got=type(value).__name__, expected=f"a cuflash.{kind.__name__}"
                )
        for name in ("alibi_slopes", "sink"):
            value = getattr(self, name)
            set_(name, None if value is None else native(name, value))
        set_("segment_ids", _segments(self.segment_ids))
        set_("dropout", probability("dropout", self.dropout))
        set_("seed", None if self.seed is None else seed_value(self.seed))
        if self.dropout > 0 and self.seed is None:
            raise problem_with(
                "seed", ValueError, got=f"dropout={self.dropout} without seed",
                expected="an int from 0 to 2^64 - 1",
                fix="the same seed in forward and backward drops the same scores",
            )  # fmt: skip
        if self.mask is not None and self.mask.dtype != np.bool_:
            raise problem_with(
                "mask",
                TypeError,
                got=f"dtype {self.mask.dtype}",
                expected="dtype bool, True where the query may attend",
                fix="additive masks go to bias=",
            )
        set_("enable_gqa", flag("enable_gqa", self.enable_gqa))
        values = {name: getattr(self, name) for name in OPTION_NAMES}
        set_("signature", OptionLayout(*map(_part, (values | dict.fromkeys(_APART)).values())))
        set_("_hash", hash(self.signature))  # once: a repeated call asks for it
        if self.segment_ids is not None:
            values["segment_ids_q"], values["segment_ids_k"] = self.segment_ids
        set_("arrays", {name: a for name, a in values.items() if hasattr(a, "strides")})

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        """Made anew where it is unpickled: hashes of texts differ between processes."""
        values = {name: getattr(self, name) for name in OPTION_NAMES}
        return functools.partial(type(self), **values), ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return (
            self.signature == other.signature
            and all(getattr(self, name) == getattr(other, name) for name in _APART)
            and all(map(operator.is_, self.arrays.values(), other.arrays.values()))
        )

    def __repr__(self) -> str:
        texts = {name: f"<{a.dtype} {a.shape}>" for name, a in self.arrays.items()}
        for f in fields(self):
            value = getattr(self, f.name, None)
            if f.name == "segment_ids" and value is not None:
                texts[f.name] = f"({texts['segment_ids_q']}, {texts['segment_ids_k']})"
            elif f.init and f.name not in texts and value != f.default:
                texts[f.name] = repr(value)
        shown = [f"{name}={texts[name]}" for name in OPTION_NAMES if name in texts]
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


#: Likeness of a misspelt name: "attn_mask" is like "mask" (0.615), "out" unlike "dropout" (0.6).
_NEAR = 0.61
OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Options) if f.init)
#: Options that no Problem depends on; a cached signature would keep a formula's arrays alive.
_APART = ("seed", "score_mod", "mask_mod")
#: Types of objects that never change, and hash by value: options of these alone are cached.
_VALUES = frozenset(
    {int, float, bool, str, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_}
)
#: Options with every array replaced by its layout.
OptionLayout: Any = namedtuple("OptionLayout", OPTION_NAMES)  # type: ignore[misc]


@functools.lru_cache(maxsize=1024, typed=True)
def _of_values(
    names: tuple[str, ...],
    sides: tuple[type, ...],  # of the window: (True, 0) is none, but equals (1, 0)
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
        window = keywords.get("window")
        sides = tuple(map(type, window)) if type(window) is tuple else ()
        try:
            return _of_values(tuple(keywords), sides, *keywords.values())
        except TypeError:  # something may change or is not hashable; a genuine error comes again
            return _of_keywords(keywords)
    if not isinstance(options, Options):
        raise problem_with(
            "options", TypeError, got=type(options).__name__, expected="a cuflash.Options"
        )
    if keywords:
        raise problem_with(
            "options",
            TypeError,
            got=f"options= together with {', '.join(keywords)}",
            expected="score options in one place",
            fix="put them all into cuflash.Options(...)",
        )
    return options


def _of_keywords(keywords: ScoreOptions) -> Options:
    for name in keywords:
        if name not in OPTION_NAMES:
            from difflib import get_close_matches

            near = get_close_matches(name, OPTION_NAMES, n=1, cutoff=_NEAR)
            raise problem_with(
                name,
                TypeError,
                got="an unknown keyword",
                expected="a parameter of this function or a score option",
                fix=f"did you mean {near[0]}?" if near else ", ".join(OPTION_NAMES),
            )
    return Options(**keywords)


def _part(value: Any) -> Any:
    if isinstance(value, tuple) and value and hasattr(value[0], "strides"):
        return tuple(map(signature, value))
    return signature(value) if hasattr(value, "strides") else value


def _causal(value: Any) -> bool | str:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str) and value in ("top_left", "bottom_right"):
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise problem_with(
        "causal", kind, got=shown(value), expected='True, False, "top_left" or "bottom_right"'
    )


def _window(value: Any) -> tuple[int | None, int | None] | None:
    expected = "a pair (left, right), each None or an int >= 0"
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        plain = isinstance(value, int)
        fix = f"for both sides alike write ({shown(value)}, {shown(value)})" if plain else ""
        raise problem_with("window", TypeError, got=shown(value), expected=expected, fix=fix)
    sides: list[int | None] = []
    for side in value:
        if side is not None and not is_integer(side):
            raise problem_with("window", TypeError, got=shown(value), expected=expected)
        number = None if side is None else integer_value("window", side, expected)
        if number is not None and number < 0:
            raise problem_with(
                "window", ValueError, got=shown(value), expected=expected, fix="None is unbounded"
            )
        sides.append(None if number is None else min(number, _WIDEST))
    return (sides[0], sides[1])


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer and neither a bool nor an array."""
    scalar = hasattr(type(value), "__index__") and not hasattr(value, "shape")
    return isinstance(value, np.integer) or (scalar and not isinstance(value, bool))


def integer_value(name: str, value: Any, expected: str) -> int:
    """The int of what :func:`is_integer`; an object of the caller's may refuse it."""
    try:
        return operator.index(value)
    except Exception as error:
        raise _refused(name, value, error, expected) from error


def _refused(name: str, value: Any, error: Exception, expected: str) -> Exception:
    got = f"{type(value).__name__} that is no number ({type(error).__name__}: {error})"
    return problem_with(name, TypeError, got=got, expected=expected)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that is only like one of them."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise problem_with(name, TypeError, got=shown(value), expected="True or False")
    return bool(value)


def _number(name: str, value: Any, *, positive: bool = False) -> float | None:
    if value is None:
        return None
    expected = f"None or a finite{' positive' if positive else ''} number"
    number = _finite(name, value, expected)
    if positive and number <= 0:
        raise problem_with(name, ValueError, got=shown(value), expected=expected)
    return number


def _finite(name: str, value: Any, expected: str) -> float:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    wrong = isinstance(value, bool | str | complex | np.void)
    wrong = wrong or kind not in ("i", "u", "f", "V")  # V: bfloat16
    if wrong or not hasattr(type(value), "__float__"):
        raise problem_with(name, TypeError, got=shown(value), expected=expected)
    if getattr(value, "shape", ()) != ():
        raise problem_with(name, TypeError, got=f"shape {value.shape}", expected=expected)
    if hasattr(value, "__cuda_array_interface__"):
        raise problem_with(
            name, TypeError, got="an array on a GPU", expected=expected, fix="pass float(value)"
        )
    try:
        number = float(value)
    except OverflowError:
        raise problem_with(
            name, ValueError, got="an int beyond the range of float", expected=expected
        ) from None
    except Exception as error:  # a tensor without memory
        raise _refused(name, value, error, expected) from error
    if not math.isfinite(number):
        raise problem_with(name, ValueError, got=shown(value), expected=expected)
    return number


def probability(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    expected = "a finite number from 0 to 1"
    if value is None or not 0 <= (number := _finite(name, value, expected)) <= 1:
        raise problem_with(name, ValueError, got=shown(value), expected=expected)
    return number


def seed_value(value: Any) -> int:
    """An int of 64 bits."""
    expected = "an int from 0 to 2^64 - 1"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise problem_with("seed", TypeError, got=shown(value), expected=expected)
    if not 0 <= value < 2**64:
        raise problem_with("seed", ValueError, got=shown(value), expected=expected)
    return int(value)


def _integers(name: str, value: Any) -> Array | int | None:
    expected = "None, an int or an integer array"
    if value is None:
        return None
    if is_integer(value):
        return integer_value(name, value, expected)
    if isinstance(value, bool | float):
        raise problem_with(name, TypeError, got=shown(value), expected=expected)
    array = native(name, value)
    if array.dtype.kind not in "iu":
        raise problem_with(name, TypeError, got=f"dtype {array.dtype}", expected=expected)
    return array


def _segments(value: Any) -> tuple[Array, Array] | None:
    if value is None:
        return None
    expected = "a pair of integer arrays, (.., m) for the queries and (.., n) for the keys"
    if not isinstance(value, tuple | list) or len(value) != 2:
        fix = "write (ids, ids) for self-attention" if hasattr(value, "strides") else ""
        raise problem_with(
            "segment_ids", TypeError, got=type(value).__name__, expected=expected, fix=fix
        )
    arrays = [native(f"segment_ids[{i}]", a) for i, a in enumerate(value)]
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise problem_with(
                "segment_ids", TypeError, got=f"dtype {array.dtype}", expected=expected
            )
    return (arrays[0], arrays[1])
