// Special registers.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// blockIdx.x and threadIdx.x, read anew by every call: what is derived from two calls is computed
// twice and does not occupy registers in between, nor is it moved out of a loop. (D85)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-ctaid
CUFLASH_DEVICE int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-tid
CUFLASH_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace cuflash::ptx
