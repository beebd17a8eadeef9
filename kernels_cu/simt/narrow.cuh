// Queries and keys of narrow heads, and what a pair of them adds to gradients. A thread keeps its
// own rows whole in registers. All threads of a block read the other rows from shared memory, the
// same row at the same time.
#pragma once

#include "simt/recompute_rows.cuh"
#include "schedule/segments.cuh"

namespace cuflash {

constexpr int width = Config::width, width_v = Config::width_v;  // true head sizes

// Does a masked block read a bias or a mask in global memory, or evaluate formulas?
constexpr bool looks_up = !Config::key_bias && Score::hides_pairs;

// A key, its value and, with Config::key_bias, its bias.
struct alignas(16) Key {
  static constexpr int room = (width + width_v + Config::key_bias + 3) / 4 * 4;
  Real element[room];

  CUFLASH_DEVICE Real k(int i) const { return element[i]; }
  CUFLASH_DEVICE Real v(int i) const { return element[width + i]; }
  CUFLASH_DEVICE Real bias() const { return element[width + width_v]; }
  CUFLASH_DEVICE bool hides() const {
    if constexpr (Config::key_bias) return bias() == -infinity();
    return false;
  }

  // Loads a key, as zeros if it does not exist.
  CUFLASH_DEVICE void load(const RowSource& from_k, const RowSource& from_v, const Score& score,
                           int kv_idx, bool exists) {
    unrolled<width>([&](int i) { element[i] = exists ? from_k.number(kv_idx, i) : Real(0); });
    unrolled<width_v>(
        [&](int i) { element[width + i] = exists ? from_v.number(kv_idx, i) : Real(0); });
    if constexpr (Config::key_bias) {
      element[width + width_v] = exists ? score.bias(0, kv_idx) : Real(0);
    }
  }

  // Is this key visible to query q_idx, which lies within its bounds?
  CUFLASH_DEVICE bool seen_by(const Score& score, int q_idx, int kv_idx) const {
    if constexpr (Config::key_bias) return !hides();
    return score.sees(q_idx, kv_idx);
  }

  // Score::apply for a visible pair.
  CUFLASH_DEVICE Real apply(const Score& score, Real product, int q_idx, int kv_idx) const {
    if constexpr (Config::key_bias) return score.with_bias(product, bias());
    return score.apply(product, q_idx, kv_idx);
  }
};

// A query, its dout, lse and delta.
struct alignas(16) Query {
  static constexpr int room = (width + width_v + 2 + 3) / 4 * 4;
  Real element[room];

  CUFLASH_DEVICE Real q(int i) const { return element[i]; }
  CUFLASH_DEVICE Real dout(int i) const { return element[width + i]; }
  CUFLASH_DEVICE Real lse() const { return element[width + width_v]; }
  CUFLASH_DEVICE Real delta() const { return element[width + width_v + 1]; }

  // Loads a query. If it sees no key, q and dout are not read.
  CUFLASH_DEVICE void load(const RowSource& from_q, const RowSource& from_dout,
                           RowStatistics statistics, int q_idx) {
    const bool sees = statistics.lse != infinity();
    unrolled<width>([&](int i) { element[i] = sees ? from_q.number(q_idx, i) : Real(0); });
    unrolled<width_v>(
        [&](int i) { element[width + i] = sees ? from_dout.number(q_idx, i) : Real(0); });
    element[width + width_v] = statistics.lse;
    element[width + width_v + 1] = statistics.delta;
  }
};

// The operands of a batch entry from which gradients read rows.
struct NarrowRows {
  RowSource q, k, v, dout;
  const RowStatistics* statistics;

  CUFLASH_DEVICE NarrowRows(const BackwardParams& params, const BatchIndex& entry,
                            const Seqlen& seqlen)
      : q(params.q, params.q_layout, entry, seqlen.first_q, params.head_dim),
        k(params.k, params.k_layout, entry, seqlen.first_k, params.head_dim),
        v(params.v, params.v_layout, entry, seqlen.first_k, params.head_dim_v),
        dout(params.dout, params.dout_layout, entry, seqlen.first_q, params.head_dim_v),
        statistics(params.rows + entry * params.rows_layout.batch + seqlen.first_q) {}
};

// What a pair within its bounds adds to the gradients of its query and key, if it is visible.
struct PairGradient {
  Real p;   // probability, which dv adds if is_kept
  Real ds;  // gradient of scale * q.k
  bool is_seen, is_kept;

  CUFLASH_DEVICE PairGradient(const Score& score, const Query& query, const Key& key, int q_idx,
                              int kv_idx, bool is_seen, const WarpPowers& power)
      : is_seen(is_seen), is_kept(is_seen) {
    Real product = 0, dp = 0;
    unrolled<width>([&](int i) { product = fma(query.q(i), key.k(i), product); });
    unrolled<width_v>([&](int i) { dp = fma(query.dout(i), key.v(i), dp); });
    const Real logit = is_seen ? key.apply(score, product, q_idx, kv_idx) : -infinity();
    p = power(score.probability_exponent(logit, query.lse()));
    if constexpr (Config::dropout) {
      is_kept = is_seen && keeps_pair(score, q_idx, kv_idx);
      dp = is_kept ? dp * score.params.kept_scale : 0;
    }
    ds = p * (dp - query.delta()) * score.derivative_at(logit, product, q_idx, kv_idx);
  }
};

// Sums of products, over the current block and over all blocks before. (D61)
template <int count>
struct BlockSums {
  Real block[count + 1], all[count + 1];  // + 1: no array is empty

  CUFLASH_DEVICE void clear() {
    unrolled<count>([&](int i) { block[i] = all[i] = 0; });
  }

  // Nothing that an invisible or dropped pair holds may reach a sum, NaN included.
  template <typename At>
  CUFLASH_DEVICE void add(bool counts, Real factor, const At& at) {
    unrolled<count>([&](int i) { block[i] = counts ? fma(factor, at(i), block[i]) : block[i]; });
  }

  CUFLASH_DEVICE void end_block() {
    unrolled<count>([&](int i) {
      all[i] += block[i];
      block[i] = 0;
    });
  }

  // Stores the sums times `factor`, and returns whether any sum is not finite.
  CUFLASH_DEVICE bool store(const RowTarget& to, int row, Real factor) const {
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      is_finite &= fabs(all[i]) < infinity();
      to.data[row * to.row_stride + i * to.column_stride] = to.rounded(all[i] * factor);
    }
    return !is_finite;
  }
};

}  // namespace cuflash
