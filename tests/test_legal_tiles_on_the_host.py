"""Do portable kernels compute the definition with tiles that no table has, too? On the host."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import tuning
from cuflash._select import choose
from cuflash.tuning import _kernels
from support.problems import make_call

pytest.importorskip("cupy", reason="CuPy is not installed")

from test_kernels_on_the_host import check

from support.host_device import COMPILER, host_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
ROWS, KEYS = 150, 170


def drawn(dtype: str, width: int, kernel: str, seed: int) -> dict[str, int]:
    """Return a legal tile with a number of warps that no table has."""
    work = tuning.Workload(2, 2, 2, ROWS, KEYS, width, width, dtype)
    found = tuning.space(work, kernel, arch="sm_90a", parameters={"num_warps": (1, 3, 5, 6)})
    return _kernels.tile_of(random.Random(seed).choice([c.config for c in found]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "width"), [("float16", 24), ("float32", 24), ("float64", 24), ("float32", 3)]
)
@pytest.mark.parametrize("seed", range(2))
def test_drawn_tiles_compute_the_definition(tmp_path, monkeypatch, dtype, width, seed):
    kind = "narrow" if width == 3 else "sm80"
    tiles = {
        name: drawn(dtype, width, name, seed)
        for name in (f"forward_{kind}", f"backward_dq_{kind}", f"backward_dkv_{kind}")
    }
    used = set()

    def overridden(chosen: Any, *_: Any) -> Any:
        name = chosen.kernel
        used.add(name)
        return _kernels.with_tile(chosen, tiles[name])

    monkeypatch.setattr(choose, "with_override", overridden)
    generator = np.random.default_rng(seed)
    mask = generator.random((ROWS, KEYS)) < 0.9
    ids = tuple(np.sort(generator.integers(0, 3, (2, 1, n))) for n in (ROWS, KEYS))
    options = {"mask": mask, "segment_ids": ids, "window": (100, None)}
    shapes = (2, 2, ROWS, width), *[(2, 2, KEYS, width)] * 2
    call = make_call("normal", seed, np.dtype(dtype), *shapes, options=options)
    with host_device(tmp_path):
        check(call, cuflash.Options(**options))
    assert used == set(tiles)
