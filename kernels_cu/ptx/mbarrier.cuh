// Barriers in shared memory that count arrivals and, for TMA, bytes. A phase ends when all arrivals
// and bytes are in; waiting is by the parity of the phase, so a waiter must not fall two phases
// behind.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
CUFLASH_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
CUFLASH_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives if `mine`: a predicated instruction, no branch, so that it may stand where products are
// in flight.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_if(uint32_t barrier, bool mine) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(
          barrier),
      "r"(static_cast<int>(mine))
      : "memory");
}

// Arrives and announces bytes that TMA will bring.
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

// Arrives when all copies that this thread has started are there: one of the expected arrivals.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
CUFLASH_DEVICE void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns once the phase of this parity is over; a fresh barrier counts as past its odd phase.
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
