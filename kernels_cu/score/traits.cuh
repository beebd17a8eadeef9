// What follows from the compiled score options alone: what a kernel may leave out, or has no
// registers for.
#pragma once

#include "numeric.cuh"

namespace cuflash {

struct ScoreTraits {
  // Under a causal bound the last rows see the most keys, and the most rows see the first keys.
  static constexpr bool last_rows_see_most = Config::window_right;

  static constexpr bool has_segments = Config::segment_ids != Dtype::none;
  using Id = Storage<Config::segment_ids>;

  // Is visibility looked up pair by pair in every block? Not if a mask or bias comes through shared
  // memory, which has it for every pair.
  static constexpr bool hides_pairs = (Config::mask && !Config::mask_stages) ||
                                      (Config::bias != Dtype::none && !Config::key_bias &&
                                       !Config::bias_stages && !Config::holds_bias) ||
                                      Config::mask_mod;

  // Can a row see no key although it lies within q_range of some key? Lengths and windows cannot
  // cause that: they leave an interval of keys to each row.
  static constexpr bool may_hide_rows = hides_pairs || has_segments || Config::mask_stages ||
                                        Config::bias_stages || Config::holds_bias;

  // Do arrays hold the lengths of an entry's sequences?
  static constexpr bool has_lengths =
      Config::q_lengths != Dtype::none || Config::kv_lengths != Dtype::none;

  // Do both a window's first key and lengths of the entry take registers?
  static constexpr bool holds_bounds = Config::window_left && has_lengths;

  static constexpr bool is_capped = Config::softcap;
  static constexpr bool has_slopes = Config::alibi_slopes != Dtype::none;
  static constexpr bool has_sink = Config::sink != Dtype::none;

  // Are rows far from 0 computed pair by pair? Their products differ by whole exponents if they are
  // rounded once more or summed in another order, so that weights would overflow or vanish. Not
  // where scores in float32 have a bias or a formula: a large finite bias may act as a mask and
  // leaves many such rows, whose scores are that bias.
  static constexpr bool recomputes_far_rows =
      is_double || (Config::bias == Dtype::none && !Config::score_mod);

  // Is a visible pair's logit formed without tanh, formulas and look-ups, which branch?
  static constexpr bool is_plain = !may_hide_rows && !Config::softcap && !Config::score_mod;

  // Is a logit plain in this sense, and without a bias, which is read for visible pairs only?
  static constexpr bool is_product = is_plain && Config::bias == Dtype::none;

  // Is the gradient of a score also that of its logit, because options only add to the score?
  static constexpr bool adds_only = !Config::softcap && !Config::score_mod;

  // Is a logit the sum of a multiple of q.k, a distance's term and a bias that is there for every
  // pair, visible or hidden? Then pairs are hidden after the exponentials, in a branch. A mask in
  // global memory hides pairs in all blocks, which leaves no branch unless there is a right bound,
  // and up to head size 128 there are too few registers without a branch.
  static constexpr bool hides_after_exponentials =
      adds_only && (Config::bias == Dtype::none || Config::bias_stages) && !Config::mask_mod &&
      (!Config::mask || Config::mask_stages || Config::window_right || Config::head_dim > 128);

  // Does that branch take hidden pairs from bits of columns? Bounds alone are compared instead.
  static constexpr bool hides_by_bits = has_segments || (Config::mask && !Config::mask_stages);

  // Do options leave registers for what dropout draws, beside scores?
  static constexpr bool leaves_registers_for_dropout =
      is_plain && !Config::window_left && Config::alibi_slopes == Dtype::none;

  // Is a mask the only option that takes registers, and are some left? Then it is looked up while
  // scores are multiplied. At 256 columns of v NVRTC 13 spills. (D8)
  static constexpr bool reads_mask_ahead =
      Config::mask && !has_segments && !Config::mask_mod && !Config::score_mod &&
      !Config::softcap && !Config::dropout && Config::bias == Dtype::none &&
      Config::alibi_slopes == Dtype::none && Config::head_dim_v <= 192;

  // Is a bias looked up then? Bounds on both sides or float64 values leave no registers for it.
  static constexpr bool reads_bias_ahead = Config::bias != Dtype::none && !Config::bias_stages &&
                                           Config::bias != Dtype::float64 && !Config::window_left &&
                                           Config::head_dim <= 128;

  // Is the exponent of a pair in a full block formed by a few multiply-adds from its product?
  static constexpr bool exponent_of_product =
      !is_double && !may_hide_rows && !Config::score_mod && Config::bias == Dtype::none &&
      Config::scale_in_exponent + is_capped + has_slopes == 1;

  // Is it so because of slopes alone, which tensor cores add to products (sm90/slopes.cuh)? With
  // packed sequences or dropout no registers are left for that.
  static constexpr bool multiplies_slopes = exponent_of_product && has_slopes && !Config::dropout &&
                                            Config::cu_seqlens == Dtype::none &&
                                            Config::head_dim <= 128;

  // Then, does a tile visit keys from the diagonal to both ends? (sm90/outward_blocks.cuh) The
  // order depends on the tile's first row. Up to head size 64 tiles have 128 or 192 rows, and the
  // bits of a row must not depend on that.
  static constexpr bool goes_outwards =
      multiplies_slopes && !Config::window_left && !Config::window_right && Config::head_dim > 64;

  // Does a softcap alone make exponents of products? Then the largest product has the largest
  // logit.
  static constexpr bool is_capped_product = exponent_of_product && is_capped;

  // Is a logit plain, and do registers keep nothing of a row or an entry but a causal bound?
  static constexpr bool leaves_registers_for_products =
      is_plain && !has_sink && !Config::window_left && !Config::dropout &&
      Config::alibi_slopes == Dtype::none && !has_lengths && Config::cu_seqlens == Dtype::none;

  // Which key blocks of a row range may be masked: some before the last one, in which lengths end,
  // and some before the full ones.
  static constexpr bool masks_before_last =
      Config::window_left || Config::window_right || may_hide_rows;
  static constexpr bool masks_before_full = Config::window_left;

  // Does a row that sees any key see keys from the first one on, as far as bounds decide?
  static constexpr bool sees_from_first = !Config::window_left;

  static constexpr bool scales_operands =
      Config::q_scale != Dtype::none || Config::k_scale != Dtype::none;

  // Is an exponent one multiply-add, which includes the scale? In float32 the difference of two
  // scores comes first, so that the weight of a row's maximum is exactly 1, free of the rounding of
  // its reference. Not in narrow heads, where an exponent is a large part of the cost of a score.
  static constexpr bool is_narrow = Config::width < 16;
  static constexpr bool folds_scale =
      Config::scale_in_exponent && (Config::dtype != Dtype::float32 || is_narrow);
};

}  // namespace cuflash
