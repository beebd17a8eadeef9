// How a thread adds values staged in shared memory to the sums of dq, in the turn of its tile:
// backward_sm90.cu, backward_pair_sm90.cu.
#pragma once

#include "ptx/tma.cuh"
#include "sm90/barrier.cuh"
#include "sm90/dq_semaphore.cuh"

namespace cuflash {

// Warps that alternate between blocks: one adds while the other waits until all can see its sums.
constexpr int writers = 2;

// Starts to add one piece of a block. The first tile stores, so that sums need not be zeroed
// before.
CUFLASH_DEVICE void start_adding(float* to, const float* staged, int bytes, bool is_first) {
  if (bytes != 0) {
    const uint32_t from = ptx::shared_address(staged);
    if (is_first) {
      ptx::bulk_store(to, from, bytes);
    } else {
      ptx::bulk_add(to, from, bytes);
    }
  }
  ptx::tma_store_commit();
}

// Waits for the turn of a tile, which is the number of tiles before it. Calls add(), which starts
// to add every piece of a block and says when shared memory may be overwritten. Passes the turn on
// once all can see the sums. Without an order the tiles wait only for the first one.
template <typename Add>
CUFLASH_DEVICE void add_in_turn(const DqSemaphore& semaphore, int place, int turn, Add add) {
  if (Config::deterministic || turn > 0) {
    semaphore.wait(place, Config::deterministic ? turn : 1);
    ptx::fence_async_proxy_global();
  }
  add();
  if (Config::deterministic || turn == 0) {
    ptx::tma_store_wait();
    ptx::fence_async_proxy_global();
    semaphore.release(place, turn);
  }
}

}  // namespace cuflash
