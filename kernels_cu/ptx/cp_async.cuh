// Asynchronous copies from global to shared memory that bypass registers (cp.async). With
// Config::simt plain copies take their place.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Copies `bytes` bytes if `valid`. Otherwise it writes zeros and does not read the source.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
template <int bytes>
CUFLASH_DEVICE void cp_async(uint32_t smem, const void* source, bool valid) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  const int source_bytes = valid ? bytes : 0;
  if constexpr (Config::simt) {
    struct alignas(bytes) Copied {
      uint32_t word[bytes / 4];
    };
    *static_cast<Copied*>(__cvta_shared_to_generic(smem)) =
        valid ? *static_cast<const Copied*>(source) : Copied{};
  } else if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(source),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem), "l"(source),
                 "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

// Copies the first `existing` of 16 bytes and fills the others with zeros.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
CUFLASH_DEVICE void cp_async_some(uint32_t smem, const void* source, int existing) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(source),
               "r"(existing)
               : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-commit-group
CUFLASH_DEVICE void cp_async_commit() {
  if constexpr (!Config::simt) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are still in flight.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group
template <int pending>
CUFLASH_DEVICE void cp_async_wait() {
  if constexpr (!Config::simt) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
  }
}

}  // namespace cuflash::ptx
