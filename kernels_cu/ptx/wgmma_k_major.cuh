// Products of TF32 (float32 whose last 13 bits are ignored) and of e4m3. B^T lies in shared memory,
// and its summed index is contiguous. A lies there in the same layout, or in registers.
//
// acc (64 x n, float32) = A (64 x k) . B (k x n) + acc, or without acc where `accumulate` is 0. k
// elements take 32 bytes of a row.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "ptx/wgmma.cuh"
#include "ptx/wgmma_registers.cuh"

namespace cuflash::ptx {

// clang-format off
#define CUFLASH_PTX_WGMMA_K_SS(name, types, columns, registers, at_a, at_b, at_p)                \
  CUFLASH_DEVICE void name(float (&acc)[registers], uint64_t a, uint64_t b, int accumulate) {    \
    asm volatile(                                                                                \
        "{.reg .pred p; setp.ne.b32 p, %" #at_p ", 0; "                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns types " {"                                  \
        CUFLASH_PTX_NUMBERS_##registers "}, %" #at_a ", %" #at_b ", p, 1, 1;}"                   \
        : CUFLASH_PTX_ACC_##registers                                                            \
        : "l"(a), "l"(b), "r"(accumulate));                                                      \
  }
#define CUFLASH_PTX_WGMMA_K_RS(name, types, columns, registers, a0, a1, a2, a3, at_b, at_p)      \
  CUFLASH_DEVICE void name(float (&acc)[registers], const uint32_t (&a)[4], uint64_t b,          \
                           int accumulate) {                                                     \
    asm volatile(                                                                                \
        "{.reg .pred p; setp.ne.b32 p, %" #at_p ", 0; "                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns types " {"                                  \
        CUFLASH_PTX_NUMBERS_##registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b   \
        ", p, 1, 1;}"                                                                            \
        : CUFLASH_PTX_ACC_##registers                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                  \
  }

CUFLASH_PTX_WGMMA_K_SS(wgmma_tf32, "k8.f32.tf32.tf32", 64, 32, 32, 33, 34)
CUFLASH_PTX_WGMMA_K_RS(wgmma_tf32, "k8.f32.tf32.tf32", 32, 16, 16, 17, 18, 19, 20, 21)
CUFLASH_PTX_WGMMA_K_RS(wgmma_tf32, "k8.f32.tf32.tf32", 64, 32, 32, 33, 34, 35, 36, 37)

// n is the number of columns of scores (SS) or of out (RS).
CUFLASH_PTX_WGMMA_K_SS(wgmma_e4m3, "k32.f32.e4m3.e4m3", 64, 32, 32, 33, 34)
CUFLASH_PTX_WGMMA_K_SS(wgmma_e4m3, "k32.f32.e4m3.e4m3", 96, 48, 48, 49, 50)
CUFLASH_PTX_WGMMA_K_SS(wgmma_e4m3, "k32.f32.e4m3.e4m3", 128, 64, 64, 65, 66)
CUFLASH_PTX_WGMMA_K_RS(wgmma_e4m3, "k32.f32.e4m3.e4m3", 64, 32, 32, 33, 34, 35, 36, 37)
CUFLASH_PTX_WGMMA_K_RS(wgmma_e4m3, "k32.f32.e4m3.e4m3", 128, 64, 64, 65, 66, 67, 68, 69)
// clang-format on

}  // namespace cuflash::ptx
