// Warpgroup matrix instructions of sm_90a: synchronisation and descriptors. The products are in
// wgmma_products.cuh and wgmma_k_major.cuh.
//
// ptxas keeps products asynchronous only if it can see that none of their registers is touched
// while they are in flight. Hence this order: `pin` of all their registers, fence, products,
// commit, and `pin` of the same registers.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Which index of an operand is contiguous in shared memory: the summed one (k), or the row of A and
// the column of B (mn). The values are PTX's imm-trans-a and imm-trans-b.
enum class Major { k, mn };

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
CUFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
CUFLASH_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` groups of products are still in flight.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int pending>
CUFLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// An empty instruction that "rewrites" registers: uses of them cannot move across it.
template <int n>
CUFLASH_DEVICE void pin(float (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int n>
CUFLASH_DEVICE void pin(uint32_t (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Starts products that add to `sums`, as one group.
template <int n, typename Products>
CUFLASH_DEVICE void wgmma_group(float (&sums)[n], Products products) {
  pin(sums);
  wgmma_fence();
  products();
  wgmma_commit();
  pin(sums);
}

// The descriptor of a matrix in shared memory with the 128-byte swizzle. Its fields count units of
// 16 bytes: adding n to a descriptor moves it by 16 n bytes.
//   bits 0-13 address, 16-29 leading offset, 32-45 stride offset (the next 8 rows of a panel, 1024
//   bytes), 62-63 swizzle (1: 128 bytes)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
CUFLASH_DEVICE uint64_t smem_descriptor(uint32_t smem, uint32_t leading_bytes) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 |
         1ull << 62;
}

}  // namespace cuflash::ptx
