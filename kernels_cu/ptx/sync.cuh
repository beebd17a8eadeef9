// Named barriers, proxy fences, acquire and release, and registers that move between warpgroups.
#pragma once

#include "config.cuh"

namespace cuflash::ptx {

// Arrives at a named barrier and waits for `threads` threads, this warp's included. (D81)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
CUFLASH_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

CUFLASH_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// No instruction, but the compiler moves no access to memory across it.
CUFLASH_DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// Makes this thread's writes to shared memory visible to wgmma and TMA behind the next barrier.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
CUFLASH_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory and TMA, in both directions.
CUFLASH_DEVICE void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Once this load returns a value that another thread block stored by store_release, everything
// written before that store is visible, too.
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

// Sleeps for about `nanoseconds`, at most twice as long.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-nanosleep
template <int nanoseconds>
CUFLASH_DEVICE void pause() {
  asm volatile("nanosleep.u32 %0;" ::"n"(nanoseconds));
}

// Lowers or raises the number of registers of each thread to `count`, a multiple of 8 from 24 to
// 256. Every warp of a warpgroup executes it. (D84)
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
