"""``quantize.cu``: elements as 8-bit floats, with powers of two as scales."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._kernels.config import Dtype, KernelConfig

#: Supported elements of a row: with 8 to a lane, 4 lanes to a whole warp.
WIDTHS = (32, 64, 128, 256)
_LEAST_ROWS = 64  # fewest rows of a thread block
_STEPS = 8  # most rows of a lane
_LANE_COLUMNS = 8  # elements of a row that a lane has
_WARPS = 8


class Own(NamedTuple):
    dtype: Dtype  # of the elements that are read
    out_dtype: Dtype  # of the elements that are written
    head_dim: int  # elements of a row
    rotates: bool  # are rows multiplied by a random rotation?
    writes: bool  # is this the second pass, which writes by the maxima that the first found?
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
        """The largest magnitude of each warp, in the first pass."""
        return 0 if self.writes else 4 * self.num_warps


def block_rows(head_dim: int, rows: int) -> int:
    """``block_m`` where ``rows`` rows share a scale: with enough rows, ``_STEPS`` for each lane."""
    most = _STEPS * 32 * _WARPS * _LANE_COLUMNS // head_dim
    return most if rows >= most else _LEAST_ROWS
