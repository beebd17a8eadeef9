// Products of 16-bit operands. B lies in shared memory, A in shared memory (wgmma_ss) or in
// registers (wgmma_rs). They are macros because the shape and the numbers of all registers are part
// of the instruction's text.
//
// acc (64 x n, float32) = A (64 x 16) . B (16 x n) + acc, or without acc where `accumulate` is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
#pragma once

#include "ptx/wgmma.cuh"
#include "ptx/wgmma_registers.cuh"

namespace cuflash::ptx {

// clang-format off
#define CUFLASH_PTX_WGMMA_SS(columns, registers, at_a, at_b, at_p, at_a_major, at_b_major)        \
  template <Major a_major, Major b_major>                                                         \
  CUFLASH_DEVICE void wgmma_ss(float (&acc)[registers], uint64_t a, uint64_t b, int accumulate) { \
    asm volatile(                                                                                 \
        "{.reg .pred p; setp.ne.b32 p, %" #at_p ", 0; "                                           \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." CUFLASH_PTX_DTYPE "."             \
        CUFLASH_PTX_DTYPE " {" CUFLASH_PTX_NUMBERS_##registers "}, %" #at_a ", %" #at_b           \
        ", p, 1, 1, %" #at_a_major ", %" #at_b_major ";}"                                         \
        : CUFLASH_PTX_ACC_##registers                                                             \
        : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(a_major)),                        \
          "n"(static_cast<int>(b_major)));                                                        \
  }
#define CUFLASH_PTX_WGMMA_RS(columns, registers, a0, a1, a2, a3, at_b, at_p, at_b_major)       \
  template <Major b_major>                                                                     \
  CUFLASH_DEVICE void wgmma_rs(float (&acc)[registers], const uint32_t (&a)[4],                \
                               uint64_t b, int accumulate) {                                   \
    asm volatile(                                                                              \
        "{.reg .pred p; setp.ne.b32 p, %" #at_p ", 0; "                                        \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." CUFLASH_PTX_DTYPE "."          \
        CUFLASH_PTX_DTYPE " {" CUFLASH_PTX_NUMBERS_##registers "}, {%" #a0 ", %" #a1 ", %" #a2 \
        ", %" #a3 "}, %" #at_b ", p, 1, 1, %" #at_b_major ";}"                                 \
        : CUFLASH_PTX_ACC_##registers                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                 \
          "n"(static_cast<int>(b_major)));                                                     \
  }

// n is the number of columns of scores where keys stay in registers, and the padded head size for
// out, dk, dv and dq.
CUFLASH_PTX_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21, 22)
CUFLASH_PTX_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38)
CUFLASH_PTX_WGMMA_RS(80, 40, 40, 41, 42, 43, 44, 45, 46)
CUFLASH_PTX_WGMMA_RS(96, 48, 48, 49, 50, 51, 52, 53, 54)
CUFLASH_PTX_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70)
CUFLASH_PTX_WGMMA_RS(192, 96, 96, 97, 98, 99, 100, 101, 102)
CUFLASH_PTX_WGMMA_RS(256, 128, 128, 129, 130, 131, 132, 133, 134)

// n is the number of columns of scores: the block sizes of cuflash/_kernels/*_sm90.py.
CUFLASH_PTX_WGMMA_SS(32, 16, 16, 17, 18, 19, 20)
CUFLASH_PTX_WGMMA_SS(48, 24, 24, 25, 26, 27, 28)
CUFLASH_PTX_WGMMA_SS(64, 32, 32, 33, 34, 35, 36)
CUFLASH_PTX_WGMMA_SS(80, 40, 40, 41, 42, 43, 44)
CUFLASH_PTX_WGMMA_SS(96, 48, 48, 49, 50, 51, 52)
CUFLASH_PTX_WGMMA_SS(112, 56, 56, 57, 58, 59, 60)
CUFLASH_PTX_WGMMA_SS(128, 64, 64, 65, 66, 67, 68)

// n is the number of columns of dk and dq.
CUFLASH_PTX_WGMMA_SS(192, 96, 96, 97, 98, 99, 100)
CUFLASH_PTX_WGMMA_SS(256, 128, 128, 129, 130, 131, 132)
// clang-format on

}  // namespace cuflash::ptx
