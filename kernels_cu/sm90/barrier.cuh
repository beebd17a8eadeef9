// mbarriers in shared memory, as a warp or a warpgroup uses them.
//
// A wait names only the parity of a phase, so a thread that fell two phases behind would wait for
// ever. Before a warp or a warpgroup lets a phase end by an arrival, all its threads must be past
// their own wait.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

CUFLASH_DEVICE void init(uint64_t& barrier, int arrivals) {
  ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
}

CUFLASH_DEVICE void wait(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
}

CUFLASH_DEVICE void arrive_if(uint64_t& barrier, bool mine) {
  ptx::mbarrier_arrive_if(ptx::shared_address(&barrier), mine);
}

// One arrival for the whole warp, after all its lanes have met and see each other's writes.
CUFLASH_DEVICE void arrive_as_warp(uint64_t& barrier) {
  __syncwarp();
  arrive_if(barrier, lane_index() == 0);
}

// Arrivals of a warp whose lanes have all read, or all written, the memory that the phase guards.
// The lanes meet, and one of them arrives for all. racecheck follows only a thread's own arrival,
// so under racecheck all lanes arrive. (D29)
constexpr int reader_arrivals = Config::under_racecheck ? 32 : 1;

CUFLASH_DEVICE void arrive_as_readers(uint64_t& barrier, bool mine) {
  __syncwarp();
  arrive_if(barrier, lane_index() < reader_arrivals && mine);
}

// Is this the thread that arrives for its warpgroup after a product? One arrival is enough, because
// a product is done only after all four warps have issued it.
CUFLASH_DEVICE bool leads_warpgroup() { return threadIdx.x % 128 == 0; }

}  // namespace cuflash
