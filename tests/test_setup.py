"""Does one command prepare any machine, and say what it cannot run there?"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import probe_extras
import setup_env
from setup_env import Driver, SetupError, Venv

HEADER = """\
Sat Nov 21 10:49:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}             Driver Version: {driver}     CUDA Version: {cuda}     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:04:00.0 Off |                    0 |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:05:00.0 Off |                    0 |
+-----------------------------------------------------------------------------------------+
"""

posix_only = pytest.mark.skipif(os.name == "nt", reason="the fake nvidia-smi is a shell script")


def install_fake(folder: Path, output: str, status: int = 0) -> None:
    """Put an nvidia-smi into a folder that prints a text and exits with a status."""
    text = folder / "output.txt"
    text.write_text(output)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nwhile read -r line; do echo \"$line\"; done <'{text}'\n")
    with program.open("a") as file:
        file.write(f"exit {status}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@posix_only
@pytest.mark.parametrize(
    ("output", "status", "cuda", "extra", "reason"),
    [
        (HEADER.format(driver="550.54.15", cuda="12.4"), 0, (12, 4), "cuda12", ""),
        (HEADER.format(driver="580.159.04", cuda="13.0"), 0, (13, 0), "cuda13", ""),
        (HEADER.format(driver="700.10.01", cuda="14.1"), 0, (14, 1), "cuda13", ""),
        ("CUDA UMD Version: 13.1\n", 0, (13, 1), "cuda13", ""),
        ("CUDA Version                 : 12.9\n", 0, (12, 9), "cuda12", ""),
        (HEADER.format(driver="520.61.05", cuda="11.8"), 0, None, None, "serves CUDA 11.8"),
        (HEADER.format(driver="550.54.15", cuda="N/A"), 0, None, None, "names no CUDA version"),
        ("", 0, None, None, "names no CUDA version"),
        ("No devices were found\n", 0, None, None, "found no device"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            9,
            None,
            None,
            "couldn't communicate with the NVIDIA driver",
        ),
        (HEADER.format(driver="550.54.15", cuda="12.4"), 15, None, None, "nvidia-smi failed"),
    ],
)
def test_driver_from_nvidia_smi(tmp_path, monkeypatch, output, status, cuda, extra, reason):
    install_fake(tmp_path, output, status)
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = setup_env.find_driver()
    assert (driver.cuda, driver.extra) == (cuda, extra)
    assert reason in driver.reason
    assert "\n" not in driver.reason


def test_no_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = setup_env.find_driver()
    assert driver.cuda is None
    assert "no nvidia-smi" in driver.reason


@posix_only
def test_nvidia_smi_that_cannot_be_run(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x00not a program")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = setup_env.find_driver()
    assert driver.cuda is None
    assert "did not answer" in driver.reason


def test_nvidia_smi_that_hangs(monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(setup_env.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(setup_env.subprocess, "run", hang)
    assert "did not answer" in setup_env.find_driver().reason


@pytest.mark.parametrize(
    ("task", "cuda", "platform", "extras"),
    [
        ("demo", None, "linux", ("demo",)),
        ("demo", (12, 4), "linux", ("demo", "cuda12")),
        ("demo", (13, 0), "win32", ("demo", "cuda13")),
        ("test", None, "linux", ("test", "demo", "examples", "tune", "compile12")),
        ("test", None, "win32", ("test", "demo", "examples", "tune", "compile12")),
        ("test", None, "darwin", ("test", "demo", "examples", "tune")),
        ("test", (12, 9), "linux", ("test", "demo", "examples", "tune", "cuda12")),
        ("test", (13, 0), "linux", ("test", "demo", "examples", "tune", "cuda13")),
        ("check", (13, 0), "linux", ("dev",)),
    ],
)
def test_extras_of_a_task(task, cuda, platform, extras):
    assert setup_env.wanted_extras(setup_env.TASKS[task], Driver(cuda), platform) == extras


def test_every_extra_is_defined_in_pyproject():
    pyproject = (setup_env.ROOT / "pyproject.toml").read_bytes()
    defined = set(probe_extras.read_project(pyproject)["optional-dependencies"])
    for task in setup_env.TASKS.values():
        for cuda in (None, (12, 0), (13, 0), (14, 0)):
            assert set(setup_env.wanted_extras(task, Driver(cuda), "linux")) <= defined


PYPROJECT = """\
[project]
name = "example"
dependencies = ["pytest>=8"]
[project.optional-dependencies]
held = ["hypothesis>=6"]
too_new = ["hypothesis>=9999"]
absent = ["cuflash-no-such-distribution"]
elsewhere = ["cuflash-no-such-distribution; sys_platform == 'nowhere'"]
demo = ["rdkit>=9999", "scipy>=9999", "onnx>=9999"]
cuda12 = ["cuflash-no-such-cupy-cuda12x>=9999"]
cuda13 = ["cuflash-no-such-cupy-cuda13x>=9999"]
compile12 = ["cuflash-no-such-cupy-cuda12x>=9999"]
"""


@pytest.fixture
def project(tmp_path):
    """Return the folder of a project that is never installed."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


@pytest.mark.parametrize(
    ("extras", "missing"),
    [
        (("held",), []),
        (("too_new",), ["hypothesis"]),
        (("held", "absent"), ["cuflash-no-such-distribution"]),
        (("elsewhere",), []),
        (("held", "cuda12"), ["cuda12"]),
        (("held", "compile12"), ["compile12"]),
    ],
)
def test_probe_names_what_an_interpreter_lacks(project, extras, missing):
    assert setup_env.missing_from(sys.executable, extras, project / "pyproject.toml") == missing


def test_probe_of_a_broken_interpreter(project):
    assert setup_env.missing_from("/no/such/python", (), project / "pyproject.toml") is None


class Commands:
    """Stands for subprocess.run in the installing functions: records, creates the interpreter."""

    def __init__(self, venv: Venv, failing: str = "") -> None:
        self.venv = venv
        self.failing = failing
        self.calls: list[list[str]] = []

    def __call__(self, command, **_):
        self.calls.append(list(command))
        if "venv" in command:
            Path(self.venv.python).parent.mkdir(parents=True, exist_ok=True)
            Path(self.venv.python).touch()
        failed = bool(self.failing) and self.failing in command
        return subprocess.CompletedProcess(command, int(failed))


@pytest.fixture
def venv(project):
    """Return the project's virtual environment, not created yet."""
    return Venv(project / ".venv", project / "pyproject.toml")


@pytest.fixture
def commands(venv, monkeypatch):
    """Record the commands that would install; the probe still runs."""
    recorded = Commands(venv)
    probe = subprocess.run
    monkeypatch.setattr(
        setup_env.subprocess,
        "run",
        lambda command, **options: (probe if options.get("capture_output") else recorded)(
            command, **options
        ),
    )
    return recorded


def installed(call: list[str]) -> str:
    """Name the extras in a pip command."""
    assert call[1:4] == ["-m", "pip", "install"]
    return re.search(r"\[(.*)\]$", call[-1])[1]


def test_complete_interpreter_is_used_as_it_is(project, commands, capsys):
    assert setup_env.choose_interpreter(("held",), project) == sys.executable
    assert not commands.calls
    assert "used as it is" in capsys.readouterr().out


def test_optional_distributions_are_skipped_with_one_line_each(project, commands, capsys):
    assert setup_env.choose_interpreter(("demo",), project) == sys.executable
    assert not commands.calls
    skipped = re.findall(r"skipped: .*pip install (\w+)", capsys.readouterr().out)
    assert skipped == ["rdkit", "scipy", "onnx"]


def test_what_the_tests_cannot_do_without():
    project = probe_extras.read_project((setup_env.ROOT / "pyproject.toml").read_bytes())
    lines = [
        line
        for extra in ("test", "demo", "examples", "tune")
        for line in project["optional-dependencies"][extra]
    ]
    names = {probe_extras.Requirement(line).name for line in lines}
    assert names - set(setup_env.OPTIONAL) == {"pytest", "hypothesis"}


def test_second_run_installs_nothing(project, venv, commands):
    assert setup_env.choose_interpreter(("absent",), project) == venv.python
    assert [call[2] for call in commands.calls] == ["venv", "pip"]
    assert installed(commands.calls[1]) == "absent"
    commands.calls.clear()
    assert setup_env.choose_interpreter(("absent",), project) == venv.python
    assert not commands.calls


def test_changed_pyproject_installs_again(project, venv, commands):
    setup_env.choose_interpreter(("absent",), project)
    commands.calls.clear()
    venv.pyproject.write_text(PYPROJECT + "# changed\n")
    setup_env.choose_interpreter(("absent",), project)
    assert [call[2] for call in commands.calls] == ["pip"]


def test_another_task_adds_its_extras(project, venv, commands):
    venv.install(("absent",))
    venv.install(("too_new", "compile12"))
    assert [call[2] for call in commands.calls] == ["venv", "pip", "pip"]
    assert installed(commands.calls[-1]) == "absent,compile12,too_new"
    assert venv.holds(("absent",))
    assert venv.holds(("compile12", "too_new"))
    assert not venv.holds(("cuda12",))


def test_another_cuda_rebuilds(project, venv, commands):
    venv.install(("compile12", "absent"))
    commands.calls.clear()
    venv.install(("cuda13", "absent"))
    assert "--clear" in commands.calls[0]
    assert installed(commands.calls[1]) == "cuda13,absent"


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_cuda_of_an_invisible_driver_compiles_and_stays(project, venv, commands, cuda):
    venv.install((cuda, "absent"))
    commands.calls.clear()
    assert setup_env.choose_interpreter(("absent", "compile12"), project) == venv.python
    assert not commands.calls
    setup_env.choose_interpreter(("absent", "too_new", "compile12"), project)
    (call,) = commands.calls
    assert installed(call) == f"absent,{cuda},too_new"


def test_unreadable_stamp_installs_again(venv, commands):
    venv.install(("absent",))
    venv.stamp_file.write_text("{")
    assert not venv.holds(("absent",))
    venv.install(("absent",))
    assert venv.holds(("absent",))


def test_failed_install_leaves_no_stamp(venv, commands):
    venv.install(("absent",))
    commands.failing = "pip"
    venv.pyproject.write_text(PYPROJECT + "# changed\n")
    with pytest.raises(SetupError, match="pip could not install absent"):
        venv.install(("absent",))
    assert not venv.stamp_file.exists()


def test_failed_venv_names_the_package_of_debian(venv, commands):
    commands.failing = "venv"
    with pytest.raises(SetupError, match="apt install python3-venv"):
        venv.install(("absent",))


def test_offline_without_cupy_the_rest_still_runs(project, commands, capsys):
    commands.failing = "pip"
    assert setup_env.choose_interpreter(("held", "compile12"), project) == sys.executable
    assert "skipped: what needs compile12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("python", "needed"),
    [
        (sys.executable, "cuflash-no-such-distribution"),
        ("/no/such/python", "what pyproject.toml names"),
    ],
)
def test_offline_without_a_necessary_distribution(project, commands, monkeypatch, python, needed):
    commands.failing = "pip"
    monkeypatch.setattr(sys, "executable", python)
    fix = f"no network\\? Use a Python that already has {needed}: add PYTHON="
    with pytest.raises(SetupError, match=f"pip could not install absent, compile12 .*{fix}"):
        setup_env.choose_interpreter(("absent", "compile12"), project)


def test_nvrtc_13_lies_apart_and_is_installed_once(tmp_path, monkeypatch, capsys):
    """In one environment with it, CuPy for CUDA 12 would compile with NVRTC 13."""
    calls = []

    def pip(command, **options):
        if options.get("capture_output"):
            return subprocess.CompletedProcess(command, 1)
        calls.append(command)
        (tmp_path / "nvidia_cuda_nvrtc-13.5.37.dist-info").mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup_env.subprocess, "run", pip)
    setup_env.install_nvrtc("python", tmp_path)
    setup_env.install_nvrtc("python", tmp_path)
    (call,) = calls
    assert call[:4] == ["python", "-m", "pip", "install"]
    assert call[-3:] == ["--target", str(tmp_path), setup_env.NVRTC_13]
    assert "skipped" not in capsys.readouterr().out


@posix_only
def test_nvrtc_13_in_the_environment_is_enough(tmp_path, capsys):
    """An environment for CUDA 13 has the wheel already."""
    folder = tmp_path / "site" / "nvidia_cuda_nvrtc-13.5.37.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: nvidia-cuda-nvrtc\nVersion: 13.5.37\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    setup_env.install_nvrtc(str(python), tmp_path / "absent")
    assert not capsys.readouterr().out


def test_without_nvrtc_13_the_rest_still_runs(tmp_path, monkeypatch, capsys):
    def failing(command, **_):
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(setup_env.subprocess, "run", failing)
    setup_env.install_nvrtc("python", tmp_path)
    assert capsys.readouterr().out.count("skipped: compiling with NVRTC 13") == 1


def test_readme_installs_the_same_nvrtc_and_the_rest_from_the_checkout():
    readme = (setup_env.ROOT / "README.md").read_text()
    assert f'--target {setup_env.NVRTC_FOLDER.name} "{setup_env.NVRTC_13}"' in readme
    assert 'pip install ".[cuda13]"' in readme
    assert "install cuflash" not in readme.replace('"', "")


@posix_only
@pytest.mark.parametrize("cuda", [None, "11.8"])
def test_command_runs_pytest_and_says_what_is_skipped(tmp_path, monkeypatch, cuda):
    """The real command on a machine without a usable driver, in an interpreter that has all."""
    extras = ("test", "demo", "examples", "tune", "compile12")
    missing = setup_env.missing_from(sys.executable, extras, setup_env.ROOT / "pyproject.toml")
    if missing is None or not set(missing) <= set(setup_env.OPTIONAL):
        pytest.skip("this interpreter cannot compile kernels")
    if not any(setup_env.NVRTC_FOLDER.glob("nvidia_cuda_nvrtc-13.*.dist-info")):
        pytest.skip("NVRTC 13 would be downloaded")
    if cuda:
        install_fake(tmp_path, HEADER.format(driver="520.61.05", cuda=cuda))
    run = subprocess.run(
        [sys.executable, "-I", setup_env.__file__, "test", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    lines = run.stdout.splitlines()
    assert sum("skipped: everything that runs on a GPU" in line for line in lines) == 1
    assert any("is used as it is" in line for line in lines)
    assert lines[-1].startswith("pytest ")


@posix_only
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("statuses", "chosen"),
    [
        ({"python3": 0, "python3.12": 0}, "python3"),
        ({"python3": 1, "python3.13": 127, "python3.12": 0}, "python3.12"),
        ({"python3": 1}, "python3"),
    ],
)
def test_make_takes_the_first_python_that_is_new_enough(tmp_path, statuses, chosen):
    for name, status in statuses.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
    run = subprocess.run(
        [shutil.which("make"), "--dry-run", "test"],
        cwd=setup_env.ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": str(tmp_path)},
    )
    assert (run.stdout.split(), run.stderr) == ([chosen, "tools/setup_env.py", "test"], "")


def test_old_python_is_told_what_is_needed(monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "OLDEST_PYTHON", (99, 0))
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "test"])
    assert setup_env.main() == 1
    assert f"Python 3.11 or later is needed, and {sys.executable}" in capsys.readouterr().out
