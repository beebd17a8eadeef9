"""What does Hopper's forward write to rows of no packed sequence? Run by a C++ compiler."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from cuflash import Options
from cuflash._kernels import params as kernel_params
from cuflash._kernels.forward_sm90 import ForwardSm90Config
from cuflash._kernels.request import Request
from cuflash._problem.packed import describe_packed

pytest.importorskip("cupy", reason="CuPy is not installed")

from support.host_device import COMPILER, SUPPORT, HostDevice

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class RowsOutsideSequencesConfig(ForwardSm90Config):
    """The one warp of Hopper's forward that writes these rows."""

    kernel = "rows_outside_sequences"

    @property
    def source(self) -> str:
        return str(SUPPORT / "rows_outside_sequences_probe.cu")


@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.float32])
def test_rows_of_no_sequence_are_zero(tmp_path: Path, dtype: Any) -> None:
    """Rows of no sequence are 0 in every column and dtype, and other rows stay unchanged."""
    device, ends = HostDevice(tmp_path), np.array([4, 4, 9, 16], np.int32)
    (config,) = RowsOutsideSequencesConfig.chosen(request_for(dtype, ends))
    device.compile(config, 0)
    ((_, run),) = device.kernels
    for head_dim in (8, 72, 256):
        out, lse = np.full((3, 21, head_dim), 7, dtype), np.full((3, 21), 7, np.float32)
        params = params_of(config, out, lse, ends)
        blocks, threads, cluster = ctypes.c_uint(2), ctypes.c_int(32), ctypes.c_uint(1)
        run(blocks, threads, cluster, ctypes.c_void_p(params.ctypes.data))
        owned = (np.arange(21) >= ends[0]) & (np.arange(21) < ends[-1])
        assert (out[:, owned] == 7).all()
        assert (lse[:, owned] == 7).all()
        assert (out[:, ~owned] == 0).all()
        assert np.isneginf(lse[:, ~owned]).all()


def request_for(dtype: Any, ends: np.ndarray) -> Request:
    """Return a request for Hopper's forward of packed sequences, with an out of ``dtype``."""
    q = np.zeros((3, 21, 64), np.float16 if dtype == np.float16 else bfloat16)
    both = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    out = np.zeros(q.shape, dtype)
    problem = describe_packed(q, q, q, Options(), both, axes=None, precision=None, out=out)
    assert not ForwardSm90Config.eligible(Request(problem)), "it serves them"
    return Request(problem)


def params_of(config: Any, out: np.ndarray, lse: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the parameters that the warp reads, for arrays (heads, rows, ...)."""
    struct = kernel_params.STRUCTS[config.params]
    room = np.zeros(struct.itemsize + kernel_params.MAP_ALIGNMENT, np.uint8)
    first = -room.ctypes.data % kernel_params.MAP_ALIGNMENT
    params = room[first:][: struct.itemsize].view(struct)
    for name, array in (("out", out), ("lse", lse)):
        heads, row = (step // array.itemsize for step in array.strides[:2])
        params[name] = array.ctypes.data
        params[f"{name}_layout"]["batch"]["axis"][0, 0] = heads
        params[f"{name}_layout"]["row"] = row
    params["batch"]["num_axes"] = 1
    params["grid"]["num_owners"] = len(out)
    params["head_dim_v"] = out.shape[-1]
    params["score"]["cu_seqlens_q"] = ends.ctypes.data
    params["score"]["num_sequences"] = len(ends) - 1
    params["score"]["seqlen_q"] = out.shape[1]
    return params
