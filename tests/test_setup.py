"""Does one command prepare any machine, and say what it cannot run there?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import setup_env
from setup_env import SetupError


@pytest.mark.parametrize(
    ("status", "version", "found", "extra"),
    [
        (0, 12040, 12, "cuda12"),
        (0, 13000, 13, "cuda13"),
        (0, 14010, 14, "cuda13"),
        (0, 11080, "serves CUDA 11, and 12 is needed", "compile12"),
        (100, 12040, "no device that it can use (cuInit returned 100)", "compile12"),
        (None, 0, "no NVIDIA driver was found", "compile12"),
    ],
)
def test_the_driver_decides_the_extra(monkeypatch, status, version, found, extra):
    def library(name):
        if status is None:
            raise OSError(name)
        asked = {"cuDriverGetVersion": lambda to: setattr(to._obj, "value", version)}
        return SimpleNamespace(cuInit=lambda flags: status, **asked)

    monkeypatch.setattr(setup_env.ctypes, "CDLL", library)
    cuda = setup_env.find_cuda()
    assert cuda == found or found in cuda
    assert setup_env.wanted_extras(setup_env.TASKS["test"], cuda, "linux")[-1] == extra


@pytest.mark.parametrize(
    ("task", "cuda", "platform", "extra"),
    [
        ("demo", "none", "linux", ()), ("demo", 13, "win32", ("cuda13",)),
        ("test", 12, "linux", ("cuda12",)), ("test", "none", "win32", ("compile12",)),
        ("test", "none", "darwin", ()), ("check", 13, "linux", ()),
        ("docs", 13, "linux", ()),
    ],
)  # fmt: skip
def test_extras_of_a_task(task, cuda, platform, extra):
    own = setup_env.TASKS[task]
    assert setup_env.wanted_extras(own, cuda, platform) == own.extras + extra


def test_the_extras_of_every_task_are_defined_and_few_are_necessary():
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text())["project"]
    table, necessary = project["optional-dependencies"], set()
    for task in setup_env.TASKS.values():
        for cuda in ("none", 12, 13, 14):
            assert set(setup_env.wanted_extras(task, cuda, "linux")) <= set(table)
    for extra in setup_env.TASKS["test"].extras:
        necessary |= {Requirement(line).name for line in table[extra]}
    assert necessary - set(setup_env.OPTIONAL) == {"pytest", "hypothesis"}


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
def test_what_an_interpreter_lacks_is_named(project, extras, missing):
    assert setup_env.missing(extras, project / "pyproject.toml") == missing


@pytest.fixture
def commands(monkeypatch):
    """Record the install commands; one that has the module ``failing`` fails."""
    recorded = SimpleNamespace(calls=[], failing="")

    def run(command, **options):
        recorded.calls.append(list(command))
        if "venv" in command:
            python = Path(command[-1], "Scripts/python.exe" if os.name == "nt" else "bin/python")
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return subprocess.CompletedProcess(command, int(recorded.failing in command[1:]))

    monkeypatch.setattr(setup_env.subprocess, "run", run)
    return recorded


def install(project, commands, *extras) -> list[str]:
    """Prepare `.venv`; return the commands run: "venv", and for a pip call the extras installed."""
    commands.calls.clear()
    python = setup_env.prepare_venv(extras, project)
    assert Path(python).parents[1] == project / ".venv"
    return [c[2] if "venv" in c else c[-1].partition("[")[2][:-1] for c in commands.calls]


def test_complete_interpreter_is_used_as_it_is(project, commands, capsys):
    assert setup_env.choose_interpreter(("held", "demo"), project) == sys.executable
    assert not commands.calls
    assert capsys.readouterr().out.count("skipped: ") == 3  # of OPTIONAL


def test_venv_is_installed_once_and_again_after_a_change(project, commands):
    assert install(project, commands, "absent") == ["venv", "absent"]
    assert install(project, commands, "absent") == []
    (project / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert install(project, commands, "absent") == ["absent"]
    assert install(project, commands, "too_new", "compile12") == ["absent,compile12,too_new"]
    assert install(project, commands, "compile12", "absent") == []
    assert install(project, commands, "cuda13") == ["venv", "cuda13"]
    for broken in ("{", "[]", "{}"):
        (project / ".venv" / "cuflash-extras.json").write_text(broken)
        assert install(project, commands, "absent") == ["absent"]


@pytest.mark.parametrize("failing", ["pip", "venv"])
def test_failed_set_up_leaves_no_stamp(project, commands, failing):
    commands.failing = failing
    with pytest.raises(SetupError, match=failing):
        setup_env.prepare_venv(("absent",), project)
    assert not (project / ".venv" / "cuflash-extras.json").exists()


def test_offline_the_rest_still_runs_where_it_is_enough(project, commands, capsys):
    commands.failing = "pip"
    assert setup_env.choose_interpreter(("held", "compile12"), project) == sys.executable
    assert "skipped: what needs compile12" in capsys.readouterr().out
    with pytest.raises(SetupError, match="already has cuflash-no-such-distribution: add PYTHON="):
        setup_env.choose_interpreter(("absent", "compile12"), project)


def test_nvrtc_13_has_a_folder_of_its_own_and_is_installed_once(tmp_path, commands, capsys):
    """NVRTC 13 is installed once, in a folder of its own: CuPy for CUDA 12 would use it, too."""
    commands.failing = "-c"  # the probe
    setup_env.install_nvrtc("python", tmp_path)
    assert commands.calls[1][-3:] == ["--target", str(tmp_path), setup_env.NVRTC_13]
    (tmp_path / "nvidia_cuda_nvrtc-13.5.37.dist-info").mkdir()
    setup_env.install_nvrtc("python", tmp_path)
    assert len(commands.calls) == 2
    commands.failing = ""  # an environment for CUDA 13 has the wheel
    setup_env.install_nvrtc("python", tmp_path / "absent")
    assert len(commands.calls) == 3
    assert "skipped" not in capsys.readouterr().out


def test_documents_install_the_same_nvrtc_and_the_rest_from_the_checkout():
    page = (setup_env.ROOT / "docs" / "install.md").read_text()
    assert f'--target {setup_env.NVRTC_FOLDER.name} "{setup_env.NVRTC_13}"' in page
    for text in (page, (setup_env.ROOT / "README.md").read_text()):
        assert 'pip install ".[cuda13]"' in text
        assert "install cuflash" not in text.replace('"', "")


def test_the_command_runs_its_program(tmp_path):
    """The real command runs its program, in a checkout with extras that this interpreter has."""
    (tmp_path / "tools").mkdir()
    script = shutil.copy(setup_env.__file__, tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(
        "[project]\ndependencies = []\n"
        "[project.optional-dependencies]\ndev = ['pytest>=8']\ntesting = []\n"
    )
    (tmp_path / "tools" / "check.py").write_text("import sys; sys.exit(len(sys.argv))")
    command = [sys.executable, "-I", script, "check", "--some", "arguments"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (3, "")


@pytest.mark.parametrize(
    ("cuda", "installed", "options"),
    [("none", True, ("-n", "auto", "--dist", "worksteal")), ("none", False, ()), (13, True, ())],
)
def test_every_core_runs_tests_where_no_gpu_does(commands, cuda, installed, options):
    commands.failing = "" if installed else "-c"  # the probe
    assert setup_env.side_by_side("python", cuda) == options


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_takes_the_first_python_that_is_new_enough(tmp_path):
    for name, status in {"python3": 1, "python3.13": 127, "python3.12": 0}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    run = subprocess.run(
        [shutil.which("make"), "--dry-run", "test"], cwd=setup_env.ROOT, capture_output=True,
        text=True, check=True, env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert run.stdout.split() == ["python3.12", "tools/setup_env.py", "test"]
