// The turn of each block of queries: the number of tiles that have added to its sums. Turns are
// stored behind the counter from which tiles are drawn.
#pragma once

#include "ptx/sync.cuh"
#include "schedule/segments.cuh"
#include "schedule/tiles.cuh"

namespace cuflash {

// The first tile of keys that a block of queries sees.
template <int tile_keys>
CUFLASH_DEVICE int first_tile(const Score& score, int block) {
  const int first_row = block * Config::block_m;
  const int first = score.kv_blocks(first_row, first_row + Config::block_m).begin;
  return first / (tile_keys / Config::block_n);
}

// Number of tiles of keys before tile `rank` that add to sum number `sum` of a block of queries.
// Tile t adds to number t % sums. Called by a whole warp where there are segments.
template <int tile_keys = Config::block_n>
CUFLASH_DEVICE int tiles_before(const Score& score, int block, int rank, int sum, int sums) {
  const int first = first_tile<tile_keys>(score, block);
  if constexpr (!Score::has_segments) {
    const int skipped = (sum + sums - first % sums) % sums;
    return max(rank - first - skipped + sums - 1, 0) / sums;
  }
  const Range rows{block * Config::block_m, (block + 1) * Config::block_m};
  const auto own = score.query_bounds<Config::block_m>(rows);
  int before = 0;
#pragma unroll 1
  for (int begin = first; warp_any(begin < rank); begin += 32) {
    const int tile = begin + lane_index(), key = min(tile, rank - 1) * tile_keys;
    const bool adds = score.key_bounds<tile_keys>({key, key + tile_keys}).overlaps(own);
    before += __popc(__ballot_sync(0xffffffff, tile < rank && adds && tile % sums == sum));
  }
  return before;
}

// A tile adds last to the blocks of queries before this one, of those that it sees: the blocks that
// do not see the next tile. Not called where there are segments.
CUFLASH_DEVICE int end_of_last_additions(const Score& score, Range keys) {
  const BlockRanges next = score.q_blocks(keys.end, keys.end + Config::block_n);
  return next.begin < next.end ? next.begin : 1 << 30;
}

// The turns of tile `rank`: how many tiles before it add to the same sum of a block of queries. A
// division for each block would delay the warps that add, and thereby all tiles after this one.
template <int tile_keys = Config::block_n>
struct Turns {
  // Without a left bound a block sees the first key, or none, and has the same turn as any other.
  static constexpr bool are_equal = Score::sees_from_first && !Score::has_segments;

  const Score& score;
  const int rank, sums;
  const int of_all;

  CUFLASH_DEVICE Turns(const Score& score, int rank, int sums)
      : score(score), rank(rank), sums(sums), of_all(are_equal ? rank / sums : 0) {}

  // Called by a whole warp where there are segments.
  CUFLASH_DEVICE int of(int block) const {
    if constexpr (are_equal) return of_all;
    if constexpr (Score::has_segments) {
      return tiles_before<tile_keys>(score, block, rank, rank % sums, sums);
    }
    return sums == 1 ? since_first(block) : since_first(block) / sums;
  }
  CUFLASH_DEVICE bool is_first(int block) const {
    static_assert(!Score::has_segments, "of() would have to count");
    return since_first(block) < sums;
  }

 private:
  CUFLASH_DEVICE int since_first(int block) const {
    return rank - first_tile<tile_keys>(score, block);
  }
};

struct DqSemaphore {
  uint32_t* of_entry;

  // Turns of sum number `sum` of the owner's `index`-th entry. Each block has `parts` neighbouring
  // turns, one for each of its parts.
  CUFLASH_DEVICE DqSemaphore(const BackwardSm90Params& params, const OwnedTile& work, int index,
                             int sum, int parts = 1) {
    const int64_t flat_entry =
        (work.owner * params.grid.entries_per_owner + index) * params.dq_sums + sum;
    const QueryBlocks blocks(params.score, work.sequence);
    of_entry = params.turns + 1 + (flat_entry * blocks.count + blocks.first) * parts;
  }

  CUFLASH_DEVICE void wait(int place, uint32_t turn) const {
    while (ptx::load_acquire(of_entry + place) != turn) {
    }
  }

  CUFLASH_DEVICE void release(int place, uint32_t turn) const {
    ptx::store_release(of_entry + place, turn + 1);
  }
};

// Waits for backward_delta.cu, which stores statistics of rows and clears turns. The kernel that
// adds up sums may start, and waits for this one. Called by all threads.
CUFLASH_DEVICE void wait_for_delta() {
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
}

// Do packed sequences overlap, since their ends decrease? Some tiles would then never be drawn, and
// others would wait for them for ever. Called by all threads.
CUFLASH_DEVICE bool sequences_overlap(const ScoreParams& params) {
  if constexpr (Config::cu_seqlens == Dtype::none) return false;
  const int first = ptx::thread_index();
  const Packing queries = Packing::of_queries(params), keys = Packing::of_keys(params);
  const bool found = queries.any_decreases(first, Config::num_threads) ||
                     keys.any_decreases(first, Config::num_threads);
  return __syncthreads_or(found);  // protects no memory: all threads return together
}

}  // namespace cuflash
