// The online softmax in the separate steps that the schedule of Hopper needs.
#pragma once

#include "score/softmax.cuh"

namespace cuflash {

// e4m3 holds numbers up to 448 and loses bits below 2^-6. Its weights, relative to the reference of
// their row, are therefore multiplied by 2^8, and may exceed the reference by a factor of
// 2^max_growth. 16-bit weights are not scaled, and that factor is 2^8.
constexpr float weight_exponent = is_fp8 ? 8.0f : 0.0f, weight_unit = is_fp8 ? 0x1p-8f : 1.0f;
constexpr float max_growth = is_fp8 ? 0.75f : 8.0f;
// If a lane's weights of a full block sum to at most this, none of them is too large.
constexpr float max_lane_sum = is_fp8 ? 440.0f : 200.0f;

// State of the two rows of lane t: t/4 and t/4 + 8 of its warp's 16 rows.
struct SplitSoftmax : OnlineSoftmax<1> {
  float shift[2];    // the reference, which is subtracted from exponents
  float rescale[2];  // factor for the previous sums
  float block_sum[2];

  // Begins a block with the same reference.
  CUFLASH_DEVICE void keep_reference() { block_sum[0] = block_sum[1] = 0.0f; }

  // May raise_to_weights have to raise a reference of these rows, or has a row no reference yet?
  CUFLASH_DEVICE bool needs_higher_reference() const {
    const float largest = fmaxf(block_sum[0], block_sum[1]);
    return !(largest <= max_lane_sum) ||
           (!raises_low && fminf(row_max[0][0], row_max[0][1]) == -infinity());
  }

  // A look-up may hide a whole block from a row, and weights of 0 do not show whether it did. A
  // bias that acts as a mask makes references so low that later weights overflow. Rows with such
  // low references compute maxima until their reference is higher.
  static constexpr bool raises_low = Score::may_hide_rows;
  static constexpr float low_reference = Config::bias_stages ? -32.0f : -largest_float;
  CUFLASH_DEVICE bool has_low_reference() const {
    return fminf(row_max[0][0], row_max[0][1]) < low_reference;
  }
  template <int tiles>
  CUFLASH_DEVICE void raise_low_references(const float (&s_acc)[1][tiles][4], const Score& score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float so_far = row_max[0][half];
      const float block_max = quad_max(lane_maximum(s_acc[0], half, so_far));
      raise_reference(half, so_far < low_reference ? block_max : so_far, score);
    }
  }

  // If weights have outgrown a reference, it is raised to the largest of them. 16-bit weights
  // outgrow it by more than a factor of 2^8, e4m3 weights by their sum. Rows whose weights
  // overflowed, or may have vanished in the first visible block, are `lost` and stay unchanged.
  //
  // The largest weight of e4m3 becomes a power of two, which is exact: 2^8 if it is nearly all of
  // its lane's sum, and less if other weights contribute, so that the next sums have room.
  template <int tiles>
  CUFLASH_DEVICE void raise_to_weights(float (&s_acc)[1][tiles][4], const Score& score,
                                       bool (&lost)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(lane_maximum(s_acc[0], half, 0.0f));
      const float sum = is_fp8 ? quad_max(block_sum[half]) : largest;
      const bool grew = sum > (is_fp8 ? max_lane_sum : 0x1p8f) ||
                        (!raises_low && row_max[0][half] == -infinity());
      lost[half] = grew && !(largest > 0x1p-64f && largest < 0x1p100f);
      const float before = shift[half];
      if (grew && !lost[half]) {
        float growth = __log2f(largest);
        if constexpr (is_fp8) growth += ceilf(__log2f(__fdividef(sum, largest)) - 0.05f);
        row_max[0][half] = score.maximum_above(before, growth);
        shift[half] = score.reference(row_max[0][half]) - weight_exponent;
      }
      rescale[half] = ptx::exp2_approx(score.exponent_between(before, shift[half]));
      row_sum[0][half] *= rescale[half];
      block_sum[half] *= rescale[half];
      scale_row(s_acc[0], half, rescale[half]);
    }
  }

  // A reference stays unless the maximum grew by more than a factor of 2^max_growth: p remains in
  // range and as exact as before, and o keeps its scale.
  template <int tiles>
  CUFLASH_DEVICE void find_maximum(const float (&s_acc)[1][tiles][4], const Score& score) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float block_max = lane_maximum(s_acc[0], half, row_max[0][half]);
      raise_reference(half, quad_max(block_max), score);
      block_sum[half] = 0.0f;
    }
  }

  CUFLASH_DEVICE void raise_reference(int half, float maximum, const Score& score) {
    const float old_reference = score.reference(row_max[0][half]);
    const float new_reference = score.reference(maximum);
    const bool grew = score.exponent_between(new_reference, old_reference) > max_growth;
    row_max[0][half] = grew ? maximum : row_max[0][half];
    const float reference = grew ? new_reference : old_reference;
    shift[half] = reference == -infinity() ? 0.0f : reference;
    rescale[half] =
        grew ? ptx::exp2_approx(score.exponent_between(old_reference, shift[half])) : 1.0f;
    row_sum[0][half] *= rescale[half];
    shift[half] -= weight_exponent;
  }

  // Turns the scores of column tiles [begin, end) into weights. exponent(score, t, i) is called for
  // register i of tile t.
  template <int tiles, typename Exponent>
  CUFLASH_DEVICE void exponentiate(float (&s_acc)[1][tiles][4], int begin, int end,
                                   const Exponent& exponent) {
#pragma unroll
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s_acc[0][t][i] = ptx::exp2_approx(exponent(s_acc[0][t][i], t, i));
      }
    }
#pragma unroll
    for (int t = begin; t < end; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        block_sum[half] += s_acc[0][t][2 * half] + s_acc[0][t][2 * half + 1];
      }
    }
  }

  CUFLASH_DEVICE void finish() {
    OnlineSoftmax<1>::finish();
    unrolled<2>([&](int half) { row_sum[0][half] *= weight_unit; });
  }

  CUFLASH_DEVICE void add_block() {
    row_sum[0][0] += block_sum[0];
    row_sum[0][1] += block_sum[1];
  }

  template <int tiles>
  CUFLASH_DEVICE void rescale_rows(float (&o_acc)[1][tiles][4]) const {
    if (!__any_sync(0xffffffff, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
    unrolled<tiles, 4>([&](int t, int i) { o_acc[0][t][i] *= rescale[i / 2]; });
  }
};

}  // namespace cuflash
