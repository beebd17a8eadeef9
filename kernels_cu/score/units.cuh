// The units of a logit, and its exponential relative to a reference or to lse.
//
// A value of Score::apply is a logit in units of `unit()`: 1, or `scale` where the logit is just
// scale * q.k (Config::scale_in_exponent). Exponentials of differences are powers of two. In the
// second case they take one multiply-add and one exp2 per score.
#pragma once

#include "schedule/scheduler.cuh"
#include "score/traits.cuh"

namespace cuflash {

struct ScoreUnits : ScoreTraits {
  const ScoreParams& params;
  Real operand_scale;  // scale of q times scale of k, where elements count in units of them

  CUFLASH_DEVICE explicit ScoreUnits(const ScoreParams& score_params) : params(score_params) {}

  CUFLASH_DEVICE void read_operand_scale(const BatchIndex& entry) {
    if constexpr (scales_operands) {
      operand_scale = read_scale<Config::q_scale>(params.q_scale, entry * params.q_scale_strides) *
                      read_scale<Config::k_scale>(params.k_scale, entry * params.k_scale_strides);
    }
  }

  // The factors that turn a product of elements into a logit in natural units, and in log2 units.
  CUFLASH_DEVICE Real scale() const { return of_operands(params.scale); }
  CUFLASH_DEVICE Real scale_log2() const { return of_operands(params.scale_log2); }

  CUFLASH_DEVICE Real unit() const { return Config::scale_in_exponent ? scale() : 1; }

  // The reference of exponents for a running maximum of values of `apply`. The maximum is rounded
  // once, here: where logits are huge, two roundings of one maximum would differ by a factor. (D2)
  CUFLASH_DEVICE Real reference(Real maximum) const {
    return folds_scale ? maximum * scale_log2() : maximum;
  }

  // Must a row with this reference be computed pair by pair?
  CUFLASH_DEVICE bool is_far(Real reference) const {
    const Real exponent = folds_scale ? reference : reference * exponent_factor();
    const bool overflows = !folds_scale && fabs(reference) >= Real(0x1p126);  // in a difference
    return (fabs(exponent) >= far_from_0 || overflows) && fabs(reference) < infinity();
  }

  // A maximum whose reference is higher than `reference` by about `exponent` in log2 units.
  CUFLASH_DEVICE float maximum_above(float reference, float exponent) const {
    return folds_scale ? __fdividef(reference + exponent, scale_log2())
                       : fma(exponent, static_cast<float>(ln_2), reference);
  }

  // log2 of exp(logit - reference), for a value of `apply`. If no scale is folded in, the
  // difference comes first: a bias may be as large as the largest float32.
  CUFLASH_DEVICE Real exponent(Real value, Real reference) const {
    return folds_scale ? fma(value, scale_log2(), -reference)
                       : (value - reference) * exponent_factor();
  }

  // The factor that turns a value of `apply` into log2 units.
  CUFLASH_DEVICE Real exponent_factor() const {
    return Config::scale_in_exponent ? scale_log2() : log2_e;
  }

  // log2 of exp(from - to), of two references.
  CUFLASH_DEVICE Real exponent_between(Real from, Real to) const {
    return folds_scale ? from - to : (from - to) * exponent_factor();
  }

  // lse of a row from the reference of its maximum and its sum of exponentials.
  CUFLASH_DEVICE Real lse(Real reference, Real sum) const {
    if constexpr (!folds_scale) return fma(reference, unit(), log(sum));
    if constexpr (Config::dtype != Dtype::float32) return fma(reference, ln_2, log(sum));
    // The backward multiplies by `scale`, which is ln_2 * scale_log2 up to the rounding of each: at
    // a logit of 100 a weight would err by 60 roundings, and all weights of a column alike.
    const Real rest = fma(-ln_2, params.scale_log2, params.scale);
    const Real factor = params.scale_log2 > 0 ? rest / params.scale_log2 : 0;
    return fma(reference, ln_2, fma(reference, factor, log(sum)));
  }

  // A value of `apply` as a logit, rounded.
  CUFLASH_DEVICE Real rounded_logit(Real value) const { return value * unit(); }

  // log2 of the probability exp(logit - lse) of a value of `apply`. lse is not rounded again.
  CUFLASH_DEVICE Real probability_exponent(Real value, Real lse) const {
    return fma(value, unit(), -lse) * log2_e;
  }

 protected:
  CUFLASH_DEVICE Real of_operands(Real factor) const {
    return scales_operands ? factor * operand_scale : factor;
  }
};

}  // namespace cuflash
