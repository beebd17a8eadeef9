// Barriers in shared memory that count arrivals and, for TMA, bytes. A phase ends when all expected
// arrivals and bytes are in. A wait names only the parity of its phase, so a waiter must not fall
// two phases behind.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
CUFLASH_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives if `mine`. This is a predicated instruction and no branch, so that it may stand where
// products are in flight.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_if(uint32_t barrier, bool mine) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(
          barrier),
      "r"(static_cast<int>(mine))
      : "memory");
}

// Arrives, and makes the phase expect `bytes` more bytes from TMA.
CUFLASH_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

CUFLASH_DEVICE void mbarrier_arrive_expect_if(uint32_t barrier, int bytes, bool mine) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %2, 0; "
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;}" ::"r"(barrier),
      "r"(bytes), "r"(static_cast<int>(mine))
      : "memory");
}

// Arrives, as one of the expected arrivals, once all cp.async copies of this thread are complete.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended. On a fresh barrier parity 1 counts as ended.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
CUFLASH_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace cuflash::ptx
