// Exponents straight from the products of a block that a row sees whole, by a few multiply-adds
// each, where Score::exponent_of_product. The row's reference stays as it is; no logit is formed.
//
//   log2 exp(logit - reference) = product * scale_log2 - slope_log2 * |q + offset - k| - shift
//
// Slopes make it linear in k on each side of q + offset: a block lies on one (Score::bends).
// Under a softcap a product is divided by it before, x: tanh x is a polynomial up to
// `polynomial_end`, and takes an exponential and a quotient beyond. Which of the two depends on x
// alone.
#pragma once

#include "score/score.cuh"

namespace cuflash {

constexpr float polynomial_end = 0.625f;

// Of the columns that a lane holds of one row, counted from its first.
struct RowExponents {
  const Score& score;
  float shift;  // the reference, and what a slope takes off at the first key, in units of log 2
  float slope;  // what the next key adds

  CUFLASH_DEVICE RowExponents(const Score& score, int q_idx, int first_key, float reference)
      : score(score), shift(Score::folds_scale ? reference : reference * log2_e) {
    if constexpr (Score::has_slopes) {
      const int first = score.near_offset + q_idx - first_key;
      slope = (first >= 0 ? score.slope : -score.slope) * log2_e;
      shift = fma(slope, static_cast<float>(first), shift);
      shift = fma(score.slope * log2_e, score.far_offset, shift);
    }
  }

  // Of a product or, where there is a softcap, of x up to polynomial_end.
  CUFLASH_DEVICE float operator()(float product, int column) const {
    const ScoreParams& params = score.params;
    if constexpr (Score::is_capped) {
      const float square = product * product;
      float factor = fma(square, params.capped_9, params.capped_7);
      factor = fma(square, factor, params.capped_5);
      factor = fma(square, factor, params.capped_3);
      factor = fma(square, factor, params.capped_1);
      return fma(product, factor, -shift);
    } else if constexpr (Score::has_slopes) {
      const float added = fma(slope, static_cast<float>(column), -shift);
      return fma(product, score.scale_log2(), added);
    } else {
      return fma(product, score.scale_log2(), -shift);
    }
  }

  // Of any x.
  CUFLASH_DEVICE float of_any(float x) const {
    // tanh x = 1 - 2 / (1 + exp 2x), which would cancel near 0.
    const float t = 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * log2_e * fabs(x)));
    const float beyond = fma(copysignf(t, x), score.params.capped_1, -shift);
    const float within = ptx::computed((*this)(x, 0));  // a branch would take longer
    return fabs(x) <= polynomial_end ? within : beyond;
  }
};

// In so many parts of an accumulator of `tiles` it is asked whether the polynomial serves: its
// registers are few then.
template <int tiles>
constexpr int exponent_parts = tiles % 4 == 0 ? 4 : 2;

// Products of one of these parts become exponents under a softcap.
template <int tiles>
CUFLASH_DEVICE void form_exponents(float (&s_acc)[1][tiles][4], int part,
                                   const RowExponents (&of_row)[2]) {
  constexpr int own = tiles / exponent_parts<tiles>;
  static_assert(own * exponent_parts<tiles> == tiles, "whole parts");
  const int first = part * own;
  float largest = 0.0f;
  unrolled<own, 4>([&](int t, int i) {
    float& x = s_acc[0][first + t][i];
    x *= of_row[0].score.params.inverse_softcap;
    largest = fmaxf(largest, fabs(x));
  });
  const bool near = largest <= polynomial_end;
  if (warp_agrees(!near)) {
    unrolled<own, 4>([&](int t, int i) {
      float& x = s_acc[0][first + t][i];
      x = of_row[i / 2].of_any(x);
    });
  } else {
    unrolled<own, 4>([&](int t, int i) {
      float& x = s_acc[0][first + t][i];
      x = of_row[i / 2](x, 0);
    });
  }
}

}  // namespace cuflash
