// Conversions, approximate functions and bit operations that C++ has no spelling for.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// 2^x, relative error 2^-22, one MUFU instruction; subnormal results are zero.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
CUFLASH_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two numbers, or NaN if one of them is NaN.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-max
CUFLASH_DEVICE float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// Rounds float32 to 16 bits, to nearest even. In a pair `low` is the lower half, at the lower
// address. Before sm_80 the two numbers are rounded one by one.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
CUFLASH_DEVICE uint16_t float_to_float16(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

CUFLASH_DEVICE uint32_t pack_float16(float low, float high) {
  if constexpr (Config::simt) {
    return float_to_float16(low) | static_cast<uint32_t>(float_to_float16(high)) << 16;
  } else {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
}

CUFLASH_DEVICE uint32_t float_to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x == x ? bits + 0x7fff + (bits >> 16 & 1) >> 16 : 0x7fff;
}

CUFLASH_DEVICE uint32_t pack_bfloat16(float low, float high) {
  if constexpr (Config::simt) {
    return float_to_bfloat16(low) | float_to_bfloat16(high) << 16;
  } else {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
}

// Rounds four float32 to 8 bits, to nearest even. Numbers that are too large become the largest of
// the format. `x0` is at the lowest address.
#define CUFLASH_PTX_PACK_FLOAT8(dtype)                                              \
  CUFLASH_DEVICE uint32_t pack_##dtype(float x0, float x1, float x2, float x3) {    \
    uint32_t packed;                                                                \
    asm("{.reg .b16 low, high; cvt.rn.satfinite." #dtype                            \
        "x2.f32 low, %2, %1; "                                                      \
        "cvt.rn.satfinite." #dtype "x2.f32 high, %4, %3; mov.b32 %0, {low, high};}" \
        : "=r"(packed)                                                              \
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));                                      \
    return packed;                                                                  \
  }
CUFLASH_PTX_PACK_FLOAT8(e4m3)
CUFLASH_PTX_PACK_FLOAT8(e5m2)

// Converts two e4m3 numbers to float16, which holds them exactly.
CUFLASH_DEVICE uint32_t e4m3_to_float16(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return halves;
}

// Fills each 16-bit half with its highest bit.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prmt
CUFLASH_DEVICE uint32_t spread_high_bits(uint32_t x) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(spread) : "r"(x));
  return spread;
}

// The minimum of each 16-bit half, unsigned. With a sum it becomes one instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#integer-arithmetic-instructions-min
CUFLASH_DEVICE uint32_t min_of_halves(uint32_t x, uint32_t y) {
  uint32_t smallest;
  asm("min.u16x2 %0, %1, %2;" : "=r"(smallest) : "r"(x), "r"(y));
  return smallest;
}

// The sum of each 16-bit half, modulo 2^16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#integer-arithmetic-instructions-add
CUFLASH_DEVICE uint32_t sum_of_halves(uint32_t x, uint32_t y) {
  uint32_t sum;
  asm("add.s16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

// The maximum of each 16-bit half, signed. With a sum it becomes one instruction.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#integer-arithmetic-instructions-max
CUFLASH_DEVICE uint32_t signed_max_of_halves(uint32_t x, uint32_t y) {
  uint32_t largest;
  asm("max.s16x2 %0, %1, %2;" : "=r"(largest) : "r"(x), "r"(y));
  return largest;
}

// x & ~(y ^ z).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#logic-and-shift-instructions-lop3
CUFLASH_DEVICE uint32_t and_not_xor(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x90;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

CUFLASH_DEVICE float float16_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

}  // namespace cuflash::ptx
