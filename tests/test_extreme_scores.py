"""Which results do infinite products have under a softcap, and slopes beside a scale of 0?"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import Options
from cuflash._kernels import params as kernel_params
from cuflash._kernels.forward_sm90 import ForwardSm90Config
from cuflash._kernels.request import Request
from cuflash._problem.problem import describe

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import score_params
from support import memory
from support.host_device import COMPILER, SUPPORT, HostDevice

#: The elements of q and of k, and options.
CASES: dict[str, tuple[float, float, dict[str, Any]]] = {
    "products of -inf under a softcap": (1e20, -1e20, {"softcap": 100.0}),
    "slopes beside a scale of 0": (1, 1, {"scale": 0.0, "alibi_slopes": np.array([0, 0.5])}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_extreme_scores_have_the_results_of_numpy(name: str, causal: bool) -> None:
    import cupy

    q_element, k_element, options = CASES[name]
    q = np.full((1, 2, 200, 64), q_element, bfloat16)
    k = np.full((1, 2, 300, 64), k_element, bfloat16)
    v = np.random.default_rng(0).standard_normal(k.shape).astype(bfloat16)
    results = []
    for xp in (np, cupy):
        given = {
            key: memory.to_device(xp, value) if isinstance(value, np.ndarray) else value
            for key, value in options.items()
        }
        arrays = (memory.to_device(xp, array) for array in (q, k, v))
        results.append(cuflash.attention(*arrays, causal=causal, return_lse=True, **given))
    expected, found = results
    np.testing.assert_allclose(memory.to_numpy(found.lse), expected.lse, rtol=1e-5)
    out = memory.to_numpy(found.out).astype(np.float32)
    np.testing.assert_allclose(out, expected.out.astype(np.float32), atol=2**-6)


class SoftcapProbeConfig(ForwardSm90Config):
    """The softmax of one block of keys, by one warp."""

    kernel = "softcap_probe"

    @property
    def source(self) -> str:
        return str(SUPPORT / "softcap_probe.cu")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_product_of_minus_infinity_is_a_score(tmp_path: Path) -> None:
    """The softcap makes -cap of it. Only a row that sees no key has an lse of -inf."""
    cap, device = 100.0, HostDevice(tmp_path)
    q = np.zeros((1, 100, 64), bfloat16)
    problem = describe(q, q, q, Options(softcap=cap, causal=True))
    (config,) = SoftcapProbeConfig.chosen(Request(problem))
    device.compile(config, 0)
    ((_, run),) = device.kernels
    params = np.zeros(1, kernel_params.STRUCTS[config.params])
    score_params.fill(params[0]["score"], problem)
    cases = [(-np.inf, 0, -cap), (np.inf, 0, cap), (0.0, 0, 0.0), (-np.inf, 50, -np.inf)]
    for product, first_key, expected in cases:
        lse = np.array([product, first_key], np.float32)
        params["lse"] = lse.ctypes.data
        blocks, threads, cluster = ctypes.c_uint(1), ctypes.c_int(32), ctypes.c_uint(1)
        run(blocks, threads, cluster, ctypes.c_void_p(params.ctypes.data))
        assert lse[0] == pytest.approx(expected, rel=1e-6), (product, first_key)
