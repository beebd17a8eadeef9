// Loads from global memory that must not become branches.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// The same number, unknown to the compiler: it computes no multiples before a loop to keep them.
// (D87)
CUFLASH_DEVICE int64_t renewed(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// What lies at the address if index < count, or zero without reading it: a predicated instruction,
// so that many of them are in flight together. (D88)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
CUFLASH_DEVICE float load_global_below(const float* from, uint32_t index, uint32_t count) {
  float x;
  asm volatile(
      "{.reg .pred p; setp.lt.u32 p, %2, %3; mov.f32 %0, 0f00000000; @p ld.global.f32 %0, [%1];}"
      : "=f"(x)
      : "l"(from), "r"(index), "r"(count));
  return x;
}

}  // namespace cuflash::ptx
