// Which blocks of a tile are visited: all of its ranges but those that segments leave out.
//
// Bounds of the ids of every 64 queries and every 64 keys, made before the launch by
// segment_bounds.cu, say of a block that it has no id of the tile's, or that there is one id in
// both. They hold for ids in any order; few blocks lie between the two where equal ids are
// neighbours. Whoever walks the blocks of a tile comes to the same ones. (D11)
#pragma once

#include "score/score.cuh"

namespace cuflash {

// What a tile walks: the keys that its queries see, or the queries that see its keys.
enum class Walk { keys, queries };

template <Walk walk>
struct VisitedBlocks {
  static constexpr bool segmented = Score::has_segments;
  static constexpr int block_size = walk == Walk::keys ? Config::block_n : Config::block_m;
  static constexpr int chunk = 16;  // blocks that are judged at a time

  const Score& score;
  const BlockRanges& ranges;
  const Range tile;   // queries or keys of the thread block
  uint32_t bits = 0;  // of the chunk last asked for: which are visited; 16 higher, of one segment

  CUFLASH_DEVICE VisitedBlocks(const Score& score, const BlockRanges& ranges, Range tile)
      : score(score), ranges(ranges), tile(tile) {}

  // The first visited block from `block` on; the end of the ranges, or more, if there is none.
  CUFLASH_DEVICE int first_from(int block) {
    if (segmented && warp_agrees(block < ranges.end)) judge(block);
    return find_up(block);
  }

  // The visited block that follows `block`, the last that was asked for.
  CUFLASH_DEVICE int next_after(int block) {
    ++block;
    if (segmented && warp_agrees(block % chunk == 0 && block < ranges.end)) judge(block);
    return find_up(block);
  }

  // The last visited block down from `block`; less than the ranges' begin if there is none.
  CUFLASH_DEVICE int last_from(int block) {
    if (segmented && warp_agrees(block >= ranges.begin)) judge(block);
    return find_down(block);
  }

  // The visited block before `block`, the last that was asked for.
  CUFLASH_DEVICE int next_before(int block) {
    --block;
    if (segmented && warp_agrees(block % chunk == chunk - 1 && block >= ranges.begin)) judge(block);
    return find_down(block);
  }

  // Are all ids of `block`, the last that was asked for, and of the tile the same?
  CUFLASH_DEVICE bool of_one_segment(int block) const {
    return !segmented || (bits >> (chunk + block % chunk) & 1);
  }

  // Does somebody have to ask which of its pairs are visible?
  CUFLASH_DEVICE bool masked(int block) const {
    return ranges.masked(block) || !of_one_segment(block);
  }

 private:
  CUFLASH_DEVICE int find_up(int block) {
    if constexpr (segmented) {
#pragma unroll 1
      while (warp_agrees(block < ranges.end)) {
        const uint32_t rest = (bits & 0xffff) >> block % chunk;
        if (warp_agrees(rest != 0)) return block + __ffs(rest) - 1;
        block = (block / chunk + 1) * chunk;
        judge(block);
      }
    }
    return block;
  }

  CUFLASH_DEVICE int find_down(int block) {
    if constexpr (segmented) {
#pragma unroll 1
      while (warp_agrees(block >= ranges.begin)) {
        const uint32_t rest = bits << (31 - block % chunk);
        if (warp_agrees(rest != 0)) return block - __clz(rest);
        block = block / chunk * chunk - 1;
        judge(block);
      }
    }
    return block;
  }

  // Each lane judges one block of the chunk that `block` is in.
  CUFLASH_DEVICE void judge(int block) {
    block += lane_index() % chunk - block % chunk;
    const bool exists = block >= ranges.begin && block < ranges.end;
    const int begin = exists ? block * block_size : 0;
    const Range streamed{begin, begin + block_size};
    const auto ids = walk == Walk::keys ? score.key_bounds<block_size>(streamed)
                                        : score.query_bounds<block_size>(streamed);
    const auto own = walk == Walk::keys ? score.query_bounds<Config::block_m>(tile)
                                        : score.key_bounds<Config::block_n>(tile);
    const bool judged = lane_index() < chunk ? ids.meets(own) : ids.is_one_with(own);
    bits = __ballot_sync(0xffffffff, exists && judged);
  }
};

}  // namespace cuflash
