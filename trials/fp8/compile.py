"""Do the variants compile cleanly? Needs NVRTC, no GPU.

    python trials/fp8/compile.py [--head-dim 128] [--only NAME] [--generation 12]

One line a variant and generation of NVRTC: registers, spilled bytes, shared memory, warnings.
"""

from __future__ import annotations

import argparse

from variants import CAUSAL, VARIANTS, config_of

from cuflash._jit.compilation import compile_static
from support.nvrtc import compiler_of

LIMIT = 227 << 10


def main() -> int:
    """Compile, print."""
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--head-dim", type=int, choices=VARIANTS, action="append")
    p.add_argument("--only")
    p.add_argument("--generation", type=int, choices=(12, 13), action="append")
    p.add_argument("--full", action="store_true", help="no causal")
    arguments = p.parse_args()
    bad = 0
    for head_dim in arguments.head_dim or VARIANTS:
        for name, changes in VARIANTS[head_dim].items():
            if arguments.only not in (None, name):
                continue
            for causal in CAUSAL[: 1 if arguments.full else 2]:
                config = config_of(head_dim, causal=causal, **changes)
                for generation in arguments.generation or (12, 13):
                    report = compile_static(config, "sm_90a", compiler_of(generation))
                    clean = not (report.spill_bytes or report.warnings)
                    clean &= config.smem_bytes <= LIMIT
                    bad += not clean
                    print(
                        f"{head_dim} {name:28} {'causal' if causal else 'full  '} nvrtc{generation}"
                        f" {report.registers:4} registers {report.spill_bytes:5} spilled"
                        f" {config.smem_bytes >> 10:4} KiB {'' if clean else 'NOT CLEAN'}"
                        f" {len(report.warnings)} warnings",
                        flush=True,
                    )
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
