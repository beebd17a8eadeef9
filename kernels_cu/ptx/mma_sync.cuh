// Warp-wide matrix instructions of sm_80: fragment loads and the products themselves.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

CUFLASH_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices of 16-bit elements. Lane 8 i + r passes the address of row r of matrix i.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
CUFLASH_DEVICE void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(smem));
}

CUFLASH_DEVICE void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(smem));
}

// acc (16x8, float32) += a (16x16) . b (16x8); b is the register pair (b0, b1).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
template <Dtype dtype>
CUFLASH_DEVICE void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                 uint32_t b1) {
  static_assert(dtype == Config::dtype, "CUFLASH_PTX_DTYPE is Config::dtype");
  asm("mma.sync.aligned.m16n8k16.row.col.f32." CUFLASH_PTX_DTYPE "." CUFLASH_PTX_DTYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same product in float16, whatever the dtype of the kernel.
CUFLASH_DEVICE void mma_m16n8k16_float16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc (16x8, float32) += a (16x8) . b (8x8) in TF32, float32 whose last 13 bits are ignored.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-1688
CUFLASH_DEVICE void mma_m16n8k8_tf32(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc (8x8, float64) += a (8x4) . b (4x8).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-884
CUFLASH_DEVICE void mma_m8n8k4_float64(double& acc0, double& acc1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(acc0), "+d"(acc1)
      : "d"(a), "d"(b));
}

// acc (16x8, float64) += a (16x16) . b (16x8), sm_90 and later. `b` points to four elements. (D50)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-f64
CUFLASH_DEVICE void mma_m16n8k16_float64(double (&acc)[4], const double (&a)[8], const double* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, "
      "{%0, %1, %2, %3};"
      : "+d"(acc[0]), "+d"(acc[1]), "+d"(acc[2]), "+d"(acc[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// Loads one element, or two neighbours, from shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
template <typename Value>
CUFLASH_DEVICE Value load_shared(uint32_t smem) {
  Value x;
  if constexpr (sizeof(Value) == 4) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem));
  } else {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(smem));
  }
  return x;
}

CUFLASH_DEVICE uint32_t load_shared_8(uint32_t smem) {
  uint16_t x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=h"(x) : "r"(smem));
  return x;
}

CUFLASH_DEVICE uint32_t load_shared_16(uint32_t smem) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(smem));
  return x;
}

CUFLASH_DEVICE float2 load_shared_pair(uint32_t smem) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(smem));
  return pair;
}

CUFLASH_DEVICE void load_shared(double& first, double& second, uint32_t smem) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(first), "=d"(second) : "r"(smem));
}

}  // namespace cuflash::ptx
