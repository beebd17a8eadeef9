// Whose turn it is to add to the sums of each block of queries, after the number of tiles drawn.
#pragma once

#include "params.cuh"
#include "ptx/sync.cuh"

namespace cuflash {

struct DqSemaphore {
  uint32_t* of_entry;

  // `parts` of each block have turns of their own, next to each other.
  CUFLASH_DEVICE DqSemaphore(const BackwardSm90Params& params, int flat_entry, int parts = 1) {
    const int64_t blocks = (params.score.seqlen_q + Config::block_m - 1) / Config::block_m;
    of_entry = params.turns + 1 + flat_entry * blocks * parts;
  }

  CUFLASH_DEVICE void await(int place, uint32_t turn) const {
    while (ptx::load_acquire(of_entry + place) != turn) {
    }
  }

  CUFLASH_DEVICE void pass_on(int place, uint32_t turn) const {
    ptx::store_release(of_entry + place, turn + 1);
  }
};

}  // namespace cuflash
