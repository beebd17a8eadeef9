"""What does a new score option cost? Two are added here: few files each, and no kernel.

`shift`, an array with a number for each head, and `lift`, one number, are added to scores. The
edits that docs/adding-a-feature.md asks for add them to a copy of cuflash. The copy then runs them
on the CPU path, in the covering array and in kernels that a C++ compiler makes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gen_score_params
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER

ROOT = Path(__file__).resolve().parents[1]
#: file -> (a text that occurs once, the text to insert before it)
EDITS = {
    "cuflash/_problem/option_table.py": (
        ('    Option(\n        "scale"', '    Option("shift", checks.floats, "add", {"shift": ""}, '
         'compiled="dtype", pressure=1),\n'
         '    Option("lift", checks.finite, "add", number=_as_it_is, compiled="flag", '
         'params={"lift": (np.float32, lambda p: p.lift, "")}),\n'),
    ),
    "cuflash/_problem/options.py": (
        ("    #: Plain values and the layouts of arrays:", "    shift: Array | None = None\n"
         "    lift: float | None = None\n"),
        ("\n\n_DEFAULTS = {", "    shift: Array | None\n    lift: float | None\n"),
    ),
    "cuflash/reference/_score.py": (
        ("    mod_slope = np.ones((), dtype)\n", "    if options.shift is not None:\n"
         "        score = score + np.asarray(options.shift).astype(dtype)[..., None, None]\n"
         "    score = score + dtype(options.lift or 0)\n"),
    ),
    "cuflash/_host/scores.py": (
        ("        mod_slope = None\n", '        if "shift" in self._arrays:\n'
         '            score += self._narrowed(self._arrays["shift"])[..., None, None]\n'
         "        score += self._dtype.type(problem.lift or 0)\n"),
    ),
    "kernels_cu/config.cuh": (
        ("  static constexpr bool softcap =", "  static constexpr Dtype shift = Dtype::none;\n"
         "  static constexpr bool lift = false;\n"),
    ),
    "kernels_cu/score/score.cuh": (
        ("  Real slope;\n", "  Real shift;\n"),
        ("    if constexpr (Config::alibi_slopes != Dtype::none) {\n      slope =",
         "    if constexpr (Config::shift != Dtype::none) {\n"
         "      shift = read_real<Config::shift>(params.shift, entry * params.shift_strides);\n"
         "    }\n"),
        ("    if constexpr (Config::alibi_slopes != Dtype::none) {\n      return",
         "    if constexpr (Config::shift != Dtype::none) logit += shift;\n"
         "    if constexpr (Config::lift) logit += params.lift;\n"),
    ),
}  # fmt: skip


def test_the_struct_of_the_kernels_is_that_of_the_table():
    assert gen_score_params.FILE.read_text(encoding="utf-8") == gen_score_params.generate()


def test_adding_an_option_edits_few_files_and_no_kernel():
    assert len(EDITS) <= 6
    assert not [path for path in EDITS if path.endswith(".cu")]


@pytest.fixture(scope="module")
def copy_with_option(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of cuflash with the options, and of the tests' support."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("cuflash", "kernels_cu", "tests/support", "tools"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name, edits in EDITS.items():
        text = (folder / name).read_text(encoding="utf-8")
        for place, added in edits:
            assert text.count(place) == 1, f"{name}: {place!r}"
            text = text.replace(place, added + place)
        (folder / name).write_text(text, encoding="utf-8")
    in_copy(folder, "tools/gen_score_params.py")
    return folder


def in_copy(folder: Path, *words: str) -> None:
    paths = os.pathsep.join((str(folder), str(folder / "tests")))
    run = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("part", ["calls", "covering", "choice"])
def test_the_option_is_everywhere(copy_with_option, part):
    in_copy(copy_with_option, "tests/support/toy_option.py", part)


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_compute_with_the_option(copy_with_option, tmp_path, dtype):
    in_copy(copy_with_option, "tests/support/toy_option.py", "kernels", str(tmp_path), dtype)
