// Online softmax in float64 for scores that are products of q and k (Config::scale_in_exponent).
// Every float64 instruction takes its time from tensor cores. Unlike score/softmax.cuh:
//   - maxima compare only the upper halves of scores, as float32 numbers in the same order;
//   - references are multiples of 1/32, so that exponents are split without being formed;
//   - a reference rises only where a weight would exceed 2^8, in few blocks. (D45, D51)
#pragma once

#include "score/score.cuh"

namespace cuflash {

// Sign, exponent and the first 20 bits of a float64, as a float32 in the same order. Infinities,
// NaN and magnitudes of 2^1017 or more become NaN or infinite.
CUFLASH_DEVICE float upper_half(double x) { return __int_as_float(__double2hiint(x)); }

// Is x greater than `power`, a power of two, as far as upper halves tell? A NaN may be.
CUFLASH_DEVICE bool exceeds(double x, double power) {
  return __double2hiint(x) > __double2hiint(power);
}

// A NaN without a sign: |x| of a NaN may keep its sign. (D55)
CUFLASH_DEVICE double nan_without_sign() { return __hiloint2double(0x7ff80000, 0); }

// The state of 16 `slices` rows of a warp, with the same interface as OnlineSoftmax.
template <int slices>
struct LazySoftmax {
  static constexpr double no_reference = -0x1.fffffffffffffp1023;  // the reference before any key
  static constexpr double exact_below = 0x1p20;  // upper halves err by at most 1 below
  static constexpr double max_exponent = 8;      // largest exponent of a weight

  Real row_reference[slices][2];
  Real row_sum[slices][2];  // over this lane's columns only, until `finish`
  DoublePowers power;

  CUFLASH_DEVICE LazySoftmax() {
#pragma unroll
    for (int s = 0; s < slices; ++s) {
      row_reference[s][0] = row_reference[s][1] = no_reference;
      row_sum[s][0] = row_sum[s][1] = 0;
    }
  }

  // Replaces scores by 2^(exponent - reference). Sums under an older reference are rescaled. (D49)
  template <int tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&s_acc)[slices][tiles][4], Real (&o_acc)[slices][out_tiles][4],
                             const Score& score) {
    Real maxima[slices][2], factors[slices][2], shifts[slices][2];
    bool any_far_or_nan = false, any_rises = false;
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maxima[s][half] = score.reference(row_maximum_in_part(s_acc[s], half));
        factors[s][half] = score.exponent_factor();
        shifts[s][half] = to_32nds - row_reference[s][half];
        any_far_or_nan |= is_far_or_nan(maxima[s][half]);
        any_rises |= exceeds(maxima[s][half] - row_reference[s][half], max_exponent);
      }
    }
    // One branch for all rows: otherwise weights of a row would wait for the next row's maximum.
    // (D52)
    if (warp_any(any_far_or_nan || any_rises)) {
      any_far_or_nan = warp_any(any_far_or_nan);
#pragma unroll
      for (int s = 0; s < slices; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bool is_far = false;
          if (any_far_or_nan) {
            const Real exact = score.reference(quad_max(lane_maximum(s_acc[s], half, -infinity())));
            is_far = is_far_or_nan(maxima[s][half]);
            maxima[s][half] = is_far ? exact : maxima[s][half];
          }
          raise_reference(maxima[s][half], s, half, o_acc, score);
          is_far = is_far && is_far_or_nan(row_reference[s][half]);
          if (any_far_or_nan) form_exponents(s_acc[s], half, is_far, row_reference[s][half], score);
          factors[s][half] = is_far ? 1 : score.exponent_factor();
          shifts[s][half] = is_far ? to_32nds : to_32nds - row_reference[s][half];
        }
      }
    }
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Four sums: each dependent addition would wait for products of the other warp. (D53)
        Real sums[4] = {row_sum[s][half]};
#pragma unroll
        for (int j = 0; j < 2 * tiles; ++j) {
          Real& value = s_acc[s][j / 2][2 * half + j % 2];
          value = power.of_product(value, factors[s][half], shifts[s][half]);
          sums[j % 4] += value;
        }
        row_sum[s][half] = sums[0] + sums[1] + (sums[2] + sums[3]);
      }
    }
  }

  // The reference of a row's sum, or -inf if the row has seen no key.
  CUFLASH_DEVICE Real reference(const Score&, int slice, int half) const {
    return row_reference[slice][half] == no_reference ? -infinity() : row_reference[slice][half];
  }

  // Completes the sums. Afterwards all four lanes of a row hold them.
  CUFLASH_DEVICE void finish() {
#pragma unroll
    for (int s = 0; s < slices; ++s) {
      row_sum[s][0] = quad_sum(row_sum[s][0]);
      row_sum[s][1] = quad_sum(row_sum[s][1]);
    }
  }

 private:
  // Is the maximum too far from 0 for its upper half to tell, or a NaN?
  CUFLASH_DEVICE static bool is_far_or_nan(double maximum) {
    return (__double2hiint(maximum) & 0x7fffffff) > __double2hiint(exact_below);
  }

  // The largest score of a row, by upper halves: the lower half of the result is 0.
  template <int tiles>
  CUFLASH_DEVICE static Real row_maximum_in_part(const Real (&s_acc)[tiles][4], int half) {
    float upper[tiles];
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      upper[t] =
          ptx::max_or_nan(upper_half(s_acc[t][2 * half]), upper_half(s_acc[t][2 * half + 1]));
      if (t > 0) upper[0] = ptx::max_or_nan(upper[0], upper[t]);
    }
    upper[0] = ptx::max_or_nan(upper[0], __shfl_xor_sync(0xffffffff, upper[0], 1));
    upper[0] = ptx::max_or_nan(upper[0], __shfl_xor_sync(0xffffffff, upper[0], 2));
    return __hiloint2double(__float_as_int(upper[0]), 0);
  }

  // Makes the maximum of a block, rounded to 1/32, the reference of its row if the reference is too
  // small, and rescales the row.
  template <int out_tiles>
  CUFLASH_DEVICE void raise_reference(Real maximum, int s, int half,
                                      Real (&o_acc)[slices][out_tiles][4], const Score& score) {
    const Real before = row_reference[s][half];
    if (exceeds(maximum - before, max_exponent)) {
      row_reference[s][half] = (maximum + to_32nds) - to_32nds;
    }
    const Real rescale = power(score.exponent_between(before, row_reference[s][half]));
    row_sum[s][half] *= rescale;
    scale_row(o_acc[s], half, rescale);
  }

  // Replaces the scores of a row that is far from 0 by exponents. A NaN loses its sign: of_product
  // would return 0 for a negative NaN.
  template <int tiles>
  CUFLASH_DEVICE static void form_exponents(Real (&s_acc)[tiles][4], int half, bool is_far,
                                            Real reference, const Score& score) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const Real value = is_far ? score.exponent(s_acc[t][i], reference) : s_acc[t][i];
        s_acc[t][i] = value == value ? value : nan_without_sign();
      }
    }
  }
};

}  // namespace cuflash
