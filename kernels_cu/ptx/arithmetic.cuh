// Conversions and approximate functions that C++ has no spelling for.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// 2^x, relative error 2^-22, one MUFU instruction; subnormal results are zero.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two float32 rounded to nearest even; `low` lands in the lower half, the lower address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// In each half all bits become its highest.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prmt
__device__ __forceinline__ uint32_t spread_high_bits(uint32_t x) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(spread) : "r"(x));
  return spread;
}

__device__ __forceinline__ float float16_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

}  // namespace cuflash::ptx
