"""What does a kernel receive? NumPy dtypes that mirror ``kernels_cu/params.cuh``.

The size of every struct is asserted when a kernel is compiled, its field offsets in the tests.
Pointers come first in each struct: a launch puts addresses before bytes that are prepared once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cuflash._problem.formulas import MAX_FORMULA_ARRAYS
from cuflash._problem.option_table import ARRAYS, OPTIONS

MAX_BATCH_AXES = 6

_POINTER = np.uint64
MAP_BYTES = 128  # size of a CUtensorMap
MAP_ALIGNMENT = 64  # its alignment in bytes


def _struct(*parts: tuple[Any, ...] | str) -> np.dtype[Any]:
    return np.dtype(list(parts), align=True)


def _numbers(*names: str, of: type = np.int32) -> list[tuple[str, type]]:
    return [(name, of) for name in names]


BATCH_STRIDES = _struct(("axis", np.int64, MAX_BATCH_AXES))
LAYOUT = _struct(("batch", BATCH_STRIDES), ("row", np.int64), ("column", np.int64))
BATCH_AXES = _struct(("num_axes", np.int32), ("extent", np.int32, MAX_BATCH_AXES))
GRID = _struct(*_numbers("num_blocks", "num_owners", "owners_per_section", "entries_per_owner"))
#: Arrays of score options, in the order of the struct.
SCORE_ARRAYS = tuple(name for o in OPTIONS for name in (*o.arrays, *o.kernel_arrays))
#: Pointers that ``SCORE`` begins with. The last two are numbers, passed like addresses.
SCORE_POINTERS = (
    *SCORE_ARRAYS, "cu_seqlens_q", "cu_seqlens_k",
    *(f"formula_array{i}" for i in range(MAX_FORMULA_ARRAYS)), "dropout_seed", "entry_number",
)  # fmt: skip
SCORE = _struct(
    *_numbers(*SCORE_POINTERS, of=_POINTER),
    *(
        (f"{name}_layout", LAYOUT) if ARRAYS.get(name, ("", ""))[1] == "mn"
        else (f"{name}_strides", BATCH_STRIDES)
        for name in (*SCORE_ARRAYS, "entry_number")
    ),
    *_numbers("offset_value", "window_left", "window_right", of=np.int64),
    *_numbers(
        "diagonal_begin", "diagonal_end", "seqlen_q", "seqlen_k", "num_sequences", "num_heads",
        "q_length", "kv_length", "first_query", "first_key",
        "num_queries",
    ),
    *((name, dtype) for o in OPTIONS for name, (dtype, *_) in o.params.items()),
)  # fmt: skip


@functools.cache
def with_reals(params: np.dtype[Any], real_bytes: int) -> np.dtype[Any]:
    """``params`` with numbers of type ``Real`` that have ``real_bytes`` bytes: 4 or 8."""
    if real_bytes == 4:
        return params
    return _struct(*((name, _widened(params[name])) for name in params.names or ()))


def _widened(field: np.dtype[Any]) -> np.dtype[Any]:
    if field == SCORE:
        return with_reals(SCORE, 8)
    return np.dtype(np.float64) if field == np.float32 else field


def _kernel(
    arrays: tuple[str, ...], *numbers: str, turns: bool = False, strides: tuple[str, ...] = ()
) -> np.dtype[Any]:
    return _struct(
        *_numbers(*arrays, *(("turns",) if turns else ()), of=_POINTER),
        *((("score", SCORE),) if "head_dim" in numbers else ()),
        *((f"{name}_layout", LAYOUT) for name in arrays),
        ("batch", BATCH_AXES),
        ("grid", GRID),
        *_numbers(*numbers),
        *_numbers(*strides, of=np.int64),
    )


FORWARD = _kernel(
    ("q", "k", "v", "out", "lse", "page_table", "so_far"),
    "head_dim", "head_dim_v", "num_splits", "part_keys", "page_size", "num_pages",
    strides=("k_page", "v_page"),
)  # fmt: skip
COMBINE = _kernel(("out_parts", "lse_parts", "out", "lse"), "head_dim_v", "num_splits", "num_rows")
DELTA = _kernel(
    ("dout", "out", "lse", "dlse", "rows"),
    "seqlen_q", "head_dim_v", "num_turns", "recomputes_far_rows", turns=True,
)  # fmt: skip
SEGMENT_BOUNDS_POINTERS = ("ids_q", "ids_k", "bounds_q", "bounds_k")
SEGMENT_BOUNDS = _struct(
    *_numbers(*SEGMENT_BOUNDS_POINTERS, of=_POINTER),
    *((f"{name}_strides", BATCH_STRIDES) for name in SEGMENT_BOUNDS_POINTERS),
    ("batch", BATCH_AXES),
    *_numbers("num_ids_q", "num_ids_k"),
)
CACHE_GROW = _struct(
    *_numbers(
        "page_table", "lengths", "dropped", "counts", "starts", "sources", "taken", of=_POINTER
    ),
    *_numbers(
        "num_sequences", "num_columns", "page_size", "num_pages", "max_length", "num_tokens"
    ),
)  # fmt: skip
CACHE_WRITE = _struct(
    *_numbers(
        "k", "v", "k_pages", "v_pages", "frequencies", "page_table", "starts", "lengths",
        "sources", "k_scales", "v_scales", of=_POINTER,
    ),
    ("k_layout", LAYOUT),
    ("v_layout", LAYOUT),
    *_numbers(
        "num_heads", "num_columns", "page_size", "num_tokens", "head_dim", "head_dim_v",
        "num_pairs",
    ),
    *_numbers("k_scale", "v_scale", of=np.float32),
)  # fmt: skip
CACHE_TAKE = _struct(
    *_numbers(
        "page_table", "lengths", "old_table", "old_lengths", "parents", "kept", of=_POINTER
    ),
    *_numbers("num_sequences", "num_columns"),
)  # fmt: skip
ROTARY = _struct(
    *_numbers("x", "out", "positions", "frequencies", of=_POINTER),
    *((f"{name}_layout", LAYOUT) for name in ("x", "out", "positions")),
    ("batch", BATCH_AXES),
    ("grid", GRID),
    ("position", np.int64),
    *_numbers("num_rows", "head_dim", "num_pairs", "sign"),
)
QUANTIZE = _struct(
    *_numbers("x", "largest", "scale", "out", of=_POINTER),
    ("signs", np.uint32, 8),
    *_numbers("rows", "rows_of_block", "blocks"),
)
BACKWARD = _kernel(
    ("dout", "q", "k", "v", "rows", "lse", "dq", "dk", "dv", "dbias", "sums"),
    "head_dim", "head_dim_v", "dq_sums", "row_parts", "part_blocks", "num_parts", turns=True,
)  # fmt: skip


def maps_at(params: np.dtype[Any]) -> int:
    """Byte offset of the tensor maps, which follow the fields of ``params``."""
    return -(-params.itemsize // MAP_ALIGNMENT) * MAP_ALIGNMENT


def _with_maps(params: np.dtype[Any], mapped: tuple[str, ...], *rest: str) -> np.dtype[Any]:
    """``params``, followed by tensor maps of ``mapped`` and by pointers."""
    names, first = params.names or (), maps_at(params)
    formats = [params[n] for n in names]
    offsets = [params.fields[n][1] for n in names if params.fields]
    end = first + len(mapped) * MAP_BYTES
    used = end + len(rest) * _POINTER().itemsize
    return np.dtype(
        {
            "names": [*names, *(f"{name}_map" for name in mapped), *rest],
            "formats": [*formats, *[f"V{MAP_BYTES}"] * len(mapped), *[_POINTER] * len(rest)],
            "offsets": [
                *offsets, *range(first, end, MAP_BYTES), *range(end, used, _POINTER().itemsize)
            ],
            "itemsize": -(-used // MAP_ALIGNMENT) * MAP_ALIGNMENT,
        }
    )  # fmt: skip


#: Operands with a tensor map, in order: the first pointers of the struct.
MAPPED = ("q", "k", "v", "out")
FORWARD_SM90 = _with_maps(FORWARD, MAPPED, "tile_counter")
BACKWARD_MAPPED = ("dout", "q", "k", "v")
BACKWARD_SM90 = _with_maps(BACKWARD, BACKWARD_MAPPED)
BACKWARD_ONE_PASS = _with_maps(BACKWARD, (*BACKWARD_MAPPED, "dq"))

#: CUDA name of each parameter struct.
STRUCTS: dict[str, np.dtype[Any]] = {
    "ForwardParams": FORWARD,
    "ForwardSm90Params": FORWARD_SM90,
    "CombineParams": COMBINE,
    "CacheGrowParams": CACHE_GROW,
    "CacheWriteParams": CACHE_WRITE,
    "CacheTakeParams": CACHE_TAKE,
    "RotaryParams": ROTARY,
    "SegmentBoundsParams": SEGMENT_BOUNDS,
    "QuantizeParams": QUANTIZE,
    "DeltaParams": DELTA,
    "BackwardParams": BACKWARD,
    "BackwardSm90Params": BACKWARD_SM90,
    "BackwardOnePassParams": BACKWARD_ONE_PASS,
}


def pointer_names(params: np.dtype[Any]) -> tuple[str, ...]:
    """Names of the pointers that a struct begins with, including those of ``SCORE``."""
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
