"""``quantize.cu``: elements as 8-bit floats, with powers of two as scales."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import Dtype, KernelConfig

#: Elements of a row: those of whole lanes, up to a warp.
WIDTHS = (32, 64, 128, 256)
#: Rows of a thread block, as in the source.
ROWS = 64


class Own(NamedTuple):
    dtype: Dtype
    out_dtype: Dtype
    head_dim: int
    rotates: bool
    writes: bool  # the second pass, by what the first found
    num_warps: int = 8


class QuantizeConfig(KernelConfig):
    kernel = "quantize"
    params = "QuantizeParams"
    computes = "quantize"
    parts = {"own": Own}  # noqa: RUF012

    def check(self) -> None:
        if self.head_dim not in WIDTHS:
            raise ValueError(f"{self.head_dim=} must be one of {WIDTHS}")
