// Products q k^T of 16 rows, computed again by one warp from global memory.
#pragma once

#include "sm90/logits.cuh"
#include "sm90/softmax.cuh"
#include "tile/pages.cuh"

namespace cuflash {

struct RawScores {
  const RowSource queries;  // queries of one entry
  const KeySource<Config::paged> keys;
  int first_row, last_row;  // rows behind last_row repeat it

  CUFLASH_DEVICE RawScores(const ForwardParams& params, const BatchIndex& entry,
                           const Seqlen& seqlen, int warp_row)
      : queries(params.q, params.q_layout, entry, seqlen.first_q, params.head_dim),
        keys(params, RowSource(params.k, params.k_layout, entry, seqlen.first_k, params.head_dim),
             entry, params.k_page),
        first_row(warp_row),
        last_row(seqlen.q - 1) {}

  // Products with eight keys, all of which exist.
  CUFLASH_DEVICE void of_keys(float (&acc)[4], int first_key) const {
    const int row = first_row + lane_index() / 4;
    const Element* upper = queries.data + min(row, last_row) * queries.row_stride;
    const Element* lower = queries.data + min(row + 8, last_row) * queries.row_stride;
    const Element* key = keys.row(first_key + lane_index() / 4);
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < Config::head_dim / 16; ++k) {
      const int column = 16 * k + 2 * (lane_index() % 4);
      const uint32_t a[4] = {pair(upper, column), pair(lower, column), pair(upper, column + 8),
                             pair(lower, column + 8)};
      const uint32_t b0 = pair(key, column), b1 = pair(key, column + 8);
      if constexpr (is_fp8) {
        ptx::mma_m16n8k16_float16(acc, a, b0, b1);
      } else {
        ptx::mma_m16n8k16<Config::dtype>(acc, a, b0, b1);
      }
    }
  }

 private:
  // Two neighbouring elements of a row (e4m3 as float16), with zeros past the true width.
  CUFLASH_DEVICE uint32_t pair(const Element* row, int column) const {
    const uint32_t low = column < queries.num_columns ? row[column] : 0;
    const uint32_t high = column + 1 < queries.num_columns ? row[column + 1] : 0;
    if constexpr (is_fp8) return ptx::e4m3_to_float16(low | high << 8);
    return low | high << 16;
  }
};

// Computes weights of a full block from scores that are multiplied again, for the rows of a warp
// that are `lost`. The weights of other rows keep their bits.
template <int tiles, int out_tiles>
CUFLASH_DEVICE void recompute_weights(float (&s_acc)[1][tiles][4], float (&o_acc)[1][out_tiles][4],
                                      SplitSoftmax& softmax, const bool (&lost)[2],
                                      const RawScores& raw, const Score& score, int first_row,
                                      int first_key) {
  const LaneIndices lane(first_row, first_key);
  const auto applied = [&](float product, int t, int i) {
    int q_idx = lane.row + 8 * (i / 2);
    const int kv_idx = lane.key + 8 * t + i % 2;
    if constexpr (Score::may_hide_rows) {  // only existing rows may be looked up
      q_idx = min(q_idx, score.seqlen.q - 1);
      if (!score.sees(q_idx, kv_idx)) return -infinity();
    }
    return score.apply(product, q_idx, kv_idx);
  };
  float s[4], maximum[2] = {-infinity(), -infinity()};
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    raw.of_keys(s, first_key + 8 * t);
    unrolled<4>([&](int i) { maximum[i / 2] = fmaxf(maximum[i / 2], applied(s[i], t, i)); });
  }
  unrolled<2>([&](int half) {
    maximum[half] = quad_max(maximum[half]);
    softmax.raise_reference(half, lost[half] ? maximum[half] : -infinity(), score);
    if (lost[half]) softmax.block_sum[half] = 0.0f;
  });
  softmax.rescale_rows(o_acc);
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    raw.of_keys(s, first_key + 8 * t);
    unrolled<4>([&](int i) {
      const float weight =
          ptx::exp2_approx(score.exponent(applied(s[i], t, i), softmax.shift[i / 2]));
      if (lost[i / 2]) softmax.block_sum[i / 2] += weight;
      unrolled<tiles>([&](int own) {
        float& value = s_acc[0][own][i];
        value = own == t && lost[i / 2] ? weight : value;
      });
    });
  }
}

}  // namespace cuflash
