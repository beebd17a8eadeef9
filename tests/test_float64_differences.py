"""Are gradients of the float64 kernels the derivatives of their own forward, to 1e-7?

They are compared with central differences along random directions, over several tiles of queries
and keys: on a GPU, and by the portable kernels that a C++ compiler runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cuflash
from support import derivatives
from support.problems import Call, make_call, run

BATCH, HEADS = 2, 2


def options_of(name: str, rows: int, keys: int) -> dict[str, Any]:
    """Return the options of a case, smooth in every array whose gradient is computed."""
    rng = np.random.default_rng(11)
    ids = tuple(np.sort(rng.integers(0, 3, (BATCH, 1, n)), -1) for n in (rows, keys))
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (40, 5), "offset": np.array([[-7], [12]])},
        "lengths": {"q_lengths": np.array([[rows], [3]]), "kv_lengths": np.array([[0], [keys]])},
        "scores": {
            "softcap": 3.0, "alibi_slopes": rng.uniform(0.01, 0.3, HEADS), "scale": -0.3,
            "sink": rng.standard_normal(HEADS), "bias": rng.standard_normal((HEADS, 1, keys)),
        },
        "mask": {"mask": rng.random((BATCH, 1, rows, keys)) < 0.7},
        "segments": {"segment_ids": ids, "causal": True},
        "dropout": {"dropout": 0.3, "seed": 2**40 + 3},
        "groups": {"enable_gqa": True, "causal": True},
    }[name]  # fmt: skip


NAMES = (
    "plain", "causal", "window", "lengths", "scores", "mask", "segments", "dropout", "groups",
)  # fmt: skip


def call_of(name: str, rows: int, keys: int, head_dim: int, head_dim_v: int) -> Call:
    options = options_of(name, rows, keys)
    heads_k = 1 if name == "groups" else HEADS
    call = make_call(
        "normal", 5, np.float64, (BATCH, HEADS, rows, head_dim), (BATCH, heads_k, keys, head_dim),
        (BATCH, heads_k, keys, head_dim_v), options=options,
    )  # fmt: skip
    dlse = np.random.default_rng(12).standard_normal(call.dout.shape[:-1])
    wrt = ("q", "k", "v", "scale", *({"bias", "alibi_slopes", "sink"} & set(options)))
    return call.but(dlse=dlse, wrt=wrt)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dims", [(20, 36), (64, 64), (128, 128)], ids=str)
def test_on_a_gpu(name: str, head_dims: tuple[int, int]) -> None:
    import cupy

    call = call_of(name, 150, 170, *head_dims)
    derivatives.check_gradients(call, lambda moved: attend(cupy, moved), run(cupy, call).gradients)


def attend(xp: ModuleType, call: Call) -> tuple[np.ndarray, np.ndarray]:
    result = run(xp, call, backward=False)
    return result.out, result.lse


def test_a_wrong_gradient_is_seen() -> None:
    call = call_of("causal", 9, 12, 5, 4)
    gradients = run(np, call).gradients
    derivatives.check_gradients(call, lambda moved: attend(np, moved), gradients)
    wrong = gradients | {"k": gradients["k"] * (1 + 1e-5)}
    with pytest.raises(AssertionError, match="dk"):
        derivatives.check_gradients(call, lambda moved: attend(np, moved), wrong)


@pytest.mark.full
@pytest.mark.parametrize("name", ["scores", pytest.param("groups", marks=pytest.mark.slow)])
def test_by_a_compiler(name: str, tmp_path: Any) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from test_kernels_on_the_host import results

    from support.host_device import COMPILER, host_device

    if COMPILER is None:
        pytest.skip("no C++ compiler")
    call = call_of(name, 40, 70, 20, 12)
    with host_device(tmp_path):

        def attend(moved: Call) -> tuple[np.ndarray, np.ndarray]:
            out, lse, _ = results(moved.but(wrt=()), cuflash.Options(**moved.options))
            return out, lse

        _, _, gradients = results(call, cuflash.Options(**call.options))
        derivatives.check_gradients(call, attend, gradients)
