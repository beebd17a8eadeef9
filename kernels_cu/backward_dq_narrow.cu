// dq of narrow heads on CUDA cores, a few rows to each thread. Every sum has a fixed order.
//
//   for each tile of block_m rows of q:                       one thread block
//     dq = 0
//     for each batch entry that shares these rows:            broadcast axes
//       for each block of block_n keys that some row sees:
//         copy k, v and a bias shared by all queries to shared memory, one key at a time
//         for each key, for each row of a thread:             registers
//           p = exp(score(q.k) - lse);  ds = p (dropout(dout.v) - delta) score'(q.k)
//           sum += ds k
//         dq += sum;  sum = 0
//     dq *= scale
//
// forward_narrow.cu says why each block has its own sums, and why no tensor cores are used.
#include "simt/narrow.cuh"

namespace cuflash {

constexpr int rows = Config::block_m / Config::num_threads;  // rows of a thread
static_assert(rows * Config::num_threads == Config::block_m, "equal rows per thread");

struct SharedMemory {
  Key keys[Config::block_n];
};

// One row of q and its gradient sums.
struct Row {
  Query query;
  BlockSums<width> dq;
};

template <bool masked>
CUFLASH_DEVICE void add_block(Row (&own)[rows], const SharedMemory& smem, const Score& score,
                              int first_row, int first_key, const WarpPowers& power) {
#pragma unroll 4
  for (int j = 0; j < Config::block_n; ++j) {
    const Key key = smem.keys[j];
    const int kv_idx = first_key + j;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int q_idx = first_row + r * Config::num_threads;
      const bool is_seen = !masked || (score.kv_range(q_idx, q_idx + 1).contains(kv_idx) &&
                                       key.seen_by(score, q_idx, kv_idx));
      const PairGradient pair(score, own[r].query, key, q_idx, kv_idx, is_seen, power);
      own[r].dq.add(pair.is_seen, pair.ds, [&](int i) { return key.k(i); });
    }
  }
  unrolled<rows>([&](int r) { own[r].dq.end_block(); });
}

// Adds what the keys of the owner's `index`-th batch entry contribute.
CUFLASH_DEVICE void add_entry(const BackwardParams& params, SharedMemory& smem, int index,
                              Row (&own)[rows]) {
  const RowTile work = RowTile::of_thread_block(params);
  const BatchIndex entry = work.entry(params, index);
  const Score score(params.score, entry);
  const Range tile{work.first_row, work.first_row + Config::block_m};
  const Range keys = score.kv_range(tile.begin, tile.end);
  const BlockRanges blocks = score.kv_blocks(tile.begin, tile.end);
  VisitedBlocks<Walk::keys> visited(score, blocks, tile);
  int block = visited.first_from(blocks.begin);
  if (block >= blocks.end) return;
  const NarrowRows from(params, entry, score.seqlen);
  const int first_row = tile.begin + threadIdx.x;
  const WarpPowers power;
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int q_idx = first_row + r * Config::num_threads;
    own[r].query.load(from.q, from.dout, score.seqlen.statistics(from.statistics, q_idx), q_idx);
  }
#pragma unroll 1
  for (; block < blocks.end; block = visited.next_after(block)) {
    const int first_key = block * Config::block_n;
    bool hides = false;
    __syncthreads();  // every thread has read the previous block
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::block_n; i += Config::num_threads) {
      smem.keys[i].load(from.k, from.v, score, first_key + i, keys.contains(first_key + i));
      hides |= smem.keys[i].hides();
    }
    hides = __syncthreads_or(hides);  // the keys have arrived
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
    cuflash_backward_dq_narrow(const __grid_constant__ cuflash::BackwardParams params) {
  using namespace cuflash;
  SharedMemory& smem = shared_memory<SharedMemory>();
  Row own[rows];
  unrolled<rows>([&](int r) { own[r].dq.clear(); });
#pragma unroll 1
  for (int index = 0; index < params.grid.entries_per_owner; ++index) {
    add_entry(params, smem, index, own);
  }
  const RowTile work = RowTile::of_thread_block(params);
  const BatchIndex entry = work.entry(params, 0);
  const Seqlen seqlen(params.score, entry);
  const RowTarget dq(params.dq, params.dq_layout, entry, seqlen.first_q, params.head_dim,
                     Config::head_dim);
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int q_idx = work.first_row + r * Config::num_threads + threadIdx.x;
    const bool odd = q_idx < seqlen.rows_q && own[r].dq.store(dq, q_idx, params.score.scale);
    const uint32_t lanes = __ballot_sync(0xffffffff, odd);
    __syncwarp();  // one thread wrote each row, and the warp may overwrite it below
    for_each_bit(lanes, [&](int lane) {
      recompute_dq(params, work.owner, work.sequence, q_idx - lane_index() + lane);
    });
  }
}
