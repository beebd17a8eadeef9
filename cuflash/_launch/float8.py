"""How do arrays on a GPU become arrays of 8-bit floats, and back? Element by element."""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from cuflash._arrays import Array, is_cupy, refuse_capture
from cuflash._jit.compilation import compile_kernel
from cuflash._kernels import params, quantize
from cuflash._launch.kernel_launcher import KernelLauncher
from cuflash._launch.one_pass import TYPES, by_neighbours, contiguous
from cuflash._problem.float8 import E4M3
from cuflash._select import hardware

_READ = ("float16", "bfloat16", "float32")
_LANE_BYTES = 16  # bytes that a lane reads at once
_FIRST_WITH_FLOAT8 = 89  # first compute capability with conversions to 8 bits

# CuPy does not compute with 8-bit floats: kernels see bytes. e4m3 has 4 bits of exponent, biased by
# 7, and 3 bits of mantissa; e5m2 has 5 bits, biased by 15, and 2.
_DECODE = """
    const bool e4m3 = {e4m3};
    const unsigned int rest = bits & 0x7fu, subnormal = e4m3 ? 8 : 4, infinite = e4m3 ? 0x7f : 0x7c;
    const unsigned int normal = (rest << (e4m3 ? 20 : 21)) + ((e4m3 ? 120u : 112u) << 23);
    float size = rest < subnormal ? rest * (e4m3 ? 0x1p-9f : 0x1p-16f) : __uint_as_float(normal);
    if (rest >= infinite) size = __uint_as_float(rest == 0x7c ? 0x7f800000 : 0x7fffffff);
    y = T((bits & 0x80u ? -size : size) * factor);
"""
# An element divided by its scale is exact. Where float32 truncates it, the last bit is set, so that
# ties are decided as by the exact number.
_ENCODE = """
    const bool e4m3 = {e4m3};
    const int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, dropped = 23 - mantissa;
    const float least = e4m3 ? 0x1p-6f : 0x1p-14f, most = e4m3 ? 448.0f : 57344.0f;
    const {real} scaled = {real}(x) / factor, size = scaled < 0 ? -scaled : scaled;
    const {real} inside = size < most ? size : {real}(most);
    const float cut = {to_float}(inside);
    const unsigned int bits = __float_as_uint(cut) | (unsigned int)({real}(cut) != inside);
    const unsigned int rounded = bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    const unsigned int normal = (rounded >> dropped) - ((127 - bias) << mantissa);
    const float steps = __uint_as_float(bits) / least * (1 << mantissa);
    const unsigned int code = cut < least ? (unsigned int)rintf(steps) : normal;
    const bool is_finite = scaled - scaled == 0;
    y = (signbit({real}(x)) ? 0x80u : 0u) | (is_finite ? code : 0x7fu);
"""


def element_body(name: str, *, e4m3: bool, wide: bool) -> str:
    """CUDA text that converts one element; ``wide``: to or from float64."""
    text = {"dequantize": _DECODE, "quantize": _ENCODE}[name]
    real, to_float = ("double", "__double2float_rz") if wide else ("float", "float")
    values = {"e4m3": str(e4m3).lower(), "real": real, "to_float": to_float}
    for word, value in values.items():
        text = text.replace(f"{{{word}}}", value)
    return text


def body_of_neighbours(count: int, *, e4m3: bool, wide: bool) -> str:
    """CUDA text of a thread that dequantises ``count`` neighbours; ``codes`` is the first."""
    return f"""
const auto from = reinterpret_cast<const Neighbours<unsigned char, {count}>&>(codes);
Neighbours<T, {count}> made;
#pragma unroll
for (int k = 0; k < {count}; ++k) {{
    const unsigned int bits = from.each[k];
    T& y = made.each[k];{element_body("dequantize", e4m3=e4m3, wide=wide)}}}
reinterpret_cast<Neighbours<T, {count}>&>(out) = made;
"""


@functools.cache
def _dequantizer(count: int, *, e4m3: bool, wide: bool) -> Any:
    inputs = f"float{64 if wide else 32} factor, uint8 codes"
    own = f"cuflash_dequantize_{'e4m3' if e4m3 else 'e5m2'}_by_{count}"
    text = body_of_neighbours(count, e4m3=e4m3, wide=wide)
    return cupy.ElementwiseKernel(inputs, "T out", text, own, preamble=TYPES)


@functools.cache
def _quantizer(*, e4m3: bool, wide: bool) -> Any:
    own = f"cuflash_quantize_{'e4m3' if e4m3 else 'e5m2'}"
    text = element_body("quantize", e4m3=e4m3, wide=wide)
    return cupy.ElementwiseKernel("T x, float32 factor", "uint8 y", text, own)


def dequantized(name: str, array: Array, factor: Any, out: Array) -> None:
    """Write elements times factors into ``out``, rounded once to its dtype.

    ``factor`` is a number, or an array with one number for each row or for more.
    """
    refuse_capture(name, "an array that needs no dequantized copy")
    wide = out.dtype == np.float64
    kernel = functools.partial(_dequantizer, e4m3=array.dtype == E4M3, wide=wide)
    real = np.float64 if wide else np.float32
    of_rows = factor.astype(real, copy=False) if is_cupy(factor) else real(factor)
    by_neighbours(kernel, array.view(np.uint8), out, of_rows=(of_rows,))


def rounded_in_two_passes(
    matrices: Array, rows: int, signs: Array | None, dtype: np.dtype[Any]
) -> tuple[Array, Array] | None:
    """Elements and scales by ``quantize.cu``; None where it does not support the call.

    ``matrices`` have shape batch + (m, d). ``rows`` rows share a scale; 0: all rows of a matrix.
    ``signs`` are the signs of a rotation, or None.
    """
    device, (*batch, m, d) = matrices.data.device_id, matrices.shape
    served = matrices.dtype.name in _READ and d in quantize.WIDTHS and matrices.size > 0
    if not served or hardware.of_device(device).capability < _FIRST_WITH_FLOAT8:
        return None
    x = contiguous(matrices)
    if x.data.ptr % _LANE_BYTES:
        x = x.copy()
    rows = rows if 0 < rows < m else m
    blocks = -(-m // rows)
    count = math.prod(batch) * blocks
    largest, scale = cupy.zeros(count, np.uint32), cupy.empty((*batch, blocks, 1), np.float32)
    out = cupy.empty(x.shape, np.uint8).view(dtype)
    filled = np.zeros(1, params.QUANTIZE)[0]
    if signs is not None:
        filled["signs"][: -(-d // 32)] = np.packbits(signs < 0, bitorder="little").view(np.uint32)
    filled["rows"], filled["rows_of_block"], filled["blocks"] = m, rows, blocks
    names = ("x", "largest", "scale", "out")
    block_m = quantize.block_rows(d, rows)
    own = {"dtype": x.dtype.name, "out_dtype": dtype.name, "head_dim": d, "block_m": block_m}
    for writes in (False, True):
        config = quantize.QuantizeConfig(**own, rotates=signs is not None, writes=writes)
        launcher = KernelLauncher(
            kernel=compile_kernel(config, device),
            grid=count * -(-rows // block_m),
            names=names,
            params=filled.tobytes()[8 * len(names) :],
        )
        pointers = tuple(array.data.ptr for array in (x, largest, scale, out))
        launcher.run(pointers, cupy.cuda.get_current_stream().ptr)
    return out, scale


def quantized(array: Array, factor: Array, dtype: np.dtype[Any]) -> Array:
    """Elements divided by factors, rounded to nearest even and saturated."""
    out = cupy.empty(array.shape, np.uint8)
    kernel = _quantizer(e4m3=dtype == E4M3, wide=array.dtype == np.float64)
    kernel(array, factor, out)
    return out.view(dtype)
