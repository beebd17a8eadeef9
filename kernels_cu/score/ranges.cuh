// Ranges of rows, keys and blocks, and the columns of a row that a lane holds.
#pragma once

#include "config.cuh"

namespace cuflash {

struct Range {
  int begin, end;

  CUFLASH_DEVICE bool contains(int i) const { return i >= begin && i < end; }
  CUFLASH_DEVICE Range relative_to(int i) const { return {begin - i, end - i}; }
};

// The keys that a Score is about: all keys, or one part where keys are split.
template <bool split>
struct PartOfKeys {
  CUFLASH_DEVICE explicit PartOfKeys(Range) {}
  CUFLASH_DEVICE Range part() const { return {0, 1 << 30}; }
};
template <>
struct PartOfKeys<true> {
  const Range keys;

  CUFLASH_DEVICE explicit PartOfKeys(Range part_of_keys) : keys(part_of_keys) {}
  CUFLASH_DEVICE Range part() const { return keys; }
};

// Blocks [begin, end) hold visible pairs. In blocks [full_begin, full_end) every pair is visible.
struct BlockRanges {
  int begin, full_begin, full_end, end;

  CUFLASH_DEVICE bool has_full() const { return full_begin < full_end; }

  CUFLASH_DEVICE bool masked(int block) const { return block < full_begin || block >= full_end; }
};

// A bit for each column that a lane holds of a row: bit 2 t + i for column i of tile t.
struct ColumnBits {
  uint32_t bits = 0xffffffff;

  // The bits of the columns within a range that is relative to the lane's first column.
  CUFLASH_DEVICE static ColumnBits within(const Range& columns) {
    return {before(columns.end) & ~before(columns.begin)};
  }

  CUFLASH_DEVICE bool contains(int t, int i) const { return bits >> (2 * t + i) & 1; }

 private:
  CUFLASH_DEVICE static uint32_t before(int end) {
    const int columns = max(end, 0), held = 2 * (columns / 8) + min(columns % 8, 2);
    return held < 32 ? (1u << held) - 1 : 0xffffffff;
  }
};

// Cuts ranges into blocks of `block` rows or keys. No block is full where pairs are looked up one
// by one (hides_pairs).
template <int block, bool hides_pairs>
CUFLASH_DEVICE BlockRanges block_ranges(Range seen, Range full) {
  const int begin = seen.begin / block;
  const int end = (seen.end + block - 1) / block;
  int full_begin = max(begin, (max(full.begin, 0) + block - 1) / block);
  int full_end = min(end, max(full.end, 0) / block);
  if (hides_pairs || full_begin >= full_end) full_begin = full_end = begin;
  return {begin, full_begin, full_end, end};
}

}  // namespace cuflash
