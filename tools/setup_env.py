"""Find or prepare an interpreter for the tests, the demo, the checks or the docs, and run them.

    python tools/setup_env.py {demo,test,check,docs} [arguments for the program]

An interpreter that has everything that the task needs is used as it is. Otherwise `.venv` is
created, and pip installs the extras for the task and the NVIDIA driver; a stamp file lets the next
run start at once. Only the standard library is used, because this runs before anything is
installed. uv is not used because it ignores pip's configuration (indexes, constraints), nor nox,
which must itself be installed first and chooses neither extras nor an interpreter.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A second NVRTC for the tests, of the CUDA version that CuPy does not use. It has its own folder
# because CuPy for CUDA 12 loads NVRTC 13 if both are in one environment.
NVRTC_FOLDER = ROOT / ".nvrtc"
NVRTC_13 = "nvidia-cuda-nvrtc>=13,<14"
OLDEST_PYTHON = (3, 11)
OLDEST_CUDA = 12
NEWEST_CUDA = 13  # newer drivers run programs built for CUDA 13
CUDA_EXTRAS = ("cuda", "compile")  # prefixes of the extras' names; the CUDA version follows


@dataclass(frozen=True)
class Task:
    """A program, the extras that it needs, and whether it runs or compiles kernels."""

    extras: tuple[str, ...]
    command: tuple[str, ...]
    uses_gpu: bool = False
    compiles_kernels: bool = False


TASKS = {
    "demo": Task(extras=("demo",), command=("examples/atom_mapping.py",), uses_gpu=True),
    "test": Task(
        extras=("test", "demo", "examples", "tune"),
        command=("-m", "pytest"),
        uses_gpu=True,
        compiles_kernels=True,
    ),
    "check": Task(extras=("dev", "testing"), command=("tools/check.py",)),
    "docs": Task(extras=("docs", "examples", "testing"), command=("tools/build_docs.py",)),
}

# Distributions that a task can do without, and what is then skipped.
OPTIONAL = {
    "rdkit": "reactions other than the demo's own two (pip install rdkit)",
    "tqdm": "progress bars (pip install tqdm)",
    "scikit-learn": "the examples' digits and photographs (pip install scikit-learn)",
    "matplotlib": "the examples' pictures (pip install matplotlib)",
    "scipy": "comparisons with SciPy in the docs (pip install scipy)",
    "kernel-tuner": "searches of kernel-tuner, and its files (pip install kernel-tuner)",
    "basedpyright": "a second type checker of a user's code (pip install basedpyright)",
    "pytest-xdist": "tests on every core; they run on one (pip install pytest-xdist)",
    "onnx": "ONNX's own cases of its operator Attention (pip install onnx==1.22.0)",
}


class SetupError(Exception):
    """Set-up failed; the text says what the user can do."""


def say(text: str) -> None:
    """Print one line, marked as not part of the program's own output."""
    print(f"cuflash: {text}", flush=True)


def find_cuda() -> int | str:
    """Return the CUDA version that the NVIDIA driver supports, or why no driver can be used."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "no NVIDIA driver was found"
    if status := driver.cuInit(0):
        return f"the NVIDIA driver found no device that it can use (cuInit returned {status})"
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    major = version.value // 1000  # 12040 is CUDA 12.4
    if major < OLDEST_CUDA:
        return f"the NVIDIA driver serves CUDA {major}, and {OLDEST_CUDA} is needed"
    return major


def wanted_extras(task: Task, cuda: int | str, platform: str = sys.platform) -> tuple[str, ...]:
    """Name the extras that the task needs on this machine."""
    if task.uses_gpu and isinstance(cuda, int):
        return (*task.extras, f"cuda{min(cuda, NEWEST_CUDA)}")
    if task.compiles_kernels and platform != "darwin":
        return (*task.extras, "compile12")
    return task.extras


def missing(extras: tuple[str, ...], pyproject: Path) -> list[str]:
    """Name the distributions, and the CUDA extras as a whole, that this interpreter lacks."""
    import tomllib  # new in Python 3.11

    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ImportError:
            return ["pip"]
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines, absent = list(project["dependencies"]), []
    for extra in extras:
        own = project["optional-dependencies"][extra]
        if not extra.startswith(CUDA_EXTRAS):
            lines += own
        elif not cupy_works(Requirement(own[0]), needs_device=extra.startswith("cuda")):
            absent.append(extra)
    return [line.name for line in map(Requirement, lines) if not satisfied(line)] + absent


def satisfied(requirement: Any) -> bool:
    """Whether a suitable version of a distribution is installed, or none is needed here."""
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        installed = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return bool(requirement.specifier.contains(installed, prereleases=True))


def cupy_works(requirement: Any, *, needs_device: bool) -> bool:
    """Whether a suitable version of CuPy finds NVRTC and, with ``needs_device``, a device.

    CuPy is tried out rather than looked up by its distribution's name, because it may come from
    conda or use a CUDA toolkit of the system.
    """
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
        devices = cupy.cuda.runtime.getDeviceCount() if needs_device else 0
    except (ImportError, RuntimeError, OSError):
        return False
    return requirement.specifier.contains(cupy.__version__) and devices >= needs_device


def pip_install(python: str, *arguments: str) -> bool:
    """Run pip install with these arguments; return whether it succeeded."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    return subprocess.run([*pip, *arguments]).returncode == 0


def prepare_venv(extras: tuple[str, ...], root: Path) -> str:
    """Install the project with these extras into `.venv` and return its interpreter."""
    folder, pyproject = root / ".venv", root / "pyproject.toml"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "cuflash-extras.json"
    digest = hashlib.sha256(pyproject.read_bytes()).hexdigest()
    try:
        written = json.loads(stamp.read_text())
        held, fresh = set(written["extras"]), written["digest"] == digest
    except (OSError, ValueError, LookupError, TypeError):
        held, fresh = set(), False
    if fresh and held >= set(extras) and python.exists():
        return str(python)
    wanted = held | set(extras)
    rebuild = len({extra[-2:] for extra in wanted if extra.startswith(CUDA_EXTRAS)}) > 1
    names = sorted(extras if rebuild else wanted)
    if rebuild or not python.exists():
        say(f"creating .venv with Python {sys.version.split()[0]}")
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)]).returncode:
            apt = "Debian and Ubuntu: apt install python3-venv"
            raise SetupError(f"{sys.executable} -m venv failed ({apt})")
    stamp.unlink(missing_ok=True)
    say(f"installing {', '.join(names)} into .venv, once")
    if not pip_install(str(python), "--editable", f"{root}[{','.join(names)}]"):
        raise SetupError(f"pip could not install {', '.join(names)} (its message is above)")
    stamp.write_text(json.dumps({"digest": digest, "extras": names}))
    return str(python)


def choose_interpreter(extras: tuple[str, ...], root: Path) -> str:
    """Return this interpreter if it has these extras, else that of `.venv`."""
    absent = missing(extras, root / "pyproject.toml")
    if set(absent) <= set(OPTIONAL):
        for name in absent:
            say(f"skipped: {OPTIONAL[name]}")
        say(f"{sys.executable} has what is needed and is used as it is")
        return sys.executable
    try:
        return prepare_venv(extras, root)
    except SetupError as error:
        kernels = {extra for extra in extras if extra.startswith(CUDA_EXTRAS)}
        if needed := sorted(set(absent) - {*OPTIONAL, *kernels}):
            fix = f"Use a Python that already has {', '.join(needed)}: add PYTHON=/path/to/python"
            raise SetupError(f"{error}; no network? {fix} to make") from error
        say(f"{error}: {sys.executable} is used as it is")
        say(f"skipped: what needs {', '.join(absent)}")
        return sys.executable


def install_nvrtc(python: str, folder: Path) -> None:
    """Install NVRTC 13 into its own folder if it is missing; the tests can do without it."""
    probe = [python, "-c", "from importlib.metadata import version; version('nvidia-cuda-nvrtc')"]
    if (
        any(folder.glob("nvidia_cuda_nvrtc-13.*.dist-info"))
        or subprocess.run(probe, capture_output=True).returncode == 0
    ):
        return
    say(f"installing NVRTC 13 into {folder.name}, once")
    if not pip_install(python, "--target", str(folder), NVRTC_13):
        say("skipped: compiling with NVRTC 13, which pip could not install (its message is above)")


def side_by_side(python: str, cuda: int | str) -> tuple[str, ...]:
    """Options of pytest for one process per core; empty with a GPU, which runs tests in series."""
    probe = [python, "-c", "import xdist"]
    if isinstance(cuda, int) or subprocess.run(probe, capture_output=True).returncode:
        return ()
    return ("-n", "auto", "--dist", "worksteal")


def main() -> int:
    """Prepare an interpreter and run the task with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        say(f"Python 3.11 or later is needed, and {sys.executable} is older")
        return 1
    task = TASKS[options.task]
    cuda = find_cuda() if task.uses_gpu else ""
    if task.uses_gpu and isinstance(cuda, str):
        say(f"skipped: everything that runs on a GPU: {cuda}")
    elif task.uses_gpu:
        say(f"the NVIDIA driver serves CUDA {cuda}")
    extras = wanted_extras(task, cuda)
    try:
        python = choose_interpreter(extras, ROOT)
    except SetupError as error:
        say(str(error))
        return 1
    if "compile12" in extras:
        install_nvrtc(python, NVRTC_FOLDER)
    environment = dict(os.environ)
    if python == sys.executable:
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    split = side_by_side(python, cuda) if options.task == "test" else ()
    command = [python, *task.command, *split, *options.arguments]
    return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
