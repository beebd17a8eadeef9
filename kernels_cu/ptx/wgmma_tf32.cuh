// A lies in registers, B^T in shared memory, the summed index contiguous; both of TF32: float32
// whose last 13 bits are ignored.
//
// acc (64 x n, float32) = A (64 x 8) . B (8 x n) + acc, or without acc where `accumulate` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "ptx/wgmma_registers.cuh"

namespace cuflash::ptx {

// clang-format off
#define CUFLASH_PTX_WGMMA_TF32_RS(columns, registers, a0, a1, a2, a3, at_b, at_p)              \
  CUFLASH_DEVICE void wgmma_tf32(float (&acc)[registers], const uint32_t (&a)[4],              \
                                 uint64_t b, int accumulate) {                                 \
    asm volatile(                                                                              \
        "{.reg .pred p; setp.ne.b32 p, %" #at_p ", 0; "                                        \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k8.f32.tf32.tf32 {"                      \
        CUFLASH_PTX_NUMBERS_##registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b \
        ", p, 1, 1;}"                                                                          \
        : CUFLASH_PTX_ACC_##registers                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                \
  }

CUFLASH_PTX_WGMMA_TF32_RS(32, 16, 16, 17, 18, 19, 20, 21)
CUFLASH_PTX_WGMMA_TF32_RS(64, 32, 32, 33, 34, 35, 36, 37)

// The same with A also in shared memory.
CUFLASH_DEVICE void wgmma_tf32(float (&acc)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" CUFLASH_PTX_NUMBERS_32
      "}, %32, %33, p, 1, 1;}"
      : CUFLASH_PTX_ACC_32
      : "l"(a), "l"(b), "r"(accumulate));
}
// clang-format on

}  // namespace cuflash::ptx
