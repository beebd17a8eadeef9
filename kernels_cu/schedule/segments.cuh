// Which blocks of a tile are visited: all blocks of its ranges except those that segments rule out.
//
// segment_bounds.cu stores the bounds (least and largest id) of every 64 queries and every 64 keys
// before the launch. The bounds of a block and of the tile can show that no id is in both, or that
// both hold the same single id, for ids in any order. Where equal ids are neighbours, few blocks
// are in neither case. All warps that walk the blocks of a tile visit the same blocks. (D11)
#pragma once

#include "score/score.cuh"

namespace cuflash {

// What a tile streams: the keys that its queries see, or the queries that see its keys.
enum class Walk { keys, queries };

template <Walk walk, int tile_size = walk == Walk::keys ? Config::block_m : Config::block_n>
struct VisitedBlocks {
  static constexpr bool segmented = Score::has_segments;
  static constexpr int block_size = walk == Walk::keys ? Config::block_n : Config::block_m;
  static constexpr int chunk = 16;  // blocks judged at a time

  const Score& score;
  const BlockRanges& ranges;
  const Range tile;  // queries or keys of the thread block
  // For the chunk judged last: bit i is set if block i is visited, bit 16 + i if it and the tile
  // hold the same single id.
  uint32_t bits = 0;

  CUFLASH_DEVICE VisitedBlocks(const Score& score, const BlockRanges& ranges, Range tile)
      : score(score), ranges(ranges), tile(tile) {}

  // The first visited block from `block` on, or ranges.end or more if there is none.
  CUFLASH_DEVICE int first_from(int block) {
    if (segmented && warp_any(block < ranges.end)) classify(block);
    return find_up(block);
  }

  // The next visited block after `block`, which the previous call returned.
  CUFLASH_DEVICE int next_after(int block) {
    ++block;
    if (segmented && warp_any(block % chunk == 0 && block < ranges.end)) classify(block);
    return find_up(block);
  }

  // The last visited block from `block` downwards, or less than ranges.begin if there is none.
  CUFLASH_DEVICE int last_from(int block) {
    if (segmented && warp_any(block >= ranges.begin)) classify(block);
    return find_down(block);
  }

  // The next visited block below `block`, which the previous call returned.
  CUFLASH_DEVICE int next_before(int block) {
    --block;
    if (segmented && warp_any(block % chunk == chunk - 1 && block >= ranges.begin)) classify(block);
    return find_down(block);
  }

  // Do the tile and `block`, which the previous call returned, hold the same single id?
  CUFLASH_DEVICE bool has_tile_segment(int block) const {
    return !segmented || (bits >> (chunk + block % chunk) & 1);
  }

  // Does the block need a mask: can some of its pairs be hidden?
  CUFLASH_DEVICE bool masked(int block) const {
    return ranges.masked(block) || !has_tile_segment(block);
  }

 private:
  CUFLASH_DEVICE int find_up(int block) {
    if constexpr (segmented) {
#pragma unroll 1
      while (warp_any(block < ranges.end)) {
        const uint32_t rest = (bits & 0xffff) >> block % chunk;
        if (warp_any(rest != 0)) return block + __ffs(rest) - 1;
        block = (block / chunk + 1) * chunk;
        classify(block);
      }
    }
    return block;
  }

  CUFLASH_DEVICE int find_down(int block) {
    if constexpr (segmented) {
#pragma unroll 1
      while (warp_any(block >= ranges.begin)) {
        const uint32_t rest = bits << (31 - block % chunk);
        if (warp_any(rest != 0)) return block - __clz(rest);
        block = block / chunk * chunk - 1;
        classify(block);
      }
    }
    return block;
  }

  // Classifies the blocks of the chunk that `block` is in. Lanes 0 to 15 ask for each block whether
  // it is visited, lanes 16 to 31 whether it and the tile hold the same single id.
  CUFLASH_DEVICE void classify(int block) {
    block += lane_index() % chunk - block % chunk;
    const bool exists = block >= ranges.begin && block < ranges.end;
    const int begin = exists ? block * block_size : 0;
    const Range streamed{begin, begin + block_size};
    const auto ids = walk == Walk::keys ? score.key_bounds<block_size>(streamed)
                                        : score.query_bounds<block_size>(streamed);
    const auto own = walk == Walk::keys ? score.query_bounds<tile_size>(tile)
                                        : score.key_bounds<tile_size>(tile);
    const bool judged = lane_index() < chunk ? ids.overlaps(own) : ids.is_same_single_id(own);
    bits = __ballot_sync(0xffffffff, exists && judged);
  }
};

}  // namespace cuflash
