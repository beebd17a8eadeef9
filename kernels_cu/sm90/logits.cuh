// Raw products of a warpgroup's 64 rows become logits, what is invisible -inf.
#pragma once

#include "ptx/special.cuh"
#include "score.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// Which end of the visible keys may lie within a block. A mask may hide keys of any block but a
// full one: it leaves none.
enum class Edge { none, first, last, both };

// With two bounds, a word of bits for each row takes fewer instructions than comparisons: the
// compiler reads seven bits at a time.
constexpr bool bounds_as_bits = Score::masks_before_full;

// What a mask shows to the two rows of this lane, if it is alone.
struct ShownPairs {
  ColumnBits to_row[2];
};

// A mask's bytes are under way while scores are multiplied.
template <int tiles>
__device__ __forceinline__ ShownPairs shown_pairs(const Score& score, int first_row,
                                                  int first_key) {
  ShownPairs shown;
  if constexpr (Score::has_mask_alone) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int lane_row = first_row + 16 * (thread / 32 % 4) + fragment_row(0, 0, lane);
    score.shown_to_rows<tiles>(shown.to_row, lane_row, first_key + fragment_column(0, 0, lane));
  }
  return shown;
}

// Of the keys from `first_key` on and the rows from `first_row` on.
template <Edge edge, int tiles>
__device__ __forceinline__ void apply_score(float (&s_acc)[1][tiles][4], const Score& score,
                                            int first_row, int first_key, const ShownPairs& shown) {
  if constexpr (edge != Edge::none || !Config::scale_in_exponent) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int lane_row = first_row + 16 * (thread / 32 % 4) + fragment_row(0, 0, lane);
    const int lane_key = first_key + fragment_column(0, 0, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = lane_row + 8 * half;
      const Range keys = score.kv_range_from(lane_key, q_idx);
      ColumnBits seen;
      if constexpr (edge != Edge::none && Score::has_mask_alone) {
        seen = shown.to_row[half];
      } else if constexpr (edge != Edge::none) {
        seen = score.seen_of_row<tiles>(q_idx, lane_key, keys);
        if constexpr (bounds_as_bits) {
          static_assert(tiles <= 16, "a bit for each column of a row");
          const int first = edge == Edge::last ? 0 : keys.begin;
          const int end = edge == Edge::first ? 8 * tiles : keys.end;
          seen.bits &= ColumnBits::within({first, end}).bits;
        }
      }
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& value = s_acc[0][t][2 * half + i];
          const int kv_idx = lane_key + 8 * t + i;
          bool visible = true;
          if constexpr (edge != Edge::none && !bounds_as_bits && !Score::has_mask_alone) {
            visible = 8 * t + i < keys.end;
          }
          if constexpr (edge != Edge::none) {
            visible = visible && seen.contains(t, i) && score.formula_shows(q_idx, kv_idx);
          }
          value = visible ? score.apply(value, q_idx, kv_idx) : -infinity();
        }
      }
    }
  }
}

}  // namespace cuflash
