// Thread block clusters: barriers, and access to the shared memory of other thread blocks.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// A barrier of all threads of the cluster: writes before it are visible to all threads after it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
CUFLASH_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// The same barrier in two steps. This arrival publishes no writes: with `.release` it would wait
// for writes to global memory (MEMBAR.ALL.GPU).
CUFLASH_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
CUFLASH_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Maps `smem`, an address in this thread block's shared memory, to the same place in the shared
// memory of the thread block `rank`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
CUFLASH_DEVICE uint32_t shared_address_of(uint32_t rank, uint32_t smem) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

CUFLASH_DEVICE int load_shared_of_cluster(uint32_t from) {
  int value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

// Arrives at `barrier`, an address from shared_address_of, if `mine`: predicated like
// mbarrier_arrive_if. It only signals that something has been read. `.release.cluster` would also
// wait for all earlier writes to global memory (MEMBAR.ALL.GPU).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_in_cluster_if(uint32_t barrier, bool mine) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; "
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(barrier),
      "r"(static_cast<int>(mine))
      : "memory");
}

// Sends one number, or two neighbours, to the shared memory of another thread block, whose
// `barrier` counts the bytes. `to` and `barrier` are addresses from shared_address_of.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
CUFLASH_DEVICE void send_in_cluster(uint32_t to, uint32_t barrier, float x) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];" ::"r"(to),
      "r"(barrier), "f"(x)
      : "memory");
}
CUFLASH_DEVICE void send_in_cluster(uint32_t to, uint32_t barrier, double x) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %2, [%1];" ::"r"(to),
      "r"(barrier), "d"(x)
      : "memory");
}
CUFLASH_DEVICE void send_in_cluster(uint32_t to, uint32_t barrier, float x, float y) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(
          to),
      "r"(barrier), "f"(x), "f"(y)
      : "memory");
}
CUFLASH_DEVICE void send_in_cluster(uint32_t to, uint32_t barrier, double x, double y) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%2, %3}, [%1];" ::"r"(
          to),
      "r"(barrier), "d"(x), "d"(y)
      : "memory");
}

// Copies contiguous bytes to another thread block, whose `barrier` counts them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
CUFLASH_DEVICE void bulk_copy_in_cluster(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace cuflash::ptx
