// In which units a logit is, and what its exponential is against a reference, or lse.
//
// A value of Score::apply is a logit in units of `unit()`: 1, or `scale` where the logit is just
// scale * q.k (Config::scale_in_exponent). Exponentials of differences are powers of two, one
// multiply-add and one exp2 per score in that case.
#pragma once

#include "schedule/scheduler.cuh"
#include "score/traits.cuh"

namespace cuflash {

struct ScoreUnits : ScoreTraits {
  const ScoreParams& params;
  Real operand_scale;  // of q times k, where their elements are multiples of it

  CUFLASH_DEVICE explicit ScoreUnits(const ScoreParams& score_params) : params(score_params) {}

  CUFLASH_DEVICE void read_operand_scale(const BatchIndex& entry) {
    if constexpr (scales_operands) {
      operand_scale = read_scale<Config::q_scale>(params.q_scale, entry * params.q_scale_strides) *
                      read_scale<Config::k_scale>(params.k_scale, entry * params.k_scale_strides);
    }
  }

  // Of products of elements, in natural units and in those of exponents.
  CUFLASH_DEVICE Real scale() const { return of_operands(params.scale); }
  CUFLASH_DEVICE Real scale_log2() const { return of_operands(params.scale_log2); }

  CUFLASH_DEVICE Real unit() const { return Config::scale_in_exponent ? scale() : 1; }

  // A running maximum (of values of `apply`) as what exponents are formed against. It is rounded
  // once, here: two roundings of one maximum would differ by a factor where logits are huge. (D2)
  CUFLASH_DEVICE Real reference(Real maximum) const {
    return folds_scale ? maximum * scale_log2() : maximum;
  }

  // Is a row with this reference to be computed pair by pair?
  CUFLASH_DEVICE bool is_far(Real reference) const {
    const Real exponent = folds_scale ? reference : reference * exponent_factor();
    const bool overflows = !folds_scale && fabs(reference) >= Real(0x1p126);  // in a difference
    return (fabs(exponent) >= far_from_0 || overflows) && fabs(reference) < infinity();
  }

  // A maximum with about the reference that is higher than another by a factor of 2^exponent.
  CUFLASH_DEVICE float maximum_above(float reference, float exponent) const {
    return folds_scale ? __fdividef(reference + exponent, scale_log2())
                       : fma(exponent, static_cast<float>(ln_2), reference);
  }

  // log2 of exp(logit - reference), for a value of `apply`. Without a scale to fold the difference
  // comes first: a bias may be as large as float32 goes.
  CUFLASH_DEVICE Real exponent(Real value, Real reference) const {
    return folds_scale ? fma(value, scale_log2(), -reference)
                       : (value - reference) * exponent_factor();
  }

  // What it multiplies a value by.
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
    // The backward multiplies by scale, which is not ln_2 scale_log2 but for a rounding of each: of
    // a logit of 100 that makes a weight err by 60 roundings, and all of a column alike.
    const Real rest = fma(-ln_2, params.scale_log2, params.scale);
    const Real factor = params.scale_log2 > 0 ? rest / params.scale_log2 : 0;
    return fma(reference, ln_2, fma(reference, factor, log(sum)));
  }

  // A value of `apply` as a logit, rounded.
  CUFLASH_DEVICE Real rounded_logit(Real value) const { return value * unit(); }

  // log2 of exp(logit - lse): the probability of a value of `apply`. lse is not rounded again.
  CUFLASH_DEVICE Real probability_exponent(Real value, Real lse) const {
    return fma(value, unit(), -lse) * log2_e;
  }

 protected:
  CUFLASH_DEVICE Real of_operands(Real factor) const {
    return scales_operands ? factor * operand_scale : factor;
  }
};

}  // namespace cuflash
