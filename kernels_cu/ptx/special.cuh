// Special registers.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// blockIdx.x and threadIdx.x, which every call reads again. Values derived from two calls are
// computed twice: they occupy no registers in between and are not moved out of a loop. (D85)
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

// The index of this thread block's cluster, the block's rank in it, and the number of its blocks.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-clusterid
CUFLASH_DEVICE int cluster_index() {
  int index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
CUFLASH_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
CUFLASH_DEVICE int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}

}  // namespace cuflash::ptx
