"""All of it: checks of every variant and the GPU tests side by side, then timings alone.

python trials/fp8/job.py OUT
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from variants import ROOT, VARIANTS

HERE = Path(__file__).parent
OUT = Path(sys.argv[1])
START = time.time()


def run(name: str, *command: str, limit: float = 100.0) -> None:
    """Run with its output in a file of its own."""
    began = time.time()
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with (OUT / f"{name}.log").open("w") as file:
        try:
            done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, stdout=file,
                                  stderr=subprocess.STDOUT, timeout=limit, check=False)  # fmt: skip
            said = f"exit {done.returncode}"
        except subprocess.TimeoutExpired:
            said = "stopped"
    print(f"{began - START:5.0f} to {time.time() - START:5.0f} s  {name}: {said}", flush=True)


def main() -> None:
    """Precision first."""
    OUT.mkdir(parents=True, exist_ok=True)
    check, timing = str(HERE / "check.py"), str(HERE / "time.py")
    tests = ("tests/test_quantize.py", "tests/test_float8.py")
    jobs = [("pytest", "-m", "pytest", "-m", "gpu", "-q", "-n", "8", "-p", "no:benchmark", *tests)]
    jobs += [
        (f"check {d} {name}".replace(" ", "_").replace(",", ""), check, "--head-dim", str(d),
         "--only", name)
        for d in (64, 128) for name in VARIANTS[d] if "one sum" not in name
    ]  # fmt: skip
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: run(*job, limit=70.0), jobs))
    cells = [("--head-dim", str(d), "--seqlen", str(n)) for d in (64, 128) for n in (512, 2048, 8192)]
    options = [("--options", "--head-dim", "128", "--seqlen", "8192")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: run(f"warm_{i}", timing, "--warm", *(cells + options)[i]),
                      range(7)))  # fmt: skip
    for d in (128, 64):
        run(f"time_{d}", timing, "--head-dim", str(d), "--json", str(OUT / f"time_{d}.json"))
    run("options_128", timing, "--options", "--head-dim", "128", "--seqlen", "8192")


if __name__ == "__main__":
    main()
