"""What is asked of a kernel? A problem, what the device has, and how arrays can be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuflash._problem.problem import Problem

#: Compute capabilities with tensor cores twice as fast in float64 as the other units, and the
#: first with the matrix products and asynchronous copies that the portable kernels are made of.
_FLOAT64_TENSOR_CORES = (80, 90)
_FIRST_WITH_PRODUCTS = 80
#: The device that the tiles of benchmarks/sweeps were measured on.
_MEASURED_ON = "NVIDIA H100 80GB HBM3"


class Request(NamedTuple):
    """Everything that the choice of a kernel and its tile depends on."""

    problem: Problem
    capability: int = 90  # of compute, 90 for sm_90
    smem_limit: int = 227 << 10  # bytes that one thread block may ask for
    num_sms: int = 132  # 0: as if every SM had rows enough
    copy_bytes: int = 16  # widest copy that strides and alignment of every operand allow
    deterministic: bool = True
    keys: frozenset[str] = frozenset()  # "k", "v": the gradients of keys and values wanted
    device: str = ""  # its name
    grad_dtype: np.dtype[Any] | None = None  # of gradients; None: that of q
    tensor_maps: bool = True  # can the driver encode them, as that of CUDA 12 does?
    look_up_bits: int = 0  # low four bits of the addresses of bias and mask, or-ed
    simt: bool = False  # do CUDA cores multiply: operands do not fit, or are float64?

    @property
    def measured(self) -> bool:
        """Whether rows of a table hold that were measured for one dtype on one device alone."""
        return self.device == _MEASURED_ON and self.problem.dtype.name == "bfloat16"


def needs_simt(problem: Problem, capability: int) -> bool:
    """Whether a device multiplies without tensor cores: before sm_80, and float64 on most."""
    of_float64 = problem.dtype == np.float64 and capability not in _FLOAT64_TENSOR_CORES
    return of_float64 or capability < _FIRST_WITH_PRODUCTS
