// Computes a row of a result again from its visible pairs: one that is not finite, or far from 0.
//
// A tensor-core product adds 0 * x for a hidden pair, and 0 * NaN is NaN: a non-finite element
// would reach all rows of its tile. One warp therefore repeats such a row pair by pair. Scores far
// from 0 (see numeric.cuh) may differ by whole exponents if they are summed in another order or
// rounded once more. Here forward and gradient form scores with the same bits, and subtract them
// before they multiply by log2 e. The functions are not inlined, so that the fast path keeps its
// registers. A lane holds the columns lane, lane + 32, ... of a row. (D56)
#pragma once

#include "schedule/tiles.cuh"
#include "score/dropout.cuh"
#include "score/softmax.cuh"
#include "tile/pages.cuh"
#include "tile/store.cuh"

namespace cuflash {

template <int width>
struct LaneColumns {
  static constexpr int count = (width + 31) / 32;

  Real value[count];

  CUFLASH_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] = 0;
  }

  // Loads a row of an operand, with zeros past its true width. (D86)
  template <typename Source>
  CUFLASH_DEVICE void load(const Source& from, int row) {
    const auto* at = from.row(row) + lane_index() * from.column_stride;
#pragma unroll
    for (int i = 0; i < count; ++i, at += 32 * from.column_stride) {
      value[i] = lane_index() + 32 * i < from.num_columns ? to_real<Source::dtype>(*at) : 0;
    }
  }

  CUFLASH_DEVICE void store(const RowTarget& to, int row, Real factor) const {
    const int first = lane_index() - to.first_column;
    auto* at = to.data + row * to.row_stride + first * to.column_stride;
#pragma unroll
    for (int i = 0; i < count; ++i, at += 32 * to.column_stride) {
      const bool is_own = own_parts == 1 || first + 32 * i >= 0;
      if (is_own && first + 32 * i < to.num_columns) *at = to.rounded(value[i] * factor);
    }
  }

  // Multiplies by `factor` and adds `before` times `row`, the existing result that this one joins.
  CUFLASH_DEVICE void join(Real factor, Real before, const Real* row, int num_columns) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int column = lane_index() + 32 * i;
      const Real earlier = column < num_columns ? row[column] : 0;
      value[i] = fma(before, earlier, value[i] * factor);
    }
  }

  CUFLASH_DEVICE void add(Real factor, const LaneColumns& other) {
#pragma unroll
    for (int i = 0; i < count; ++i) value[i] = fma(factor, other.value[i], value[i]);
  }

  CUFLASH_DEVICE Real dot(const LaneColumns& other) const {
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) sum = fma(value[i], other.value[i], sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    return sum;
  }
};

using QkColumns = LaneColumns<Config::head_dim>;
using VColumns = LaneColumns<Config::head_dim_v>;

// Bit r of the result tells whether any lane has marked row r of a slice: `upper` marks a lane's
// row t/4, `lower` its row t/4 + 8.
CUFLASH_DEVICE uint32_t marked_rows(bool upper, bool lower) {
  uint32_t rows = 0;
  if (warp_any(upper || lower)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t lanes = __ballot_sync(0xffffffff, half == 0 ? upper : lower);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (lanes >> (4 * r) & 15) rows |= 1u << (8 * half + r);
      }
    }
  }
  return rows;
}

// Bits of the rows of a slice that hold a non-finite element.
template <int tiles>
CUFLASH_DEVICE uint32_t non_finite_rows(const Real (&acc)[tiles][4]) {
  Real poison[2] = {0, 0};
  unrolled<tiles, 4>([&](int t, int i) { poison[i / 2] = fma(acc[t][i], Real(0), poison[i / 2]); });
  return marked_rows(poison[0] != 0, poison[1] != 0);
}

// Calls step(i) for every set bit i, from the lowest on. `bits` is the same in all lanes.
template <typename Step>
CUFLASH_DEVICE void for_each_bit(uint32_t bits, const Step& step) {
#pragma unroll 1
  for (; warp_any(bits != 0); bits &= bits - 1) step(__ffs(bits) - 1);
}

// What the gradient needs of a row. For a row far from 0 the statistics hold NaN instead of lse,
// and its lse is read from params.lse.
struct ExactRow {
  bool is_far;
  Real lse, delta;

  CUFLASH_DEVICE ExactRow(const BackwardParams& params, const BatchIndex& entry, int row) {
    const RowStatistics statistics = (params.rows + entry * params.rows_layout.batch)[row];
    is_far = is_quiet_nan(statistics.lse);
    lse = is_far ? params.lse[entry * params.lse_layout.batch + row * params.lse_layout.row]
                 : statistics.lse;
    delta = statistics.delta;
  }

  // The probability of a value of `apply`. Only a rounding error makes a logit exceed lse.
  CUFLASH_DEVICE Real probability(const Score& score, Real value) const {
    const Real difference = score.rounded_logit(value) - lse;
    const Real far_exponent = (difference > 0 ? 0 : difference) * log2_e;
    return power_of_two(is_far ? far_exponent : score.probability_exponent(value, lse));
  }
};

// What the gradient needs of one visible pair.
struct ExactPair {
  Real p;       // probability, 0 if it is dropped
  Real dscore;  // gradient of the score
  Real ds;      // gradient of scale * q.k

  CUFLASH_DEVICE ExactPair(const Score& score, const ExactRow& row, Real product, Real dp,
                           int q_idx, int kv_idx) {
    p = row.probability(score, score.apply(product, q_idx, kv_idx));
    const Real kept = keeps_pair(score, q_idx, kv_idx) ? 1 : 0;
    dscore = p * (dp * kept * kept_scale(score.params) - row.delta);
    ds = dscore * score.derivative(product, q_idx, kv_idx);
    p *= kept;
  }
};

// The end of a row, from its largest logit and its sum of exponentials.
CUFLASH_DEVICE RowEnd exact_end(const Score& score, const BatchIndex& entry, Real largest,
                                Real sum) {
  if constexpr (!Score::has_sink) {
    return {1, sum, largest + log(sum)};
  } else {
    const Real sink = score.sink(entry), larger = fmax(largest, sink);
    const Real weight = power_of_two((largest - larger) * log2_e);
    const Real total = fma(sum, weight, power_of_two((sink - larger) * log2_e));
    return {weight, total, larger + log(total)};
  }
}

// Stores rows of out and lse in the caller's arrays, or in those of parts.
struct CallersRows {
  // A target that stores pairs of columns of any row.
  CUFLASH_DEVICE RowTarget pairs(const ForwardParams& params, const BatchIndex& entry,
                                 int first_q) const {
    return {KeyPart::of_thread_block(params).out(params),
            params.out_layout,
            entry,
            first_q,
            params.head_dim_v,
            Config::head_dim_v};
  }

  CUFLASH_DEVICE void store_lse(const ForwardParams& params, const BatchIndex& entry, int first_q,
                                int q_idx, Real lse) const {
    if (params.lse != nullptr) *lse_of_row(params, entry, first_q + q_idx) = lse;
  }

  CUFLASH_DEVICE static Real* lse_of_row(const ForwardParams& params, const BatchIndex& entry,
                                         int row) {
    return params.lse + entry * params.lse_layout.batch + row * params.lse_layout.row +
           KeyPart::of_thread_block(params).index;
  }

  CUFLASH_DEVICE void store(const ForwardParams& params, const BatchIndex& entry, int q_idx,
                            const VColumns& o, Real factor) const {
    o.store(pairs(params, entry, Seqlen(params.score, entry).first_q), q_idx, factor);
  }
};

// Computes one row of out again, and its lse if writes_lse.
template <typename Target = CallersRows>
__device__ __noinline__ void recompute_out(const ForwardParams& params, const BatchIndex entry,
                                           int q_idx, bool writes_lse, const Target to = {}) {
  const KeyPart part = KeyPart::of_thread_block(params);
  const Score score(params.score, entry, part.keys);
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const KeySource<Config::paged> k_rows(
      params, KeyRows(params.k, params.k_layout, entry, first_k, params.head_dim), entry,
      params.k_page);
  const KeySource<Config::paged> v_rows(
      params, KeyRows(params.v, params.v_layout, entry, first_k, params.head_dim_v), entry,
      params.v_page);
  QkColumns q, k;
  VColumns v, o;
  q.load(RowSource(params.q, params.q_layout, entry, first_q, params.head_dim), q_idx);
  o.clear();
  Real row_max = -infinity(), row_sum = 0;
  const Range keys = score.kv_range(q_idx, q_idx + 1);
#pragma unroll 1
  for (int kv_idx = keys.begin; warp_any(kv_idx < keys.end); ++kv_idx) {
    if (warp_any(!score.sees(q_idx, kv_idx))) continue;
    k.load(k_rows, kv_idx);
    v.load(v_rows, kv_idx);
    const Real logit = score.rounded_logit(score.apply(q.dot(k), q_idx, kv_idx));
    const Real new_max = fmax(row_max, logit);
    const Real shift = new_max == -infinity() ? 0 : new_max;
    const Real rescale = power_of_two((row_max - shift) * log2_e);
    const Real p = power_of_two((logit - shift) * log2_e);
    const Real new_sum = row_sum * rescale + p;
    row_max = new_max;
    if (warp_any(new_sum == 0)) continue;  // a formula has hidden all pairs so far
    // A running mean: it stays within the range where a sum of large values would overflow.
    const Real share = row_sum * rescale / new_sum;
    row_sum = new_sum;
#pragma unroll
    for (int i = 0; i < VColumns::count; ++i) o.value[i] *= share;
    o.add(keeps_pair(score, q_idx, kv_idx) ? p / new_sum : 0, v);
  }
  const RowEnd end = exact_end(score, entry, row_max, row_sum);
  Real factor = kept_scale(params.score) * score.value_scale(entry) * end.weight;
  factor *= row_sum / end.sum;
  factor = row_sum == 0 ? 0 : factor;
  Real lse = row_sum == 0 ? score.lse_without_keys(entry, q_idx) : end.lse;
  if constexpr (Config::joins) {
    const Joined joined(*to.lse_of_row(params, entry, first_q + q_idx), lse);
    const Real* earlier = params.so_far + entry * params.so_far_layout.batch +
                          (first_q + q_idx) * params.so_far_layout.row;
    o.join(factor * joined.now, joined.before, earlier, params.head_dim_v);
    factor = 1;
    lse = joined.lse;
    __syncwarp();  // all lanes have read lse before it is replaced
  }
  to.store(params, entry, q_idx, o, factor);
  if (writes_lse && lane_index() == 0) to.store_lse(params, entry, first_q, q_idx, lse);
}

// Computes one row of dq again, summed over the batch entries of its owner.
__device__ __noinline__ void recompute_dq(const BackwardParams& params, int owner, int sequence,
                                          int q_idx) {
  const int first_entry = owner * params.grid.entries_per_owner;
  QkColumns q, k, dq;
  VColumns v, dout;
  dq.clear();
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    const BatchIndex entry(params.batch, first_entry + index, sequence);
    const Score score(params.score, entry);
    const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
    const RowSource k_rows(params.k, params.k_layout, entry, first_k, params.head_dim);
    const RowSource v_rows(params.v, params.v_layout, entry, first_k, params.head_dim_v);
    const ExactRow row(params, entry, first_q + q_idx);
    const Range keys = score.kv_range(q_idx, q_idx + 1);
    if (row.lse == infinity()) continue;  // sees nothing: its dout is not read
    q.load(RowSource(params.q, params.q_layout, entry, first_q, params.head_dim), q_idx);
    dout.load(RowSource(params.dout, params.dout_layout, entry, first_q, params.head_dim_v), q_idx);
#pragma unroll 1
    for (int kv_idx = keys.begin; kv_idx < keys.end; ++kv_idx) {
      if (!score.sees(q_idx, kv_idx)) continue;
      k.load(k_rows, kv_idx);
      v.load(v_rows, kv_idx);
      dq.add(ExactPair(score, row, q.dot(k), dout.dot(v), q_idx, kv_idx).ds, k);
    }
  }
  const BatchIndex entry(params.batch, first_entry, sequence);
  const Seqlen seqlen(params.score, entry);
  dq.store(RowTarget(params.dq, params.dq_layout, entry, seqlen.first_q, params.head_dim,
                     Config::head_dim),
           q_idx, params.score.scale);
}

// Computes one row of dk and dv again, summed over the batch entries of its owner.
__device__ __noinline__ void recompute_dkv(const BackwardParams& params, int owner, int sequence,
                                           int kv_idx) {
  const int first_entry = owner * params.grid.entries_per_owner;
  QkColumns q, k, dk;
  VColumns v, dout, dv;
  dk.clear();
  dv.clear();
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    const BatchIndex entry(params.batch, first_entry + index, sequence);
    const Score score(params.score, entry);
    const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
    const RowSource q_rows(params.q, params.q_layout, entry, first_q, params.head_dim);
    const RowSource dout_rows(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
    const Range queries = score.q_range(kv_idx, kv_idx + 1);
    k.load(RowSource(params.k, params.k_layout, entry, first_k, params.head_dim), kv_idx);
    v.load(RowSource(params.v, params.v_layout, entry, first_k, params.head_dim_v), kv_idx);
#pragma unroll 1
    for (int q_idx = queries.begin; q_idx < queries.end; ++q_idx) {
      if (!score.sees(q_idx, kv_idx)) continue;
      q.load(q_rows, q_idx);
      dout.load(dout_rows, q_idx);
      const ExactRow row(params, entry, first_q + q_idx);
      const ExactPair pair(score, row, q.dot(k), dout.dot(v), q_idx, kv_idx);
      dk.add(pair.ds, q);
      dv.add(pair.p, dout);
    }
  }
  const BatchIndex entry(params.batch, first_entry, sequence);
  const Seqlen seqlen(params.score, entry);
  if constexpr (Config::grad_k) {
    dk.store(RowTarget(params.dk, params.dk_layout, entry, seqlen.first_k, params.head_dim,
                       Config::head_dim),
             kv_idx, params.score.scale);
  }
  if constexpr (Config::grad_v) {
    dv.store(RowTarget(params.dv, params.dv_layout, entry, seqlen.first_k, params.head_dim_v,
                       Config::head_dim_v),
             kv_idx, kept_scale(params.score));
  }
}

}  // namespace cuflash
