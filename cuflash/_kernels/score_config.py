"""Which score options are compiled into a kernel, and what do they cost it?

Every field becomes a macro, as those of ``_kernels/config.py`` do.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from cuflash._errors import problem_with
from cuflash._host import philox
from cuflash._problem.operand import Operand
from cuflash._problem.problem import Problem

#: Dtype of an option's array; "none" where the call has none.
Floats = Literal["none", "float16", "bfloat16", "float32", "float64"]
Integers = Literal["none", "int32", "int64"]
#: One value for the launch, the entry's kv_length - q_length, or an array.
Offset = Literal["value", "lengths", "int32", "int64"]

_MOST_ROWS = 1 << 29  # queries or keys that 32-bit indices of blocks reach


class ScoreConfig(NamedTuple):
    """What kernels are told of score options; bounds, scale and lengths are run-time parameters."""

    window_left: bool  # is that side bounded?
    window_right: bool  # causal is window_right with bound 0
    scale_in_exponent: bool
    softcap: bool
    bias: Floats
    alibi_slopes: Floats
    mask: bool
    segment_ids: Integers
    offset: Offset
    q_lengths: Integers
    kv_lengths: Integers
    score_mod: bool
    mask_mod: bool
    formulas: tuple[tuple[str, str], ...]  # files of the source, with the caller's text
    dropout: bool
    cu_seqlens: Integers  # "none" where sequences are not packed

    def check(self) -> None:
        """Raise a ValueError for options that exclude each other."""
        changed = self.softcap or self.score_mod or not self.bias == self.alibi_slopes == "none"
        if self.scale_in_exponent and changed:
            raise ValueError(
                f"{self.scale_in_exponent=} excludes softcap, bias, slopes and score_mod"
            )


def score_config(problem: Problem) -> ScoreConfig:
    """The score options of a problem."""
    if max(problem.seqlen_q, problem.seqlen_k) >= _MOST_ROWS:
        raise problem_with(
            "q, k", ValueError, got=f"{problem.seqlen_q} queries, {problem.seqlen_k} keys",
            expected="fewer than 2^29 of each",
        )  # fmt: skip
    formulas = problem.formulas
    score_mod = formulas is not None and formulas.score_mod
    changes = (problem.softcap, problem.bias, problem.alibi_slopes)
    plain = all(option is None for option in changes) and not score_mod
    return ScoreConfig(
        window_left=problem.window_left is not None,
        window_right=problem.window_right is not None,
        # Beyond these bounds scale * log2(e) leaves the normal range of float32.
        scale_in_exponent=plain and 1e-30 < problem.scale < 1e30,
        softcap=problem.softcap is not None,
        bias=dtype_of(problem.bias),
        alibi_slopes=dtype_of(problem.alibi_slopes),
        mask=problem.mask is not None,
        segment_ids=dtype_of(problem.segment_ids_q),  # type: ignore[arg-type]
        offset=_offset_of(problem),
        q_lengths=dtype_of(problem.q_lengths),  # type: ignore[arg-type]
        kv_lengths=dtype_of(problem.kv_lengths),  # type: ignore[arg-type]
        score_mod=score_mod,
        mask_mod=formulas is not None and formulas.mask_mod,
        formulas=() if formulas is None else formulas.texts,
        dropout=philox.threshold(problem.dropout) > 0,
        cu_seqlens=dtype_of(problem.cu_seqlens_q),  # type: ignore[arg-type]
    )


def needs_score_math(problem: Problem) -> bool:
    """Whether a score takes more than a product, a scale and bounds: registers of its own."""
    present = (
        problem.softcap, problem.bias, problem.alibi_slopes, problem.formulas, problem.mask,
        problem.segment_ids_q,
    )  # fmt: skip
    return any(x is not None for x in present) or philox.threshold(problem.dropout) > 0


def register_pressure(problem: Problem) -> int:
    """How many options there are that take registers in a main loop, bias and formulas aside."""
    present = (problem.mask, problem.segment_ids_q, problem.alibi_slopes, problem.softcap)
    return sum(x is not None for x in present) + (philox.threshold(problem.dropout) > 0)


def dtype_of(operand: Operand | None) -> Floats:
    """The field of an option that is an array."""
    return "none" if operand is None else operand.dtype.name  # type: ignore[return-value]


def _offset_of(problem: Problem) -> Offset:
    bounds = (problem.window_left, problem.window_right)
    if bounds == (None, None) and problem.alibi_slopes is None:
        return "value"
    if problem.offset is not None:
        return dtype_of(problem.offset)  # type: ignore[return-value]
    own = problem.q_lengths or problem.kv_lengths or problem.cu_seqlens_q
    return "lengths" if problem.offset_value is None and own else "value"
