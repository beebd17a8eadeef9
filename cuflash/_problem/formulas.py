"""What does the compiler need of a caller's formulas? Their texts, and their arrays' types."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cuflash._arrays import Array, array_module, refuse_capture, same_module
from cuflash._errors import wrong_value
from cuflash._problem.options import Options

MAX_FORMULA_ARRAYS = 6  # on a GPU
#: CUDA names of element types; arrays of other dtypes are converted to float32.
_TYPES = {
    "bool": "bool", "int8": "signed char", "uint8": "uint8_t", "int16": "short",
    "uint16": "uint16_t", "int32": "int32_t", "uint32": "uint32_t", "int64": "int64_t",
    "uint64": "uint64_t", "float32": "float", "float64": "double",
}  # fmt: skip


class Formulas(NamedTuple):
    """The formulas of a call, as texts that replace the files in ``kernels_cu/formulas``."""

    score_mod: bool
    mask_mod: bool
    texts: tuple[tuple[str, str], ...]  # file and text


def formulas_of(options: Options) -> Formulas | None:
    """The formulas of these options, or None."""
    score, mask = options.score_mod, options.mask_mod
    if score is None and mask is None:
        return None
    types = tuple(
        (name, _TYPES.get(array.dtype.name, "float")) for name, array in _named(options).items()
    )
    return _formulas(
        None if score is None else (score.expression, score.grad),
        None if mask is None else mask.expression,
        types,
    )


def formula_arrays(options: Options, like: Array) -> dict[str, Array]:
    """Arrays of the formulas by kernel parameter, in C order and of a type that CUDA has."""
    found = {}
    for i, (name, array) in enumerate(_named(options).items()):
        same_module(**{"q": like, f"arrays[{name!r}]": array})
        if array.dtype.name not in _TYPES or not array.flags.c_contiguous:
            refuse_capture(f"arrays[{name!r}]", "a contiguous array of a dtype that CUDA has")
            dtype = array.dtype if array.dtype.name in _TYPES else np.float32
            array = array_module(array).ascontiguousarray(array.astype(dtype))
        found[f"formula_array{i}"] = array
    return found


def _named(options: Options) -> dict[str, Array]:
    """The arrays of both formulas by name; each name is the same array in both."""
    named: dict[str, Array] = {}
    for mod in (options.score_mod, options.mask_mod):
        for name, array in () if mod is None else mod.arrays.items():
            if named.setdefault(name, array) is not array:
                raise wrong_value(
                    "mask_mod", f"array {name!r}, which is another one in score_mod",
                    "one array for each name",
                )  # fmt: skip
    if len(named) > MAX_FORMULA_ARRAYS:
        raise wrong_value(
            "score_mod, mask_mod", f"{len(named)} arrays",
            f"at most {MAX_FORMULA_ARRAYS} on a GPU", "concatenate some and index the parts",
        )  # fmt: skip
    return named


@functools.lru_cache(maxsize=1024)
def _formulas(
    score: tuple[str, str] | None, mask: str | None, types: tuple[tuple[str, Any], ...]
) -> Formulas:
    lines = [
        f"const {kind}* const {name} = formula_array<{kind}, {i}>();\n"
        for i, (name, kind) in enumerate(types)
    ]
    texts = {"arrays": "".join(lines)}
    if score is not None:
        texts |= {"score_mod.expression": score[0], "score_mod.grad": score[1]}
    if mask is not None:
        texts["mask_mod.expression"] = mask
    named = tuple((f"formulas/{name}", text) for name, text in texts.items())
    return Formulas(score is not None, mask is not None, named)
