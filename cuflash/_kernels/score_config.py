"""Which score options are compiled into a kernel, and what do they cost it?

Every field becomes a member of ``Config``, like the fields of ``_kernels/config.py``. A compiled
option of ``option_table.py`` has a field of its name. Fields that depend on several options are
written by hand.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Literal, cast

from cuflash._errors import wrong_value
from cuflash._problem.operand import Operand
from cuflash._problem.option_table import Option, of_stages
from cuflash._problem.problem import Problem

#: Dtype of an option's array; "none" where the call has none.
Floats = Literal["none", "float16", "bfloat16", "float32", "float64"]
Integers = Literal["none", "int32", "int64"]
#: Where the causal offset comes from: one value for the launch, each entry's kv_length - q_length,
#: or an array of this dtype.
Offset = Literal["value", "lengths", "int32", "int64"]

_MOST_ROWS = 1 << 29  # queries or keys that 32-bit block indices can address


#: Options that change a score by more than a factor: the scale is then not part of the exponent.
CHANGING = (*(option.name for option in of_stages("cap", "add")), "score_mod")
#: Options with a field here. Options of stage "row" are fields of forward kernels only.
COMPILED = tuple(option for option in of_stages() if option.compiled and option.stage != "row")
#: Scales of 8-bit operands. Kernels of other dtypes have none.
_SCALES = of_stages("operand")


def _dtype_or_flag(option: Option, problem: Problem) -> Any:
    if option.compiled == "dtype":
        return dtype_of(getattr(problem, next(iter(option.arrays))))
    return problem.has(option)


def scale_in_exponent(problem: Problem) -> bool:
    """Whether scale * log2(e) is part of the exponent: no option changes scores."""
    plain = not any(problem.has(option) for option in of_stages("cap", "add"))
    plain = plain and not (problem.formulas is not None and problem.formulas.score_mod)
    # Beyond these bounds scale * log2(e) leaves the normal range of float32.
    return plain and 1e-30 < problem.scale < 1e30


def _offset(problem: Problem) -> Offset:
    bounds = (problem.window_left, problem.window_right)
    if bounds == (None, None) and problem.alibi_slopes is None:
        return "value"
    if problem.offset is not None:
        return dtype_of(problem.offset)  # type: ignore[return-value]
    own = problem.q_lengths or problem.kv_lengths or problem.cu_seqlens_q
    return "lengths" if problem.offset_value is None and own else "value"


#: The value of each field for a problem. Bounds, scale and lengths are run-time parameters.
_FIELDS: dict[str, Callable[[Problem], Any]] = {
    "window_left": lambda p: p.window_left is not None,
    "window_right": lambda p: p.window_right is not None,  # causal is window_right with bound 0
    "scale_in_exponent": scale_in_exponent,
    **{o.name: functools.partial(_dtype_or_flag, o) for o in COMPILED if o not in _SCALES},
    "offset": _offset,
    "score_mod": lambda p: p.formulas is not None and p.formulas.score_mod,
    "mask_mod": lambda p: p.formulas is not None and p.formulas.mask_mod,
    "formulas": lambda p: () if p.formulas is None else p.formulas.texts,  # (file, text) pairs
    "cu_seqlens": lambda p: dtype_of(p.cu_seqlens_q),  # "none" where sequences are not packed
    "heads_in_rows": lambda p: p.num_queries is not None,
    **{option.name: functools.partial(_dtype_or_flag, option) for option in _SCALES},
}
_DEFAULTS = [False, *["none"] * len(_SCALES)]
_Fields: Any = cast(Any, namedtuple("_Fields", tuple(_FIELDS), defaults=_DEFAULTS))


class ScoreConfig(_Fields):  # type: ignore[misc]
    """Which score options a kernel is compiled for: each a bool, or a dtype ("none": absent).

    ``offset`` is a dtype, "value" for one value of the launch, or "lengths" for the default.
    """

    __slots__ = ()

    def check(self) -> None:
        changed = any(getattr(self, name) not in (False, "none") for name in CHANGING)
        if self.scale_in_exponent and changed:
            raise ValueError(f"{self.scale_in_exponent=} excludes {', '.join(CHANGING)}")


def score_config(problem: Problem) -> ScoreConfig:
    """The score options of a problem."""
    if max(problem.seqlen_q, problem.seqlen_k) >= _MOST_ROWS:
        got = f"{problem.seqlen_q} queries, {problem.seqlen_k} keys"
        raise wrong_value("q, k", got, "fewer than 2^29 of each")
    return ScoreConfig(*(value(problem) for value in _FIELDS.values()))


def present(problem: Problem, *stages: Any) -> set[str]:
    """Names of the options of these stages that are compiled in; formulas do not count."""
    return {option.name for option in COMPILED if option.stage in stages and problem.has(option)}


def needs_score_math(problem: Problem) -> bool:
    """Whether a score takes more than a product, a scale and bounds, and thus more registers."""
    return problem.formulas is not None or bool(present(problem, "cap", "add", "see", "weight"))


def register_pressure(problem: Problem) -> int:
    """How many options take registers in a main loop; bias and formulas do not count."""
    return sum(option.pressure for option in COMPILED if problem.has(option))


def dtype_of(operand: Operand | None) -> Floats:
    """The field of an option with an array: its dtype, or "none"."""
    return "none" if operand is None else operand.dtype.name  # type: ignore[return-value]
