// Exponents straight from the products of a block that a row sees whole, by a few multiply-adds
// each, where Score::exponent_of_product. The row's reference stays as it is; no logit is formed.
//
//   log2 exp(logit - reference) = product * scale_log2 - slope_log2 * |q + offset - k| - shift
//
// Slopes make it linear in k on each side of q + offset: a block lies on one (Score::bends). What
// they add from key to key is part of the product by then (sm90/slopes.cuh).
// Under a softcap a logit is softcap * tanh x: an odd polynomial of the product while that is near
// 0, an exponential and a quotient beyond. Which of the two depends on the product alone.
#pragma once

#include "score/score.cuh"

namespace cuflash {

// Of one row.
struct RowExponents {
  const Score& score;
  float shift;  // the reference, and what a slope takes off at the first key, in units of log 2

  CUFLASH_DEVICE RowExponents(const Score& score, int q_idx, int first_key, float reference)
      : score(score), shift(Score::folds_scale ? reference : reference * log2_e) {
    if constexpr (Score::has_slopes) {
      const int first = score.near_offset + q_idx - first_key;
      const float distance = static_cast<float>(abs(first)) + score.far_offset;
      shift = fma(score.slope * log2_e, distance, shift);
    }
  }

  // Of a product; where there is a softcap, of one near 0.
  CUFLASH_DEVICE float operator()(float product) const {
    const ScoreParams& params = score.params;
    if constexpr (Score::is_capped) {
      const float t = beyond_near(product);
      float factor = fma(t, params.capped_3, params.capped_2);
      factor = fma(t, factor, params.capped_1);
      factor = fma(t, factor, params.capped_0);
      return fma(product, factor, -shift);
    } else {
      return fma(product, score.scale_log2(), -shift);
    }
  }

  // How far the square of a product is beyond those of products near 0; where it is negative, the
  // product is no larger than near_product.
  CUFLASH_DEVICE float beyond_near(float product) const {
    return fma(product, product, -score.params.near_square);
  }

  // Of any product under a softcap, of which `near` is the exponent if it is near 0.
  CUFLASH_DEVICE float of_any(float product, float near) const {
    const float x = product * score.params.inverse_softcap;
    // tanh x = 1 - 2 / (1 + exp 2x), which would cancel near 0.
    const float t = 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * log2_e * fabs(x)));
    const float far = fma(copysignf(t, x), score.params.softcap * log2_e, -shift);
    return fabs(product) <= score.params.near_product ? near : far;
  }
};

// Exponents of some neighbouring tiles of an accumulator under a softcap. A branch for a whole
// block would leave exponentials nothing to run beside, one for each tile takes longer.
template <int tiles>
struct CappedExponents {
  static constexpr int count = tiles % 4 == 0 ? 4 : 2;
  static_assert(tiles % count == 0, "no tile is left over");
  float exponents[count][4];
  int signs;  // negative where all products are near 0

  // As if they were.
  CUFLASH_DEVICE void form(const float (&s_acc)[1][tiles][4], int first,
                           const RowExponents (&of_row)[2]) {
    signs = -1;
    unrolled<count, 4>([&](int t, int i) {
      const float product = s_acc[0][first + t][i];
      signs &= __float_as_int(of_row[0].beyond_near(product));
      exponents[t][i] = of_row[i / 2](product);
    });
  }

  // Those of other products. `sum` never has these bits: it is complete when this is asked.
  CUFLASH_DEVICE void mend(const float (&s_acc)[1][tiles][4], int first,
                           const RowExponents (&of_row)[2], float sum) {
    if (!warp_agrees(signs >= 0 || __float_as_uint(sum) == 0xffffffffu)) return;
    unrolled<count, 4>([&](int t, int i) {
      float& exponent = exponents[t][i];
      exponent = of_row[i / 2].of_any(s_acc[0][first + t][i], exponent);
    });
  }
};

}  // namespace cuflash
