// The tiles of keys that a thread block of backward_sm90.cu draws, as a warp receives them.
#pragma once

#include "sm90/dkv_producer.cuh"

namespace cuflash {

// One after the other, of the two that shared memory holds.
template <typename SharedMemory>
struct DrawnTiles {
  SharedMemory& smem;
  Ring<2> ring;

  // Negative: none is left.
  CUFLASH_DEVICE int receive() const {
    wait(smem.tile_full[ring.stage()], ring.full_parity());
    return index();
  }
  CUFLASH_DEVICE int index() const {
    int tile = 0;
    if (lane_index() == 0) tile = smem.tile[ring.stage()];
    return __shfl_sync(0xffffffff, tile, 0);
  }
  CUFLASH_DEVICE void release() {
    arrive_as_warp(smem.tile_empty[ring.stage()]);
    ring.advance();
  }
  CUFLASH_DEVICE uint32_t keys_parity() const { return ring.uses & 1; }
  // Asked for anew at each block: no register holds where a part begins. (D145)
  CUFLASH_DEVICE bool has(int block) const {
    if constexpr (!Config::split_rows) return true;
    return block >= *const_cast<const volatile int*>(&smem.first_block[ring.stage()]);
  }
};

}  // namespace cuflash
