"""Which wgmma instructions do the kernels use? Writes two headers of kernels_cu/ptx/.

wgmma_ss.cuh and wgmma_rs.cuh, named after where operand A lies.

python tools/gen_wgmma.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "kernels_cu" / "ptx"

#: Columns of scores: the block sizes of the rows of cuflash/_kernels/*_sm90.py.
SCORES = (32, 48, 64, 80, 96, 112, 128)
#: Columns of a result where A lies in shared memory: scores, and dk and dq.
SHARED = (*SCORES, 192, 256)
#: Columns of a result where A lies in registers: scores of keys that stay there, and out, dk, dv
#: and dq (the padded head sizes).
REGISTERS = (64, 96, 128, 192, 256)

HEADER = """\
// {title}
//
// Written by tools/gen_wgmma.py: do not edit.
//
// acc (64 x n, float32) = A (64 x 16) . B (16 x n) + acc, or without acc where `accumulate` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "ptx/wgmma.cuh"

namespace cuflash::ptx {{

// clang-format off
"""

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


def function(columns: int, *, a_in_registers: bool) -> str:
    """One overload: one instruction of any 16-bit element type and of any layout."""
    count = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    if a_in_registers:
        name, majors, parameter = "wgmma_rs", ["b_major"], "const uint32_t (&a)[4]"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs = [f'"r"(a[{i}])' for i in range(4)]
    else:
        name, majors, parameter = "wgmma_ss", ["a_major", "b_major"], "uint64_t a"
        a, inputs = f"%{count}", ['"l"(a)']
    b, predicate, *transposed = (f"%{count + len(inputs) + i}" for i in range(2 + len(majors)))
    shape = (
        f"{{.reg .pred p; setp.ne.b32 p, {predicate}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32."
    )
    text = f"{{{accumulators}}}, {a}, {b}, p, {', '.join(('1', '1', *transposed))};}}"
    outputs = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    flags = (f'"n"(static_cast<int>({major}))' for major in majors)
    operands = ", ".join((*inputs, '"l"(b)', '"r"(accumulate)', *flags))
    start = f"__device__ __forceinline__ void {name}("
    template = ", ".join(f"Major {major}" for major in majors)
    return "\n".join(
        (
            "",
            f"template <{template}>",
            f"{start}float (&acc)[{count}], {parameter},",
            f"{' ' * len(start)}uint64_t b, int accumulate) {{",
            "  asm volatile(",
            wrapped(shape, "      ", '"'),
            '      CUFLASH_PTX_DTYPE "." CUFLASH_PTX_DTYPE " "',
            wrapped(text, "      ", '"'),
            wrapped(f": {outputs}", "      "),
            wrapped(f": {operands});", "      "),
            "}",
            "",
        )
    )


def generate() -> dict[str, str]:
    """The headers, by name."""
    headers = (
        ("wgmma_ss.cuh", "A and B lie in shared memory.", SHARED, False),
        ("wgmma_rs.cuh", "A lies in registers, B in shared memory.", REGISTERS, True),
    )
    return {
        name: HEADER.format(title=title)
        + "".join(function(n, a_in_registers=a_in_registers) for n in columns)
        + FOOTER
        for name, title, columns, a_in_registers in headers
    }


if __name__ == "__main__":
    for name, text in generate().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
