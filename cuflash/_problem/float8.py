"""Which 8-bit floats are there, and what do their scales mean?"""

from __future__ import annotations

from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

from cuflash._arrays import Array, array_module, rounded
from cuflash._errors import wrong_type, wrong_value
from cuflash._problem.operand import broadcastable

E4M3, E5M2 = np.dtype(float8_e4m3fn), np.dtype(float8_e5m2)
FLOAT8 = (E4M3, E5M2)
#: Result dtypes if all operands have 8 bits: the default, and the dtypes that ``out`` may have.
RESULT = np.dtype(bfloat16)
RESULTS = (np.dtype(np.float16), RESULT, np.dtype(np.float32))
#: The largest finite number of each dtype.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
#: The smallest positive number of each dtype.
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def rows_of_blocks(length: int, blocks: int) -> int:
    """Rows of a block: the smallest power of two with which the blocks cover ``length`` rows."""
    return 1 << max(-(-length // max(blocks, 1)) - 1, 0).bit_length()


def checked_scale(name: str, scale: Array, batch: tuple[int, ...], length: int) -> None:
    """Raise unless an array of factors fits matrices of ``length`` rows."""
    shape = scale.shape
    expected = f"a shape that broadcasts to {(*batch, 1, 1)}, or to {(*batch, 'blocks of rows', 1)}"
    if len(shape) < 2 or shape[-1] != 1 or not broadcastable(shape[:-2], batch):
        fix = f"one factor for each matrix has the shape {(*batch, 1, 1)}"
        if broadcastable(shape, batch):
            fix = f"write {name}[..., None, None]; " + fix
        raise wrong_value(name, f"shape {shape}", expected, fix)
    rows = rows_of_blocks(length, shape[-2])
    if shape[-2] != 1 and shape[-2] != -(-length // rows):
        got = f"{shape[-2]} blocks for {length} rows"
        fix = f"with {rows} rows in a block, {-(-length // rows)} blocks cover them"
        raise wrong_value(name, got, "blocks of a power of two of rows that cover them", fix)


def factor_of_rows(scale: Any, length: int) -> Any:
    """A factor that broadcasts against a matrix of ``length`` rows."""
    if not getattr(scale, "shape", ()) or scale.shape[-2] == 1:
        return scale
    blocks = scale.shape[-2]
    rows = rows_of_blocks(length, blocks)
    return array_module(scale).repeat(scale, rows, axis=-2)[..., :length, :]


@np.errstate(all="ignore")
def divided(array: Array, factor: Array, dtype: np.dtype[Any]) -> Array:
    """Elements divided by factors, rounded to nearest even and saturated; NaN unless finite."""
    wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
    scaled = wide / factor.astype(wide.dtype)
    clipped = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
    known = np.where(np.isfinite(scaled), clipped, np.nan).astype(wide.dtype)
    return np.asarray(rounded(known, dtype))


def result_dtype(dtypes: list[np.dtype[Any]], out: np.dtype[Any] | None) -> np.dtype[Any]:
    """The dtype to which 8-bit operands are dequantised: the other operands', or the result's."""
    others = [dtype for dtype in dtypes if dtype not in FLOAT8]
    if others:
        return max(others, key=lambda dtype: dtype.itemsize)
    if out is not None and out not in RESULTS:
        raise wrong_type("out", f"dtype {out}", "dtype float16, bfloat16 or float32")
    return RESULT if out is None else out
