"""How does a user's own formula enter a score or decide who sees whom?"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from cuflash._arrays import Array, native
from cuflash._errors import problem_with

_RESERVED = ("score", "b", "h", "q", "k")
#: Not what C++ and CUDA keep to themselves (two underscores, one before a capital), nor ours.
_IDENTIFIER = re.compile(r"(?!.*__|_[A-Z]|CUFLASH_|formula_)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Of C++20, types and macros that are in scope, and names of kernels_cu/formulas.cuh.
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
    """What both kinds have; without this line a signature would be made for documentation."""

    expression: str
    arrays: Mapping[str, Array] = field(default_factory=dict, kw_only=True)
    host: Callable[..., Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        _require_text("expression", self.expression)
        _require_callable("host", self.host)
        if not isinstance(self.arrays, Mapping):
            raise problem_with(
                "arrays", TypeError, got=type(self.arrays).__name__, expected="names and arrays"
            )
        checked = {}
        for name, array in self.arrays.items():
            usable = isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
            if not usable or name in _RESERVED or name in _WORDS or keyword.iskeyword(name):
                raise problem_with(
                    "arrays", ValueError, got=f"the name {name!r}",
                    expected=f"an identifier other than {', '.join(_RESERVED)}, words of Python "
                    "and C++, and what these reserve",
                )  # fmt: skip
            checked[name] = native(f"arrays[{name!r}]", array)
        object.__setattr__(self, "arrays", MappingProxyType(checked))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMod(_Modifier):
    """A formula that changes every score, after bias and ALiBi and before visibility.

    Parameters
    ----------
    expression : str
        CUDA C++ expression of ``score`` (float, or double for float64), ``b``, ``h``, ``q``, ``k``
        (int: batch entry, head, query, key) and the names in ``arrays``, as in
        :class:`cupy.ElementwiseKernel`.
    grad : str
        Its derivative with respect to ``score``, of the same names.
    arrays : mapping of str to array, optional
        Named arrays that the formulas index, of the library of q. To the CUDA formulas each is a
        pointer to its elements in C order (16-bit floats as float); at most 6.
    host : callable
        ``host(score, b, h, q, k, **arrays)``: the formula on NumPy arrays that broadcast.
    host_grad : callable
        Its derivative with respect to ``score``.

    Raises
    ------
    TypeError, ValueError
        For a formula that is no text or not callable, or a name that is no identifier.

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

        Compared with fourth-order central differences at entry 0, query 0 and key 0.
        """
        score = np.linspace(low, high, 201)
        zero = np.zeros((), np.int64)

        def at(shift: float) -> Array:
            return np.asarray(
                self.host(score + shift, zero, zero, zero, zero, **self.arrays), np.float64
            )

        slope = (8 * (at(_STEP) - at(-_STEP)) - (at(2 * _STEP) - at(-2 * _STEP))) / (12 * _STEP)
        given = np.broadcast_to(
            self.host_grad(score, zero, zero, zero, zero, **self.arrays), slope.shape
        )
        # Rounding of the difference quotient: 2 values of size |f| over 12 steps, 18 in weight.
        rounding = 1.5 * np.finfo(float).eps * (np.abs(at(0)) + np.abs(score)) / _STEP
        wrong = np.abs(given - slope) > 8 * rounding + 1e-6 * np.abs(slope)
        if wrong.any():
            i = int(np.argmax(np.abs(given - slope)))
            raise problem_with(
                "host_grad", ValueError, got=f"{given[i]:.6g} at score {score[i]:.6g}",
                expected=f"{slope[i]:.6g}, the slope of host",
            )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MaskMod(_Modifier):
    """A formula that decides which pairs see each other, besides every other option.

    Parameters
    ----------
    expression : str
        CUDA C++ expression, true where the query may attend, of ``b``, ``h``, ``q``, ``k`` and the
        names in ``arrays``.
    arrays : mapping of str to array, optional
        Named arrays that the formula indexes, as in :class:`ScoreMod`.
    host : callable
        ``host(b, h, q, k, **arrays)``: the formula on NumPy arrays that broadcast.

    Raises
    ------
    TypeError, ValueError
        As :class:`ScoreMod`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> even = cuflash.MaskMod("(q - k) % 2 == 0", host=lambda b, h, q, k: (q - k) % 2 == 0)
    >>> x = np.eye(4)
    >>> lse = cuflash.logsumexp(x, x, mask_mod=even)
    >>> cuflash.weights(x, x, lse, rows=[0], mask_mod=even).round(3)
    array([[0.622, 0.   , 0.378, 0.   ]])
    """


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise problem_with(name, TypeError, got=type(value).__name__, expected="an expression")
    if not value.strip():
        raise problem_with(name, ValueError, got=repr(value), expected="an expression")


def _require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise problem_with(name, TypeError, got=type(value).__name__, expected="a callable")
