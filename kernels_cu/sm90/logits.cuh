// Logits from the raw products of a warpgroup's 64 rows. Invisible pairs become -inf.
#pragma once

#include "score/score.cuh"

namespace cuflash {

// Which ends of the visible keys may lie within a block. A mask may hide keys of any block, so with
// a mask no block is full.
enum class Edge { none, first, last, both };

// With two bounds, a word of bits for each row takes fewer instructions than comparisons: the
// compiler reads seven bits at a time.
constexpr bool bounds_as_bits = Score::masks_before_full;

// Indices of the first query and key of a lane's scores.
struct LaneIndices {
  int row, key;

  CUFLASH_DEVICE LaneIndices(int first_row, int first_key) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    row = first_row + 16 * (thread / 32 % 4) + fragment_row(0, 0, lane);
    key = first_key + fragment_column(0, 0, lane);
  }
};

// The columns of one row that lie within its bounds. `keys` counts from the lane's first key.
CUFLASH_DEVICE ColumnBits columns_within(Range keys, Edge edge, int columns) {
  const int first = edge == Edge::last ? 0 : keys.begin;
  const int end = edge == Edge::first ? columns : keys.end;
  return ColumnBits::within({first, end});
}

// The columns within bounds, for the two rows of this lane.
struct SeenColumns {
  ColumnBits of_row[2];

  SeenColumns() = default;

  CUFLASH_DEVICE SeenColumns(const Score& score, const LaneIndices& lane, Edge edge, int columns) {
    if (edge == Edge::none) return;
    unrolled<2>([&](int half) {
      const Range keys = score.kv_range_from(lane.key, lane.row + 8 * half);
      of_row[half] = columns_within(keys, edge, columns);
    });
  }
};

// Values of a mask (if it is the only such option) and of a bias for the two rows of this lane,
// loaded while scores are multiplied.
template <int tiles>
struct PrefetchedMaskBias {
  ColumnBits shown[2];
  Score::BiasOf<tiles> bias[2];

  PrefetchedMaskBias() = default;

  CUFLASH_DEVICE PrefetchedMaskBias(const Score& score, int first_row, int first_key) {
    const LaneIndices lane(first_row, first_key);
    if constexpr (Score::reads_mask_ahead) score.shown_to_rows<tiles>(shown, lane.row, lane.key);
    if constexpr (Score::reads_bias_ahead) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bias[half] = score.bias_of_row<tiles>(lane.row + 8 * half, lane.key);
      }
    }
  }
};

// Applies the score to pairs of rows from `first_row` on and keys from `first_key` on.
template <Edge edge, int tiles>
CUFLASH_DEVICE void apply_score(float (&s_acc)[1][tiles][4], const Score& score, int first_row,
                                int first_key, const PrefetchedMaskBias<tiles>& prefetched) {
  if constexpr (edge != Edge::none || !Config::scale_in_exponent) {
    const LaneIndices lane(first_row, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = lane.row + 8 * half;
      const Range keys = score.kv_range_from(lane.key, q_idx);
      const auto bias = Score::reads_bias_ahead ? prefetched.bias[half]
                                                : score.bias_of_row<tiles>(q_idx, lane.key);
      ColumnBits seen;
      if constexpr (edge != Edge::none && Score::reads_mask_ahead) {
        seen = prefetched.shown[half];  // bounds are already applied
      } else if constexpr (edge != Edge::none) {
        seen = score.seen_of_row<tiles>(q_idx, lane.key, keys);
        if constexpr (bounds_as_bits) {
          static_assert(tiles <= 16, "a 32-bit mask has one bit per column of a lane");
          seen.bits &= columns_within(keys, edge, 8 * tiles).bits;
        }
      }
      unrolled<tiles, 2>([&](int t, int i) {
        float& value = s_acc[0][t][2 * half + i];
        const int kv_idx = lane.key + 8 * t + i;
        bool visible = true;
        if constexpr (edge != Edge::none && !bounds_as_bits && !Score::reads_mask_ahead) {
          visible = 8 * t + i < keys.end;
        }
        if constexpr (edge != Edge::none) {
          visible = visible && seen.contains(t, i) && score.formula_shows(q_idx, kv_idx);
        }
        value = score.apply_if(visible, value, bias(t, i), q_idx, kv_idx);
      });
    }
  }
}

}  // namespace cuflash
