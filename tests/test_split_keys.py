"""Do parts of the keys add up to the whole? Kernels run by a C++ compiler, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash._kernels import split_keys
from cuflash._problem.problem import describe
from support.budget import Budget
from support.problems import Call, make_call

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import run
from support.host_device import COMPILER, HostDevice, host_device, on_device, options_on_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def device(tmp_path: Any) -> Iterator[HostDevice]:
    with host_device(tmp_path) as found:
        yield found


def forward(call: Call, options: cuflash.Options) -> tuple[np.ndarray, np.ndarray]:
    options_on_device(options)
    q, k, v = (on_device(call.array(name)) for name in "qkv")
    problem = describe(q, k, v, options)
    out = on_device(np.full(problem.out_shape, np.nan, problem.dtype))
    lse = on_device(np.full(problem.lse_shape, np.nan, problem.lse_dtype))
    run.forward(problem, q, k, v, options, out, lse)
    return np.asarray(out), np.asarray(lse)


def arrays(rows: int, keys: int) -> dict[str, Any]:
    """Every option that reads arrays, formulas apart."""
    rng = np.random.default_rng(2)
    return {
        "causal": {"causal": True},
        "window": {"window": (100, 3), "offset": 300},
        "sink": {"sink": np.array([1.5, -2.0], np.float32)},
        "a sink alone": {
            "sink": np.array([1.5, -2.0], np.float32),
            "kv_lengths": np.array([[0], [keys]]),
        },
        "lengths": {"kv_lengths": np.array([[5], [keys - 7]]), "causal": True},
        "bias": {"bias": rng.standard_normal((rows, keys)).astype(np.float32)},
        "mask": {"mask": rng.random((2, 1, rows, keys)) < 0.01},
        "segments": {
            "segment_ids": (
                rng.integers(0, 3, (2, 1, rows)), np.sort(rng.integers(0, 3, (2, 1, keys))),
            )
        },
        "the rest": {
            "alibi_slopes": np.array([0.1, 0.02], np.float32), "softcap": 4.0, "dropout": 0.3,
            "seed": 3,
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(arrays(3, 700)))
def test_parts_are_within_the_budget(
    device: HostDevice, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arrays(3, 700)[kind]
    shapes = (2, 2, 3, 20), (2, 1, 700, 20), (2, 1, 700, 28)
    monkeypatch.setattr(split_keys, "wanted", lambda _: True)
    monkeypatch.setattr(split_keys, "parts_of", lambda *_: 5)
    call = make_call("normal", 1, np.dtype(np.float16), *shapes, options=given, wrt=())
    options = cuflash.Options(**given)
    found = forward(call, options)
    Budget(call).check_forward(*found)
    assert "cuflash_forward_combine" in device.launched
