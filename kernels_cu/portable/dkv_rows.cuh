// What a warp does with its keys' rows of dk and dv, for all kinds of products: p, ds, epilogue.
#pragma once

#include "portable/look_ups.cuh"
#include "simt/recompute_rows.cuh"
#include "schedule/tiles.cuh"
#include "schedule/segments.cuh"

namespace cuflash {

// The sums of a warp: its keys' rows of dk and dv. Unless both are wanted, one of them is a stub.
constexpr int dk_columns = Config::grad_k ? Config::head_dim / own_parts : 16;
constexpr int dv_columns = Config::grad_v ? Config::head_dim_v / own_parts : 16;

template <int slices>
struct Gradients {
  Real dk[slices][dk_columns / 8][4];
  Real dv[slices][dv_columns / 8][4];
};

using Work = KeyTile;

// The queries that see a tile's keys in the owner's `index`-th batch entry, for all warps.
struct TileWalk {
  Work work;
  BatchIndex entry;
  Score score;
  Range keys, rows;
  BlockRanges blocks;

  CUFLASH_DEVICE TileWalk(const BackwardParams& params, int index)
      : work(Work::of_thread_block(params)),
        entry(work.entry(params, index)),
        score(params.score, entry),
        keys{work.first_key, work.first_key + Config::block_n},
        rows(score.q_range(keys.begin, keys.end)),
        blocks(score.q_blocks(keys.begin, keys.end)) {}
};

// Starts the copy of a tile's keys and, if dk is computed, of its values.
template <typename Shared>
CUFLASH_DEVICE void load_keys(const BackwardParams& params, Shared& smem, const BatchIndex& entry,
                              int first_key) {
  const Seqlen seqlen(params.score, entry);
  const Range keys{0, seqlen.rows_k};
  const RowSource k(params.k, params.k_layout, entry, seqlen.first_k, params.head_dim);
  load_tile(smem.k, k, first_key, keys);
  if constexpr (Config::grad_k) {
    const RowSource v(params.v, params.v_layout, entry, seqlen.first_k, params.head_dim_v);
    load_tile(smem.v, v, first_key, keys);
  }
}

// The statistics of two neighbouring columns (queries), read at once.
struct alignas(16) TwoRows {
  Real first_lse, first_delta, second_lse, second_delta;
};

// Replaces s^T by p^T and dp^T by ds^T.
template <bool masked, int slices, int tiles, typename LookUps>
CUFLASH_DEVICE void compute_p_ds(Real (&s_acc)[slices][tiles][4], Real (&dp_acc)[slices][tiles][4],
                                 const RowStatistics* rows, const Score& score, int first_row,
                                 int first_key, const LookUps& look_ups) {
  const int lane = ptx::thread_index() % 32;
  const int lane_key = first_key + fragment_row(0, 0, lane);
  const int lane_row = first_row + fragment_column(0, 0, lane);
  const KeptBits<slices, tiles> kept(score, first_row, first_key);
  const Real scale = kept_scale(score.params);
  const WarpPowers power;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    ColumnBits unmasked[2];
    if constexpr (masked) look_ups.unmasked(unmasked, s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int kv_idx = lane_key + 16 * s + 8 * half;
      // Relative to this lane's first column, so that columns are compared as constants.
      const Range seeing = score.q_range(kv_idx, kv_idx + 1).relative_to(lane_row);
      const BiasOfPairs<tiles> bias = look_ups.bias(s, half);
      ColumnBits segment;
      if constexpr (masked) segment = score.segment_of_key<tiles>(kv_idx, lane_row, seeing);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        const TwoRows pair = *reinterpret_cast<const TwoRows*>(&rows[fragment_column(t, 0, lane)]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Real lse = i == 0 ? pair.first_lse : pair.second_lse;
          Real& value = s_acc[s][t][2 * half + i];
          const Real product = value;
          const int q_idx = lane_row + 8 * t + i;
          const bool visible =
              !masked || (seeing.contains(8 * t + i) && segment.contains(t, i) &&
                          unmasked[half].contains(t, i) && score.formula_shows(q_idx, kv_idx));
          const Real logit = score.apply_held(visible, product, bias, t, i, q_idx, kv_idx);
          value = power(score.probability_exponent(logit, lse));
          if constexpr (Config::grad_k) {
            const Real delta = i == 0 ? pair.first_delta : pair.second_delta;
            Real& ds = dp_acc[s][t][2 * half + i];
            const Real dp = kept.contains(s, t, 2 * half + i) ? ds * scale : 0;
            ds = value * (dp - delta) * score.derivative_at(logit, product, q_idx, kv_idx);
            // A hidden pair's values may be NaN, and 0 * NaN is NaN.
            if ((masked || Config::holds_bias) && logit == -infinity()) ds = 0;
          }
          if (!kept.contains(s, t, 2 * half + i)) value = 0;
        }
      }
    }
  }
}

template <bool masked, int slices, int tiles>
CUFLASH_DEVICE void compute_p_ds(Real (&s_acc)[slices][tiles][4], Real (&dp_acc)[slices][tiles][4],
                                 const RowStatistics* rows, const Score& score, int first_row,
                                 int first_key) {
  const KeysWhenNeeded<tiles> look_ups(score, first_row, first_key);
  compute_p_ds<masked>(s_acc, dp_acc, rows, score, first_row, first_key, look_ups);
}

// Stores one result of the keys of warp `warp`.
template <int slices, int tiles>
CUFLASH_DEVICE void store_rows(const RowTarget& target, int warp, int first_key, int num_keys,
                               Real factor, const Real (&acc)[slices][tiles][4]) {
  unrolled<slices, 2>([&](int s, int half) {
    const int kv_idx = first_key + warp * 16 * slices + fragment_row(s, 2 * half);
    if (kv_idx >= num_keys) return;
    unrolled<tiles>([&](int t) {
      target.store_pair(kv_idx, fragment_column(t, 0), acc[s][t][2 * half] * factor,
                        acc[s][t][2 * half + 1] * factor);
    });
  });
}

template <int slices>
CUFLASH_DEVICE void store_gradients(const BackwardParams& params, int warp,
                                    const Gradients<slices>& acc) {
  const Work work = Work::of_thread_block(params);
  const BatchIndex entry = work.entry(params, 0);
  const Seqlen seqlen(params.score, entry);
  const int first_k = seqlen.first_k, num_keys = seqlen.rows_k;
  if constexpr (Config::grad_k) {
    store_rows(
        RowTarget(params.dk, params.dk_layout, entry, first_k, params.head_dim, Config::head_dim),
        warp, work.first_key, num_keys, params.score.scale, acc.dk);
  }
  if constexpr (Config::grad_v) {
    store_rows(RowTarget(params.dv, params.dv_layout, entry, first_k, params.head_dim_v,
                         Config::head_dim_v),
               warp, work.first_key, num_keys, kept_scale(params.score), acc.dv);
  }
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    const int first_key = work.first_key + warp * 16 * slices + 16 * s;
    uint32_t rows = 0;
    if constexpr (Config::grad_k) rows |= non_finite_rows(acc.dk[s]);
    if constexpr (Config::grad_v) rows |= non_finite_rows(acc.dv[s]);
    for_each_bit(rows, [&](int row) {
      if (first_key + row < num_keys) {
        recompute_dkv(params, work.owner, work.sequence, first_key + row);
      }
    });
  }
}

}  // namespace cuflash
