"""Which kernels do the drawn calls of all properties share on a GPU?

Another dtype, an array in place of a number, or another dtype of that array needs another kernel,
which takes seconds to compile. So calls for a GPU are of few kinds. Every dtype meets every set of
options, with one choice of all else. Shapes, values and placements are drawn as on the host.
`test_covering.py` is where three choices meet.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuflash import testing
from cuflash.testing._strategies import ALL_OPTIONS, DTYPES

CallT = TypeVar("CallT", bound=testing.Call)
#: Mixed dtypes of q, k and v: the narrowest is drawn, and widened.
_MIXED = (
    ("float16", "float32", "float16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float64", "float32", "float32"),
    ("float16", "float16", "float64"),
)
_INTEGERS = ("offset", "q_lengths", "kv_lengths")
_FLOATS = ("bias", "alibi_slopes", "sink")


class Kind(NamedTuple):
    """What changes machine code in a call, and is chosen before the call is drawn."""

    dtypes: tuple[str, str, str]  # of q, k and v
    options: frozenset[str]
    head_dim: int
    aligned: bool
    integers: str  # dtype of lengths, offsets and segments; "" for numbers on the host
    own_floats: bool  # do bias, slopes and sink have the dtype of the result?
    window: tuple[bool, bool]  # does it have a left side, and a right one?

    @property
    def drawn(self) -> dict[str, Any]:
        """Return arguments of ``cuflash.testing.calls``, whose arrays are then widened."""
        narrowest = min(self.dtypes, key=lambda name: DTYPES[name].itemsize)
        return {
            "dtypes": (narrowest,), "mixed_dtypes": False, "head_dims": (self.head_dim,),
            "option_sets": (self.options,),
        }  # fmt: skip

    def of(self, call: CallT) -> CallT:
        """Return a drawn call as one of this kind."""
        arrays = (a.astype(DTYPES[name]) for a, name in zip(call.qkv, self.dtypes, strict=True))
        wide = call.but(**dict(zip("qkv", arrays, strict=True)))
        dlse = None if call.dlse is None else call.dlse.astype(wide.lse_dtype)
        options = {name: self._option(wide, name, own) for name, own in call.options.items()}
        return replace(wide, dout=call.dout.astype(wide.dtype), dlse=dlse, options=options)

    def _option(self, call: testing.Call, name: str, value: Any) -> Any:
        if name in _FLOATS:
            return value.astype(call.dtype if self.own_floats else np.float32)
        if name == "segment_ids":
            return tuple(ids.astype(self.integers or np.int32) for ids in value)
        if name == "window":
            return tuple(
                (16 if side is None else side) if there else None
                for side, there in zip(value, self.window, strict=True)
            )
        if name in _INTEGERS:
            array = np.asarray(value, self.integers or np.int64)
            return array if self.integers else int(array.flat[0]) if array.size else 0
        return value


def kinds(
    dtypes: Sequence[str],
    option_sets: Sequence[Collection[str]],
    head_dims: Sequence[int],
    options: Collection[str] = ALL_OPTIONS,
) -> tuple[Kind, ...]:
    """Return every dtype with every set of options that may be set, and mixed dtypes.

    All else follows from these two, so that two properties share the kernels of a set.
    """
    own = [frozenset(names) & frozenset(options) for names in option_sets]
    pairs = [((dtype,) * 3, names) for dtype in dtypes for names in dict.fromkeys(own)]
    pairs += zip(_MIXED, own, strict=False)
    return tuple(_kind(*pair, head_dims) for pair in pairs)


def _kind(dtypes: tuple[str, str, str], options: frozenset[str], head_dims: Sequence[int]) -> Kind:
    rng = random.Random(f"{dtypes} {sorted(options)}")
    return Kind(
        dtypes,
        options,
        head_dim=rng.choice(head_dims),
        aligned=rng.choice((True, False)),
        integers=rng.choice(("int32", "int64", "")),
        own_floats=rng.choice((True, False)),
        window=rng.choice(((True, True), (True, False), (False, True))),
    )
