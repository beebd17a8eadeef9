"""Which score options are there? One row for each, from which the library derives what it can.

To add an option, write a row here, its typed field and paragraph in ``options.py``, and its meaning
in ``reference/_score.py``, ``_host/scores.py`` and ``kernels_cu/score/score.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from cuflash._errors import wrong_type
from cuflash._problem import checks, philox
from cuflash._problem.score_mod import MaskMod, ScoreMod
from cuflash._problem.softcap_polynomial import NEAR_PARAMS, cap

#: What an option acts on, in the order in which configurations and keys of tiles name options.
Stage = Literal[
    "scale", "bound", "cap", "add", "see", "place", "formula", "weight", "row", "call", "operand"
]
_STAGES = get_args(Stage)


class Option(NamedTuple):
    """One score option."""

    name: str
    check: Callable[[str, Any], Any]  # (name, value) -> plain value, or an exception
    stage: Stage
    #: Names of its arrays, each with the core axes "mn", "m", "n" or "" (one value for each entry).
    arrays: dict[str, str] = {}  # noqa: RUF012 - a default that nobody changes
    #: Gives the field of Problem for the option's value; 0 and None mean that the option is absent.
    number: Callable[[Any], Any] | None = None
    #: Kernels are compiled for the option's presence ("flag"), or for the dtype of its array.
    compiled: Literal["", "flag", "dtype"] = ""
    #: Scalar parameters of kernels: dtype (float32 is float64 in float64 kernels), value, comment.
    params: dict[str, tuple[type, Callable[[Any], float], str]] = {}  # noqa: RUF012
    kernel_arrays: tuple[str, ...] = ()  # arrays that kernels get too, computed from its own
    pressure: int = 0  # rank of the registers that it needs in a main loop
    grad: str = ""  # its field of Gradients, if it has a gradient
    from_host: bool = False  # may its array be in host memory with operands on a GPU?
    in_problem: bool = True  # does a Problem, which is cached, depend on it?


def _formula(kind: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong_type(name, type(value).__name__, f"a cuflash.{kind.__name__}")
        return value

    return check


def _as_it_is(value: Any) -> Any:
    return value


#: In the order of ``ScoreParams`` in ``kernels_cu/params.cuh``.
OPTIONS = (
    Option("bias", checks.floats, "add", {"bias": "mn"}, compiled="dtype", grad="dbias"),
    Option("mask", checks.booleans, "see", {"mask": "mn"}, compiled="flag", pressure=1),
    Option("causal", checks.alignment, "bound"),
    Option("window", checks.window, "bound"),
    Option("offset", checks.offset, "place", {"offset": ""}, from_host=True),
    Option(
        "q_lengths", checks.integers, "place", {"q_lengths": ""}, compiled="dtype", from_host=True
    ),
    Option(
        "kv_lengths", checks.integers, "place", {"kv_lengths": ""}, compiled="dtype", from_host=True
    ),
    Option(
        "alibi_slopes", checks.slopes, "add", {"alibi_slopes": ""}, compiled="dtype", pressure=1,
        grad="dslopes",
    ),
    Option(
        "segment_ids", checks.pair_of_ids, "see", {"segment_ids_q": "m", "segment_ids_k": "n"},
        compiled="dtype", kernel_arrays=("segment_bounds_q", "segment_bounds_k"), pressure=1,
    ),
    Option("sink", checks.floats, "row", {"sink": ""}, compiled="dtype", grad="dsink"),
    Option(
        "scale", checks.finite, "scale", grad="dscale",
        params={
            "scale": (np.float32, lambda p: p.scale, ""),
            "scale_log2": (np.float32, lambda p: p.scale * math.log2(math.e), "scale * log2(e)"),
        },
    ),
    Option(
        "softcap", checks.positive, "cap", number=_as_it_is, compiled="flag", pressure=1,
        params={
            "softcap": (np.float32, cap, ""),
            "inverse_softcap": (np.float32, lambda p: p.scale / cap(p), "scale / softcap"),
            **NEAR_PARAMS,
        },
    ),
    Option("score_mod", _formula(ScoreMod), "formula", in_problem=False),
    Option("mask_mod", _formula(MaskMod), "formula", in_problem=False),
    Option(
        "dropout", checks.probability, "weight", number=philox.rounded, compiled="flag", pressure=1,
        params={
            "dropout_threshold": (
                np.uint32, lambda p: philox.threshold(p.dropout),
                "weights with 16 random bits below it are dropped",
            ),
            "kept_scale": (
                np.float32, lambda p: philox.kept_scale(p.dropout), "factor of kept weights",
            ),
        },
    ),
    Option("seed", checks.seed, "weight", in_problem=False),
    Option("enable_gqa", checks.flag, "call"),
    *(
        Option(f"{name}_scale", checks.operand_scale, "operand", {f"{name}_scale": ""},
               compiled="dtype")
        for name in ("q", "k", "v")
    ),
)  # fmt: skip
#: The option and the core axes of every array that an option may hold.
ARRAYS = {name: (option, core) for option in OPTIONS for name, core in option.arrays.items()}
#: Field of Gradients for each input that has a gradient.
FIELDS = {"q": "dq", "k": "dk", "v": "dv"} | {o.name: o.grad for o in OPTIONS if o.grad}


def of_stages(*stages: Stage) -> tuple[Option, ...]:
    """The options of these stages, or of all stages if none is named, in the order of stages."""
    chosen = [option for option in OPTIONS if not stages or option.stage in stages]
    return tuple(sorted(chosen, key=lambda option: _STAGES.index(option.stage)))
