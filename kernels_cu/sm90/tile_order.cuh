// The tile of rows of each rank. Ranks begin with the heaviest tiles.
#pragma once

#include "simt/recompute_rows.cuh"

namespace cuflash {

constexpr bool is_packed = Config::cu_seqlens != Dtype::none;

// Without packing, tiles follow the order of the array, or the reverse if its last rows see most.
// Packed sequences are sorted in groups of 32 neighbours, most keys first. Each lane has one
// sequence, and knows how many tiles come before its own. Called by a whole warp.
struct TileOrder {
  int group_begin = 0, group_end = 0;  // ranks of the 32 current sequences
  int sequence, first_rank, num_tiles;

  // A negative sequence means that the rank has no rows: see Packing::first_rank.
  CUFLASH_DEVICE Place place_of(const ForwardParams& params, int rank) {
    if constexpr (!is_packed) {
      return {0, Score::last_rows_see_most ? params.grid.num_blocks - 1 - rank : rank};
    } else {
      if (warp_any(rank < group_begin || rank >= group_end)) sort_group_of(params.score, rank);
      const int own = rank - group_begin - first_rank;
      const uint32_t owner = __ballot_sync(0xffffffff, own >= 0 && own < num_tiles);
      const int block = Score::last_rows_see_most ? num_tiles - 1 - own : own;
      const int lane = owner == 0 ? 0 : __ffs(owner) - 1;
      const Place found{__shfl_sync(0xffffffff, sequence, lane),
                        __shfl_sync(0xffffffff, block, lane)};
      return owner == 0 ? Place{-1, 0} : found;
    }
  }

 private:
  CUFLASH_DEVICE void sort_group_of(const ScoreParams& params, int rank) {
    const Packing queries = Packing::of_queries(params), keys = Packing::of_keys(params);
    int low = 0, high = (queries.num_sequences - 1) / 32;
#pragma unroll 1
    while (warp_any(low < high)) {
      const int middle = (low + high + 1) / 2;
      if (warp_any(queries.first_rank<Config::block_m>(32 * middle) <= rank)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int next = 32 * low + 32;
    group_begin = queries.first_rank<Config::block_m>(32 * low);
    group_end = next < queries.num_sequences ? queries.first_rank<Config::block_m>(next) : 1 << 30;
    sequence = 32 * low + lane_index();
    const int counted = min(sequence, queries.num_sequences - 1);
    const int rows = sequence == counted ? queries.rows(counted) : 0;
    const int length = keys.rows(counted);
    num_tiles = (rows + Config::block_m - 1) / Config::block_m;
    first_rank = 0;
#pragma unroll 4
    for (int lane = 0; lane < 32; ++lane) {
      const int other = __shfl_sync(0xffffffff, length, lane);
      const int tiles = __shfl_sync(0xffffffff, num_tiles, lane);
      const bool sooner = other > length || (other == length && lane < lane_index());
      first_rank += sooner ? tiles : 0;
    }
  }
};

}  // namespace cuflash
