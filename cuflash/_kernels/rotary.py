"""``rotary.cu``: rotary embedding, which rotates rows of an array by their positions."""

from __future__ import annotations

from typing import Literal, NamedTuple

from cuflash._kernels.config import Dtype, KernelConfig
from cuflash._kernels.score_config import Integers

#: Which features are rotated as a pair: none, i and i + half, or 2 i and 2 i + 1.
Rotation = Literal["none", "halves", "neighbours"]


class Own(NamedTuple):
    dtype: Dtype
    rotation: Rotation
    positions: Integers  # dtype of the positions; "none": one position for all rows
    num_warps: int = 4  # each warp rotates one row


class RotaryConfig(KernelConfig):
    kernel = "rotary"
    params = "RotaryParams"
    computes = "turns"
    parts = {"own": Own}  # noqa: RUF012
