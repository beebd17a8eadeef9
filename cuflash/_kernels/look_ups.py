"""Can a mask or a bias be copied to shared memory? Hopper's kernels copy 16 bytes at a time."""

from __future__ import annotations

from cuflash._kernels.request import Request
from cuflash._problem.operand import Operand

_COPIED = 16  # bytes of one copy


def come_by_rows(operand: Operand | None, request: Request) -> bool:
    """Whether every row of an array is contiguous and begins at a multiple of 16 bytes."""
    if operand is None or request.look_up_bits % _COPIED:
        return False
    side_by_side = operand.strides[-1] == operand.dtype.itemsize
    return side_by_side and not any(stride % _COPIED for stride in operand.strides[:-1])


def bias_comes(request: Request) -> bool:
    """Whether rows of a bias also end at multiples of 16 bytes: kernels copy no part of 16."""
    bias = request.problem.bias
    return (
        bias is not None
        and bias.dtype.itemsize <= 4
        and bias.shape[-1] % 8 == 0
        and come_by_rows(bias, request)
    )
