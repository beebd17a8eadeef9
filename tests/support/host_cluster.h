// A cluster on the host, and barriers of one phase that count bytes, for host_kernel.h.
#pragma once

#include "config.cuh"

namespace host {
struct CountedBytes {
  int32_t missing, bytes;
};
// An address in shared memory: that of the running block, or the rank of another in high bits.
constexpr int rank_shift = 20;
inline unsigned char* at(uint32_t address) {
  return smem_of(address >> rank_shift) + (address & ((1 << rank_shift) - 1));
}
}  // namespace host

namespace cuflash::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  reinterpret_cast<host::CountedBytes&>(smem_bytes[barrier]) = {arrivals, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  auto& counted = reinterpret_cast<host::CountedBytes&>(smem_bytes[barrier]);
  --counted.missing;
  counted.bytes += bytes;
}
// Hopper's forward calls it with a condition that is never true.
inline void mbarrier_arrive_if(uint32_t, bool) {}
inline void mbarrier_wait(uint32_t barrier, uint32_t) {
  const auto& counted = reinterpret_cast<host::CountedBytes&>(smem_bytes[barrier]);
  while (counted.missing != 0 || counted.bytes != 0) host::yield();
}

// Once in a kernel.
inline void cluster_arrive() { ++host::arrived_in_cluster; }
inline void cluster_wait() {
  while (host::arrived_in_cluster < host::cluster_blocks * host::num_threads) host::yield();
}
inline uint32_t shared_address_of(uint32_t rank, uint32_t smem) {
  return rank << host::rank_shift | smem;
}
template <typename... Numbers>
inline void send_in_cluster(uint32_t to, uint32_t barrier, Numbers... x) {
  ((std::memcpy(host::at(to), &x, sizeof x), to += sizeof x), ...);
  reinterpret_cast<host::CountedBytes*>(host::at(barrier))->bytes -= (sizeof x + ...);
}

}  // namespace cuflash::ptx
