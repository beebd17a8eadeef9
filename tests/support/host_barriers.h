// Barriers in shared memory on the host, for threads of host_kernel.h: by parity, as PTX has them.
// Warp `late_warp` looks at a barrier `late_by` turns later than the others.
#pragma once

#include "config.cuh"

namespace host {
static int late_warp, late_by;
static bool stuck;  // did a thread wait for a phase that did not end?
constexpr int most_looks = 2000;

struct Barrier {
  uint16_t missing, arrivals;
  uint32_t phase;
};
static Barrier& barrier_at(uint32_t smem) {
  return *reinterpret_cast<Barrier*>(cuflash::smem_bytes + smem);
}
static Meeting named[16];
}  // namespace host

namespace cuflash::ptx {

inline void mbarrier_init(uint32_t at, int arrivals) {
  const uint16_t number = static_cast<uint16_t>(arrivals);
  host::barrier_at(at) = {number, number, 0};
}
inline void mbarrier_arrive_if(uint32_t at, bool mine) {
  host::Barrier& barrier = host::barrier_at(at);
  if (!mine || --barrier.missing > 0) return;
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
}
// While a phase of this parity is under way, which may be a later one than the caller means.
inline void mbarrier_wait(uint32_t at, uint32_t parity) {
  const bool late = host::current / 32 == host::late_warp;
  for (int i = 0; late && i < host::late_by; ++i) host::yield();
  for (int i = 0; host::barrier_at(at).phase % 2 == parity; ++i) {
    if (i == host::most_looks || host::stuck) {
      host::stuck = true;
      return;
    }
    host::yield();
  }
}
inline void fence_async_proxy() {}
inline void named_barrier_sync(int barrier, int threads) {
  host::meet(host::named[barrier], threads);
}

}  // namespace cuflash::ptx
