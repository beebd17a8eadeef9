// The lengths of the sequences of one batch entry, what holds for rows beyond them, and the entry's
// causal diagonal.
#pragma once

#include "schedule/scheduler.cuh"

namespace cuflash {

// Lengths are clamped to the extents of arrays, so that no value in an array can cause a fault.
struct Seqlen {
  int q;           // rows [0, q) exist
  int k;           // keys [0, k) exist
  int64_t offset;  // key n lies on the causal diagonal of row n - offset
  int first_q;     // rows of the arrays that hold row 0 and key 0 of this entry
  int first_k;
  int rows_q;  // how many rows the arrays have for this entry
  int rows_k;

  CUFLASH_DEVICE Seqlen(const ScoreParams& params, const BatchIndex& entry)
      : q(params.q_length),
        k(params.kv_length),
        first_q(0),
        first_k(0),
        rows_q(params.seqlen_q),
        rows_k(params.seqlen_k) {
    if constexpr (Config::cu_seqlens != Dtype::none) {
      const Packing queries = Packing::of_queries(params), keys = Packing::of_keys(params);
      first_q = queries.begin(entry.sequence());
      first_k = keys.begin(entry.sequence());
      rows_q = queries.rows(entry.sequence());
      rows_k = keys.rows(entry.sequence());
      q = min(q, rows_q);
      k = min(k, rows_k);
    }
    if constexpr (Config::q_lengths != Dtype::none) {
      const int64_t index = entry * params.q_lengths_strides;
      q = static_cast<int>(clamp(read_integer<Config::q_lengths>(params.q_lengths, index), 0, q));
    }
    if constexpr (Config::kv_lengths != Dtype::none) {
      const int64_t index = entry * params.kv_lengths_strides;
      k = static_cast<int>(clamp(read_integer<Config::kv_lengths>(params.kv_lengths, index), 0, k));
    }
    if constexpr (Config::offset == Offset::value) {
      offset = params.offset_value;
    } else if constexpr (Config::offset == Offset::lengths) {
      offset = k - (Config::heads_in_rows ? params.num_queries : q);
    } else {
      constexpr Dtype dtype = Config::offset == Offset::int32 ? Dtype::int32 : Dtype::int64;
      offset = read_integer<dtype>(params.offset, entry * params.offset_strides);
    }
  }

  // What the gradient needs of one row of this entry. A row beyond the length is no query, whatever
  // `rows` holds: lse = +inf makes its probabilities zero.
  CUFLASH_DEVICE RowStatistics statistics(const RowStatistics* rows, int q_idx) const {
    return q_idx < q ? rows[q_idx] : RowStatistics{infinity(), 0};
  }
};

}  // namespace cuflash
