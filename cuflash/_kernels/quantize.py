"""``quantize.cu``: elements as 8-bit floats, with powers of two as scales."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import Dtype, KernelConfig

#: Elements of a row: those of whole lanes, up to a warp.
WIDTHS = (32, 64, 128, 256)
_LEAST_ROWS = 64  # of a thread block
_STEPS = 8  # rows of a lane, at most
_LANE_COLUMNS = 8
_WARPS = 8


class Own(NamedTuple):
    dtype: Dtype
    out_dtype: Dtype
    head_dim: int
    rotates: bool
    writes: bool  # the second pass, by what the first found
    block_m: int  # rows of a thread block
    num_warps: int = _WARPS


class QuantizeConfig(KernelConfig):
    kernel = "quantize"
    params = "QuantizeParams"
    computes = "quantize"
    parts = {"own": Own}  # noqa: RUF012

    def check(self) -> None:
        if self.head_dim not in WIDTHS:
            raise ValueError(f"{self.head_dim=} must be one of {WIDTHS}")

    @property
    def smem_bytes(self) -> int:
        """The largest magnitude of each warp."""
        return 0 if self.writes else 4 * self.num_warps


def block_rows(head_dim: int, rows: int) -> int:
    """Rows of a thread block where so many have one scale: as many as a thread has loads for."""
    most = _STEPS * 32 * _WARPS * _LANE_COLUMNS // head_dim
    return most if rows >= most else _LEAST_ROWS
