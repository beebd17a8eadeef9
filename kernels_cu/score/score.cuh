// What a score means: the only file that knows scale, softcap, bias, ALiBi, mask, segments, causal,
// window, offset, lengths and sink. It speaks of query and key indices of one batch entry, never of
// tiles or registers, except for the block ranges, which say which tiles have anything visible.
//
//   raw q.k  ->  logit = scale * q.k  ->  softcap * tanh(logit / softcap)
//            ->  + bias - slope * |q + offset - k|  ->  the caller's formula
//
// `apply` returns the logit in the units of score/units.cuh; where it is just scale * q.k, apply is
// the identity.
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
  uint64_t entry_number;  // number of this entry
  Real slope;
  int near_offset;                   // the causal offset, clamped to where keys may lie
  Real far_offset;                   // how far beyond that it lies
  int diagonal_begin, diagonal_end;  // visible: diagonal_begin <= kv_idx - q_idx < diagonal_end

  CUFLASH_DEVICE Score(const ScoreParams& score_params, const BatchIndex& entry,
                       Range part_of_keys = {0, 1 << 30})
      : ScoreUnits(score_params),
        PartOfKeys(part_of_keys),
        seqlen(score_params, entry),
        formulas(formulas_of(score_params, entry)) {
    // Sequences are shorter than 2^30: a bound clamped to that distance decides the same pairs, and
    // its sum with an index cannot overflow. An offset that an array holds is clamped first.
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

  // The definition. A row's visible keys are an interval apart from the mask, and so are a key's
  // rows: a loop over many pairs asks for kv_range(q_idx, q_idx + 1), or q_range, once and for
  // `unmasked` within it.
  CUFLASH_DEVICE bool visible(int q_idx, int kv_idx) const {
    return kv_range(q_idx, q_idx + 1).contains(kv_idx) && unmasked(q_idx, kv_idx) &&
           same_segment(q_idx, kv_idx);
  }

  // What mask and formula say of a pair of existing indices.
  CUFLASH_DEVICE bool unmasked(int q_idx, int kv_idx) const {
    bool seen = true;
    if constexpr (Config::mask) {
      const Layout& layout = params.mask_layout;
      seen = params.mask[mask_offset + q_idx * layout.row + kv_idx * layout.column] != 0;
    }
    return seen && formula_shows(q_idx, kv_idx);
  }

  // Bounds of the ids of `size` queries, or keys, the first a multiple of `size`; they count what
  // lies between these and multiples of bounded_ids, too.
  template <int size>
  CUFLASH_DEVICE IdBounds<Id> query_bounds(Range rows) const {
    return bounds_within<size, Id>(params.segment_bounds_q, bounds_q_offset, rows, seqlen.q);
  }
  template <int size>
  CUFLASH_DEVICE IdBounds<Id> key_bounds(Range keys) const {
    return bounds_within<size, Id>(params.segment_bounds_k, bounds_k_offset, keys, seqlen.k);
  }

  // Which keys of one row are of its segment: those of the columns that a lane holds, counted from
  // `first_key`, and within `keys`, counted so, too.
  template <int tiles>
  CUFLASH_DEVICE ColumnBits segment_of_row(int q_idx, int first_key, Range keys) const {
    if constexpr (Config::segment_ids == Dtype::none) return {};
    return same_ids<tiles>(query_ids()[min(q_idx, seqlen.q - 1)], key_ids() + first_key, keys);
  }

  // Which of them the mask also shows. Asked for by a whole warp.
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

  // What the mask shows and bounds leave of row q_idx and of that 8 below.
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

  // What the mask shows of two keys, `kv_idx` and 8 more, to the queries of the columns.
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

  // What the caller's formula says of a pair of existing indices.
  CUFLASH_DEVICE bool formula_shows(int q_idx, int kv_idx) const {
    if constexpr (Config::mask_mod) return formulas.formula_mask(q_idx, kv_idx);
    return true;
  }

  // Which queries are of the segment of one key.
  template <int tiles>
  CUFLASH_DEVICE ColumnBits segment_of_key(int kv_idx, int first_row, Range rows) const {
    if constexpr (Config::segment_ids == Dtype::none) return {};
    return same_ids<tiles>(key_ids()[min(kv_idx, seqlen.k - 1)], query_ids() + first_row, rows);
  }

  // Whether a pair within kv_range(q_idx, q_idx + 1) sees each other, a bias of -inf considered.
  CUFLASH_DEVICE bool sees(int q_idx, int kv_idx) const {
    if constexpr (Config::bias != Dtype::none) {
      if (bias(q_idx, kv_idx) == -infinity()) return false;
    }
    return unmasked(q_idx, kv_idx) && same_segment(q_idx, kv_idx);
  }

  // Defined for visible pairs only: it may read arrays at (q_idx, kv_idx).
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

  // -inf for a pair that is hidden. A formula is not asked about it; a bias, which was read, is
  // added first: a branch for each pair would take longer.
  CUFLASH_DEVICE Real apply_if(bool visible, Real score, Real bias, int q_idx, int kv_idx) const {
    if constexpr (Config::bias == Dtype::none || Config::score_mod) {
      return visible ? apply(score, bias, q_idx, kv_idx) : -infinity();
    } else {
      const Real logit = apply(score, bias, q_idx, kv_idx);
      return visible ? logit : -infinity();
    }
  }

  // The same where a lane holds the bias of its pairs, of which this is one.
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
  template <int tiles>  // no more than a name where nothing is held
  using HeldBias = PairValues<Config::holds_bias ? Config::bias : Dtype::none, tiles>;

  // The bias of one row at the columns that a lane holds from `first_key` on, or of one key at the
  // rows. Asked for by a whole warp.
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

  // `apply` of a visible pair whose bias was read and is all that is added, or slopes with it. A
  // bias of -inf hides the pair if its product is finite.
  CUFLASH_DEVICE Real with_bias(Real score, Real bias) const { return fma(scale(), score, bias); }
  CUFLASH_DEVICE Real with_bias(Real score, Real bias, int q_idx, int kv_idx) const {
    return with_alibi(with_bias(score, bias), q_idx, kv_idx);
  }

  // Do some of these keys lie before, and others behind, what slopes count from?
  CUFLASH_DEVICE bool bends(Range rows, Range keys) const {
    if constexpr (Config::alibi_slopes == Dtype::none) return false;
    return keys.end > near_offset + rows.begin + 1 && keys.begin < near_offset + rows.end;
  }

  // Does a slope make weights of these keys 2^64 times those of their neighbours that were visited
  // before? Or is it too much beside products, whose sums are rounded? These keys lie on one side
  // of what slopes count from.
  CUFLASH_DEVICE bool is_steep(Range rows, Range keys) const {
    if constexpr (Config::alibi_slopes == Dtype::none) return false;
    const Real step = slope * static_cast<Real>(keys.end - keys.begin) * log2_e;
    const bool nears = !goes_outwards && keys.begin > near_offset + rows.begin;
    if ((nears ? step : -step) > 64) return true;
    return multiplies_slopes && !(fabs(step) <= 512 && fabs(step) <= 0x1p13f * fabs(scale_log2()));
  }

  // What a slope multiplies.
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

  // d apply / d(scale * q.k), for visible pairs; the factor `scale` is left to the end of a
  // gradient's sum.
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

  // The same where the value of `apply` is known: a formula is not asked about a hidden pair.
  CUFLASH_DEVICE Real derivative_at(Real value, Real score, int q_idx, int kv_idx) const {
    return derivative_at(value, score, Config::score_mod ? bias(q_idx, kv_idx) : 0, q_idx, kv_idx);
  }
  CUFLASH_DEVICE Real derivative_at(Real value, Real score, Real bias, int q_idx,
                                    int kv_idx) const {
    return Config::score_mod && value == -infinity() ? 0 : derivative(score, bias, q_idx, kv_idx);
  }

  // Of v, whose elements are multiples of it.
  CUFLASH_DEVICE Real value_scale(const BatchIndex& entry) const {
    return read_scale<Config::v_scale>(params.v_scale, entry * params.v_scale_strides);
  }

  // One more score of every row of an entry, of a key without a value: the first part's.
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

  // lse of a row without keys: the sink's score. A row beyond the length is no query, and has none.
  CUFLASH_DEVICE Real lse_without_keys(const BatchIndex& entry, int q_idx) const {
    return q_idx < seqlen.q ? sink(entry) : -infinity();
  }

  // log2 of exp(sink - logit), for the logit of a reference.
  CUFLASH_DEVICE Real sink_exponent(const BatchIndex& entry, Real reference) const {
    const Real at = sink(entry);
    return folds_scale ? at * log2_e - reference : fma(-reference, unit(), at) * log2_e;
  }

  // The queries that rows stand for. Where rows of several heads follow each other, row r is query
  // r % num_queries of its head: one row is one query, and several rows may be any.
  CUFLASH_DEVICE Range queries_of(Range rows) const {
    if constexpr (!Config::heads_in_rows) return rows;
    const int query = rows.begin % params.num_queries;
    return rows.end - rows.begin == 1 ? Range{query, query + 1} : Range{0, params.num_queries};
  }

  // Keys that some row of [m_begin, m_end) sees, mask and bias apart.
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

  // Keys that row q_idx sees, mask and bias apart, counted from `first_key`: the column of a
  // register is compared as a constant. Where no first key is hidden, nothing is left to compare.
  CUFLASH_DEVICE Range kv_range_from(int first_key, int q_idx) const {
    const Range keys = kv_range(q_idx, q_idx + 1).relative_to(first_key);
    return {Config::window_left ? keys.begin : 0, keys.end};
  }

  // Rows that see some key of [n_begin, n_end), mask and bias apart.
  CUFLASH_DEVICE Range q_range(int n_begin, int n_end) const {
    n_end = min(n_end, seqlen.k);
    Range rows{0, seqlen.q};
    if constexpr (Config::window_right) rows.begin = max(rows.begin, n_begin - diagonal_end + 1);
    if constexpr (Config::window_left) rows.end = min(rows.end, n_end - diagonal_begin);
    return n_begin < n_end && diagonal_begin < diagonal_end && rows.begin < rows.end ? rows
                                                                                     : Range{0, 0};
  }

  // Key blocks for the rows [m_begin, m_end). Rows past the length count as seeing what the others
  // see: their results are discarded. A formula, which may read an array at any index that it is
  // given, is given existing ones. (D19)
  CUFLASH_DEVICE BlockRanges kv_blocks(int m_begin, int m_end) const {
    Range full{0, Config::score_mod && m_end > seqlen.q ? 0 : seqlen.k};
    const Range queries = queries_of({m_begin, min(m_end, seqlen.q)});
    if constexpr (Config::window_left) {
      full.begin = max(full.begin, queries.end - 1 + diagonal_begin);
    }
    if constexpr (Config::window_right) full.end = min(full.end, queries.begin + diagonal_end);
    return block_ranges<Config::block_n, hides_pairs>(kv_range(m_begin, m_end), full);
  }

  // Query blocks for the keys [n_begin, n_end). A block is full only if all these keys exist:
  // another entry of the same owner may be longer, so their sums are not discarded.
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
