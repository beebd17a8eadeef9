// The order in which a tile visits blocks of keys. Under slopes without bounds it goes from the
// diagonal to the last key, then from the diagonal back to the first: weights fall both ways, so
// that the reference of a row stays. Otherwise it goes from the last key to the first.
#pragma once

#include "schedule/segments.cuh"

namespace cuflash {

// Has the interface of VisitedBlocks.
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
