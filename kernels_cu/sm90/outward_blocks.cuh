// In which order a tile visits blocks of keys: the last first; by slopes without bounds from the
// diagonal to the last key, and then from there back to the first. Weights fall both ways, so that
// the reference of a row stays.
#pragma once

#include "schedule/segments.cuh"

namespace cuflash {

// Asked like VisitedBlocks.
struct OutwardBlocks {
  const BlockRanges& ranges;
  int start;

  CUFLASH_DEVICE OutwardBlocks(const Score& score, const BlockRanges& ranges, Range rows)
      : ranges(ranges),
        start(min(max((score.near_offset + rows.begin) / Config::block_n, ranges.begin),
                  ranges.end - 1)) {}

  CUFLASH_DEVICE int last_from(int) const { return start; }
  CUFLASH_DEVICE int next_before(int block) const {
    if (block < start) return block - 1;
    return block + 1 < ranges.end ? block + 1 : start - 1;
  }
};

using KeyWalk = If<Score::goes_outwards, OutwardBlocks, VisitedBlocks<Walk::keys>>;

}  // namespace cuflash
