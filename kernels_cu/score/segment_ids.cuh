// Bounds of the segment ids of neighbouring queries or keys, and which ids equal a row's own.
#pragma once

#include "params.cuh"
#include "score/ranges.cuh"

namespace cuflash {

// The least and the largest of some segment ids.
template <typename Id>
struct alignas(2 * sizeof(Id)) IdBounds {
  Id low, high;

  CUFLASH_DEVICE void add(const IdBounds& other) {
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
  // Can an id lie within both bounds?
  CUFLASH_DEVICE bool overlaps(const IdBounds& other) const {
    return low <= other.high && other.low <= high;
  }
  // Do both hold the same single id?
  CUFLASH_DEVICE bool is_same_single_id(const IdBounds& other) const {
    return low == high && other.low == low && other.high == low;
  }
};

template <int size, typename Id>
CUFLASH_DEVICE IdBounds<Id> bounds_within(const void* array, int64_t offset, Range range,
                                          int length) {
  constexpr bool even = size % bounded_ids == 0;
  constexpr int most = even ? size / bounded_ids : (size + bounded_ids - 2) / bounded_ids + 1;
  const int first = min(range.begin, length - 1) / bounded_ids;
  const int last = (min(range.end, length) - 1) / bounded_ids;
  const auto* bounds = static_cast<const IdBounds<Id>*>(array) + offset;
  IdBounds<Id> all = bounds[first];
#pragma unroll
  for (int i = 1; i < most; ++i) all.add(bounds[min(first + i, last)]);
  return all;
}

// Unrolled in part: registers would not hold the ids of a whole row beside its scores. (D91)
template <int tiles, typename Id>
CUFLASH_DEVICE ColumnBits same_ids(Id id, const Id* ids, Range valid) {
  uint32_t bits = 0;
#pragma unroll 4
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * t + i;
      if (valid.contains(column) && ids[column] == id) bits |= 1u << (2 * t + i);
    }
  }
  return {bits};
}

}  // namespace cuflash
