"""What does the choice of a kernel depend on? The problem, the device, and the arrays' layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash._problem.problem import Problem

#: Compute capabilities with tensor cores that are twice as fast in float64 as CUDA cores.
_FLOAT64_TENSOR_CORES = (80, 90)
#: The first with the matrix products and asynchronous copies that the portable kernels use.
_FIRST_WITH_PRODUCTS = 80
#: The device on which the sweeps of benchmarks/sweeps measured tiles.
_MEASURED_ON = "NVIDIA H100 80GB HBM3"


class Request(NamedTuple):
    """Everything that the choice of a kernel and its tile depends on."""

    problem: Problem
    capability: int = 90  # compute capability, 90 for sm_90
    smem_limit: int = 227 << 10  # bytes of shared memory that one thread block may have
    num_sms: int = 132  # SMs of the device; 0: choose as if every SM had rows enough
    copy_bytes: int = 16  # bytes of the widest copy that all strides and alignments allow
    deterministic: bool = True  # must sums have a fixed order?
    keys: frozenset[str] = frozenset()  # "k" for dk, "v" for dv: the gradients that are wanted
    device: str = ""  # name of the device
    grad_dtype: np.dtype[Any] | None = None  # dtype of dq, dk and dv; None: the dtype of q
    tensor_maps: bool = True  # can the driver encode tensor maps (CUDA 12)?
    look_up_bits: int = 0  # low four bits of the addresses of bias and mask, or-ed
    clusters: bool = True  # may the thread blocks of a cluster share the keys of a tile?
    simt: bool = False  # must CUDA cores multiply: no tensor cores for the dtype, or no tile fits?

    @property
    def measured(self) -> bool:
        """Whether rows of a table apply that were measured only in bfloat16 on one device."""
        return self.device == _MEASURED_ON and self.problem.dtype.name == "bfloat16"


def needs_simt(problem: Problem, capability: int) -> bool:
    """Whether the device multiplies on CUDA cores: before sm_80, and float64 on most devices."""
    of_float64 = problem.dtype == np.float64 and capability not in _FLOAT64_TENSOR_CORES
    return of_float64 or capability < _FIRST_WITH_PRODUCTS
