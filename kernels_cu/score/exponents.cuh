// Exponents formed directly from the products of a block that a row sees whole, by a few
// multiply-adds each and without a logit. Only where Score::exponent_of_product. The row's
// reference does not change.
//
//   log2 exp(logit - reference) = product * scale_log2 - slope_log2 * |q + offset - k| - shift
//
// With slopes this is linear in k on each side of q + offset, and a block lies on one side
// (Score::crosses_diagonal). The product already includes the slope's step from key to key
// (sm90/slopes.cuh). With a softcap a logit is softcap * tanh x. Near 0 tanh x is an odd polynomial
// of the product, elsewhere an exponential and a quotient. The product alone decides which of the
// two.
#pragma once

#include "score/score.cuh"

namespace cuflash {

// The exponents of one row.
struct RowExponents {
  const Score& score;
  float shift;  // the reference plus the slope's term at the first key, in log2 units

  CUFLASH_DEVICE RowExponents(const Score& score, int q_idx, int first_key, float reference)
      : score(score), shift(Score::folds_scale ? reference : reference * log2_e) {
    if constexpr (Score::has_slopes) {
      const int first = score.near_offset + q_idx - first_key;
      const float distance = static_cast<float>(abs(first)) + score.far_offset;
      shift = fma(score.slope * log2_e, distance, shift);
    }
  }

  // The exponent of a product. With a softcap the product has to be near 0.
  CUFLASH_DEVICE float operator()(float product) const {
    const ScoreParams& params = score.params;
    if constexpr (Score::is_capped) {
      const float t = near_square_excess(product);
      float factor = fma(t, params.capped_3, params.capped_2);
      factor = fma(t, factor, params.capped_1);
      factor = fma(t, factor, params.capped_0);
      return fma(product, factor, -shift);
    } else {
      return fma(product, score.scale_log2(), -shift);
    }
  }

  // product^2 - near_square. If this is negative, |product| is at most near_product.
  CUFLASH_DEVICE float near_square_excess(float product) const {
    return fma(product, product, -score.params.near_square);
  }

  // The exponent of any product under a softcap. `near` is what operator() gives, right near 0.
  CUFLASH_DEVICE float exact_exponent(float product, float near) const {
    const float x = product * score.params.inverse_softcap;
    // tanh x = 1 - 2 / (1 + exp 2x), which would cancel near 0.
    const float t = 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(2.0f * log2_e * fabs(x)));
    const float far = fma(copysignf(t, x), score.params.softcap * log2_e, -shift);
    return fabs(product) <= score.params.near_product ? near : far;
  }
};

// Exponents of `count` neighbouring tiles of an accumulator under a softcap. With one branch for a
// whole block the exponentials would have nothing to overlap with. One for each tile takes longer.
template <int tiles>
struct CappedExponents {
  static constexpr int count = tiles % 4 == 0 ? 4 : 2;
  static_assert(tiles % count == 0, "tiles come in whole groups");
  float exponents[count][4];
  int signs;  // negative if all products are near 0

  // Forms all exponents as if the products were near 0.
  CUFLASH_DEVICE void form_near(const float (&s_acc)[1][tiles][4], int first,
                                const RowExponents (&of_row)[2]) {
    signs = -1;
    unrolled<count, 4>([&](int t, int i) {
      const float product = s_acc[0][first + t][i];
      signs &= __float_as_int(of_row[0].near_square_excess(product));
      exponents[t][i] = of_row[i / 2](product);
    });
  }

  // Corrects the exponents of products that are not near 0. `sum` never has the bits it is compared
  // with: the comparison makes the branch wait for a complete sum.
  CUFLASH_DEVICE void correct_far(const float (&s_acc)[1][tiles][4], int first,
                                  const RowExponents (&of_row)[2], float sum) {
    if (!warp_any(signs >= 0 || __float_as_uint(sum) == 0xffffffffu)) return;
    unrolled<count, 4>([&](int t, int i) {
      float& exponent = exponents[t][i];
      exponent = of_row[i / 2].exact_exponent(s_acc[0][first + t][i], exponent);
    });
  }
};

}  // namespace cuflash
