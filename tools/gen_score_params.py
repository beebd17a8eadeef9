"""Write `struct ScoreParams` in kernels_cu/params.cuh: the kernel parameters of score options.

The struct is generated from cuflash/_problem/option_table.py.

python tools/gen_score_params.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cuflash._kernels import params  # noqa: E402
from cuflash._problem.option_table import ARRAYS, OPTIONS  # noqa: E402

FILE = ROOT / "kernels_cu" / "params.cuh"
BEGIN = "// Written by tools/gen_score_params.py: do not edit."
END = "// End of what tools/gen_score_params.py writes."
TYPES = {
    np.dtype(np.int32): "int32_t", np.dtype(np.int64): "int64_t", np.dtype(np.uint32): "uint32_t",
    np.dtype(np.float32): "Real", params.LAYOUT: "Layout", params.BATCH_STRIDES: "BatchStrides",
}  # fmt: skip
COMMENTS = {
    "segment_bounds_q": "(ceil(m / bounded_ids)) IdBounds, contiguous",
    "segment_bounds_k": "(ceil(n / bounded_ids)) IdBounds, contiguous",
    "cu_seqlens_q": "(sequences + 1), contiguous: where packed sequences begin and end",
    "cu_seqlens_k": "(sequences + 1), contiguous",
    "formula_array0": "arrays of the caller's formulas, contiguous",
    "dropout_seed": "a number, patched at each launch as the addresses are",
    "entry_number": "number of the first batch entry, patched like the seed",
    "offset_value": "used where Config::offset is `value`",
    "window_left": "used where Config::window_left; below 2^60",
    "diagonal_begin": "first diagonal in the window, used where Config::offset is `value`",
    "seqlen_q": "extents of the arrays; rows of all sequences if they are packed",
    "q_length": "used where no array of lengths is passed",
    "num_queries": "queries of a head, used where Config::heads_in_rows",
    "first_query": "position of the first query in the whole call, for dropout and formulas",
    **{name: text for o in OPTIONS for name, (_, _, text) in o.params.items()},
    **{name: f"({', '.join(core)})" for name, (_, core) in ARRAYS.items()},
}


def generate() -> str:
    """Return the text of params.cuh with the struct generated anew."""
    before, rest = FILE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{''.join(lines())}{END}{rest.split(END)[1]}"


def lines() -> Iterator[str]:
    """Yield the lines of the struct."""
    yield "// clang-format off\n"
    yield "struct ScoreParams {\n"
    for name in params.SCORE.names or ():
        comment = COMMENTS.get(name, "")
        yield f"  {_type(name)} {name};{'  // ' * bool(comment)}{comment}\n"
    yield "};\n"
    yield "// clang-format on\n"


def _type(name: str) -> str:
    if name in ("dropout_seed", "entry_number"):
        return "uint64_t"
    if name in params.SCORE_POINTERS:
        holds_bools = name in ARRAYS and ARRAYS[name][0].compiled == "flag"
        return "const uint8_t*" if holds_bools else "const void*"
    return TYPES[params.SCORE[name]]


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
