"""What does a new kernel need? A source, a module of the same name, and a line in the registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cuflash import Options
from cuflash._jit import source as jit_source
from cuflash._jit.compilation import compile_static, source_of
from cuflash._kernels import config as kernel_config
from cuflash._kernels import registry
from cuflash._problem.problem import Problem, describe
from cuflash._select.choose import choose
from cuflash._select.hardware import typical
from cuflash.tuning import _kernels
from support.forward_of_no_keys import ForwardOfNoKeysConfig

NAME = "forward_of_no_keys"
#: The folder of its source and module, as they would be in kernels_cu and cuflash/_kernels.
FOLDER = Path(__file__).with_name("support")


def problem_of(keys: int, columns: int = 64, dtype: type = np.float32) -> Problem:
    shapes = ((2, 10, 64), (2, keys, 64), (2, keys, columns))
    return describe(*(np.zeros(shape, dtype) for shape in shapes), Options())


@pytest.fixture(autouse=True)
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Add a kernel: a folder of sources with one more, and a registry with one more line."""
    cuda = tmp_path / "kernels_cu"
    cuda.mkdir()
    for path in jit_source.kernels_dir().iterdir():
        (cuda / path.name).symlink_to(path)
    (cuda / f"{NAME}.cu").symlink_to(FOLDER / f"{NAME}.cu")
    kernels = {NAME: ForwardOfNoKeysConfig, **registry.KERNELS}  # before the others
    monkeypatch.setattr(registry, "KERNELS", kernels)
    monkeypatch.setattr(jit_source, "kernels_dir", lambda: cuda)
    jit_source.flatten.cache_clear()
    yield cuda
    jit_source.flatten.cache_clear()


def kernel_of(problem: Problem, arch: str = "sm_80") -> kernel_config.KernelConfig:
    return choose(problem, typical(arch))[-1].config


def test_it_is_chosen_where_it_serves() -> None:
    assert kernel_of(problem_of(0)).kernel == NAME
    assert kernel_of(problem_of(0), "sm_90").kernel == NAME
    assert kernel_of(problem_of(5)).kernel == "forward_sm80"
    assert kernel_of(problem_of(0, dtype=np.float16)).kernel == "forward_sm80"


def test_its_table_gives_the_tile() -> None:
    assert [kernel_of(problem_of(0, n)).num_warps for n in (64, 200)] == [4, 2]
    config = kernel_of(problem_of(0))
    assert _kernels.tile_of(config) == {"block_m": 64, "block_n": 64, "num_warps": 4}
    with pytest.raises(ValueError, match="block_m = 70 must be a positive multiple of 16"):
        config.replace(block_m=70)
    assert _kernels.config_from_json(_kernels.config_as_json(config)) == config


def test_its_source_has_the_fields_as_members() -> None:
    text = source_of(kernel_of(problem_of(0)))
    assert "static constexpr int num_warps = 4;\nstatic constexpr" in text
    assert "cuflash_forward_of_no_keys" in text


@pytest.mark.nvrtc
def test_it_compiles() -> None:
    report = compile_static(kernel_of(problem_of(0)), "sm_80")
    assert (report.spill_bytes, report.warnings) == (0, ())
    assert report.cubin
