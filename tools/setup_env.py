"""Which interpreter can run the tests, the demo or the checks, and what must be installed first?

    python tools/setup_env.py {demo,test,check} [arguments for the program]

An interpreter that already has what the task needs is used as it is. Otherwise `.venv` is created
and the extras that the task and this machine's NVIDIA driver call for are installed into it; a
stamp makes the next run start at once. Standard library only: this runs before anything is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# NVRTC of the generation that CuPy does not compile with, for the tests. It lies apart because CuPy
# for CUDA 12 takes NVRTC 13 where both are in one environment.
NVRTC_FOLDER = ROOT / ".nvrtc"
NVRTC_13 = "nvidia-cuda-nvrtc>=13,<14"
OLDEST_PYTHON = (3, 11)
OLDEST_CUDA = 12
NEWEST_CUDA = 13  # a newer driver runs what was built for CUDA 13


@dataclass(frozen=True)
class Task:
    """One thing that can be asked for."""

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
    "check": Task(extras=("dev",), command=("tools/check.py",)),
}

# Distributions that a task can do without, and what it is then without.
OPTIONAL = {
    "rdkit": "reactions other than the demo's own two (pip install rdkit)",
    "tqdm": "progress bars (pip install tqdm)",
    "scikit-learn": "the examples' digits and photographs (pip install scikit-learn)",
    "matplotlib": "the examples' pictures (pip install matplotlib)",
    "scipy": "comparisons with SciPy in the docs (pip install scipy)",
    "kernel-tuner": "searches of kernel-tuner, and its files (pip install kernel-tuner)",
    "onnx": "ONNX's own cases of its operator Attention (pip install onnx==1.22.0)",
}


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says: the CUDA version that the driver serves, or why none can be used."""

    cuda: tuple[int, int] | None
    reason: str = ""

    @property
    def extra(self) -> str | None:
        """The extra whose CuPy this driver runs."""
        return f"cuda{min(self.cuda[0], NEWEST_CUDA)}" if self.cuda else None


def parse_nvidia_smi(output: str) -> Driver:
    """Read the CUDA version from nvidia-smi's header."""
    if "No devices were found" in output:
        return Driver(None, "nvidia-smi found no device")
    match = re.search(r"CUDA[A-Za-z ]*Version *: *(\d+)\.(\d+)", output)
    if match is None:
        return Driver(None, "nvidia-smi names no CUDA version")
    major, minor = int(match[1]), int(match[2])
    if major < OLDEST_CUDA:
        return Driver(None, f"the driver serves CUDA {major}.{minor}, and {OLDEST_CUDA} is needed")
    return Driver((major, minor))


def find_driver() -> Driver:
    """Ask nvidia-smi for the NVIDIA driver of this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(None, "no NVIDIA driver was found (no nvidia-smi)")
    try:
        answer = subprocess.run(
            [program], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Driver(None, f"nvidia-smi did not answer ({type(error).__name__})")
    if answer.returncode != 0:
        words = (answer.stdout + answer.stderr).split()
        return Driver(None, f"nvidia-smi failed ({' '.join(words)[:120] or answer.returncode})")
    return parse_nvidia_smi(answer.stdout)


def wanted_extras(task: Task, driver: Driver, platform: str = sys.platform) -> tuple[str, ...]:
    """Name the extras that the task calls for on this machine."""
    if task.uses_gpu and driver.extra:
        return (*task.extras, driver.extra)
    if task.compiles_kernels and platform != "darwin":
        return (*task.extras, "compile12")
    return task.extras


def missing_from(python: str, extras: tuple[str, ...], pyproject: Path) -> list[str] | None:
    """Name what an interpreter lacks for these extras; None where it cannot even be asked."""
    probe = [python, str(Path(__file__).with_name("probe_extras.py")), str(pyproject), *extras]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [str(name) for name in json.loads(answer.stdout.splitlines()[-1])]


class SetupError(Exception):
    """Set-up cannot go on; the text says what the user can do."""


@dataclass(frozen=True)
class Venv:
    """The project's own virtual environment and the stamp of what was installed into it."""

    folder: Path
    pyproject: Path

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        windows = self.folder / "Scripts" / "python.exe"
        return str(windows if os.name == "nt" else self.folder / "bin" / "python")

    @property
    def stamp_file(self) -> Path:
        """Where the extras are recorded, beside a digest of the file that defines them."""
        return self.folder / "cuflash-extras.json"

    def digest(self) -> str:
        """Digest of pyproject.toml."""
        return hashlib.sha256(self.pyproject.read_bytes()).hexdigest()

    def installed_extras(self) -> tuple[str, ...] | None:
        """Extras installed from any state of pyproject.toml; None without a readable stamp."""
        try:
            return tuple(json.loads(self.stamp_file.read_text())["extras"])
        except (OSError, ValueError, KeyError):
            return None

    def holds(self, extras: tuple[str, ...]) -> bool:
        """Whether these extras were installed from the present pyproject.toml."""
        if not Path(self.python).exists():
            return False
        try:
            stamp = json.loads(self.stamp_file.read_text())
        except (OSError, ValueError):
            return False
        return stamp.get("digest") == self.digest() and set(extras) <= set(stamp["extras"])

    def adapted(self, extras: tuple[str, ...]) -> tuple[str, ...]:
        """These extras, with the CUDA that is installed in place of compile12: it compiles too."""
        cuda = [extra for extra in self.installed_extras() or () if extra.startswith("cuda")]
        return tuple(cuda[0] if cuda and extra == "compile12" else extra for extra in extras)

    def install(self, extras: tuple[str, ...]) -> None:
        """Create it where it is absent and install the project with these extras."""
        before = self.installed_extras() or ()
        union = tuple(sorted({*before, *extras}))
        rebuild = len({extra[-2:] for extra in union if extra.startswith(("cuda", "comp"))}) > 1
        if rebuild:
            say("the driver now serves another CUDA, so .venv is rebuilt")
            union = extras
        if rebuild or not Path(self.python).exists():
            say(f"creating .venv with Python {sys.version.split()[0]}")
            clear = ["--clear"] if rebuild else []
            made = subprocess.run([sys.executable, "-m", "venv", *clear, str(self.folder)])
            if made.returncode != 0:
                raise SetupError(
                    f"{sys.executable} -m venv failed (Debian and Ubuntu: apt install python3-venv)"
                )
        self.stamp_file.unlink(missing_ok=True)
        target = f"{self.pyproject.parent}[{','.join(union)}]"
        say(f"installing {', '.join(union)} into .venv, once")
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        pip = [self.python, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
        if subprocess.run([*pip, "--editable", target]).returncode != 0:
            raise SetupError(f"pip could not install {', '.join(union)} (its message is above)")
        self.stamp_file.write_text(json.dumps({"digest": self.digest(), "extras": union}))


def say(text: str) -> None:
    """Print one line that is told apart from the program's own output."""
    print(f"cuflash: {text}", flush=True)


def choose_interpreter(extras: tuple[str, ...], root: Path) -> str:
    """Return an interpreter that has these extras, preparing `.venv` where none has them."""
    pyproject = root / "pyproject.toml"
    venv = Venv(root / ".venv", pyproject)
    missing = missing_from(sys.executable, extras, pyproject)
    if missing is not None and set(missing) <= set(OPTIONAL):
        for name in missing:
            say(f"skipped: {OPTIONAL[name]}")
        say(f"{sys.executable} has what is needed and is used as it is")
        return sys.executable
    if venv.holds(venv.adapted(extras)):
        return venv.python
    try:
        venv.install(venv.adapted(extras))
    except SetupError as error:
        kernels = {extra for extra in extras if extra.startswith(("cuda", "compile"))}
        needed = sorted(set(missing or ()) - {*OPTIONAL, *kernels})
        if missing is None or needed:
            names = ", ".join(needed) or "what pyproject.toml names"
            fix = f"Use a Python that already has {names}: add PYTHON=/path/to/python to make"
            raise SetupError(f"{error}; no network? {fix}") from error
        say(f"{error}: {sys.executable} is used as it is")
        say(f"skipped: what needs {', '.join(missing)}")
        return sys.executable
    return venv.python


def install_nvrtc(python: str, folder: Path) -> None:
    """Put NVRTC 13 into a folder of its own where it is absent; the tests can do without."""
    probe = [python, "-c", "from importlib.metadata import version; version('nvidia-cuda-nvrtc')"]
    if (
        any(folder.glob("nvidia_cuda_nvrtc-13.*.dist-info"))
        or subprocess.run(probe, capture_output=True).returncode == 0
    ):
        return
    say(f"installing NVRTC 13 into {folder.name}, once")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    if subprocess.run([*pip, "--target", str(folder), NVRTC_13]).returncode != 0:
        say("skipped: compiling with NVRTC 13, which pip could not install (its message is above)")


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
    driver = find_driver() if task.uses_gpu else Driver(None)
    if driver.cuda:
        say(f"the NVIDIA driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]}")
    elif task.uses_gpu:
        say(f"skipped: everything that runs on a GPU: {driver.reason}")
    extras = wanted_extras(task, driver)
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
    command = [python, *task.command, *options.arguments]
    return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
