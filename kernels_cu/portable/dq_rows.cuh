// What a warp does with its rows of dq, for all kinds of products: statistics, ds, epilogue.
#pragma once

#include "portable/look_ups.cuh"
#include "portable/seen_columns.cuh"
#include "simt/recompute_rows.cuh"
#include "schedule/tiles.cuh"
#include "schedule/segments.cuh"

namespace cuflash {

using Work = RowTile;

// The keys that a tile's rows see in the owner's `index`-th batch entry, for all warps.
struct TileWalk {
  Work work;
  BatchIndex entry;
  Score score;
  Range rows, keys;
  BlockRanges blocks;

  CUFLASH_DEVICE explicit TileWalk(const BackwardParams& params, int index = 0)
      : work(Work::of_thread_block(params)),
        entry(work.entry(params, index)),
        score(params.score, entry),
        rows{work.first_row, work.first_row + Config::block_m},
        keys(score.kv_range(rows.begin, rows.end)),
        blocks(score.kv_blocks(rows.begin, rows.end)) {}
};

// Reads the statistics of this lane's rows.
template <int slices>
CUFLASH_DEVICE void read_statistics(RowStatistics (&rows)[slices][2], const BackwardParams& params,
                                    const BatchIndex& entry, const Seqlen& seqlen, int first_row) {
  const RowStatistics* from = params.rows + entry * params.rows_layout.batch + seqlen.first_q;
  unrolled<slices, 2>([&](int s, int half) {
    const int q_idx = first_row + fragment_row(s, 2 * half);
    rows[s][half] = seqlen.statistics(from, q_idx);
  });
}

// Replaces s by ds.
template <bool masked, int slices, int tiles, typename LookUps>
CUFLASH_DEVICE void compute_ds(Real (&s_acc)[slices][tiles][4],
                               const Real (&dp_acc)[slices][tiles][4],
                               const RowStatistics (&rows)[slices][2], const Score& score,
                               int first_row, int first_key, const LookUps& look_ups) {
  const int lane = ptx::thread_index() % 32;
  const int lane_row = first_row + fragment_row(0, 0, lane);
  const int lane_key = first_key + fragment_column(0, 0, lane);
  const WarpPowers power;
  unrolled<slices, 2>([&](int s, int half) {
    const int q_idx = lane_row + 16 * s + 8 * half;
    const SeenColumns<masked, tiles> seen(score, q_idx, lane_key);
    const BiasOfPairs<tiles> bias = look_ups.bias(s, half);
    unrolled<tiles, 2>([&](int t, int i) {
      Real& value = s_acc[s][t][2 * half + i];
      const Real product = value;
      const int kv_idx = lane_key + 8 * t + i;
      const bool visible = seen.contains(t, i);
      const Real logit = score.apply_held(visible, product, bias, t, i, q_idx, kv_idx);
      const Real p = power(score.probability_exponent(logit, rows[s][half].lse));
      const Real ds = p * (dp_acc[s][t][2 * half + i] - rows[s][half].delta);
      value = ds * score.derivative_at(logit, product, q_idx, kv_idx);
      // A hidden pair's values may be NaN, and 0 * NaN is NaN.
      if ((masked || Config::holds_bias) && logit == -infinity()) value = 0;
    });
  });
}

template <bool masked, int slices, int tiles>
CUFLASH_DEVICE void compute_ds(Real (&s_acc)[slices][tiles][4],
                               const Real (&dp_acc)[slices][tiles][4],
                               const RowStatistics (&rows)[slices][2], const Score& score,
                               int first_row, int first_key) {
  const RowsWhenNeeded<tiles> look_ups(score, first_row, first_key);
  compute_ds<masked>(s_acc, dp_acc, rows, score, first_row, first_key, look_ups);
}

// Stores dq of the rows of warp `warp`. Non-finite rows are computed again.
template <int slices, int dq_tiles>
CUFLASH_DEVICE void store_rows(const BackwardParams& params, int warp,
                               const Real (&dq_acc)[slices][dq_tiles][4]) {
  const Work work = Work::of_thread_block(params);
  const BatchIndex entry = work.entry(params, 0);
  const Seqlen seqlen(params.score, entry);
  const RowTarget dq(params.dq, params.dq_layout, entry, seqlen.first_q, params.head_dim,
                     Config::head_dim);
  unrolled<slices, 2>([&](int s, int half) {
    const int q_idx = work.first_row + warp * 16 * slices + fragment_row(s, 2 * half);
    if (q_idx >= seqlen.rows_q) return;
#pragma unroll
    for (int t = 0; t < dq_tiles; ++t) {
      dq.store_pair(q_idx, fragment_column(t, 0), dq_acc[s][t][2 * half] * params.score.scale,
                    dq_acc[s][t][2 * half + 1] * params.score.scale);
    }
  });
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    const int first_row = work.first_row + warp * 16 * slices + 16 * s;
    for_each_bit(non_finite_rows(dq_acc[s]), [&](int row) {
      if (first_row + row < seqlen.rows_q) {
        recompute_dq(params, work.owner, work.sequence, first_row + row);
      }
    });
  }
}

}  // namespace cuflash
