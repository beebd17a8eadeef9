// How the maximum and the sum of a row evolve over key blocks, and what they give at the end.
#pragma once

#include "score/softmax_float64.cuh"

namespace cuflash {

// What the sums of a row come to: out is weight / sum times the sum of its values.
struct RowEnd {
  Real weight, sum, lse;
};

// From the reference and the sum of exponentials of a row that saw some key.
CUFLASH_DEVICE RowEnd end_of_sum(const Score& score, const BatchIndex& entry, Real reference,
                                 Real sum) {
  if constexpr (!Score::has_sink) {
    return {1, sum, score.lse(reference, sum)};
  } else {
    const Real sink = score.sink_exponent(entry, reference);
    const Real larger = fmax(sink, Real(0));
    const Real weight = power_of_two(-larger);
    const Real added = power_of_two(sink - larger);
    const Real total = fma(sum, weight, added);
    // A sink far from 0 is not rounded again.
    const Real lse = sink < 0 ? score.lse(reference, total) : score.sink(entry) + log(total);
    return {weight, total, lse};
  }
}

// What results over two sets of keys are worth together, and the lse of both.
struct Joined {
  Real before, now, lse;

  CUFLASH_DEVICE Joined(Real lse_before, Real lse_now) {
    const Real larger = fmax(lse_before, lse_now);
    const Real shift = larger == -infinity() ? 0 : larger;
    before = power_of_two((lse_before - shift) * log2_e);
    now = power_of_two((lse_now - shift) * log2_e);
    const Real sum = before + now;
    lse = shift + log(sum);
    before = sum == 0 ? 0 : before / sum;
    now = sum == 0 ? 0 : now / sum;
  }
};

// The same from its maximum.
CUFLASH_DEVICE RowEnd end_of_row(const Score& score, const BatchIndex& entry, Real maximum,
                                 Real sum) {
  return end_of_sum(score, entry, score.reference(maximum), sum);
}

// Are the sums of a row not to be relied on? Those of a row far from 0 are not. Where products and
// references are rounded one by one, infinities may be left from before its reference came near.
CUFLASH_DEVICE bool is_unsure(const Score& score, Real reference, Real sum) {
  const bool overflowed = Config::scale_in_exponent && !(fabs(sum) < infinity());
  // A bias of -inf was added to a NaN, or to infinity.
  if constexpr (Config::bias_stages > 0) return is_quiet_nan(sum);
  return Score::recomputes_far_rows && (score.is_far(reference) || overflowed);
}

// Of float32: equal weights are rounded alike in every block, so what a rounding adds to their sum
// is kept and taken off the next block's (Kahan 1965); a block that a row does not see changes no
// bit. In 16 bits a weight errs by more than that; sums of float64 are exact enough.
constexpr bool keeps_loss = Config::dtype == Dtype::float32;

// State of 16 `slices` rows of a warp: this lane holds rows t/4 and t/4 + 8 of each slice. Scores
// are in units of Score::unit(), which is positive.
template <int slices>
struct OnlineSoftmax {
  Real row_max[slices][2];
  Real row_sum[slices][2];   // of this lane's columns only, until `finish`
  Real row_loss[slices][2];  // what the last rounding has added to it
  WarpPowers power;

  CUFLASH_DEVICE OnlineSoftmax() {
    unrolled<slices>([&](int s) {
      row_max[s][0] = row_max[s][1] = -infinity();
      row_sum[s][0] = row_sum[s][1] = 0;
      row_loss[s][0] = row_loss[s][1] = 0;
    });
  }

  // Scores become exp(score - row_max); what was summed under the old maximum is rescaled: not by 1
  // where multiplications take time from tensor cores, as of float64 (D54), or from another
  // warpgroup (D125).
  template <bool skips_one = is_double, int tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&s_acc)[slices][tiles][4], Real (&o_acc)[slices][out_tiles][4],
                             const Score& score) {
    unrolled<slices, 2>([&](int s, int half) {
      const Real block_max = quad_max(lane_maximum(s_acc[s], half, row_max[s][half]));
      // A row that has seen nothing yet: -inf minus -inf would be NaN.
      const Real shift = block_max == -infinity() ? 0 : score.reference(block_max);
      // Most blocks of keys leave every maximum as it was, whose factor is 1.
      if (!skips_one || warp_agrees(block_max != row_max[s][half])) {
        const Real rescale =
            power(score.exponent_between(score.reference(row_max[s][half]), shift));
        row_max[s][half] = block_max;
        row_sum[s][half] *= rescale;
        if constexpr (keeps_loss) row_loss[s][half] *= rescale;
        scale_row(o_acc[s], half, rescale);
      }
      Real sum = keeps_loss ? -row_loss[s][half] : row_sum[s][half];
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s_acc[s][t][i] = power(score.exponent(s_acc[s][t][i], shift));
          sum += s_acc[s][t][i];
        }
      }
      if constexpr (keeps_loss) {
        const Real total = row_sum[s][half] + sum;
        row_loss[s][half] = (total - row_sum[s][half]) - sum;
        row_sum[s][half] = total;
      } else {
        row_sum[s][half] = sum;
      }
    });
  }

  // What the sum of a row is relative to; -inf where nothing was seen.
  CUFLASH_DEVICE Real reference(const Score& score, int slice, int half) const {
    return score.reference(row_max[slice][half]);
  }

  // Completes the sums; afterwards every lane of a row holds them.
  CUFLASH_DEVICE void finish() {
    unrolled<slices, 2>([&](int s, int half) {
      if constexpr (keeps_loss) row_sum[s][half] -= row_loss[s][half];
      row_sum[s][half] = quad_sum(row_sum[s][half]);
    });
  }
};

template <int slices>
using WarpSoftmax = If<is_double && Config::scale_in_exponent && !Config::simt, HeldSoftmax<slices>,
                       OnlineSoftmax<slices>>;

}  // namespace cuflash
