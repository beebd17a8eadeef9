// Kernel parameters, passed by value. cuflash/_kernels/params.py mirrors every struct. Strides
// count elements.
#pragma once

#include "numeric.cuh"
#include "ptx/tma.cuh"

namespace cuflash {

constexpr int max_batch_axes = 6;
constexpr int bounded_ids = 64;  // neighbouring segment ids that share one pair of bounds (D90)

// Batch axes of the launch, slowest first. Index 0 takes the remainder of a flat index. With packed
// sequences the last of max_batch_axes counts the sequences, and packed arrays have stride 0 there.
struct BatchAxes {
  int32_t num_axes;
  int32_t extent[max_batch_axes];
};

struct BatchStrides {
  int64_t axis[max_batch_axes];
};

// One matrix for each batch entry: its rows are queries or keys, its columns features or keys.
struct Layout {
  BatchStrides batch;
  int64_t row;
  int64_t column;
};

// Everything that score/score.cuh needs. An absent array is null, and no code reads it.
// Written by tools/gen_score_params.py: do not edit.
// clang-format off
struct ScoreParams {
  const void* bias;  // (m, n)
  const uint8_t* mask;  // (m, n)
  const void* offset;  // ()
  const void* q_lengths;  // ()
  const void* kv_lengths;  // ()
  const void* alibi_slopes;  // ()
  const void* segment_ids_q;  // (m)
  const void* segment_ids_k;  // (n)
  const void* segment_bounds_q;  // (ceil(m / bounded_ids)) IdBounds, contiguous
  const void* segment_bounds_k;  // (ceil(n / bounded_ids)) IdBounds, contiguous
  const void* sink;  // ()
  const void* q_scale;  // ()
  const void* k_scale;  // ()
  const void* v_scale;  // ()
  const void* cu_seqlens_q;  // (sequences + 1), contiguous: where packed sequences begin and end
  const void* cu_seqlens_k;  // (sequences + 1), contiguous
  const void* formula_array0;  // arrays of the caller's formulas, contiguous
  const void* formula_array1;
  const void* formula_array2;
  const void* formula_array3;
  const void* formula_array4;
  const void* formula_array5;
  uint64_t dropout_seed;  // a number, patched at each launch as the addresses are
  uint64_t entry_number;  // number of the first batch entry, patched like the seed
  Layout bias_layout;
  Layout mask_layout;
  BatchStrides offset_strides;
  BatchStrides q_lengths_strides;
  BatchStrides kv_lengths_strides;
  BatchStrides alibi_slopes_strides;
  BatchStrides segment_ids_q_strides;
  BatchStrides segment_ids_k_strides;
  BatchStrides segment_bounds_q_strides;
  BatchStrides segment_bounds_k_strides;
  BatchStrides sink_strides;
  BatchStrides q_scale_strides;
  BatchStrides k_scale_strides;
  BatchStrides v_scale_strides;
  BatchStrides entry_number_strides;
  int64_t offset_value;  // used where Config::offset is `value`
  int64_t window_left;  // used where Config::window_left; below 2^60
  int64_t window_right;
  int32_t diagonal_begin;  // first diagonal in the window, used where Config::offset is `value`
  int32_t diagonal_end;
  int32_t seqlen_q;  // extents of the arrays; rows of all sequences if they are packed
  int32_t seqlen_k;
  int32_t num_sequences;
  int32_t num_heads;
  int32_t q_length;  // used where no array of lengths is passed
  int32_t kv_length;
  int32_t first_query;  // position of the first query in the whole call, for dropout and formulas
  int32_t first_key;
  int32_t num_queries;  // queries of a head, used where Config::heads_in_rows
  Real scale;
  Real scale_log2;  // scale * log2(e)
  Real softcap;
  Real inverse_softcap;  // scale / softcap
  Real near_product;  // largest product that is capped by a polynomial
  Real near_square;
  Real capped_0;  // coefficient of (product^2 - near_square)^0 in log2(exp(capped score)) / product
  Real capped_1;  // coefficient of (product^2 - near_square)^1 in log2(exp(capped score)) / product
  Real capped_2;  // coefficient of (product^2 - near_square)^2 in log2(exp(capped score)) / product
  Real capped_3;  // coefficient of (product^2 - near_square)^3 in log2(exp(capped score)) / product
  uint32_t dropout_threshold;  // weights with 16 random bits below it are dropped
  Real kept_scale;  // factor of kept weights
};
// clang-format on
// End of what tools/gen_score_params.py writes.

// Tiles of one launch in the order of schedule/scheduler.cuh.
struct Grid {
  int32_t num_blocks;  // tiles of one owner
  int32_t num_owners;  // batch entries that own a result
  int32_t owners_per_section;
  int32_t entries_per_owner;  // batch entries summed into one result
};

struct ForwardParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  Real* lse;                  // may be null
  const int32_t* page_table;  // used where Config::paged: pages of each sequence, in order
  const Real* so_far;         // earlier out over other keys; used where Config::joins
  ScoreParams score;
  Layout q_layout;
  Layout k_layout;
  Layout v_layout;
  Layout out_layout;
  Layout lse_layout;         // one column
  Layout page_table_layout;  // one column
  Layout so_far_layout;
  BatchAxes batch;
  Grid grid;  // where keys are split, num_owners is owners times parts
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t num_splits;  // parts of the keys, used where Config::split_keys
  int32_t part_keys;   // keys of each part
  int32_t page_size;   // rows of a page of k and v, used where Config::paged
  int32_t num_pages;
  int64_t k_page;  // stride from one page to the next
  int64_t v_page;
};

// forward_combine.cu: partial results over parts of the keys become one result.
struct CombineParams {
  const Real* out_parts;  // rows of (parts, head_dim_v)
  const Real* lse_parts;  // rows of (parts,)
  void* out;
  Real* lse;  // may be null
  Layout out_parts_layout;
  Layout lse_parts_layout;
  Layout out_layout;
  Layout lse_layout;
  BatchAxes batch;
  Grid grid;
  int32_t head_dim_v;
  int32_t num_splits;
  int32_t num_rows;
};

// Statistics of one query for the backward passes. lse is +inf for a row that saw no key, so that
// its probabilities are 0. It is NaN for a row far from 0: every result that the row reaches
// becomes NaN, and is computed again with the true lse. delta = rowsum(dout * out) - dlse.
struct RowStatistics {
  Real lse;
  Real delta;
};

struct ForwardSm90Params : ForwardParams {
  ptx::TensorMap q_map;  // (column, row, three batch axes); broadcast axes have extent 1
  ptx::TensorMap k_map;
  ptx::TensorMap v_map;
  ptx::TensorMap out_map;
  uint32_t* tile_counter;  // 0 before and after the launch; null: tiles are assigned in advance
};

// cache_grow.cu. Arrays are contiguous. They have one element for each sequence unless a shape is
// given.
struct CacheGrowParams {
  int32_t* page_table;  // (sequences, columns)
  int32_t* lengths;     // in: lengths before the new keys; out: after them
  int32_t* dropped;     // in and out: count of keys that found no room
  const void* counts;   // number of new keys (int64); null: num_tokens for every sequence
  int32_t* starts;      // out: the lengths before the new keys
  int32_t* sources;     // out: the page to copy into the page of the first new key; -1: none
  int32_t* taken;       // (pages,), out: the free pages that are taken, lowest first
  int32_t num_sequences;
  int32_t num_columns;
  int32_t page_size;
  int32_t num_pages;
  int32_t max_length;
  int32_t num_tokens;
};

// cache_write.cu: new keys and values, and the pages that receive them. Pages are contiguous.
struct CacheWriteParams {
  const void* k;
  const void* v;
  void* k_pages;  // (pages, heads, page_size, head_dim)
  void* v_pages;
  const double* frequencies;  // null: rotary frequencies of base 10000
  const int32_t* page_table;
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* sources;
  const float* k_scales;  // (heads,) of pages of 8 bits; null: k_scale
  const float* v_scales;
  Layout k_layout;  // (sequences, heads, tokens, head_dim)
  Layout v_layout;
  int32_t num_heads;
  int32_t num_columns;
  int32_t page_size;
  int32_t num_tokens;
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t num_pairs;  // pairs of features that are rotated together
  Real k_scale;
  Real v_scale;
};

// cache_take.cu: each sequence of a cache takes over the state of its parent.
struct CacheTakeParams {
  int32_t* page_table;
  int32_t* lengths;
  const int32_t* old_table;
  const int32_t* old_lengths;
  const void* parents;  // int64
  const void* kept;     // int64, number of keys that each sequence keeps; null: all
  int32_t num_sequences;
  int32_t num_columns;
};

// rotary.cu: rows are rotated by their positions.
struct RotaryParams {
  const void* x;
  void* out;
  const void* positions;      // used unless Config::positions is `none`
  const double* frequencies;  // null: rotary frequencies of base 10000
  Layout x_layout;
  Layout out_layout;
  Layout positions_layout;  // one column
  BatchAxes batch;
  Grid grid;
  int64_t position;  // position of every row if there is no array
  int32_t num_rows;
  int32_t head_dim;
  int32_t num_pairs;
  int32_t sign;  // 1, or -1 for the inverse rotation
};

// segment_bounds.cu: bounds of the segment ids of every batch entry. Ids and bounds are contiguous.
struct SegmentBoundsParams {
  const void* ids_q;
  const void* ids_k;
  void* bounds_q;
  void* bounds_k;
  BatchStrides ids_q_strides;
  BatchStrides ids_k_strides;
  BatchStrides bounds_q_strides;
  BatchStrides bounds_k_strides;
  BatchAxes batch;
  int32_t num_ids_q;
  int32_t num_ids_k;
};

// quantize.cu. The rows of x are contiguous, matrix by matrix. A block of rows shares one scale.
struct QuantizeParams {
  const void* x;
  uint32_t* largest;  // bits of the largest magnitude of each block; 0 before the first pass
  float* scale;       // scale of each block
  uint8_t* out;
  uint32_t signs[8];      // one bit for each column: negate the column before the rotation?
  int32_t rows;           // rows of a matrix
  int32_t rows_of_block;  // rows of a block
  int32_t blocks;         // blocks of a matrix
};

struct DeltaParams {
  const void* dout;
  const void* out;
  const Real* lse;
  const Real* dlse;  // null unless Config::grad_lse
  RowStatistics* rows;
  uint32_t* turns;  // turns of backward_sm90.cu or backward_pair_sm90.cu, set to 0
  Layout dout_layout;
  Layout out_layout;
  Layout lse_layout;
  Layout dlse_layout;
  Layout rows_layout;
  BatchAxes batch;
  Grid grid;
  int32_t seqlen_q;
  int32_t head_dim_v;
  int32_t num_turns;            // 0 if no kernel uses turns
  int32_t recomputes_far_rows;  // Score::recomputes_far_rows of the backward passes
};

struct BackwardParams {
  const void* dout;
  const void* q;
  const void* k;
  const void* v;
  const RowStatistics* rows;
  const Real* lse;
  void* dq;
  void* dk;
  void* dv;
  void* dbias;      // used where Config::grad_bias
  Real* sums;       // sums of the scores' gradient, or gradients before they are scaled and rounded
  uint32_t* turns;  // turns of the tiles that add to dq: see backward_sm90.cu
  ScoreParams score;
  Layout dout_layout;
  Layout q_layout;
  Layout k_layout;
  Layout v_layout;
  Layout rows_layout;
  Layout lse_layout;
  Layout dq_layout;
  Layout dk_layout;
  Layout dv_layout;
  Layout dbias_layout;
  Layout sums_layout;
  BatchAxes batch;
  Grid grid;  // where queries are split: owners times parts, and the entries of one part
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t dq_sums;      // separate sums of dq: tile t of keys adds to sum t % dq_sums
  int32_t row_parts;    // parts of the query blocks of an entry, used where Config::split_rows
  int32_t part_blocks;  // blocks of queries in such a part
  int32_t num_parts;    // partial sums of dk and dv of an owner: backward_combine.cu adds them
};

struct BackwardSm90Params : BackwardParams {
  ptx::TensorMap dout_map;  // as in ForwardSm90Params
  ptx::TensorMap q_map;
  ptx::TensorMap k_map;
  ptx::TensorMap v_map;
};

struct BackwardOnePassParams : BackwardSm90Params {
  ptx::TensorMap dq_map;  // used where Config::finishes_dq
};

}  // namespace cuflash
