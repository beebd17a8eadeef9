// TMA, the copy engine: boxes of a tensor between global and shared memory, each by one thread.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// The driver's CUtensorMap: opaque, encoded by the host.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
CUFLASH_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box that begins at (column, row, i2, i1, i0), where i is `batch`. `barrier` counts the
// bytes. Elements outside the tensor arrive as zeros.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
CUFLASH_DEVICE void tma_load(uint32_t smem, const TensorMap& map, uint32_t barrier, int column,
                             int row, const int (&batch)[3]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0])
      : "memory");
}

// Loads the box into the address `smem` of several thread blocks of the cluster: of rank r if bit r
// of `ranks` is set. In each of them `barrier` counts the bytes.
CUFLASH_DEVICE void tma_load_multicast(uint32_t smem, const TensorMap& map, uint32_t barrier,
                                       int column, int row, const int (&batch)[3], uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0]),
      "h"(ranks)
      : "memory");
}

// Stores a box. Elements outside the tensor are not written. The source may change after
// tma_store_wait_read.
CUFLASH_DEVICE void tma_store(const TensorMap& map, uint32_t smem, int column, int row,
                              const int (&batch)[3]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(&map),
      "r"(smem), "r"(column), "r"(row), "r"(batch[2]), "r"(batch[1]), "r"(batch[0])
      : "memory");
}

// Stores contiguous bytes. Size and addresses are multiples of 16. The source may change after
// tma_store_wait_read.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
CUFLASH_DEVICE void bulk_store(float* to, uint32_t smem, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem),
               "r"(bytes)
               : "memory");
}

// Loads contiguous bytes. Size and addresses are multiples of 16. `barrier` counts the bytes.
CUFLASH_DEVICE void bulk_load(uint32_t smem, const float* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Adds contiguous float32 elements. Each addition is atomic.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
CUFLASH_DEVICE void bulk_add(float* to, uint32_t smem, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(smem), "r"(bytes)
      : "memory");
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-commit-group
CUFLASH_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int pending = 0>
CUFLASH_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
CUFLASH_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace cuflash::ptx
