// Shared memory of backward_sm90.cu, and its barriers:
//
//   barrier      arrivals a phase   what the end of a phase means
//   ds_full      4 consumers        ds of a block is complete
//   ds_empty     1 (4 warps)        dq was multiplied (and dbias stored): stage the next ds
//   dq_full      4 (warps)          a part of dq is staged: add it to the sums
//   dq_empty     1                  the part was read: stage it for the next block; or the sums of
//                                   the tiles before have arrived
//   keys_empty   4 consumers + 4    k and v of the tile were read: load the next tile
//   tile_full    1                  the next tile is drawn
//   tile_empty   tile_readers       all warps have read the tile: draw the one after the next
//   others                          see sm90/dkv_producer.cuh
#pragma once

#include "sm90/dkv_warpgroup.cuh"
#include "sm90/dq_accum.cuh"
#include "sm90/dq_writer.cuh"
#include "sm90/key_look_ups.cuh"

namespace cuflash {

constexpr int tile_readers = 4 * consumers + 4 + looks_up;  // warps

// One addition of a tile to the sums of one block of queries.
struct Addition {
  DqAccum sums;
  DqSemaphore semaphore;
  int block;
  int turn;  // negative: the writer may end
};

// Does the warpgroup of dq add the sums of the tiles before to a block, and store dq?
struct Finish {
  bool wanted;
  int batch[3];  // if so, the coordinates of the batch entry in the tensor map of dq
};

struct SharedMemory : DkvSharedMemory {
  using DsTile = PanelTile<Config::block_n, Config::block_m>;

  DsTile ds[2];                                                // ds^T: rows are keys
  alignas(1024) float dq[Config::block_m * Config::head_dim];  // staged part by part
  If<looks_up, KeyLookUps, NoLookUps> look_ups;
  uint64_t ds_full[2], ds_empty[2];
  uint64_t dq_full[writers][DqAccum::parts], dq_empty[writers][DqAccum::parts];
  Addition addition[writers];
  Finish finish[writers];  // used where Config::finishes_dq
  uint64_t keys_empty;
  uint64_t tile_full[2], tile_empty[2];
  int tile[2];         // negative: no tile is left
  int first_block[2];  // first block of queries of the tile's part
};

static_assert(consumers == 2, "two consumer warpgroups ping-pong");
static_assert(!loads_mask || Score::hides_after_exponentials,
              "the mask in shared memory zeroes probabilities");

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  init_rings(smem);
  for (int i = 0; i < 2; ++i) {
    init(smem.ds_full[i], 4 * consumers);
    init(smem.ds_empty[i], Config::grad_bias ? 4 * reader_arrivals : 1);
  }
  for (int i = 0; i < writers; ++i) {
    for (int part = 0; part < DqAccum::parts; ++part) {
      init(smem.dq_full[i][part], 4);
      init(smem.dq_empty[i][part], 1);
    }
  }
  smem.look_ups.init_barriers();
  init(smem.keys_empty, 4 * consumers * reader_arrivals + 4);
  for (int i = 0; i < 2; ++i) {
    init(smem.tile_full[i], 1);
    init(smem.tile_empty[i], tile_readers);
  }
  ptx::fence_mbarrier_init();
}

using Tiles = DrawnTiles<SharedMemory>;

}  // namespace cuflash
