// What a warp does with its rows of the forward, for all kinds of products: scores, epilogue.
#pragma once

#include "portable/look_ups.cuh"
#include "portable/seen_columns.cuh"
#include "simt/recompute_rows.cuh"
#include "schedule/tiles.cuh"
#include "schedule/segments.cuh"

namespace cuflash {

// Replaces the products of one block of keys by logits, and by -inf for hidden pairs.
template <bool masked, int slices, int tiles, typename LookUps>
CUFLASH_DEVICE void apply_score(Real (&s_acc)[slices][tiles][4], const Score& score, int first_row,
                                int first_key, const LookUps& look_ups) {
  const int lane = ptx::thread_index() % 32;
  const int lane_row = first_row + fragment_row(0, 0, lane);
  const int lane_key = first_key + fragment_column(0, 0, lane);
  unrolled<slices, 2>([&](int s, int half) {
    const int q_idx = lane_row + 16 * s + 8 * half;
    const SeenColumns<masked, tiles> seen(score, q_idx, lane_key);
    const BiasOfPairs<tiles> bias = look_ups.bias(s, half);
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Real& value = s_acc[s][t][2 * half + i];
        const int kv_idx = lane_key + 8 * t + i;
        value = score.apply_held(seen.contains(t, i), value, bias, t, i, q_idx, kv_idx);
      }
    }
  });
}

template <bool masked, int slices, int tiles>
CUFLASH_DEVICE void apply_score(Real (&s_acc)[slices][tiles][4], const Score& score, int first_row,
                                int first_key) {
  apply_score<masked>(s_acc, score, first_row, first_key,
                      RowsWhenNeeded<tiles>(score, first_row, first_key));
}

// The tile of this thread block, computed again at each call.
struct Work {
  int first_row;
  BatchIndex entry;

  CUFLASH_DEVICE static Work of_thread_block(const ForwardParams& params) {
    const RowTile tile = RowTile::of_thread_block(params);
    const int owner = KeyPart::owner(params, tile.owner);
    return {tile.first_row, BatchIndex(params.batch, owner, tile.sequence)};
  }
};

// The keys that a tile's rows see, for all warps.
struct TileWalk {
  Work work;
  Score score;
  Range rows, keys;
  BlockRanges blocks;

  CUFLASH_DEVICE explicit TileWalk(const ForwardParams& params)
      : work(Work::of_thread_block(params)),
        score(params.score, work.entry, KeyPart::of_thread_block(params).keys),
        rows{work.first_row, work.first_row + Config::block_m},
        keys(score.kv_range(rows.begin, rows.end)),
        blocks(score.kv_blocks(rows.begin, rows.end)) {}
};

// Stores out and lse of the rows of warp `warp`. Rows that saw no key become +0 and
// lse_without_keys.
template <int slices, int out_tiles, typename Target = CallersRows>
CUFLASH_DEVICE void store_rows(const ForwardParams& params, int warp, WarpSoftmax<slices>& softmax,
                               const Real (&o_acc)[slices][out_tiles][4], const Work& work,
                               const Target to = {}) {
  const KeyPart part = KeyPart::of_thread_block(params);
  const Score score(params.score, work.entry, part.keys);
  const int first_q = score.seqlen.first_q;
  const auto out = to.pairs(params, work.entry, first_q);
  softmax.finish();
  uint32_t far_or_overflowed[slices], rows_to_recompute[slices];  // each row is stored once
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    bool marks[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real reference = softmax.reference(score, s, half);
      marks[half] = must_recompute(score, reference, softmax.row_sum[s][half]);
    }
    far_or_overflowed[s] = marked_rows(marks[0], marks[1]);
    rows_to_recompute[s] = non_finite_rows(o_acc[s]) | far_or_overflowed[s];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = work.first_row + warp * 16 * slices + fragment_row(s, 2 * half);
      if (q_idx >= score.seqlen.rows_q) continue;
      const int row = fragment_row(0, 2 * half);
      const bool exists = q_idx < score.seqlen.q;
      const bool hidden = !exists || softmax.row_sum[s][half] == 0;
      const RowEnd end = end_of_sum(score, work.entry, softmax.reference(score, s, half),
                                    softmax.row_sum[s][half]);
      const Real factor = kept_scale(params.score) * end.weight / end.sum / operand_unit;
      const Real unit = score.value_scale(work.entry);  // times factor it might be subnormal
#pragma unroll
      for (int t = 0; t < out_tiles; ++t) {
        if (exists && rows_to_recompute[s] >> row & 1) break;
        out.store_pair(q_idx, result_column(t), hidden ? 0 : o_acc[s][t][2 * half] * factor * unit,
                       hidden ? 0 : o_acc[s][t][2 * half + 1] * factor * unit);
      }
      if (exists && far_or_overflowed[s] >> row & 1) continue;
      if (first_own_column(Config::head_dim_v) == 0 && lane_index() % 4 == 0) {
        const Real lse = hidden ? score.lse_without_keys(work.entry, q_idx) : end.lse;
        to.store_lse(params, work.entry, first_q, q_idx, lse);
      }
    }
  }
  __syncwarp();  // recompute_out writes a row by all lanes
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    const int first_row = work.first_row + warp * 16 * slices + 16 * s;
    for_each_bit(rows_to_recompute[s], [&](int row) {
      if (first_row + row < score.seqlen.q) {
        recompute_out(params, work.entry, first_row + row, far_or_overflowed[s] >> row & 1, to);
      }
    });
  }
}

}  // namespace cuflash
