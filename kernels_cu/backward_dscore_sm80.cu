// Sums of the scores' gradient, for bias, ALiBi slopes and scale, for tensor cores of sm_80 and
// later (mma.sync); no atomics, the order of every sum is fixed.
//
//   for each tile that is a result's:                         one thread block
//     acc = 0                                                 block_m x block_n, in registers
//     for each batch entry that shares the result, and each block of pairs of the tile:
//       s = q k^T;  p = exp(score(s) - lse);  dp = dropout(dout v^T)
//       acc += p (dp - delta) * what the score has of it      1, - distance, or s score'(s)
//     sums = acc, or its columns' or its rows' sums
//
// A tile of a bias (m, n) is one block of pairs, one of a key bias (1, n) all blocks of some keys,
// one of a query bias (m, 1) all blocks of some queries; so is one of slopes and scale, whose sums
// over queries are left to be added up. Queries far from 0 join sums at the end, pair by pair.
#include "tile/matmul.cuh"
#include "schedule/segments.cuh"
#include "simt/recompute_rows.cuh"

namespace cuflash {

struct SharedMemory {
  using QTile = OperandTile<Config::block_m, Config::head_dim>;
  using DoutTile = OperandTile<Config::block_m, Config::head_dim_v>;
  using KTile = StreamedTile<Config::block_n, Config::head_dim>;
  using VTile = StreamedTile<Config::block_n, Config::head_dim_v>;

  QTile q;
  DoutTile dout;
  KTile k;
  VTile v;
  Real column_sums[Config::num_warps][Config::block_n];
};

constexpr int slices = Config::block_m / (16 * Config::num_warps);
static_assert(slices * 16 * Config::num_warps == Config::block_m, "every warp owns whole slices");
constexpr int tiles = Config::block_n / 8;
constexpr bool streams_queries = Config::sums_to == SumsTo::keys;

// Sums of slopes and scale lie where the packed queries do; a bias has a matrix for each sequence,
// or one for all.
constexpr bool packed = Config::cu_seqlens != Dtype::none;
constexpr bool of_packed_rows = packed && Config::grad_of != GradOf::bias;

// The tile of this thread block, as often as it is asked for.
struct Work {
  int m_block;  // unless queries are streamed
  int n_block;  // unless keys are
  int owner;
  Range sequences;

  CUFLASH_DEVICE static Work of_this_block(const BackwardParams& params) {
    const Tile tile = tile_of(params.grid, ptx::block_index());
    Range sequences{0, 1};
    int rank = tile.block;
    if constexpr (of_packed_rows) {
      const Place place = place_of<Config::block_m>(Packing::of_queries(params.score), rank);
      rank = place.block;
      sequences = {place.sequence, place.sequence + 1};
    } else if constexpr (packed) {
      sequences.end = params.score.num_sequences;
      if (params.sums_layout.batch.axis[max_batch_axes - 1] != 0) {
        const int tiles_each = params.grid.num_blocks / params.score.num_sequences;
        sequences = {rank / tiles_each, rank / tiles_each + 1};
        rank %= tiles_each;
      }
    }
    if constexpr (Config::sums_to == SumsTo::keys) return {0, rank, tile.owner, sequences};
    if constexpr (Config::sums_to == SumsTo::queries) return {rank, 0, tile.owner, sequences};
    const int columns = (num_columns(params) + Config::block_n - 1) / Config::block_n;
    return {rank / columns, rank % columns, tile.owner, sequences};
  }

  // The `index`-th batch entry of the owner.
  CUFLASH_DEVICE BatchIndex entry(const BackwardParams& params, int index, int sequence) const {
    return {params.batch, owner * params.grid.entries_per_owner + index, sequence};
  }

  // Extents of a bias.
  CUFLASH_DEVICE static int num_rows(const BackwardParams& params) {
    return packed ? params.score.q_length : params.score.seqlen_q;
  }
  CUFLASH_DEVICE static int num_columns(const BackwardParams& params) {
    return packed ? params.score.kv_length : params.score.seqlen_k;
  }
};

// What a pair adds to the result, from the gradient of its score.
CUFLASH_DEVICE Real contribution(const Score& score, Real ds, Real product, int q_idx, int kv_idx) {
  if constexpr (Config::grad_of == GradOf::alibi_slopes) {
    return -ds * score.formula_slope(product, q_idx, kv_idx) * score.distance(q_idx, kv_idx);
  } else if constexpr (Config::grad_of == GradOf::scale) {
    return ds * score.derivative(product, q_idx, kv_idx) * product;
  } else {
    return ds * score.formula_slope(product, q_idx, kv_idx);
  }
}

// Adds the pairs of one block but those of queries far from 0, of which `any_far` tells.
template <bool masked>
CUFLASH_DEVICE void add_pairs(Real (&acc)[slices][tiles][4], const Real (&s_acc)[slices][tiles][4],
                              const Real (&dp_acc)[slices][tiles][4],
                              const RowStatistics* statistics, const Score& score, int first_row,
                              int first_key, bool& any_far) {
  const int lane = ptx::thread_index() % 32;
  const int lane_row = first_row + fragment_row(0, 0, lane);
  const int lane_key = first_key + fragment_column(0, 0, lane);
  const WarpPowers power;
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q_idx = lane_row + 16 * s + 8 * half;
      RowStatistics row = score.seqlen.statistics(statistics, q_idx);
      if (is_quiet_nan(row.lse)) {
        any_far = true;
        row.lse = infinity();
      }
      // Relative to this lane's first column, so that columns are compared as constants.
      const Range keys = score.kv_range(q_idx, q_idx + 1).relative_to(lane_key);
      ColumnBits seen;
      if constexpr (masked) seen = score.seen_of_row<tiles>(q_idx, lane_key, keys);
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Real product = s_acc[s][t][2 * half + i];
          const int kv_idx = lane_key + 8 * t + i;
          const bool visible = !masked || (keys.contains(8 * t + i) && seen.contains(t, i) &&
                                           score.formula_shows(q_idx, kv_idx));
          const Real logit = visible ? score.apply(product, q_idx, kv_idx) : -infinity();
          const Real p = power(score.probability_exponent(logit, row.lse));
          const Real ds = p * (dp_acc[s][t][2 * half + i] - row.delta);
          // An invisible value may be NaN: zero times it would not do.
          if (!masked || logit != -infinity()) {
            acc[s][t][2 * half + i] += contribution(score, ds, product, q_idx, kv_idx);
          }
        }
      }
    }
  }
}

// Adds one block of pairs of one batch entry.
CUFLASH_DEVICE void add_block(const BackwardParams& params, SharedMemory& smem,
                              const BatchIndex& entry, const Score& score, int first_row,
                              int first_key, bool masked, Real (&acc)[slices][tiles][4],
                              bool& any_far) {
  const Range rows{0, score.seqlen.q}, keys{0, score.seqlen.k};
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, entry, first_q, params.head_dim);
  const RowSource dout(params.dout, params.dout_layout, entry, first_q, params.head_dim_v);
  const RowSource k(params.k, params.k_layout, entry, first_k, params.head_dim);
  const RowSource v(params.v, params.v_layout, entry, first_k, params.head_dim_v);
  __syncthreads();  // every warp is done with the block before
  load_tile(smem.q, q, first_row, rows);
  load_tile(smem.dout, dout, first_row, rows);
  load_tile(smem.k, k, first_key, keys);
  load_tile(smem.v, v, first_key, keys);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  split(smem.k);
  split(smem.v);
  __syncthreads();  // all four are there

  const int warp_row = warp_index() * 16 * slices;
  Real s_acc[slices][tiles][4], dp_acc[slices][tiles][4];
  clear(s_acc);
  multiply_transposed(s_acc, read_rows(smem.q, warp_row), read_columns(smem.k));
  clear(dp_acc);
  multiply_transposed<columns_of_dp>(dp_acc, read_rows(smem.dout, warp_row), read_columns(smem.v));
  drop_gradients(dp_acc, score, first_row + warp_row, first_key);
  const RowStatistics* statistics = params.rows + entry * params.rows_layout.batch + first_q;
  if (masked) {
    add_pairs<true>(acc, s_acc, dp_acc, statistics, score, first_row + warp_row, first_key,
                    any_far);
  } else {
    add_pairs<false>(acc, s_acc, dp_acc, statistics, score, first_row + warp_row, first_key,
                     any_far);
  }
}

// Adds the blocks of the owner's `index`-th batch entry.
CUFLASH_DEVICE void accumulate(const BackwardParams& params, SharedMemory& smem, int index,
                               int sequence, Real (&acc)[slices][tiles][4], bool& any_far) {
  const Work work = Work::of_this_block(params);
  const BatchIndex entry = work.entry(params, index, sequence);
  const Score score(params.score, entry);
  const int first_row = work.m_block * Config::block_m, first_key = work.n_block * Config::block_n;
  const Range rows{first_row, first_row + Config::block_m};
  const Range keys{first_key, first_key + Config::block_n};
  const BlockRanges blocks = streams_queries ? score.q_blocks(keys.begin, keys.end)
                                             : score.kv_blocks(rows.begin, rows.end);
  VisitedBlocks<streams_queries ? Walk::queries : Walk::keys> visited(
      score, blocks, streams_queries ? keys : rows);
  int begin = blocks.begin, end = blocks.end;
  if constexpr (Config::sums_to == SumsTo::pairs) {
    begin = max(begin, work.n_block);
    end = min(end, work.n_block + 1);
  }
#pragma unroll 1
  for (int block = visited.first_from(begin); block < end; block = visited.next_after(block)) {
    const bool masked = blocks.masked(block) || !visited.of_one_segment(block);
    add_block(params, smem, entry, score, streams_queries ? block * Config::block_m : first_row,
              streams_queries ? first_key : block * Config::block_n, masked, acc, any_far);
  }
}

// Adds the pairs of queries far from 0 to stored sums. A sum belongs to one warp.
__device__ __noinline__ void add_far_rows(const BackwardParams& params, int index, int sequence,
                                          Real* sums) {
  constexpr bool of_keys = Config::sums_to == SumsTo::keys;
  const Work work = Work::of_this_block(params);
  const BatchIndex entry = work.entry(params, index, sequence);
  const Score score(params.score, entry);
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource k_rows(params.k, params.k_layout, entry, first_k, params.head_dim);
  const RowSource v_rows(params.v, params.v_layout, entry, first_k, params.head_dim_v);
  Range rows{0, score.seqlen.q}, own_keys{0, score.seqlen.k};
  if constexpr (!streams_queries) {
    rows.begin = work.m_block * Config::block_m;
    rows.end = min(rows.end, rows.begin + Config::block_m);
  }
  if constexpr (Config::sums_to != SumsTo::queries) {
    own_keys.begin = work.n_block * Config::block_n;
    own_keys.end = min(own_keys.end, own_keys.begin + Config::block_n);
  }
  QkColumns q, k;
  VColumns v, dout;
#pragma unroll 1
  for (int q_idx = rows.begin; q_idx < rows.end; ++q_idx) {
    if (!of_keys && q_idx % Config::num_warps != warp_index()) continue;
    const ExactRow row(params, entry, first_q + q_idx);
    if (warp_agrees(!row.is_far)) continue;
    q.load(RowSource(params.q, params.q_layout, entry, first_q, params.head_dim), q_idx);
    dout.load(RowSource(params.dout, params.dout_layout, entry, first_q, params.head_dim_v), q_idx);
    const Range keys = score.kv_range(q_idx, q_idx + 1);
    const int end = min(keys.end, own_keys.end);
#pragma unroll 1
    for (int kv_idx = max(keys.begin, own_keys.begin); kv_idx < end; ++kv_idx) {
      if (of_keys && kv_idx % Config::num_warps != warp_index()) continue;
      if (warp_agrees(!score.sees(q_idx, kv_idx))) continue;
      k.load(k_rows, kv_idx);
      v.load(v_rows, kv_idx);
      const Real product = q.dot(k);
      const ExactPair pair(score, row, product, dout.dot(v), q_idx, kv_idx);
      if (lane_index() == 0) {
        sums[(of_keys ? 0 : q_idx * params.sums_layout.row) +
             (Config::sums_to == SumsTo::queries ? 0 : kv_idx * params.sums_layout.column)] +=
            contribution(score, pair.dscore, product, q_idx, kv_idx);
      }
    }
  }
}

CUFLASH_DEVICE void store_pairs(const BackwardParams& params, Real* sums, const Work& work,
                                const Real (&acc)[slices][tiles][4]) {
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q_idx =
            work.m_block * Config::block_m + warp_index() * 16 * slices + fragment_row(s, i);
        const int kv_idx = work.n_block * Config::block_n + fragment_column(t, i);
        if (q_idx < Work::num_rows(params) && kv_idx < Work::num_columns(params)) {
          sums[q_idx * params.sums_layout.row + kv_idx * params.sums_layout.column] = acc[s][t][i];
        }
      }
    }
  }
}

CUFLASH_DEVICE void store_queries(const BackwardParams& params, Real* sums, const Work& work,
                                  int num_rows, const Real (&acc)[slices][tiles][4]) {
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Real sum = 0;
#pragma unroll
      for (int t = 0; t < tiles; ++t) sum += acc[s][t][2 * half] + acc[s][t][2 * half + 1];
      sum = quad_sum(sum);
      const int q_idx =
          work.m_block * Config::block_m + warp_index() * 16 * slices + fragment_row(s, 2 * half);
      if (q_idx < num_rows && lane_index() % 4 == 0) {
        sums[q_idx * params.sums_layout.row] = sum;
      }
    }
  }
}

CUFLASH_DEVICE void store_keys(const BackwardParams& params, SharedMemory& smem, Real* sums,
                               const Work& work, const Real (&acc)[slices][tiles][4]) {
  unrolled<tiles, 2>([&](int t, int i) {
    Real sum = 0;
#pragma unroll
    for (int s = 0; s < slices; ++s) sum += acc[s][t][i] + acc[s][t][i + 2];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (lane_index() < 4) smem.column_sums[warp_index()][fragment_column(t, i)] = sum;
  });
  __syncthreads();  // the sums of every warp are there
  for (int column = threadIdx.x; column < Config::block_n; column += Config::num_threads) {
    Real sum = 0;
#pragma unroll
    for (int warp = 0; warp < Config::num_warps; ++warp) sum += smem.column_sums[warp][column];
    const int kv_idx = work.n_block * Config::block_n + column;
    if (kv_idx < Work::num_columns(params)) sums[kv_idx * params.sums_layout.column] = sum;
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dscore_sm80(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  const Work work = Work::of_this_block(params);
  Real acc[slices][tiles][4];
  clear(acc);
  bool any_far = false;
#pragma unroll 1
  for (int sequence = work.sequences.begin; sequence < work.sequences.end; ++sequence) {
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      accumulate(params, smem, index, sequence, acc, any_far);
    }
  }
  const BatchIndex entry = work.entry(params, 0, work.sequences.begin);
  Real* sums = params.sums + entry * params.sums_layout.batch;
  if constexpr (Config::sums_to == SumsTo::pairs) store_pairs(params, sums, work, acc);
  if constexpr (Config::sums_to == SumsTo::keys) store_keys(params, smem, sums, work, acc);
  if constexpr (Config::sums_to == SumsTo::queries) {
    const Seqlen seqlen(params.score, entry);
    if constexpr (of_packed_rows) sums += seqlen.first_q * params.sums_layout.row;
    store_queries(params, sums, work, of_packed_rows ? seqlen.rows_q : Work::num_rows(params), acc);
  }
  if (!__syncthreads_or(any_far)) return;  // all sums are stored
#pragma unroll 1
  for (int sequence = work.sequences.begin; sequence < work.sequences.end; ++sequence) {
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      add_far_rows(params, index, sequence, sums);
    }
  }
}
