// The caller's own formulas for scores and visibility (cuflash.ScoreMod and cuflash.MaskMod). Their
// text replaces the files in formulas/, which hold formulas that change nothing.
#pragma once

#include "schedule/scheduler.cuh"

namespace cuflash {

struct FormulaArrays {
  const ScoreParams& formula_params;

  template <typename Value, int index>
  CUFLASH_DEVICE const Value* formula_array() const {
    const void* const arrays[] = {formula_params.formula_array0, formula_params.formula_array1,
                                  formula_params.formula_array2, formula_params.formula_array3,
                                  formula_params.formula_array4, formula_params.formula_array5};
    return static_cast<const Value*>(arrays[index]);
  }
};

// The formulas of one batch entry. They may use b (the batch element), h (the head), q and k (the
// query and the key) and their arrays, which are members. A call may be one part of a whole: q and
// k count in the whole.
struct Formulas : FormulaArrays {
#include "formulas/arrays"
  const int b, h;

  CUFLASH_DEVICE Formulas(const ScoreParams& params, int entry, int head)
      : FormulaArrays{params}, b(entry), h(head) {}

  CUFLASH_DEVICE Real formula_score(Real score, int q, int k) const {
    formula_place(q, k);
    return static_cast<Real>(
#include "formulas/score_mod.expression"
    );
  }

  // d formula_score / d score
  CUFLASH_DEVICE Real formula_grad(Real score, int q, int k) const {
    formula_place(q, k);
    return static_cast<Real>(
#include "formulas/score_mod.grad"
    );
  }

  CUFLASH_DEVICE bool formula_mask(int q, int k) const {
    formula_place(q, k);
    return static_cast<bool>(
#include "formulas/mask_mod.expression"
    );
  }

 private:
  CUFLASH_DEVICE void formula_place(int& q, int& k) const {
    q += formula_params.first_query;
    k += formula_params.first_key;
  }
};

CUFLASH_DEVICE Formulas formulas_of(const ScoreParams& params, const BatchIndex& entry) {
  if constexpr (Config::score_mod || Config::mask_mod) {
    const int64_t number = params.entry_number + entry * params.entry_number_strides;
    return {params, static_cast<int>(number / params.num_heads),
            static_cast<int>(number % params.num_heads)};
  } else {
    return {params, 0, 0};
  }
}

}  // namespace cuflash
