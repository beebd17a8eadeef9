"""Which score options are there? One row each, from which the library derives what it can.

To add an option: a row here, its typed field and paragraph in ``options.py``, and its meaning in
three languages: ``reference.py``, ``_host/scores.py`` and ``kernels_cu/score.cuh``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from cuflash._errors import wrong_type
from cuflash._problem import checks
from cuflash._problem.score_mod import MaskMod, ScoreMod

#: The steps of a score in their order; "call" is for what is no step.
Stage = Literal["scale", "cap", "add", "formula", "place", "see", "row", "weight", "call"]


class Option(NamedTuple):
    """One score option."""

    name: str
    check: Callable[[str, Any], Any]  # (name, value) -> plain value, or an exception
    stage: Stage
    #: Names of its arrays, each with the core axes "mn", "m", "n" or "" (one value an entry).
    arrays: dict[str, str] = {}  # noqa: RUF012 - a default that nobody changes
    number: bool = False  # Problem and kernels have its value, a number
    from_host: bool = False  # its array may lie in host memory beside operands on a GPU
    grad: str = ""  # the field of Gradients, where it has a gradient
    in_problem: bool = True  # does a Problem, which is cached, depend on it?


def _formula(kind: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong_type(name, type(value).__name__, f"a cuflash.{kind.__name__}")
        return value

    return check


#: In the order in which kernels get their arrays and numbers.
OPTIONS = (
    Option("bias", checks.floats, "add", {"bias": "mn"}, grad="dbias"),
    Option("mask", checks.booleans, "see", {"mask": "mn"}),
    Option("causal", checks.alignment, "place"),
    Option("offset", checks.offset, "place", {"offset": ""}, from_host=True),
    Option("window", checks.window, "place"),
    Option("q_lengths", checks.integers, "place", {"q_lengths": ""}, from_host=True),
    Option("kv_lengths", checks.integers, "place", {"kv_lengths": ""}, from_host=True),
    Option("alibi_slopes", checks.floats, "add", {"alibi_slopes": ""}, grad="dslopes"),
    Option("segment_ids", checks.pair_of_ids, "see", {"segment_ids_q": "m", "segment_ids_k": "n"}),
    Option("sink", checks.floats, "row", {"sink": ""}, grad="dsink"),
    Option("scale", checks.finite, "scale", grad="dscale"),
    Option("softcap", checks.positive, "cap", number=True),
    Option("score_mod", _formula(ScoreMod), "formula", in_problem=False),
    Option("mask_mod", _formula(MaskMod), "see", in_problem=False),
    Option("dropout", checks.probability, "weight", number=True),
    Option("seed", checks.seed, "weight", in_problem=False),
    Option("enable_gqa", checks.flag, "call"),
)
#: The option and the core axes of every array that an option may hold.
ARRAYS = {name: (option, core) for option in OPTIONS for name, core in option.arrays.items()}
#: Field of Gradients for each input that has a gradient.
FIELDS = {"q": "dq", "k": "dk", "v": "dv"} | {o.name: o.grad for o in OPTIONS if o.grad}
