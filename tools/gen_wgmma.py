"""Which wgmma instructions do the kernels use? Writes kernels_cu/ptx/wgmma_*_a.cuh.

python tools/gen_wgmma.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "kernels_cu" / "ptx"

#: Columns of the result, by where A lies: the block sizes, and the padded head sizes of v, of the
#: rows of cuflash/_select/sm90.py; those of a part of dq, whose operands are read by rows; those of
#: dk where ds comes from shared memory; and those of scores whose keys stay in registers.
SHARED_A = (32, 48, 64, 80, 96, 112, 128)
REGISTER_A = (64, 96, 128, 192, 256)
SHARED_ROWS = (32, 64, 128)
SHARED_B_ROWS = (128, 192, 256)
REGISTER_A_COLUMNS = (64,)
PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}

HEADER = """\
// {title}
//
// Written by tools/gen_wgmma.py: do not edit.
//
// acc (64 x n, float32) = A (64 x 16) . B (16 x n) + acc, or without acc where `accumulate` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "config.cuh"

namespace cuflash::ptx {{

// clang-format off
"""
TITLES = {
    "wgmma_shared_a.cuh": "A and B lie in shared memory, the summed index contiguous in both.",
    "wgmma_register_a.cuh": "A lies in registers, B in shared memory, its columns contiguous.",
    "wgmma_register_a_columns.cuh": "A lies in registers, B^T in shared memory, its columns "
    "contiguous.",
    "wgmma_shared_rows.cuh": "A^T and B lie in shared memory, the columns contiguous in both.",
    "wgmma_shared_b_rows.cuh": "A and B lie in shared memory, of A the summed index contiguous, of "
    "B the columns.",
}

FOOTER = """
// clang-format on

}  // namespace cuflash::ptx
"""


def wrapped(text: str, indent: str, quote: str = "") -> str:
    """Break at spaces to lines of 100 columns, each quoted."""
    width = 98 - len(indent) - 2 * len(quote)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    ends = [" " if quote else ""] * (len(lines) - 1) + [""]
    return "\n".join(
        f"{indent}{quote}{line}{end}{quote}" for line, end in zip(lines, ends, strict=True)
    )


def instruction(
    columns: int, dtype: str, *, a_in_registers: bool, a_by_rows: bool, b_by_rows: bool
) -> str:
    """One asm statement."""
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    if a_in_registers:
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = [f'"r"(a[{i}])' for i in range(4)]
        flags = "1, 1, 1" if b_by_rows else "1, 1, 0"
    else:
        a, inputs = f"%{count}", ['"l"(a)']
        flags = f"1, 1, {int(a_by_rows)}, {int(b_by_rows)}"
    b, predicate = f"%{count + len(inputs)}", f"%{count + len(inputs) + 1}"
    ptx = PTX_TYPES[dtype]
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, {predicate}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx} "
        f"{{{accumulators}}}, {a}, {b}, p, {flags};}}"
    )
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    operands = ", ".join((*inputs, '"l"(b)', '"r"(accumulate)'))
    return (
        "    asm volatile(\n"
        + wrapped(text, "        ", '"')
        + "\n"
        + wrapped(f": {outputs}", "        ")
        + "\n"
        + wrapped(f": {operands});", "        ")
    )


def function(
    columns: int, *, a_in_registers: bool, b_by_rows: bool, a_by_rows: bool = False
) -> str:
    """One overload, for both element types."""
    name = {
        (False, False, False): "wgmma_shared",
        (False, True, True): "wgmma_shared_rows",
        (False, False, True): "wgmma_shared_b_rows",
        (True, False, False): "wgmma_registers_columns",
        (True, False, True): "wgmma_registers",
    }[a_in_registers, a_by_rows, b_by_rows]
    a = "const uint32_t (&a)[4]" if a_in_registers else "uint64_t a"
    pad = " " * len(f"__device__ __forceinline__ void {name}(")
    first, second = (
        instruction(
            columns, dtype, a_in_registers=a_in_registers, a_by_rows=a_by_rows, b_by_rows=b_by_rows
        )
        for dtype in PTX_TYPES
    )
    return (
        "\ntemplate <Dtype dtype>\n"
        f"__device__ __forceinline__ void {name}(float (&acc)[{columns // 2}], {a},\n"
        f"{pad}uint64_t b, int accumulate) {{\n"
        "  if constexpr (dtype == Dtype::float16) {\n"
        f"{first}\n"
        "  } else {\n"
        f"{second}\n"
        "  }\n"
        "}\n"
    )


def generate() -> dict[str, str]:
    """The headers, by name."""
    functions = (
        [function(n, a_in_registers=False, b_by_rows=False) for n in SHARED_A],
        [function(n, a_in_registers=True, b_by_rows=True) for n in REGISTER_A],
        [function(n, a_in_registers=True, b_by_rows=False) for n in REGISTER_A_COLUMNS],
        [function(n, a_in_registers=False, a_by_rows=True, b_by_rows=True) for n in SHARED_ROWS],
        [function(n, a_in_registers=False, b_by_rows=True) for n in SHARED_B_ROWS],
    )
    return {
        name: HEADER.format(title=title) + "".join(texts) + FOOTER
        for (name, title), texts in zip(TITLES.items(), functions, strict=True)
    }


if __name__ == "__main__":
    for name, text in generate().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
