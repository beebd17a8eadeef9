// How a thread adds what is staged in shared memory to the sums of dq, when it is its tile's turn:
// backward_sm90.cu, backward_pair_sm90.cu.
#pragma once

#include "ptx/tma.cuh"
#include "sm90/barrier.cuh"
#include "sm90/dq_semaphore.cuh"

namespace cuflash {

// Warps that take blocks in turns: one waits until all can see what it added while the other adds.
constexpr int writers = 2;

// Starts to add one piece of a block; the first tile stores, so that sums need no zeros before.
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

// Calls start(), which starts to add every piece of a block, when it is the turn of the tile that
// `turn` others come before; arrives at `read` once shared memory may be written again, and passes
// the turn on once all can see the sums. Without an order all wait for the first tile alone.
template <typename Start>
CUFLASH_DEVICE void add_in_turn(const DqSemaphore& turns, int place, int turn, uint64_t& read,
                                Start start) {
  if (Config::deterministic || turn > 0) {
    turns.await(place, Config::deterministic ? turn : 1);
    ptx::fence_async_proxy_global();
  }
  start();
  ptx::tma_store_wait_read();
  arrive_if(read, true);
  if (Config::deterministic || turn == 0) {
    ptx::tma_store_wait();
    ptx::fence_async_proxy_global();
    turns.pass_on(place, turn);
  }
}

}  // namespace cuflash
