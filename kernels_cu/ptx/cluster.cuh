// Thread blocks that run at the same time, and reach each other's shared memory.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// All threads of the cluster meet; what each wrote before is visible to all.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
CUFLASH_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// The same in two steps, of which the first says nothing of what was written: with `.release` it
// would wait for global memory (MEMBAR.ALL.GPU).
CUFLASH_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
CUFLASH_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where `smem`, an address of this thread block, lies in that of this rank.
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

// `barrier` as shared_address_of gives it; predicated as mbarrier_arrive_if. Says what was read:
// `.release.cluster` would also wait for all that was written to global memory (MEMBAR.ALL.GPU).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_in_cluster_if(uint32_t barrier, bool mine) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; "
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(barrier),
      "r"(static_cast<int>(mine))
      : "memory");
}

// One number, or two neighbours, to another thread block, counted on its `barrier`; addresses as
// shared_address_of gives them.
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

// Bytes in one piece to another thread block, counted on its `barrier`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
CUFLASH_DEVICE void bulk_copy_in_cluster(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace cuflash::ptx
