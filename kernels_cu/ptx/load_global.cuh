// A load from global memory that must not become a branch, and a number hidden from the compiler.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Returns x, but hides its value from the compiler, which therefore cannot compute multiples of x
// before a loop and keep them in registers. (D87)
CUFLASH_DEVICE int64_t opaque_value(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
CUFLASH_DEVICE int opaque_value(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Returns *from if index < count, else 0 without reading memory. It is one predicated instruction,
// so that many such loads are in flight together. (D88)
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
