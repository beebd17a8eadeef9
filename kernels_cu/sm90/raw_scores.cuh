// Products q k^T of 16 rows once more, by one warp alone, from global memory.
#pragma once

#include "tile/load.cuh"

namespace cuflash {

struct RawScores {
  const RowSource queries, keys;  // of one entry
  int first_row, last_row;        // rows from last_row on are like that one

  CUFLASH_DEVICE RawScores(const ForwardParams& params, const BatchIndex& entry,
                           const Seqlen& seqlen, int warp_row)
      : queries(params.q, params.q_layout, entry, seqlen.first_q, params.head_dim),
        keys(params.k, params.k_layout, entry, seqlen.first_k, params.head_dim),
        first_row(warp_row),
        last_row(seqlen.q - 1) {}

  // Of eight keys, all of which exist.
  CUFLASH_DEVICE void of_keys(float (&acc)[4], int first_key) const {
    const int row = first_row + lane_index() / 4;
    const Element* upper = queries.data + min(row, last_row) * queries.row_stride;
    const Element* lower = queries.data + min(row + 8, last_row) * queries.row_stride;
    const Element* key = keys.data + (first_key + lane_index() / 4) * keys.row_stride;
    acc[0] = acc[1] = acc[2] = acc[3] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < Config::head_dim / 16; ++k) {
      const int column = 16 * k + 2 * (lane_index() % 4);
      const uint32_t a[4] = {pair(upper, column), pair(lower, column), pair(upper, column + 8),
                             pair(lower, column + 8)};
      ptx::mma_m16n8k16<Config::dtype>(acc, a, pair(key, column), pair(key, column + 8));
    }
  }

 private:
  // Two neighbouring elements of a row; zeros past its true width.
  CUFLASH_DEVICE uint32_t pair(const Element* row, int column) const {
    const uint32_t low = column < queries.num_columns ? row[column] : 0;
    const uint32_t high = column + 1 < queries.num_columns ? row[column + 1] : 0;
    return low | high << 16;
  }
};

}  // namespace cuflash
