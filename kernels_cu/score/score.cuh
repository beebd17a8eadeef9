// What a score means. No other file knows scale, softcap, bias, ALiBi, mask, segments, causal,
// window, offset, lengths and sink. Indices are those of queries and keys in one batch entry. Tiles
// and registers appear only as block ranges, which tell which blocks hold visible pairs, and as the
// columns that a lane holds.
//
//   raw q.k  ->  logit = scale * q.k  ->  softcap * tanh(logit / softcap)
//            ->  + bias - slope * |q + offset - k|  ->  the caller's formula
//
// `apply` returns the logit in the units of score/units.cuh. Where the logit is just scale * q.k,
// `apply` is the identity.
#pragma once

#include "score/formulas.cuh"
#include "score/mask_bits.cuh"
#include "score/pair_values.cuh"
#include "score/segment_ids.cuh"
#include "score/seqlen.cuh"
#include "score/units.cuh"

namespace cuflash {

struct Score : ScoreUnits, PartOfKeys<Config::split_keys> {
  const Seqlen seqlen;
  const Formulas formulas;
  int64_t bias_offset, mask_offset, ids_q_offset, ids_k_offset, bounds_q_offset, bounds_k_offset;
  uint64_t entry_number;  // of this batch entry, for dropout
  Real slope;
  int near_offset;                   // the causal offset, clamped to where keys may lie
  Real far_offset;                   // how far it lies beyond near_offset
  int diagonal_begin, diagonal_end;  // visible: diagonal_begin <= kv_idx - q_idx < diagonal_end

  CUFLASH_DEVICE Score(const ScoreParams& score_params, const BatchIndex& entry,
                       Range part_of_keys = {0, 1 << 30})
      : ScoreUnits(score_params),
        PartOfKeys(part_of_keys),
        seqlen(score_params, entry),
        formulas(formulas_of(score_params, entry)) {
    // Sequences are shorter than 2^30. A bound clamped to that distance decides the same pairs, and
    // its sum with an index cannot overflow. An offset from an array is clamped first.
    constexpr int64_t farthest = 1 << 30;
    if constexpr (Config::offset == Offset::value) {
      diagonal_begin = params.diagonal_begin;
      diagonal_end = params.diagonal_end;
    } else {
      const int64_t offset = clamp(seqlen.offset, -(1ll << 62), 1ll << 62);
      diagonal_begin = static_cast<int>(clamp(offset - params.window_left, -farthest, farthest));
      diagonal_end = static_cast<int>(clamp(offset + params.window_right + 1, -farthest, farthest));
    }
    if constexpr (!Config::window_left) diagonal_begin = -farthest;
    if constexpr (!Config::window_right) diagonal_end = farthest;
    if constexpr (Config::bias != Dtype::none) bias_offset = entry * params.bias_layout.batch;
    if constexpr (Config::mask) mask_offset = entry * params.mask_layout.batch;
    if constexpr (Config::dropout) {
      entry_number = params.entry_number + entry * params.entry_number_strides;
    }
    if constexpr (Config::segment_ids != Dtype::none) {
      ids_q_offset = entry * params.segment_ids_q_strides;
      ids_k_offset = entry * params.segment_ids_k_strides;
      bounds_q_offset = entry * params.segment_bounds_q_strides;
      bounds_k_offset = entry * params.segment_bounds_k_strides;
    }
    read_operand_scale(entry);
    if constexpr (Config::alibi_slopes != Dtype::none) {
      slope =
          read_real<Config::alibi_slopes>(params.alibi_slopes, entry * params.alibi_slopes_strides);
      const int64_t near = clamp(seqlen.offset, -farthest, farthest);
      near_offset = static_cast<int>(near);
      far_offset = fabs(static_cast<Real>(seqlen.offset - near));
    }
  }

  // The definition of visibility, apart from biases of -inf. Without mask, formula and segments,
  // the keys that a row sees are an interval, and so are the rows that see a key. A loop over many
  // pairs calls kv_range(q_idx, q_idx + 1), or q_range, once, and looks up the rest within it.
  CUFLASH_DEVICE bool visible(int q_idx, int kv_idx) const {
    return kv_range(q_idx, q_idx + 1).contains(kv_idx) && unmasked(q_idx, kv_idx) &&
           same_segment(q_idx, kv_idx);
  }

  // Do mask and formula show this pair? Both indices have to exist.
  CUFLASH_DEVICE bool unmasked(int q_idx, int kv_idx) const {
    bool seen = true;
    if constexpr (Config::mask) {
      const Layout& layout = params.mask_layout;
      seen = params.mask[mask_offset + q_idx * layout.row + kv_idx * layout.column] != 0;
    }
    return seen && formula_shows(q_idx, kv_idx);
  }

  // Bounds of the segment ids of `size` queries or keys that begin at a multiple of `size`. They
  // include all of the bounded_ids neighbours whose bounds are stored together.
  template <int size>
  CUFLASH_DEVICE IdBounds<Id> query_bounds(Range rows) const {
    return bounds_within<size, Id>(params.segment_bounds_q, bounds_q_offset, rows, seqlen.q);
  }
  template <int size>
  CUFLASH_DEVICE IdBounds<Id> key_bounds(Range keys) const {
    return bounds_within<size, Id>(params.segment_bounds_k, bounds_k_offset, keys, seqlen.k);
  }

  // Which keys are of the segment of row q_idx, among the columns that a lane holds from
  // `first_key` on and within `keys`, a range relative to first_key.
  template <int tiles>
  CUFLASH_DEVICE ColumnBits segment_of_row(int q_idx, int first_key, Range keys) const {
    if constexpr (Config::segment_ids == Dtype::none) return {};
    return same_ids<tiles>(query_ids()[min(q_idx, seqlen.q - 1)], key_ids() + first_key, keys);
  }

  // Which of these keys the mask also shows. Called by a whole warp.
  template <int tiles>
  CUFLASH_DEVICE ColumnBits seen_of_row(int q_idx, int first_key, Range keys) const {
    ColumnBits seen = segment_of_row<tiles>(q_idx, first_key, keys);
    if constexpr (Config::mask) {
      const int block_key = first_key - 2 * (ptx::thread_index() % 4);
      const int row = min(q_idx, seqlen.q - 1);
      seen.bits &= mask_matrix().template columns<tiles>(row, block_key, seqlen.k);
    }
    return seen;
  }

  // Which keys the mask and the bounds of a row show to rows q_idx and q_idx + 8.
  template <int tiles>
  CUFLASH_DEVICE void shown_to_rows(ColumnBits (&shown)[2], int q_idx, int first_key) const {
    const int rows[2] = {min(q_idx, seqlen.q - 1), min(q_idx + 8, seqlen.q - 1)};
    const int block_key = first_key - 2 * (ptx::thread_index() % 4);
    uint32_t bits[2];
    mask_matrix().template columns<tiles>(bits, rows, block_key, seqlen.k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range keys = kv_range_from(first_key, q_idx + 8 * half);
      shown[half].bits = bits[half] & ColumnBits::within(keys).bits;
    }
  }

  // To which queries of the lane's columns the mask shows the keys kv_idx and kv_idx + 8.
  template <int tiles>
  CUFLASH_DEVICE void unmasked_of_keys(ColumnBits (&seen)[2], int kv_idx, int first_row) const {
    if constexpr (Config::mask && !Config::mask_stages) {
      uint32_t bits[2];
      const int block_row = first_row - 2 * (ptx::thread_index() % 4);
      mask_matrix().template rows<tiles>(bits, block_row, seqlen.q, kv_idx, seqlen.k);
      seen[0].bits = bits[0];
      seen[1].bits = bits[1];
    }
  }

  // Does the caller's formula show this pair? Both indices have to exist.
  CUFLASH_DEVICE bool formula_shows(int q_idx, int kv_idx) const {
    if constexpr (Config::mask_mod) return formulas.formula_mask(q_idx, kv_idx);
    return true;
  }

  // Which queries are of the segment of key kv_idx: like segment_of_row.
  template <int tiles>
  CUFLASH_DEVICE ColumnBits segment_of_key(int kv_idx, int first_row, Range rows) const {
    if constexpr (Config::segment_ids == Dtype::none) return {};
    return same_ids<tiles>(key_ids()[min(kv_idx, seqlen.k - 1)], query_ids() + first_row, rows);
  }

  // Is a pair within kv_range(q_idx, q_idx + 1) visible? A bias of -inf hides it, too.
  CUFLASH_DEVICE bool sees(int q_idx, int kv_idx) const {
    if constexpr (Config::bias != Dtype::none) {
      if (bias(q_idx, kv_idx) == -infinity()) return false;
    }
    return unmasked(q_idx, kv_idx) && same_segment(q_idx, kv_idx);
  }

  // The logit of a visible pair, from its product q.k. It may read arrays at (q_idx, kv_idx).
  CUFLASH_DEVICE Real apply(Real score, int q_idx, int kv_idx) const {
    return apply(score, bias(q_idx, kv_idx), q_idx, kv_idx);
  }
  CUFLASH_DEVICE Real apply(Real score, Real bias, int q_idx, int kv_idx) const {
    const Real logit = before_formula(score, bias, q_idx, kv_idx);
    if constexpr (Config::score_mod) {
      // A bias of -inf hides the pair, whatever the formula makes of it.
      if (Config::bias != Dtype::none && logit == -infinity()) return logit;
      return formulas.formula_score(logit, q_idx, kv_idx);
    } else {
      return logit;
    }
  }

  // `apply`, or -inf for a hidden pair. A formula is not evaluated for hidden pairs. A bias has
  // been read for all pairs and is added to all: a branch for each pair would take longer.
  CUFLASH_DEVICE Real apply_if(bool visible, Real score, Real bias, int q_idx, int kv_idx) const {
    if constexpr (Config::bias == Dtype::none || Config::score_mod) {
      return visible ? apply(score, bias, q_idx, kv_idx) : -infinity();
    } else {
      const Real logit = apply(score, bias, q_idx, kv_idx);
      return visible ? logit : -infinity();
    }
  }

  // The same for the pair at column i of tile t, where the lane holds the bias of its pairs.
  template <typename HeldBias>
  CUFLASH_DEVICE Real apply_held(bool visible, Real score, const HeldBias& bias, int t, int i,
                                 int q_idx, int kv_idx) const {
    if constexpr (Config::holds_bias) {
      return apply_if(visible, score, bias(t, i), q_idx, kv_idx);
    } else {
      return visible ? apply(score, q_idx, kv_idx) : -infinity();
    }
  }

  CUFLASH_DEVICE Real bias(int q_idx, int kv_idx) const {
    if constexpr (Config::bias == Dtype::none) return 0;
    const Layout& layout = params.bias_layout;
    return read_real<Config::bias>(params.bias,
                                   bias_offset + q_idx * layout.row + kv_idx * layout.column);
  }

  using BiasValue = Storage<Config::bias>;
  CUFLASH_DEVICE const BiasValue* first_bias() const {
    return static_cast<const BiasValue*>(params.bias) + bias_offset;
  }
  CUFLASH_DEVICE static Real real_bias(BiasValue x) { return finite_real<Config::bias>(x); }

  template <int tiles>
  using BiasOf = PairValues<Config::bias, tiles>;
  template <int tiles>  // empty if no bias is held
  using HeldBias = PairValues<Config::holds_bias ? Config::bias : Dtype::none, tiles>;

  // The bias of one row at the columns that a lane holds from `first_key` on, or of one key at the
  // rows that it holds from `first_row` on. Called by a whole warp.
  template <int tiles>
  CUFLASH_DEVICE BiasOf<tiles> bias_of_row(int q_idx, int first_key) const {
    const Layout& layout = params.bias_layout;
    return {first_bias(), layout.row, layout.column, min(q_idx, seqlen.q - 1), first_key, seqlen.k};
  }
  template <int tiles>
  CUFLASH_DEVICE BiasOf<tiles> bias_of_key(int kv_idx, int first_row) const {
    const Layout& layout = params.bias_layout;
    return {first_bias(), layout.column, layout.row, min(kv_idx, seqlen.k - 1),
            first_row,    seqlen.q};
  }

  // `apply` for a visible pair where only a bias, which has been read, is added to the product, or
  // a bias and slopes. A bias of -inf hides the pair if its product is finite.
  CUFLASH_DEVICE Real with_bias(Real score, Real bias) const { return fma(scale(), score, bias); }
  CUFLASH_DEVICE Real with_bias(Real score, Real bias, int q_idx, int kv_idx) const {
    return with_alibi(with_bias(score, bias), q_idx, kv_idx);
  }

  // Do these keys lie on both sides of the diagonal from which slopes count distances?
  CUFLASH_DEVICE bool crosses_diagonal(Range rows, Range keys) const {
    if constexpr (Config::alibi_slopes == Dtype::none) return false;
    return keys.end > near_offset + rows.begin + 1 && keys.begin < near_offset + rows.end;
  }

  // Does the slope make weights of these keys more than 2^64 times the weights of the keys that
  // were visited just before? Or is it too large for tensor cores to add to products, because they
  // round the sums, or is the scale 0? All these keys lie on one side of the diagonal.
  CUFLASH_DEVICE bool is_steep(Range rows, Range keys) const {
    if constexpr (Config::alibi_slopes == Dtype::none) return false;
    const Real step = slope * static_cast<Real>(keys.end - keys.begin) * log2_e;
    const bool approaches_diagonal = !goes_outwards && keys.begin > near_offset + rows.begin;
    if ((approaches_diagonal ? step : -step) > 64) return true;
    return multiplies_slopes && !(fabs(step) <= 512 && fabs(step) < 0x1p13f * fabs(scale_log2()));
  }

  // |q + offset - k|, which a slope multiplies.
  CUFLASH_DEVICE Real distance(int q_idx, int kv_idx) const {
    return static_cast<Real>(abs(near_offset + q_idx - kv_idx)) + far_offset;
  }

  // d apply / d(bias), for visible pairs.
  CUFLASH_DEVICE Real formula_slope(Real score, int q_idx, int kv_idx) const {
    return formula_slope(score, Config::score_mod ? bias(q_idx, kv_idx) : 0, q_idx, kv_idx);
  }
  CUFLASH_DEVICE Real formula_slope(Real score, Real bias, int q_idx, int kv_idx) const {
    if constexpr (Config::score_mod) {
      return formulas.formula_grad(before_formula(score, bias, q_idx, kv_idx), q_idx, kv_idx);
    } else {
      return 1;
    }
  }

  // d apply / d(scale * q.k), for visible pairs. The factor `scale` is applied to the whole sum of
  // a gradient at its end.
  CUFLASH_DEVICE Real derivative(Real score, int q_idx, int kv_idx) const {
    return derivative(score, Config::score_mod ? bias(q_idx, kv_idx) : 0, q_idx, kv_idx);
  }
  CUFLASH_DEVICE Real derivative(Real score, Real bias, int q_idx, int kv_idx) const {
    const Real slope = formula_slope(score, bias, q_idx, kv_idx);
    if constexpr (Config::softcap) {
      const Real t = capped(score);
      return slope * ((1 - t) * (1 + t));
    } else {
      return slope;
    }
  }

  // The same where the value of `apply` is known. A formula is not evaluated for hidden pairs.
  CUFLASH_DEVICE Real derivative_at(Real value, Real score, int q_idx, int kv_idx) const {
    return derivative_at(value, score, Config::score_mod ? bias(q_idx, kv_idx) : 0, q_idx, kv_idx);
  }
  CUFLASH_DEVICE Real derivative_at(Real value, Real score, Real bias, int q_idx,
                                    int kv_idx) const {
    return Config::score_mod && value == -infinity() ? 0 : derivative(score, bias, q_idx, kv_idx);
  }

  // The scale of v: elements of v count in units of it.
  CUFLASH_DEVICE Real value_scale(const BatchIndex& entry) const {
    return read_scale<Config::v_scale>(params.v_scale, entry * params.v_scale_strides);
  }

  // The sink: one more logit in every row of a batch entry, like that of a key without a value.
  // Where keys are split, it belongs to the first part.
  CUFLASH_DEVICE Real sink(const BatchIndex& entry) const {
    if constexpr (has_sink) {
      if constexpr (Config::split_keys) {
        if (part().begin > 0) return -infinity();
      }
      return read_real<Config::sink>(params.sink, entry * params.sink_strides);
    } else {
      return -infinity();
    }
  }

  // lse of a row that sees no key: the sink. A row beyond the length is no query and has no sink.
  CUFLASH_DEVICE Real lse_without_keys(const BatchIndex& entry, int q_idx) const {
    return q_idx < seqlen.q ? sink(entry) : -infinity();
  }

  // log2 of exp(sink - logit), where `reference` is the reference of the logit.
  CUFLASH_DEVICE Real sink_exponent(const BatchIndex& entry, Real reference) const {
    const Real at = sink(entry);
    return folds_scale ? at * log2_e - reference : fma(-reference, unit(), at) * log2_e;
  }

  // The queries of some rows. Where the rows of several heads follow each other (PackGQA), row r is
  // query r % num_queries of its head: one row is one query, but several rows may be any queries.
  CUFLASH_DEVICE Range queries_of(Range rows) const {
    if constexpr (!Config::heads_in_rows) return rows;
    const int query = rows.begin % params.num_queries;
    return rows.end - rows.begin == 1 ? Range{query, query + 1} : Range{0, params.num_queries};
  }

  // The keys that some row of [m_begin, m_end) sees as far as lengths, windows and the part decide.
  CUFLASH_DEVICE Range kv_range(int m_begin, int m_end) const {
    m_end = min(m_end, seqlen.q);
    Range keys{0, seqlen.k};
    if constexpr (Config::split_keys) keys = {part().begin, min(part().end, seqlen.k)};
    const Range queries = queries_of({m_begin, m_end});
    if constexpr (Config::window_left) keys.begin = max(keys.begin, queries.begin + diagonal_begin);
    if constexpr (Config::window_right) keys.end = min(keys.end, queries.end - 1 + diagonal_end);
    return m_begin < m_end && diagonal_begin < diagonal_end && keys.begin < keys.end ? keys
                                                                                     : Range{0, 0};
  }

  // kv_range of row q_idx relative to `first_key`, so that the column of a register is compared as
  // a constant. Without a left window it begins at 0, so that nothing is compared there.
  CUFLASH_DEVICE Range kv_range_from(int first_key, int q_idx) const {
    const Range keys = kv_range(q_idx, q_idx + 1).relative_to(first_key);
    return {Config::window_left ? keys.begin : 0, keys.end};
  }

  // The rows that see some key of [n_begin, n_end) as far as lengths and windows decide.
  CUFLASH_DEVICE Range q_range(int n_begin, int n_end) const {
    n_end = min(n_end, seqlen.k);
    Range rows{0, seqlen.q};
    if constexpr (Config::window_right) rows.begin = max(rows.begin, n_begin - diagonal_end + 1);
    if constexpr (Config::window_left) rows.end = min(rows.end, n_end - diagonal_begin);
    return n_begin < n_end && diagonal_begin < diagonal_end && rows.begin < rows.end ? rows
                                                                                     : Range{0, 0};
  }

  // The key blocks of rows [m_begin, m_end). Rows past the length are taken to see what the other
  // rows see: their results are discarded. With a formula no block of such rows is full, because a
  // formula may read arrays at its indices, which have to exist. (D19)
  CUFLASH_DEVICE BlockRanges kv_blocks(int m_begin, int m_end) const {
    Range full{0, Config::score_mod && m_end > seqlen.q ? 0 : seqlen.k};
    const Range queries = queries_of({m_begin, min(m_end, seqlen.q)});
    if constexpr (Config::window_left) {
      full.begin = max(full.begin, queries.end - 1 + diagonal_begin);
    }
    if constexpr (Config::window_right) full.end = min(full.end, queries.begin + diagonal_end);
    return block_ranges<Config::block_n, hides_pairs>(kv_range(m_begin, m_end), full);
  }

  // The query blocks of keys [n_begin, n_end). A block is full only if all these keys exist:
  // another entry of the same owner may be longer, so the sums of these keys are not discarded.
  CUFLASH_DEVICE BlockRanges q_blocks(int n_begin, int n_end) const {
    Range full{0, n_end <= seqlen.k ? seqlen.q : 0};
    if constexpr (Config::window_right) full.begin = max(full.begin, n_end - diagonal_end);
    if constexpr (Config::window_left) full.end = min(full.end, n_begin - diagonal_begin + 1);
    return block_ranges<Config::block_m, hides_pairs>(q_range(n_begin, n_end), full);
  }

 private:
  CUFLASH_DEVICE Real before_formula(Real score, Real bias, int q_idx, int kv_idx) const {
    if constexpr (Config::scale_in_exponent) {
      return score;
    } else {
      const Real factor = Config::softcap ? params.softcap : scale();
      const Real x = Config::softcap ? capped(score) : score;
      if constexpr (Config::bias != Dtype::none) {
        // A bias of -inf hides the pair, whatever its product is. (D18)
        return bias == -infinity() ? bias : with_alibi(fma(factor, x, bias), q_idx, kv_idx);
      } else {
        return with_alibi(factor * x, q_idx, kv_idx);
      }
    }
  }

  CUFLASH_DEVICE ByteMatrix mask_matrix() const {
    return {params.mask + mask_offset, params.mask_layout.row, params.mask_layout.column};
  }

  CUFLASH_DEVICE const Id* query_ids() const {
    return static_cast<const Id*>(params.segment_ids_q) + ids_q_offset;
  }
  CUFLASH_DEVICE const Id* key_ids() const {
    return static_cast<const Id*>(params.segment_ids_k) + ids_k_offset;
  }

  CUFLASH_DEVICE bool same_segment(int q_idx, int kv_idx) const {
    if constexpr (Config::segment_ids == Dtype::none) return true;
    return query_ids()[q_idx] == key_ids()[kv_idx];
  }

  CUFLASH_DEVICE Real with_alibi(Real logit, int q_idx, int kv_idx) const {
    if constexpr (Config::alibi_slopes != Dtype::none) {
      return fma(-slope, distance(q_idx, kv_idx), logit);
    } else {
      return logit;
    }
  }

  CUFLASH_DEVICE Real capped(Real score) const {
    return tanh(score * of_operands(params.inverse_softcap));
  }
};

}  // namespace cuflash
