"""Does the package work in an environment that has only the package and its dependencies?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import cuflash
from cuflash._jit import source


def main() -> int:
    """Check the kernel sources in the package, a NumPy call, show_config and the commands."""
    if "cupy" in sys.modules:
        return fail("importing cuflash imported CuPy")
    package = Path(cuflash.__file__).parent
    kernels = source.kernels_dir()
    if kernels.parent != package or not (kernels / "config.cuh").is_file():
        return fail(f"the kernel sources are not inside {package} but in {kernels}")
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, 5, 8), dtype=np.float32)
    out = cuflash.attention(q, k, v, causal=True)
    error = np.abs(out - cuflash.reference.attention(q, k, v, causal=True)).max()
    if not error < 1e-5:
        return fail(f"attention is off by {error}")
    cuflash.show_config()
    said = subprocess.run(
        [sys.executable, "-I", "-m", "cuflash", "bench", "--set", "cpu"],
        capture_output=True, text=True,
    )  # fmt: skip
    if said.returncode != 1 or "in a checkout" not in said.stderr or said.stderr.count("\n") != 1:
        return fail(f"bench says {said.stderr!r}, expected where the benchmarks are, in one line")
    script = Path(sys.executable).with_name("cuflash")
    said = subprocess.run([script, "--version"], capture_output=True, text=True)
    if said.stdout != f"cuflash {cuflash.__version__}\n":
        return fail(f"the command cuflash says {said.stdout!r} and {said.stderr!r}")
    return 0


def fail(reason: str) -> int:
    """Print the reason and return the exit status."""
    print(f"the installed package: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
