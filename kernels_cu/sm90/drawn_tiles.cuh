// The tiles of keys that a thread block of backward_sm90.cu draws, as a warp receives them.
#pragma once

#include "sm90/dkv_producer.cuh"

namespace cuflash {

// Receives one tile after another. Shared memory holds two at a time.
template <typename SharedMemory>
struct DrawnTiles {
  SharedMemory& smem;
  Ring<2> ring;

  // Waits for the next tile. A negative index means that no tile is left.
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
  // Is the block in this tile's part? Where the part begins is read anew for each block, so that it
  // occupies no register. (D145)
  CUFLASH_DEVICE bool has_block(int block) const {
    if constexpr (!Config::split_rows) return true;
    return block >= *const_cast<const volatile int*>(&smem.first_block[ring.stage()]);
  }
};

}  // namespace cuflash
