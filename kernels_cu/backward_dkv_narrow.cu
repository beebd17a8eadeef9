// dk and dv (or one of them) of narrow heads on CUDA cores, a few keys to each thread. Every sum
// has a fixed order.
//
//   for each tile of block_n keys:                            one thread block
//     dk = 0, dv = 0
//     for each batch entry that shares these keys:            heads of a group, broadcast axes
//       for each block of block_m queries that see some key:
//         copy q, dout and the statistics of the block to shared memory, one query at a time
//         for each query, for each key of a thread:           registers
//           p = exp(score(q.k) - lse);  ds = p (dropout(dout.v) - delta) score'(q.k)
//           sum_v += dropout(p) dout;  sum_k += ds q
//         dv += sum_v;  dk += sum_k;  both sums = 0
//     dk *= scale
//
// forward_narrow.cu says why each block has its own sums, and why no tensor cores are used.
#include "simt/narrow.cuh"

namespace cuflash {

constexpr int rows = Config::block_n / Config::num_threads;  // keys of a thread
static_assert(rows * Config::num_threads == Config::block_n, "equal rows per thread");

struct SharedMemory {
  Query queries[Config::block_m];
};

// One key and its gradient sums.
struct Row {
  Key key;
  BlockSums<Config::grad_k ? width : 0> dk;
  BlockSums<Config::grad_v ? width_v : 0> dv;
};

template <bool masked>
CUFLASH_DEVICE void add_block(Row (&own)[rows], const SharedMemory& smem, const Score& score,
                              int first_row, int first_key, const WarpPowers& power) {
#pragma unroll 4
  for (int i = 0; i < Config::block_m; ++i) {
    const Query query = smem.queries[i];
    const int q_idx = first_row + i;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int kv_idx = first_key + r * Config::num_threads;
      const bool is_seen = !masked || (score.q_range(kv_idx, kv_idx + 1).contains(q_idx) &&
                                       own[r].key.seen_by(score, q_idx, kv_idx));
      const PairGradient pair(score, query, own[r].key, q_idx, kv_idx, is_seen, power);
      own[r].dk.add(pair.is_seen, pair.ds, [&](int i) { return query.q(i); });
      own[r].dv.add(pair.is_kept, pair.p, [&](int i) { return query.dout(i); });
    }
  }
  unrolled<rows>([&](int r) {
    own[r].dk.end_block();
    own[r].dv.end_block();
  });
}

// Adds what the queries of the owner's `index`-th batch entry contribute.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              Row (&own)[rows]) {
  const KeyTile work = KeyTile::of_thread_block(params);
  const BatchIndex entry = work.entry(params, index);
  const Score score(params.score, entry);
  const Range tile{work.first_key, work.first_key + Config::block_n};
  const Range queries = score.q_range(tile.begin, tile.end);
  const BlockRanges blocks = score.q_blocks(tile.begin, tile.end);
  VisitedBlocks<Walk::queries> visited(score, blocks, tile);
  int block = visited.first_from(blocks.begin);
  if (block >= blocks.end) return;
  const NarrowRows from(params, entry, score.seqlen);
  const int first_key = tile.begin + threadIdx.x;
  const WarpPowers power;
  bool hides = false;
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int kv_idx = first_key + r * Config::num_threads;
    own[r].key.load(from.k, from.v, score, kv_idx, kv_idx < score.seqlen.k);
    hides |= own[r].key.hides();
  }
  hides = warp_any(hides);
#pragma unroll 1
  for (; block < blocks.end; block = visited.next_after(block)) {
    const int first_row = block * Config::block_m;
    __syncthreads();  // every thread has read the previous block
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::block_m; i += Config::num_threads) {
      const int q_idx = first_row + i;
      const RowStatistics none{infinity(), 0};
      const RowStatistics found = queries.contains(q_idx) ? from.statistics[q_idx] : none;
      smem.queries[i].load(from.q, from.dout, found, q_idx);
    }
    __syncthreads();  // the queries have arrived
    if (looks_up || hides || visited.masked(block)) {
      add_block<true>(own, smem, score, first_row, first_key, power);
    } else {
      add_block<false>(own, smem, score, first_row, first_key, power);
    }
  }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_backward_dkv_narrow(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  Row own[rows];
  unrolled<rows>([&](int r) {
    own[r].dk.clear();
    own[r].dv.clear();
  });
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, own);
  }
  const KeyTile work = KeyTile::of_thread_block(params);
  const BatchIndex entry = work.entry(params, 0);
  const Seqlen seqlen(params.score, entry);
  const RowTarget dk(params.dk, params.dk_layout, entry, seqlen.first_k, params.head_dim,
                     Config::head_dim);
  const RowTarget dv(params.dv, params.dv_layout, entry, seqlen.first_k, params.head_dim_v,
                     Config::head_dim_v);
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int kv_idx = work.first_key + r * Config::num_threads + threadIdx.x;
    bool odd = false;
    if (kv_idx < seqlen.rows_k) {
      odd = own[r].dk.store(dk, kv_idx, params.score.scale);
      odd |= own[r].dv.store(dv, kv_idx, kept_scale(params.score));
    }
    const uint32_t lanes = __ballot_sync(0xffffffff, odd);
    __syncwarp();  // one thread wrote each row, and the warp may overwrite it below
    for_each_bit(lanes, [&](int lane) {
      recompute_dkv(params, work.owner, work.sequence, kv_idx - lane_index() + lane);
    });
  }
}
