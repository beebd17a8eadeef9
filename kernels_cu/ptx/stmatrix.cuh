// Stores of a warp's accumulator fragments to shared memory.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Stores four 8x8 matrices of 16-bit elements. Lane 8 i + r has the address of row r of matrix i.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
CUFLASH_DEVICE void stmatrix_x4(uint32_t smem, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace cuflash::ptx
