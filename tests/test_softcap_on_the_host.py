"""Which lse does a block of equal products have under a softcap on Hopper? By a C++ compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._kernels import params as kernel_params
from cuflash._kernels.forward_sm90 import ForwardSm90Config
from cuflash._kernels.request import Request
from cuflash._problem.problem import describe

pytest.importorskip("cupy", reason="CuPy is not installed")

from cuflash._launch import score_params
from support.host_device import COMPILER, SUPPORT, HostDevice

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class SoftcapProbeConfig(ForwardSm90Config):
    """The softmax of one block of keys, by one warp."""

    kernel = "softcap_probe"

    @property
    def source(self) -> str:
        return str(SUPPORT / "softcap_probe.cu")


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
