// Atomic additions in global memory that return nothing. (D25)
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Adds to four neighbours. Each of the four additions is atomic.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
CUFLASH_DEVICE void red_add(float (&to)[4], const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace cuflash::ptx
