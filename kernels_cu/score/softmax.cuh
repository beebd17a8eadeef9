// Online softmax: how the maximum and the sum of a row change from key block to key block, and the
// row's results at the end.
#pragma once

#include "score/softmax_float64.cuh"

namespace cuflash {

// The final values of a row: out is weight / sum times the accumulated sum of its values.
struct RowEnd {
  Real weight, sum, lse;
};

// The end of a row that saw some key, from its reference and sum of exponentials, with its sink.
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

// The factors of two results over different sets of keys in their joined result, and its lse.
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

// The same from the row's maximum.
CUFLASH_DEVICE RowEnd end_of_row(const Score& score, const BatchIndex& entry, Real maximum,
                                 Real sum) {
  return end_of_sum(score, entry, score.reference(maximum), sum);
}

// Is a row to be computed again, pair by pair? Rows far from 0 are. So are rows whose sum is not
// finite: where products and references are rounded separately, an infinity may come from earlier
// blocks, when the reference was still far from 0.
CUFLASH_DEVICE bool must_recompute(const Score& score, Real reference, Real sum) {
  const bool overflowed = Config::scale_in_exponent && !(fabs(sum) < infinity());
  if (narrows_range && is_quiet_nan(sum)) return true;
  // The sum is NaN where a bias of -inf was added to a NaN or to infinity.
  if constexpr (Config::bias_stages > 0) return is_quiet_nan(sum);
  return Score::recomputes_far_rows && (score.is_far(reference) || overflowed);
}

// In float32, equal weights are rounded in the same direction in every block. The rounding error of
// a row's sum is therefore kept and subtracted from the next block's sum (Kahan 1965). A block that
// a row does not see changes no bit. With 16-bit inputs the error of a weight is larger than this
// error, and sums in float64 are exact enough.
constexpr bool compensates_sum = Config::dtype == Dtype::float32;

// The state of 16 `slices` rows of a warp. Lane t holds rows t/4 and t/4 + 8 of each slice. Scores
// are in units of Score::unit(), which is positive.
template <int slices>
struct OnlineSoftmax {
  Real row_max[slices][2];
  Real row_sum[slices][2];    // over this lane's columns only, until `finish`
  Real row_error[slices][2];  // what the last rounding has added to row_sum
  WarpPowers power;

  CUFLASH_DEVICE OnlineSoftmax() {
    unrolled<slices>([&](int s) {
      row_max[s][0] = row_max[s][1] = -infinity();
      row_sum[s][0] = row_sum[s][1] = 0;
      row_error[s][0] = row_error[s][1] = 0;
    });
  }

  // Replaces scores by exp(score - row_max). Sums under the old maximum are rescaled. Rescaling by
  // 1 is skipped where multiplications take time from tensor cores, as in float64 (D54), from
  // another warpgroup (D125), or from conversions of keys.
  template <bool skips_one = is_double || has_8_bit_keys, int tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&s_acc)[slices][tiles][4], Real (&o_acc)[slices][out_tiles][4],
                             const Score& score) {
    unrolled<slices, 2>([&](int s, int half) {
      const Real block_max = quad_max(lane_maximum(s_acc[s], half, row_max[s][half]));
      // A row that has seen no key yet: -inf minus -inf would be NaN.
      const Real shift = block_max == -infinity() ? 0 : score.reference(block_max);
      // Most blocks of keys change no maximum, and then the factors are 1.
      if (!skips_one || warp_any(block_max != row_max[s][half])) {
        const Real rescale =
            power(score.exponent_between(score.reference(row_max[s][half]), shift));
        row_max[s][half] = block_max;
        row_sum[s][half] *= rescale;
        if constexpr (compensates_sum) row_error[s][half] *= rescale;
        scale_row(o_acc[s], half, rescale);
      }
      Real sum = compensates_sum ? -row_error[s][half] : row_sum[s][half];
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s_acc[s][t][i] = power(score.exponent(s_acc[s][t][i], shift));
          sum += s_acc[s][t][i];
        }
      }
      if constexpr (compensates_sum) {
        const Real total = row_sum[s][half] + sum;
        row_error[s][half] = (total - row_sum[s][half]) - sum;
        row_sum[s][half] = total;
      } else {
        row_sum[s][half] = sum;
      }
    });
  }

  // The reference of a row's sum, or -inf if the row has seen no key.
  CUFLASH_DEVICE Real reference(const Score& score, int slice, int half) const {
    return score.reference(row_max[slice][half]);
  }

  // Completes the sums. Afterwards all four lanes of a row hold them.
  CUFLASH_DEVICE void finish() {
    unrolled<slices, 2>([&](int s, int half) {
      if constexpr (compensates_sum) row_sum[s][half] -= row_error[s][half];
      row_sum[s][half] = quad_sum(row_sum[s][half]);
    });
  }
};

template <int slices>
using WarpSoftmax = If<is_double && Config::scale_in_exponent && !Config::simt, LazySoftmax<slices>,
                       OnlineSoftmax<slices>>;

}  // namespace cuflash
