"""Sweep on the simulated device, in a process that a test can interrupt.

python simulated_sweep.py FILE [BUDGET]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cuflash import tuning

DEVICE = (sys.executable, str(Path(__file__).with_name("simulated_device.py")))
WORK = tuning.Workload(2, 8, 8, 1024, 1024, 128, 128, "bfloat16")


def space_of(**parameters: tuple[int, ...]) -> tuning.Space:
    """Return a small space of Hopper's forward."""
    tried = {"block_m": (128,), "num_q_stages": (1,), "overlap_quarters": (0,), **parameters}
    return simulated(tuning.space(WORK, "forward_sm90", arch="sm_90a", parameters=tried))


def simulated(found: tuning.Space) -> tuning.Space:
    """Return a space for the simulated device; facts are made up, nothing is compiled."""
    name = os.environ.get("SIMULATED_NAME", "simulated")
    found.hardware = found.hardware._replace(name=name)
    found.compile = lambda chosen=None, **_: found.facts.update(  # type: ignore[method-assign]
        {c.key: tuning.Facts(c.config.smem_bytes, registers=168) for c in chosen or found}
    )
    return found


def main() -> None:
    budget = int(sys.argv[2]) if len(sys.argv) > 2 else None
    found = tuning.sweep(
        WORK, space_of(), file=sys.argv[1], budget=budget, device_command=DEVICE,
        progress=lambda now: print(now.stage, now.done, flush=True),
    )  # fmt: skip
    print("best", found.best["key"], flush=True)


if __name__ == "__main__":
    main()
