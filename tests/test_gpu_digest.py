"""Does the digest of the GPU report follow the code that runs, and nothing else?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpu_digest import ROOT, digest, ranks_digest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("cuflash", "kernels_cu"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_file_that_moves_leaves_results_valid(checkout: Path) -> None:
    """Moving a file, or changing imports, comments and docstrings, leaves the digest as it is."""
    assert (before := digest(checkout)) == digest()
    moved = checkout / "cuflash" / "_launch" / "elsewhere"
    moved.mkdir()
    shutil.move(checkout / "cuflash" / "_launch" / "run.py", moved / "launches.py")
    edited(moved / "launches.py", "cuflash._launch import plan_cache", "x import plan_cache")
    edited(moved / "launches.py", '"""How does a call run', '"""How does each call run')
    kernels = checkout / "kernels_cu"
    shutil.move(kernels / "score" / "philox.cuh", kernels / "philox.cuh")
    edited(kernels / "score/dropout.cuh", '#include "score/philox.cuh"', '#include "philox.cuh"')
    assert digest(checkout) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("kernels_cu/score/philox.cuh", "0xD2511F53", "0xD2511F55"),
        ("kernels_cu/forward_sm90.cu", "__launch_bounds__(", "__launch_bounds__(1 + "),
        ("cuflash/_launch/run.py", "& 15", "& 7"),
        ("cuflash/_kernels/forward_sm90.py", "(192, 128, 4", "(128, 128, 4"),
        ("cuflash/_host/scores.py", "seen & ", "seen | "),  # attention_weights scores on the GPU
    ],
)
def test_a_token_of_a_kernel_or_a_launch_does_not(
    checkout: Path, name: str, old: str, new: str
) -> None:
    before = digest(checkout)
    edited(checkout / name, old, new)
    assert digest(checkout) != before


def test_what_no_launch_goes_through_is_apart(checkout: Path) -> None:
    """The digest ignores code that no launch runs; calls of several ranks have one of their own."""
    before, of_ranks = digest(checkout), ranks_digest(checkout)
    edited(checkout / "cuflash" / "tuning" / "_space.py", "20_000", "30_000")
    edited(checkout / "cuflash" / "_host" / "forward.py", "acc += part", "acc -= part")
    assert ranks_digest(checkout) == of_ranks
    edited(checkout / "cuflash" / "distributed" / "_traffic.py", " + ", " - ")
    assert ranks_digest(checkout) != of_ranks
    assert digest(checkout) == before
    assert digest(checkout, apart=()) != digest(apart=())
