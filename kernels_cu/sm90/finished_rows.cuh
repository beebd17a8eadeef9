// The end of a warpgroup's 64 rows: their sums become out and lse, or join an earlier result.
#pragma once

#include "sm90/softmax.cuh"
#include "sm90/store.cuh"

namespace cuflash {

struct FinishedRows {
  const ForwardSm90Params& params;
  SharedMemory& smem;
  const int warpgroup;  // index among the consumers
  SplitSoftmax& softmax;
  float (&o_acc)[1][o_tiles][4];

  // An earlier result is read in parts of a row. Up to 128 columns, registers hold both rows of a
  // lane, and they are read before their weights are known.
  static constexpr int pairs = o_tiles <= 16 ? o_tiles / 2 : o_tiles / 8;  // of tiles
  static constexpr bool reads_ahead = Config::joins && o_tiles / 2 == pairs;
  using EarlierPart = float4[pairs];

  // Writes out and lse of these 64 rows, or +0 and lse_without_keys for rows that saw no key.
  CUFLASH_DEVICE void write(const Work& work, const Score& score, int q_stage) {
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int tile_row = 64 * warpgroup + 16 * (thread / 32 % 4);
    const int warp_row = work.first_row + tile_row;
    const int num_rows = min(max(score.seqlen.q - warp_row, 0), 16);
    const uint32_t non_finite = non_finite_rows(o_acc[0]);
    EarlierPart earlier[2];
    if constexpr (reads_ahead) {
      unrolled<2>(
          [&](int half) { read_so_far(earlier[half], work, score, warp_row, 0, half, lane); });
    }
    softmax.finish();
    bool hidden[2], far_or_overflowed[2];
    float factor[2], before[2] = {};
    const float value_unit = kept_scale(params.score) * weight_unit * score.value_scale(work.entry);
    unrolled<2>([&](int half) {
      const float sum = softmax.row_sum[0][half];
      far_or_overflowed[half] = must_recompute(score, softmax.reference(score, 0, half), sum);
      hidden[half] = fragment_row(0, 2 * half, lane) >= num_rows || sum == 0.0f;  // or at least 1
      const RowEnd end = end_of_row(score, work.entry, softmax.row_max[0][half], sum);
      factor[half] = hidden[half] ? 0.0f : __fdividef(value_unit * end.weight, end.sum);
      if constexpr (Config::joins) {
        const int q_idx = warp_row + fragment_row(0, 2 * half, lane);
        const bool exists = q_idx < score.seqlen.rows_q;
        const Joined joined(exists ? *lse_of(work, score, q_idx) : -infinity(),
                            hidden[half] ? score.lse_without_keys(work.entry, q_idx) : end.lse);
        factor[half] *= joined.now;
        before[half] = joined.before;
      }
    });
    const uint32_t existing = (1u << num_rows) - 1;
    const uint32_t without_lse = marked_rows(far_or_overflowed[0], far_or_overflowed[1]) & existing;
    const uint32_t rows_to_recompute = non_finite & existing | without_lse;
    bool cleared[2] = {hidden[0], hidden[1]};
    if constexpr (Config::joins) {  // rows that are computed again keep the earlier result
      unrolled<2>([&](int half) {
        const bool again = rows_to_recompute >> fragment_row(0, 2 * half, lane) & 1;
        cleared[half] |= again;
        factor[half] = again ? 0.0f : factor[half];
        before[half] = again ? 1.0f : before[half];
      });
    }
    if (warp_any(non_finite != 0)) {  // 0 * NaN is not 0
      unrolled<o_tiles, 4>(
          [&](int t, int i) { o_acc[0][t][i] = cleared[i / 2] ? 0.0f : o_acc[0][t][i]; });
    }
    unrolled<o_tiles, 4>([&](int t, int i) {
      o_acc[0][t][i] = fmaf(o_acc[0][t][i], factor[i / 2], 0.0f);  // -1 * 0 alone is -0
    });
    if constexpr (reads_ahead) {
      unrolled<2>([&](int half) { add_so_far(earlier[half], before[half], 0, half, lane); });
    } else if constexpr (Config::joins) {
      unrolled<o_tiles / 2 / pairs, 2>([&](int part, int half) {
        // A branch, so that ptxas reads a part only after the part before it.
        if (warp_any(16 * pairs * part >= params.head_dim_v)) return;
        read_so_far(earlier[half], work, score, warp_row, part, half, lane);
        add_so_far(earlier[half], before[half], part, half, lane);
      });
    }
    if constexpr (stages_out) {
      // Only this warpgroup reads these rows of q, and it has finished with them.
      stage_rows(params, work, smem.q[q_stage], tile_row, o_acc, rows_to_recompute, without_lse);
      arrive_as_warp(smem.o_full[q_stage][warpgroup]);
    } else {
      store_rows(params, work.entry, score.seqlen, warp_row, o_acc, rows_to_recompute, without_lse);
    }
    // The first lane of a quad writes lse of the upper row, the second lane lse of the lower row.
    const int q_idx = warp_row + lane / 4 + 8 * (lane % 4);
    const bool lower = lane % 4 == 1;
    const RowEnd end =
        end_of_row(score, work.entry, lower ? softmax.row_max[0][1] : softmax.row_max[0][0],
                   lower ? softmax.row_sum[0][1] : softmax.row_sum[0][0]);
    const float value =
        (lower ? hidden[1] : hidden[0]) ? score.lse_without_keys(work.entry, q_idx) : end.lse;
    float* at = lse_of(work, score, q_idx);
    const bool is_own =
        lane % 4 < 2 && q_idx < score.seqlen.rows_q && (without_lse >> (q_idx - warp_row) & 1) == 0;
    if (params.lse != nullptr && is_own) *at = Config::joins ? Joined(*at, value).lse : value;
    __syncwarp();  // else the compiler takes the warp for diverged: see warp_any
  }

 private:
  // Reads a part of the upper (half 0) or the lower row of the earlier result in float32. Its rows
  // begin at multiples of 16 bytes. (D170)
  CUFLASH_DEVICE void read_so_far(EarlierPart& earlier, const Work& work, const Score& score,
                                  int warp_row, int part, int half, int lane) const {
    const int q_idx = warp_row + fragment_row(0, 2 * half, lane);
    const float* row = params.so_far + work.entry * params.so_far_layout.batch +
                       (score.seqlen.first_q + q_idx) * params.so_far_layout.row;
    unrolled<pairs>([&](int pair) {
      const int column = column_of_four(2 * (part * pairs + pair), lane);
      const bool exists = q_idx < score.seqlen.rows_q && column < params.head_dim_v;
      earlier[pair] = exists ? __ldcs(reinterpret_cast<const float4*>(row + column)) : float4{};
    });
  }

  // Adds `before` times that part.
  CUFLASH_DEVICE void add_so_far(const EarlierPart& earlier, float before, int part, int half,
                                 int lane) {
    unrolled<pairs>([&](int pair) {
      const float4 x = exchange_halves(earlier[pair], lane);
      const int t = 2 * (part * pairs + pair);
      float (&first)[4] = o_acc[0][t], (&second)[4] = o_acc[0][t + 1];
      first[2 * half] = fmaf(before, x.x, first[2 * half]);
      first[2 * half + 1] = fmaf(before, x.y, first[2 * half + 1]);
      second[2 * half] = fmaf(before, x.z, second[2 * half]);
      second[2 * half + 1] = fmaf(before, x.w, second[2 * half + 1]);
    });
  }

  CUFLASH_DEVICE float* lse_of(const Work& work, const Score& score, int q_idx) const {
    return params.lse + work.entry * params.lse_layout.batch +
           (score.seqlen.first_q + q_idx) * params.lse_layout.row +
           KeyPart::of_thread_block(params).index;
  }
};

}  // namespace cuflash
