"""What does a kernel receive? NumPy dtypes that mirror ``kernels_cu/params.cuh``.

The size of every struct is asserted when a kernel is compiled, its field offsets in the tests.
Pointers come first in each struct, so that a launch patches one contiguous run of a prepared copy.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash._problem.formulas import MAX_FORMULA_ARRAYS
from cuflash._problem.option_table import ARRAYS, OPTIONS

MAX_BATCH_AXES = 6

_POINTER = np.uint64
MAP_BYTES = 128
MAP_ALIGNMENT = 64  # of a CUtensorMap


def _struct(*parts: tuple[Any, ...] | str) -> np.dtype[Any]:
    return np.dtype(list(parts), align=True)


BATCH_STRIDES = _struct(("axis", np.int64, MAX_BATCH_AXES))
LAYOUT = _struct(("batch", BATCH_STRIDES), ("row", np.int64), ("column", np.int64))
BATCH_AXES = _struct(("num_axes", np.int32), ("extent", np.int32, MAX_BATCH_AXES))
GRID = _struct(
    ("num_blocks", np.int32),
    ("num_owners", np.int32),
    ("owners_per_section", np.int32),
    ("entries_per_owner", np.int32),
)
#: Arrays of score options, in the order of the struct.
SCORE_ARRAYS = tuple(name for o in OPTIONS for name in (*o.arrays, *o.kernel_arrays))
#: The last two are numbers that a launch patches in like addresses.
SCORE_POINTERS = (
    *SCORE_ARRAYS, "cu_seqlens_q", "cu_seqlens_k",
    *(f"formula_array{i}" for i in range(MAX_FORMULA_ARRAYS)), "dropout_seed", "entry_number",
)  # fmt: skip
SCORE = _struct(
    *((name, _POINTER) for name in SCORE_POINTERS),
    *(
        (f"{name}_layout", LAYOUT) if ARRAYS.get(name, ("", ""))[1] == "mn"
        else (f"{name}_strides", BATCH_STRIDES)
        for name in (*SCORE_ARRAYS, "entry_number")
    ),
    ("offset_value", np.int64),
    ("window_left", np.int64),
    ("window_right", np.int64),
    ("diagonal_begin", np.int32),
    ("diagonal_end", np.int32),
    ("seqlen_q", np.int32),
    ("seqlen_k", np.int32),
    ("num_sequences", np.int32),
    ("num_heads", np.int32),
    ("q_length", np.int32),
    ("kv_length", np.int32),
    *((name, dtype) for o in OPTIONS for name, (dtype, *_) in o.params.items()),
)  # fmt: skip


@functools.cache
def with_reals(params: np.dtype[Any], real_bytes: int) -> np.dtype[Any]:
    """``params``, or what they are where scores are of 8 bytes."""
    if real_bytes == 4:
        return params
    return _struct(*((name, _widened(params[name])) for name in params.names or ()))


def _widened(field: np.dtype[Any]) -> np.dtype[Any]:
    if field == SCORE:
        return with_reals(SCORE, 8)
    return np.dtype(np.float64) if field == np.float32 else field


def _kernel(
    pointers: tuple[str, ...], layouts: tuple[str, ...], *rest: tuple[Any, ...]
) -> np.dtype[Any]:
    return _struct(
        *((name, _POINTER) for name in pointers),
        *((("score", SCORE),) if ("head_dim", np.int32) in rest else ()),
        *((f"{name}_layout", LAYOUT) for name in layouts),
        ("batch", BATCH_AXES),
        ("grid", GRID),
        *rest,
    )


FORWARD = _kernel(
    ("q", "k", "v", "out", "lse"),
    ("q", "k", "v", "out", "lse"),
    ("head_dim", np.int32),
    ("head_dim_v", np.int32),
)


DELTA = _kernel(
    ("dout", "out", "lse", "dlse", "rows", "turns"),
    ("dout", "out", "lse", "dlse", "rows"),
    ("seqlen_q", np.int32),
    ("head_dim_v", np.int32),
    ("num_turns", np.int32),
    ("recomputes_far_rows", np.int32),
)
SEGMENT_BOUNDS_POINTERS = ("ids_q", "ids_k", "bounds_q", "bounds_k")
SEGMENT_BOUNDS = _struct(
    *((name, _POINTER) for name in SEGMENT_BOUNDS_POINTERS),
    *((f"{name}_strides", BATCH_STRIDES) for name in SEGMENT_BOUNDS_POINTERS),
    ("batch", BATCH_AXES),
    ("num_ids_q", np.int32),
    ("num_ids_k", np.int32),
)
BACKWARD = _kernel(
    ("dout", "q", "k", "v", "rows", "lse", "dq", "dk", "dv", "sums", "turns"),
    ("dout", "q", "k", "v", "rows", "lse", "dq", "dk", "dv", "sums"),
    ("head_dim", np.int32),
    ("head_dim_v", np.int32),
)


def maps_at(params: np.dtype[Any]) -> int:
    """Where the tensor maps begin that follow the fields of ``params``."""
    return -(-params.itemsize // MAP_ALIGNMENT) * MAP_ALIGNMENT


def _with_maps(params: np.dtype[Any], mapped: tuple[str, ...], *rest: str) -> np.dtype[Any]:
    """``params``, tensor maps, and pointers."""
    first, names = maps_at(params), params.names or ()
    end = first + len(mapped) * MAP_BYTES
    used = end + len(rest) * _POINTER().itemsize
    return np.dtype(
        {
            "names": [*names, *(f"{n}_map" for n in mapped), *rest],
            "formats": [
                *(params[n] for n in names),
                *(f"V{MAP_BYTES}" for _ in mapped),
                *(_POINTER for _ in rest),
            ],
            "offsets": [
                *(params.fields[n][1] for n in names if params.fields),
                *range(first, end, MAP_BYTES),
                *range(end, used, _POINTER().itemsize),
            ],
            "itemsize": -(-used // MAP_ALIGNMENT) * MAP_ALIGNMENT,
        }
    )


#: What the tensor maps describe, in their order: the pointers that a struct starts with.
MAPPED = ("q", "k", "v", "out")
FORWARD_SM90 = _with_maps(FORWARD, MAPPED, "tile_counter")
BACKWARD_MAPPED = ("dout", "q", "k", "v")
BACKWARD_SM90 = _with_maps(BACKWARD, BACKWARD_MAPPED)

#: CUDA name of each parameter struct.
STRUCTS: dict[str, np.dtype[Any]] = {
    "ForwardParams": FORWARD,
    "ForwardSm90Params": FORWARD_SM90,
    "SegmentBoundsParams": SEGMENT_BOUNDS,
    "DeltaParams": DELTA,
    "BackwardParams": BACKWARD,
    "BackwardSm90Params": BACKWARD_SM90,
}


def pointer_names(params: np.dtype[Any]) -> tuple[str, ...]:
    """Names of the pointers that a struct starts with, the pointers of the score included."""
    names: list[str] = []
    for name in params.names or ():
        field = params[name]
        if field == np.dtype(_POINTER):
            names.append(name)
        elif field in (SCORE, with_reals(SCORE, 8)):
            names += SCORE_POINTERS
        else:
            break
    return tuple(names)
