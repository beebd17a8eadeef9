"""How does a user's own formula change a score, or decide which keys a query sees?"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from cuflash._arrays import Array, deeply_copied, native
from cuflash._errors import shown, wrong_type, wrong_value

_RESERVED = ("score", "b", "h", "q", "k")
#: Excludes names that C++ and CUDA reserve (two underscores, one before a capital), and our own.
_IDENTIFIER = re.compile(r"(?!.*__|_[A-Z]|CUFLASH_|formula_)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Words of C++20, types and macros in scope, and names of kernels_cu/score/formulas.cuh.
_WORDS = frozenset(re.findall(r"\w+", """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t
    char32_t char8_t class co_await co_return co_yield compl concept const const_cast
    consteval constexpr constinit continue decltype default delete do double dynamic_cast else
    enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid
    typename union unsigned using virtual void volatile wchar_t while xor xor_eq int8_t
    int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t NULL FormulaArrays Formulas
    Real ScoreParams
"""))  # fmt: skip
_STEP = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class _Modifier:
    """Fields of both kinds. Without this docstring, dataclass would write a signature here."""

    expression: str
    arrays: Mapping[str, Array] = field(default_factory=dict, kw_only=True)
    host: Callable[..., Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        _require_text("expression", self.expression)
        _require_callable("host", self.host)
        if not isinstance(self.arrays, Mapping):
            raise wrong_type("arrays", type(self.arrays).__name__, "a mapping of names to arrays")
        checked = {}
        for name, array in self.arrays.items():
            usable = isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
            if not usable or name in _RESERVED or name in _WORDS or keyword.iskeyword(name):
                raise wrong_value(
                    "arrays",
                    f"the name {shown(name)}",
                    f"an identifier other than {', '.join(_RESERVED)}, and no reserved word of "
                    "Python or C++",
                )
            checked[name] = native(f"arrays[{name!r}]", array)
        object.__setattr__(self, "arrays", MappingProxyType(checked))

    def __reduce__(self) -> Any:
        """Rebuild the formula when unpickling, because a MappingProxyType cannot be pickled."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return functools.partial(type(self), **values | {"arrays": dict(self.arrays)}), ()

    __deepcopy__ = deeply_copied


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMod(_Modifier):
    """A formula that changes every score, after bias and ALiBi and before visibility.

    Parameters
    ----------
    expression : str
        CUDA C++ expression, as in :class:`cupy.ElementwiseKernel`. Its names are ``score`` (float,
        or double for float64 inputs), the ints ``b``, ``h``, ``q``, ``k`` (batch entry, head,
        query, key) and the names in ``arrays``. Preprocessor lines such as ``#include`` raise.
    grad : str
        Derivative of ``expression`` with respect to ``score``, as an expression of the same names.
    arrays : mapping of str to array, optional
        Arrays that the formulas index, by name, of the same library as q; at most 6 on a GPU. In
        CUDA each is a pointer to its elements in C order (16-bit floats as float).
    host : callable
        ``host(score, b, h, q, k, **arrays)`` computes the formula on NumPy arrays that broadcast.
        It may overwrite them, but not ``arrays``. If it raises, nothing has been written.
    host_grad : callable
        ``host_grad(score, b, h, q, k, **arrays)``: derivative of ``host`` with respect to
        ``score``.

    Raises
    ------
    TypeError, ValueError
        If an expression is not text, a host function is not callable, or a name is not an
        identifier that C++ and Python allow.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> wave = cuflash.ScoreMod(
    ...     "score + amp[h] * sinf(q - k)",
    ...     grad="1.0f",
    ...     arrays={"amp": np.array([0.5, 2.0])},
    ...     host=lambda score, b, h, q, k, amp: score + amp[h] * np.sin(q - k),
    ...     host_grad=lambda score, b, h, q, k, amp: np.ones_like(score),
    ... )
    >>> wave.check()
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 4))
    >>> cuflash.attention(x, x, x, score_mod=wave).shape
    (2, 5, 4)
    """

    grad: str = field(kw_only=True)
    host_grad: Callable[..., Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        _Modifier.__post_init__(self)
        _require_text("grad", self.grad)
        _require_callable("host_grad", self.host_grad)

    def check(self, low: float = -10.0, high: float = 10.0) -> None:
        """Raise ValueError unless ``host_grad`` is the slope of ``host`` from ``low`` to ``high``.

        It is compared with fourth-order central differences at entry 0, query 0 and key 0. There
        ``host`` must be a number, or -inf, which hides a key, and ``host_grad`` must be finite.

        Examples
        --------
        >>> import numpy as np, cuflash
        >>> wrong = cuflash.ScoreMod(
        ...     "score * score",
        ...     grad="score",
        ...     host=lambda score, b, h, q, k: score**2,
        ...     host_grad=lambda score, b, h, q, k: score,  # the slope is 2 * score
        ... )
        >>> wrong.check()
        Traceback (most recent call last):
        ValueError: host_grad: got -10 at score -10, expected -20, the slope of host
        """
        try:
            first, last = float(low), float(high)
        except Exception:  # any error of a caller's object
            first = last = math.nan
        if not -math.inf < first < last < math.inf:
            raise wrong_value(
                "low, high", f"{shown(low)} and {shown(high)}", "two finite numbers, low below high"
            )
        score = np.linspace(first, last, 201)
        zero = np.zeros((), np.int64)

        def of(name: str, shift: float = 0.0) -> Array:
            formula = getattr(self, name)
            found = formula(score + shift, zero, zero, zero, zero, **lent(self.arrays))
            return result_of(name, found, score.shape, "iuf").astype(np.float64)

        value = of("host")
        with np.errstate(all="ignore"):
            slope = 8 * (of("host", _STEP) - of("host", -_STEP))
            slope = (slope - (of("host", 2 * _STEP) - of("host", -2 * _STEP))) / (12 * _STEP)
            given = of("host_grad")
            # Rounding of the quotient: values of size |f| with weights of 18 in all, over 12 steps.
            rounding = 1.5 * np.finfo(float).eps * (np.abs(value) + np.abs(score)) / _STEP
            right = np.abs(given - slope) <= 8 * rounding + 1e-6 * np.abs(slope)
        undefined = np.isnan(value) | np.isposinf(value)
        if undefined.any():
            i = int(np.argmax(undefined))
            raise wrong_value(
                "host", f"{value[i]} at score {score[i]:.6g}", "a number or -inf",
                "pass low= and high= between which the formula is defined",
            )  # fmt: skip
        # Near a hidden key there is no slope; there, 0 times host_grad has to be 0.
        right = np.where(np.isfinite(slope), right, np.isfinite(given))
        if not right.all():
            error = np.where(right, -1, np.nan_to_num(np.abs(given - slope), nan=np.inf))
            i = int(np.argmax(error))
            known = (
                f"{slope[i]:.6g}, the slope of host" if np.isfinite(slope[i]) else "a finite number"
            )
            raise wrong_value("host_grad", f"{given[i]:.6g} at score {score[i]:.6g}", known)


@dataclass(frozen=True, slots=True, eq=False)
class MaskMod(_Modifier):
    """A formula that decides which keys a query sees, in addition to the other options.

    Parameters
    ----------
    expression : str
        CUDA C++ expression of ``b``, ``h``, ``q``, ``k`` and the names in ``arrays``, as in
        :class:`ScoreMod`. It is true where the query may attend to the key.
    arrays : mapping of str to array, optional
        Arrays that the formula indexes, by name, as in :class:`ScoreMod`.
    host : callable
        ``host(b, h, q, k, **arrays)`` computes the formula on NumPy arrays that broadcast.

    Raises
    ------
    TypeError, ValueError
        As in :class:`ScoreMod`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> even = cuflash.MaskMod("(q - k) % 2 == 0", host=lambda b, h, q, k: (q - k) % 2 == 0)
    >>> x = np.eye(4)
    >>> lse = cuflash.logsumexp(x, x, mask_mod=even)
    >>> cuflash.weights(x, x, lse, rows=[0], mask_mod=even).round(3)
    array([[0.622, 0.   , 0.378, 0.   ]])
    """


def lent(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays that formulas get: NumPy arrays are passed as read-only views."""
    views = {name: array[...] for name, array in arrays.items()}
    for view in views.values():
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
    return views


def result_of(
    name: str, result: Any, shape: tuple[int, ...], kinds: str, xp: ModuleType = np
) -> Array:
    """The result of a formula as an array of ``shape``; raise for other dtype kinds."""
    try:
        array = xp.asarray(result)
    except (TypeError, ValueError) as error:  # a ragged list
        raise wrong_type(name, str(error), "an array") from None
    if array.dtype.kind not in kinds:
        raise wrong_type(
            name, f"an array of dtype {array.dtype}", "booleans" if kinds == "b" else "numbers"
        )
    try:
        return xp.broadcast_to(array, shape)
    except ValueError:
        raise wrong_value(
            name, f"an array of shape {array.shape}",
            f"an array that broadcasts to {shape}",
        ) from None  # fmt: skip


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise wrong_type(name, type(value).__name__, "an expression")
    if not value.strip():
        raise wrong_value(name, shown(value), "an expression")
    spliced = value.replace("\\\r\n", "").replace("\\\n", "")
    if any(wrong in spliced for wrong in ("#", "%:", "??=", "\0")):
        raise wrong_value(
            name, shown(value),
            "an expression without preprocessor directives such as #include",
        )  # fmt: skip
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong_value(name, shown(value), "an expression that UTF-8 can encode") from None


def _require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise wrong_type(name, type(value).__name__, "a callable")
