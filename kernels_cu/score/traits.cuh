// What follows from the compiled score options alone: what a kernel may leave out, or has no
// registers for.
#pragma once

#include "numeric.cuh"

namespace cuflash {

struct ScoreTraits {
  // Under a causal bound the last rows see the most keys, and the first keys are seen most.
  static constexpr bool last_rows_see_most = Config::window_right;

  static constexpr bool has_segments = Config::segment_ids != Dtype::none;
  using Id = Storage<Config::segment_ids>;

  // Is visibility looked up pair by pair, whichever the block? What comes through shared memory is
  // there for every pair.
  static constexpr bool hides_pairs = (Config::mask && !Config::mask_stages) ||
                                      (Config::bias != Dtype::none && !Config::key_bias &&
                                       !Config::bias_stages && !Config::holds_bias) ||
                                      Config::mask_mod;

  // Can a row see nothing although it lies within the row range of some key? Lengths and windows
  // cannot cause that: they leave an interval of keys to each row.
  static constexpr bool may_hide_rows = hides_pairs || has_segments || Config::mask_stages ||
                                        Config::bias_stages || Config::holds_bias;

  // Do arrays say how long the sequences of an entry are?
  static constexpr bool has_lengths =
      Config::q_lengths != Dtype::none || Config::kv_lengths != Dtype::none;

  // Are a window's first key and lengths of the entry to be kept in registers?
  static constexpr bool holds_bounds = Config::window_left && has_lengths;

  static constexpr bool is_capped = Config::softcap;
  static constexpr bool has_slopes = Config::alibi_slopes != Dtype::none;
  static constexpr bool has_sink = Config::sink != Dtype::none;

  // Are rows far from 0 computed pair by pair? Their products, rounded once more or summed in
  // another order, differ by whole exponents: weights would overflow or vanish. Not where a finite
  // bias may stand for a mask, as in float32: it leaves many such rows, whose scores are that bias.
  static constexpr bool recomputes_far_rows =
      is_double || (Config::bias == Dtype::none && !Config::score_mod);

  // Is a visible pair's logit a multiple of q.k, without tanh and look-ups, which branch?
  static constexpr bool is_plain = !may_hide_rows && !Config::softcap && !Config::score_mod;

  // Is it so without a bias, which is read for visible pairs only?
  static constexpr bool is_product = is_plain && Config::bias == Dtype::none;

  // Is the gradient of a score that of its logit?
  static constexpr bool adds_only = !Config::softcap && !Config::score_mod;

  // Is a logit a multiple of q.k, a distance and a bias that is there for every pair, whoever sees
  // it? Who does is asked after the exponentials, in a branch. A mask that is read where it lies
  // has no branch, and no registers without one.
  static constexpr bool hides_after_exponentials =
      adds_only && (Config::bias == Dtype::none || Config::bias_stages) && !Config::mask_mod &&
      (!Config::mask || Config::mask_stages || Config::window_right);

  // Is who sees a pair asked for as bits of columns then? Bounds alone are compared.
  static constexpr bool hides_by_bits = has_segments || (Config::mask && !Config::mask_stages);

  // Do options leave registers beside scores for what dropout draws?
  static constexpr bool leaves_registers =
      is_plain && !Config::window_left && Config::alibi_slopes == Dtype::none;

  // Is a mask all that takes registers, and are some left? Then it is looked up while scores are
  // multiplied. At 256 columns of values NVRTC 13 spills. (D8)
  static constexpr bool has_mask_alone =
      Config::mask && !has_segments && !Config::mask_mod && !Config::score_mod &&
      !Config::softcap && !Config::dropout && Config::bias == Dtype::none &&
      Config::alibi_slopes == Dtype::none && Config::head_dim_v <= 192;

  // Is a bias looked up so? Neither bounds on both sides nor values of float64 leave the registers.
  static constexpr bool reads_bias_ahead = Config::bias != Dtype::none && !Config::bias_stages &&
                                           Config::bias != Dtype::float64 && !Config::window_left &&
                                           Config::head_dim <= 128;

  // Is the exponent of a pair that is seen for sure a few multiply-adds of its product?
  static constexpr bool exponent_of_product =
      !is_double && !may_hide_rows && !Config::score_mod && Config::bias == Dtype::none &&
      Config::scale_in_exponent + is_capped + has_slopes == 1;

  // Do slopes alone make it so, and are what tensor cores add to products? (sm90/slopes.cuh) Beside
  // packed sequences and dropout no registers are left.
  static constexpr bool multiplies_slopes = exponent_of_product && has_slopes && !Config::dropout &&
                                            Config::cu_seqlens == Dtype::none &&
                                            Config::head_dim <= 128;

  // Does a softcap alone make it so? Then the largest product has the largest logit.
  static constexpr bool is_capped_product = exponent_of_product && is_capped;

  // Is it so with nothing of a row or an entry to keep in registers but where a causal bound lies?
  static constexpr bool is_light = is_plain && !has_sink && !Config::window_left &&
                                   !Config::dropout && Config::alibi_slopes == Dtype::none &&
                                   !has_lengths && Config::cu_seqlens == Dtype::none;

  // Which of a row range's key blocks may be masked, beside the last one, in which lengths end.
  static constexpr bool masks_before_last =
      Config::window_left || Config::window_right || may_hide_rows;
  static constexpr bool masks_before_full = Config::window_left;

  static constexpr bool scales_operands =
      Config::q_scale != Dtype::none || Config::k_scale != Dtype::none;

  // Is one multiply-add an exponent? Of float32 the difference of two scores comes first: then the
  // weight of a row's maximum is 1, and not what its reference was rounded by. Not in narrow heads,
  // where an exponent is a large part of what a score costs.
  static constexpr bool is_narrow = Config::width < 16;
  static constexpr bool folds_scale =
      Config::scale_in_exponent && (Config::dtype != Dtype::float32 || is_narrow);
};

}  // namespace cuflash
