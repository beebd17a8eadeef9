// What the two thread blocks of a cluster share that compute one tile of keys
// (backward_pair_sm90.cu): the layout of shared memory, mbarriers, the tile, and the order of
// blocks of queries.
#pragma once

#include "ptx/cluster.cuh"
#include "sm90/dkv_parts.cuh"
#include "sm90/dkv_warpgroup.cuh"
#include "sm90/dq_writer.cuh"

namespace cuflash {

constexpr int tile_keys = 2 * Config::block_n;
// Each thread block has half of the columns of dq: whole panels and, if the number of panels is
// odd, half of the middle one.
constexpr int whole_panels = Config::head_dim / 128;
constexpr bool shares_middle = Config::head_dim % 128 != 0;
static_assert(Config::block_m == 64 && Config::block_n == 64,
              "one warpgroup computes all scores of a block");
static_assert(Config::head_dim % 64 == 0 && Config::head_dim_v % 64 == 0,
              "head sizes are whole panels");

// Does shared memory have room to stage dq of a block? If not, dq is added from registers.
constexpr bool stages_dq = Config::head_dim < 256;
static_assert(stages_dq || !shares_middle, "additions from registers need whole panels");

// Our staged columns of dq, in the layout of the sums: whole panels, then the middle one.
struct StagedDq {
  alignas(128) float sums[64 * Config::head_dim / 2];
  uint64_t full[writers], empty[writers];

  CUFLASH_DEVICE DqSlice<8>& whole(int panel, int slice) {
    return reinterpret_cast<DqSlice<8>*>(sums)[4 * panel + slice];
  }
  CUFLASH_DEVICE DqSlice<4>& middle(int slice) {
    return reinterpret_cast<DqSlice<4>*>(sums)[8 * whole_panels + slice];
  }
  CUFLASH_DEVICE void init_barriers() {
    for (int i = 0; i < writers; ++i) {
      init(full[i], 4);
      init(empty[i], 1);
    }
  }
};

// If registers add dq: passes the turn to them and back.
struct RegisterAddition {
  uint64_t may_add, added;
  bool is_first;  // is the tile the first to add, so that it stores? Written if there are segments

  CUFLASH_DEVICE void init_barriers() {
    init(may_add, 1);
    init(added, 4);
  }
};

struct SharedMemory : DkvSharedMemory {
  using DsTile = PanelTile<64, 64>;  // ds^T: rows are keys
  using OtherKTile = PanelTile<64, Config::head_dim / 2>;

  OtherKTile other_k;  // keys of the other thread block, only our columns of dq
  DsTile ds, other_ds;
  If<stages_dq, StagedDq, RegisterAddition> dq;
  uint64_t rows_raw[Config::num_stages];
  uint64_t ds_full, other_full, ds_empty;
  uint32_t rows_to_recompute[4];  // bit mask of the non-finite rows of dk of each warp
  int tile;                       // read from the first thread block: the tile of both
};

// Called by one thread, before any other thread uses an mbarrier.
CUFLASH_DEVICE void init_barriers(SharedMemory& smem) {
  for (int i = 0; i < Config::num_stages; ++i) {
    init(smem.full[i], 32);
    init(smem.empty[i], 4 * reader_arrivals + 3);
    init(smem.rows_raw[i], 1);
  }
  init(smem.keys_full, 32);
  init(smem.raw, 1);
  init(smem.ds_full, 4);
  init(smem.other_full, 1);
  init(smem.ds_empty, 3);
  smem.dq.init_barriers();
  ptx::fence_mbarrier_init();
}

// The first of the whole panels of k and dq that only this thread block multiplies and adds.
CUFLASH_DEVICE int first_whole_panel() {
  return ptx::cluster_rank() * (whole_panels + shares_middle);
}

CUFLASH_DEVICE uint32_t other_rank() { return ptx::cluster_rank() ^ 1; }

CUFLASH_DEVICE void arrive_at_other_if(uint64_t& barrier, bool mine) {
  ptx::mbarrier_arrive_in_cluster_if(
      ptx::shared_address_of(other_rank(), ptx::shared_address(&barrier)), mine);
}

// The tile of both thread blocks: `keys` are ours, `tile_key` is the first key of both.
struct Work {
  KeyTile keys;
  int tile_key;

  CUFLASH_DEVICE static Work at(const BackwardParams& params, int index) {
    const Tile tile = tile_of(params.grid, index);
    const Place place = place_of<tile_keys>(Packing::of_keys(params.score), tile.block);
    const int tile_key = place.block * tile_keys,
              first_key = tile_key + static_cast<int>(ptx::cluster_rank()) * Config::block_n;
    return {KeyTile::of(params, tile.owner, place.sequence, first_key), tile_key};
  }
  CUFLASH_DEVICE Range tile() const { return {tile_key, tile_key + tile_keys}; }
  // The number of the sum of dq to which the tile adds.
  CUFLASH_DEVICE int sum(const BackwardParams& params) const {
    return tile_key / tile_keys % params.dq_sums;
  }
  CUFLASH_DEVICE Turns<tile_keys> turns(const BackwardParams& params, const Score& score) const {
    return {score, tile_key / tile_keys, params.dq_sums};
  }
  CUFLASH_DEVICE int other_key() const {
    return tile_key + static_cast<int>(other_rank()) * Config::block_n;
  }
};

// Visits a block if the keys of either thread block may have a segment in common with its queries.
using PairWalk = LastRowsFirstOf<tile_keys>;

// Calls visit(score, entry_index, block, masked) for each block of queries, in the same order for
// all roles, and finish() after the blocks of an entry.
template <typename Visit, typename Finish>
CUFLASH_DEVICE void walk_blocks(const BackwardParams& params, const Work& work, Visit visit,
                                Finish finish) {
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    const Score score(params.score, work.keys.entry(params, index));
    const BlockRanges blocks =
        work.keys.own_blocks(score.q_blocks(work.tile().begin, work.tile().end), params);
    PairWalk walk(score, blocks, work.tile());
#pragma unroll 1
    for (int block = walk.first(); walk.in_range(block); block = walk.next(block)) {
      visit(score, index, block, walk.masked(block));
    }
    finish();
  }
}

}  // namespace cuflash
