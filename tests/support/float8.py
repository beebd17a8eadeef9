"""How do tests make arrays of 8-bit floats, and which numbers are these?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cuflash._problem.float8 import E4M3, rows_of_blocks

BF16 = np.dtype(ml_dtypes.bfloat16)


def of_8_bits(shape: tuple[int, ...], seed: int, dtype: Any = E4M3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def powers_of_two(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32)


def dequantized(array: np.ndarray, scale: Any, dtype: Any = np.float64) -> np.ndarray:
    """Multiply by the scale row by row, as the definition says."""
    wide = array.astype(np.float64)
    if getattr(scale, "ndim", 0):
        rows = rows_of_blocks(array.shape[-2], scale.shape[-2])
        numbers = np.arange(array.shape[-2]) // rows if scale.shape[-2] > 1 else [0]
        scale = scale[..., numbers, :]
    return (wide * scale).astype(dtype)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def on_gpu(cupy: Any, value: Any) -> Any:
    """Copy to the GPU; arrays of 8-bit floats go as bytes, since CuPy takes none from the host."""
    if isinstance(value, tuple):
        return tuple(on_gpu(cupy, part) for part in value)
    if not hasattr(value, "strides"):
        return value
    return (
        cupy.asarray(value.view(np.uint8)).view(value.dtype)
        if value.itemsize == 1
        else (cupy.asarray(value))
    )


def on_host(array: Any) -> np.ndarray:
    return array.view(np.uint8).get().view(array.dtype)
