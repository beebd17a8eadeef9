// Loads and stores of global memory that is used once and need not stay in the caches.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Loads 16 bytes that the caches evict first, as they do with what store_once stores.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#cache-operators
CUFLASH_DEVICE uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

CUFLASH_DEVICE void store_once(void* to, uint4 x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

// Discards the contents of these 128 bytes: they are not written back to memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-discard
CUFLASH_DEVICE void discard_line(void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

}  // namespace cuflash::ptx
