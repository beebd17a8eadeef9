"""Is the source clean, does the wheel work, and has this state of the code run on a GPU?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from gpu_digest import ROOT, sources

WHEEL_LIMIT = 750_000  # bytes


def run(*command: str) -> None:
    """Run a command in the checkout; raise CalledProcessError if it fails."""
    subprocess.run(command, check=True, cwd=ROOT)


def check_lint() -> str:
    """Lint every Python file."""
    run(sys.executable, "-m", "ruff", "check", ".")
    return "clean"


def check_format() -> str:
    """Compare every Python file with its formatted form."""
    run(sys.executable, "-m", "ruff", "format", "--check", ".")
    return "clean"


def check_cuda_format() -> str:
    """Compare every CUDA source with its formatted form."""
    folders = {"kernels_cu": "**/*.cu*", "tests/support": "*.cu", "benchmarks": "**/*.cu"}
    files = [str(path) for folder, name in folders.items() for path in (ROOT / folder).glob(name)]
    program = "import clang_format; clang_format.clang_format()"  # the wheel has no __main__
    run(sys.executable, "-c", program, "--dry-run", "-Werror", *files)
    return "clean"


def check_types() -> str:
    """Run mypy, strictly on the package and loosely on the benchmarks, and pyright on user code."""
    run(sys.executable, "-m", "mypy")
    if importlib.util.find_spec("basedpyright") is None:
        return "clean to mypy (pip install basedpyright: the other type checker)"
    run(sys.executable, "-m", "basedpyright")
    return "clean"


def check_wheel() -> str:
    """Build the wheel, check its size and content, and run it in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("cuflash-*.whl")
        size = wheel.stat().st_size
        if size >= WHEEL_LIMIT:
            raise ValueError(f"the wheel has {size} bytes, and {WHEEL_LIMIT} is the limit")
        with zipfile.ZipFile(wheel) as archive:
            held = {name for name in archive.namelist() if ".dist-info/" not in name}
        expected = expected_in_wheel()
        if held != expected:
            raise ValueError(f"the wheel differs from the checkout in {sorted(held ^ expected)}")
        clean = Path(folder) / "clean"
        run(sys.executable, "-m", "venv", str(clean))
        python = str(clean / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
        run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", str(wheel))
        run(python, "-I", "tools/try_installed.py")  # -I: neither the checkout nor PYTHONPATH
    return f"{size / 1000:.0f} kB; imported and run in a clean environment"


def expected_in_wheel() -> set[str]:
    """Return the paths in the wheel of every source file of the checkout."""
    names = set()
    for folder, prefix in (("cuflash", "cuflash"), ("kernels_cu", "cuflash/kernels_cu")):
        for path in (ROOT / folder).rglob("*"):
            left_out = "__pycache__" in path.parts or path.suffix == ".md"
            if path.is_file() and not left_out:
                names.add(f"{prefix}/{path.relative_to(ROOT / folder).as_posix()}")
    return names


def check_gpu_report() -> str:
    """Compare the digests in the committed GPU test report with the sources; only warns."""
    path = ROOT / "tests" / "gpu_report.json"
    if not path.exists():
        return "WARNING: there is no tests/gpu_report.json"
    report = json.loads(path.read_text())
    keys = ("passed", "failed", "skipped", "not run")
    counts = ", ".join(f"{report.get(key)} {key}" for key in keys)
    summary = f"{counts} on {report.get('device')}"
    stale = [name for name, found in sources().items() if report.get(name) != found]
    if stale:
        return f"WARNING: stale, {' and '.join(stale)} differ ({summary})"
    return f"matches the sources ({summary})"


CHECKS = {
    "lint": check_lint,
    "format": check_format,
    "CUDA format": check_cuda_format,
    "types": check_types,
    "wheel": check_wheel,
    "GPU report": check_gpu_report,
}


def main() -> int:
    """Run every check, even after a failure, and print one line for each."""
    results = {}
    failed = False
    for name, check in CHECKS.items():
        start = time.perf_counter()
        try:
            verdict = check()
        except (subprocess.CalledProcessError, ValueError) as error:
            failed = True
            verdict = f"FAILED: {error}"[:300]
        results[name] = f"{verdict} [{time.perf_counter() - start:.0f} s]"
    print("\n".join(f"check: {name}: {verdict}" for name, verdict in results.items()), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
