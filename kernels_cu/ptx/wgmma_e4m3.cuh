// The products of e4m3 operands: B^T lies in shared memory, the summed index contiguous, A there or
// in registers.
//
// acc (64 x n, float32) = A (64 x 32) . B (32 x n) + acc, or without acc where `accumulate` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "ptx/wgmma.cuh"
#include "ptx/wgmma_registers.cuh"

namespace cuflash::ptx {

// clang-format off
#define CUFLASH_PTX_WGMMA_E4M3(columns, registers, r0, r1, r2, r3, r4, r5)                        \
  CUFLASH_DEVICE void wgmma_e4m3(float (&acc)[registers], uint64_t a, uint64_t b,                 \
                                 int accumulate) {                                                \
    asm volatile(                                                                                 \
        "{.reg .pred p; setp.ne.b32 p, %" #r2 ", 0; "                                             \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {"                        \
        CUFLASH_PTX_NUMBERS_##registers "}, %" #r0 ", %" #r1 ", p, 1, 1;}"                        \
        : CUFLASH_PTX_ACC_##registers                                                             \
        : "l"(a), "l"(b), "r"(accumulate));                                                       \
  }                                                                                               \
  CUFLASH_DEVICE void wgmma_e4m3(float (&acc)[registers], const uint32_t (&a)[4], uint64_t b,     \
                                 int accumulate) {                                                \
    asm volatile(                                                                                 \
        "{.reg .pred p; setp.ne.b32 p, %" #r5 ", 0; "                                             \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {"                        \
        CUFLASH_PTX_NUMBERS_##registers "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4      \
        ", p, 1, 1;}"                                                                             \
        : CUFLASH_PTX_ACC_##registers                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                   \
  }

CUFLASH_PTX_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21)
CUFLASH_PTX_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37)
CUFLASH_PTX_WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53)
CUFLASH_PTX_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69)
CUFLASH_PTX_WGMMA_E4M3(80, 40, 40, 41, 42, 43, 44, 45)
CUFLASH_PTX_WGMMA_E4M3(112, 56, 56, 57, 58, 59, 60, 61)
CUFLASH_PTX_WGMMA_E4M3(160, 80, 80, 81, 82, 83, 84, 85)
CUFLASH_PTX_WGMMA_E4M3(192, 96, 96, 97, 98, 99, 100, 101)
CUFLASH_PTX_WGMMA_E4M3(224, 112, 112, 113, 114, 115, 116, 117)
CUFLASH_PTX_WGMMA_E4M3(256, 128, 128, 129, 130, 131, 132, 133)
// clang-format on

}  // namespace cuflash::ptx
