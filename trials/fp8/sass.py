"""How many instructions of each kind does a variant's loop have? Needs NVRTC and nvdisasm.

    python trials/fp8/sass.py --nvdisasm PATH --head-dim 128 [--only NAME]

Counts are of the shortest loop with products: that over full blocks of keys, of one warp.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from variants import VARIANTS, config_of

from cuflash._jit.compilation import compile_static
from support.nvrtc import compiler_of

KINDS = ("FMNMX", "MUFU", "FFMA", "FADD", "FMUL", "F2FP", "PRMT", "QGMMA", "SHFL", "WARPSYNC",
         "SYNCS", "BAR", "MOV", "R2UR", "VOTE")  # fmt: skip


def loops(text: str) -> list[list[str]]:
    """Instructions between a label and a later branch back to it."""
    places: dict[str, int] = {}
    lines: list[str] = []
    found = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            places[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
            target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in places:
                found.append(lines[places[target[1]] :])
    return found


def main() -> int:
    """Compile, disassemble, count."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--nvdisasm", required=True)
    p.add_argument("--head-dim", type=int, choices=VARIANTS, required=True)
    p.add_argument("--only")
    arguments = p.parse_args()
    for name, changes in VARIANTS[arguments.head_dim].items():
        if arguments.only not in (None, name):
            continue
        config = config_of(arguments.head_dim, causal=False, **changes)
        cubin = compile_static(config, "sm_90a", compiler_of(12)).cubin
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            command = [arguments.nvdisasm, "-c", file.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        own = [loop for loop in loops(text) if any("QGMMA" in line for line in loop)]
        loop = min(own, key=len)
        counts = Counter(
            next((kind for kind in KINDS if re.search(rf"\b{kind}\b", line)), "other")
            for line in loop
        )
        shown = " ".join(f"{kind} {counts[kind]}" for kind in (*KINDS, "other") if counts[kind])
        print(f"{arguments.head_dim} {name:28} {len(loop):5} instructions: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
