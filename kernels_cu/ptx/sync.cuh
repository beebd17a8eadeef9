// Barriers by number, proxies, and registers that move between warpgroups.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Waits until `threads` threads have arrived at the barrier, these among them. (D81)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
CUFLASH_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUFLASH_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Shared memory that this thread wrote becomes visible to wgmma and TMA, after the next barrier.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
CUFLASH_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory and TMA, in both directions.
CUFLASH_DEVICE void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// What another thread block wrote before its store_release is visible after the load that
// returns its value.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
CUFLASH_DEVICE uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
CUFLASH_DEVICE void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Sleeps for about that many nanoseconds, at most twice as many.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-nanosleep
template <int nanoseconds>
CUFLASH_DEVICE void pause() {
  asm volatile("nanosleep.u32 %0;" ::"n"(nanoseconds));
}

// Every warp of a warpgroup executes it; `count` is per thread, a multiple of 8 from 24 to 256.
// (D84)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int count>
CUFLASH_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
CUFLASH_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

}  // namespace cuflash::ptx
