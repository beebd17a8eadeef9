// Sums of the scores' gradient, for bias, ALiBi slopes and scale, for tensor cores of sm_80 and
// later (mma.sync), without atomics. Every sum has a fixed order.
//
//   for each tile of a result:                                one thread block
//     acc = 0                                                 block_m x block_n, in registers
//     for each batch entry that shares the result, and each block of pairs of the tile:
//       s = q k^T;  p = exp(score(s) - lse);  dp = dropout(dout v^T)
//       acc += p (dp - delta) * d score / d option            1, - distance, or s score'(s)
//     sums = acc, or the sums of its columns or of its rows
//
// A tile of a bias (m, n) is one block of pairs. A tile of a key bias (1, n) is all blocks of some
// keys. A tile of a query bias (m, 1), of slopes or of scale is all blocks of some queries, and the
// sums of slopes and scale over queries are left to a later reduction. Queries far from 0 are added
// at the end, pair by pair.
#include "portable/dscore_blocks.cuh"

namespace cuflash {

// Adds the blocks of the owner's `index`-th batch entry to the tile.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              int sequence, Real (&acc)[slices][tiles][4], bool& any_far) {
  const Work work = Work::of_thread_block(params);
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
    const bool masked = blocks.masked(block) || !visited.has_tile_segment(block);
    add_block(params, smem, entry, score, streams_queries ? block * Config::block_m : first_row,
              streams_queries ? first_key : block * Config::block_n, masked, acc, any_far);
  }
}

// Adds the pairs of queries far from 0 to the stored sums. Each sum is updated by one warp.
__device__ __noinline__ void add_far_rows(const BackwardParams& params, int index, int sequence,
                                          Real* sums) {
  constexpr bool of_keys = Config::sums_to == SumsTo::keys;
  const Work work = Work::of_thread_block(params);
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
    if (warp_any(!row.is_far)) continue;
    q.load(RowSource(params.q, params.q_layout, entry, first_q, params.head_dim), q_idx);
    dout.load(RowSource(params.dout, params.dout_layout, entry, first_q, params.head_dim_v), q_idx);
    const Range keys = score.kv_range(q_idx, q_idx + 1);
    const int end = min(keys.end, own_keys.end);
#pragma unroll 1
    for (int kv_idx = max(keys.begin, own_keys.begin); kv_idx < end; ++kv_idx) {
      if (of_keys && kv_idx % Config::num_warps != warp_index()) continue;
      if (warp_any(!score.sees(q_idx, kv_idx))) continue;
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

// Stores one sum for each pair: as Real, or rounded once to 16 bits, two neighbours in one store.
CUFLASH_DEVICE void store_pairs(const BackwardParams& params, int64_t first, const Work& work,
                                const Real (&acc)[slices][tiles][4]) {
  constexpr Dtype dtype = Config::sums_dtype;
  constexpr bool rounds = dtype == Dtype::float16 || dtype == Dtype::bfloat16;
  using Sum = If<rounds, uint16_t, Real>;
  Sum* const sums = reinterpret_cast<Sum*>(params.sums) + first;
  const Layout& layout = params.sums_layout;
  const int num_rows = Work::num_rows(params), num_columns = Work::num_columns(params);
  const bool by_pairs = layout.column == 1 &&
                        ((reinterpret_cast<uint64_t>(sums) / sizeof(Sum) | layout.row) & 1) == 0;
  unrolled<slices, tiles>([&](int s, int t) {
    unrolled<2>([&](int half) {
      const int q_idx =
          work.m_block * Config::block_m + warp_index() * 16 * slices + fragment_row(s, 2 * half);
      const int kv_idx = work.n_block * Config::block_n + fragment_column(t, 0);
      if (q_idx >= num_rows || kv_idx >= num_columns) return;
      const Real low = acc[s][t][2 * half], high = acc[s][t][2 * half + 1];
      Sum* const to = sums + q_idx * layout.row + kv_idx * layout.column;
      if constexpr (rounds) {
        const uint32_t pair = pack<dtype>(low, high);
        if (by_pairs && kv_idx + 1 < num_columns) {
          *reinterpret_cast<uint32_t*>(to) = pair;
          return;
        }
        to[0] = static_cast<uint16_t>(pair);
        if (kv_idx + 1 < num_columns) to[layout.column] = static_cast<uint16_t>(pair >> 16);
      } else {
        to[0] = low;
        if (kv_idx + 1 < num_columns) to[layout.column] = high;
      }
    });
  });
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
  __syncthreads();  // every warp has written its sums
  for (int column = threadIdx.x; column < Config::block_n; column += Config::num_threads) {
    Real sum = 0;
#pragma unroll
    for (int warp = 0; warp < Config::num_warps; ++warp) sum += smem.column_sums[warp][column];
    const int kv_idx = work.n_block * Config::block_n + column;
    if (kv_idx < Work::num_columns(params)) sums[kv_idx * params.sums_layout.column] = sum;
  }
}

static_assert(Config::num_stages == 1 ||
                  (Config::sums_to == SumsTo::pairs && !packed && !Score::has_segments),
              "two stages hold the same block of two successive entries");

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dscore_sm80(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  const Work work = Work::of_thread_block(params);
  Real acc[slices][tiles][4];
  clear(acc);
  bool any_far = false;
  if constexpr (Config::num_stages == 2) {
    EntriesOfPairs{params, smem, work}.add(acc, any_far);
  } else {
#pragma unroll 1
    for (int sequence = work.sequences.begin; sequence < work.sequences.end; ++sequence) {
#pragma unroll 1
      for (int index = 0; index < params.grid.entries_per_owner; ++index) {
        add_entry(params, smem, index, sequence, acc, any_far);
      }
    }
  }
  const BatchIndex entry = work.entry(params, 0, work.sequences.begin);
  const auto first = entry * params.sums_layout.batch;  // offset in sums
  Real* sums = params.sums + first;
  if constexpr (Config::sums_to == SumsTo::pairs) store_pairs(params, first, work, acc);
  if constexpr (Config::sums_to == SumsTo::keys) store_keys(params, smem, sums, work, acc);
  if constexpr (Config::sums_to == SumsTo::queries) {
    const Seqlen seqlen(params.score, entry);
    if constexpr (of_packed_rows) sums += seqlen.first_q * params.sums_layout.row;
    store_queries(params, sums, work, of_packed_rows ? seqlen.rows_q : Work::num_rows(params), acc);
  }
  if constexpr (!Score::recomputes_far_rows) return;
  if (!__syncthreads_or(any_far)) return;  // all sums are stored
#pragma unroll 1
  for (int sequence = work.sequences.begin; sequence < work.sequences.end; ++sequence) {
#pragma unroll 1
    for (int index = 0; index < params.grid.entries_per_owner; ++index) {
      add_far_rows(params, index, sequence, sums);
    }
  }
}
