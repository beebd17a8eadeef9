// Attention forward of narrow heads on CUDA cores, a few rows to each thread.
//
//   for each tile of block_m rows of q:                       one thread block
//     for each block of block_n keys that some row sees:
//       its keys, values and, if all queries share it, bias come into shared memory, by key
//       for each run of keys:                               registers: scores of a run, for each
//       row
//         s = score(q.k);  m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p
//         o = o exp(m - m') + sum dropout(p) v
//       L = L exp(M - m) + l;  O = O exp(M - m) + o;  M = m;  l = o = 0
//     out = O / L,  lse = M + log L                         a sink joins M and L here
//
// A sum of 262,144 exponentials in float32, one after the other, loses those below half a unit in
// its last place: 5e-5 of it where they differ as those of points in space do. Of sums of blocks,
// 2e-6. A product of tensor cores has 16 or 32 columns at least; with 3 of them the exponential is
// what takes longest. All threads read the same key at a time, for all their rows. (D61)
#include "portable/forward_rows.cuh"
#include "simt/narrow.cuh"

namespace cuflash {

constexpr int rows = Config::block_m / Config::num_threads;  // of a thread
constexpr int run = 8;                                       // keys between two maxima
static_assert(rows * Config::num_threads == Config::block_m, "every thread has as many");
static_assert(Config::block_n % run == 0, "a block is whole runs");

struct SharedMemory {
  Key keys[Config::block_n];
};

// Exponentials under a maximum of scores, and values by their weight, summed.
struct Sums {
  Real maximum, weights;
  Real o[width_v + 1];  // an array has an element

  CUFLASH_DEVICE void clear() {
    weights = 0;
    unrolled<width_v>([&](int i) { o[i] = 0; });
  }

  // What turns sums under this maximum into sums under another; 0 where there are none.
  CUFLASH_DEVICE Real rescale_to(Real other, const Score& score, const WarpPowers& power) const {
    // A row that has seen nothing yet: -inf minus -inf would be NaN.
    const Real to = other == -infinity() ? 0 : score.reference(other);
    return power(score.exponent_between(score.reference(maximum), to));
  }
};

// One row of q, what is summed of it in this block, and in all blocks before.
struct Row {
  Real q[width];
  Sums block, all;

  CUFLASH_DEVICE void begin(const RowSource& from, int q_idx, bool exists) {
    unrolled<width>([&](int i) { q[i] = exists ? from.number(q_idx, i) : Real(0); });
    block.maximum = all.maximum = -infinity();
    block.clear();
    all.clear();
  }

  CUFLASH_DEVICE Real dot(const Key& key) const {
    Real product = 0;
    unrolled<width>([&](int i) { product = fma(q[i], key.k(i), product); });
    return product;
  }

  // Scores of a run become weights; what was summed under the old maximum is rescaled.
  CUFLASH_DEVICE void online_softmax(Real (&s)[run], const Score& score, const WarpPowers& power) {
    Real maximum = block.maximum;
    unrolled<run>([&](int j) { maximum = fmax(maximum, s[j]); });
    const Real shift = maximum == -infinity() ? 0 : score.reference(maximum);
    const Real rescale = block.rescale_to(maximum, score, power);
    block.maximum = maximum;
    Real added = 0;
    unrolled<run>([&](int j) {
      s[j] = power(score.exponent(s[j], shift));
      added += s[j];
    });
    block.weights = fma(block.weights, rescale, added);
    unrolled<width_v>([&](int i) { block.o[i] *= rescale; });
  }

  // The sums of a block join those before; the next one goes on with its maximum.
  CUFLASH_DEVICE void end_block(const Score& score, const WarpPowers& power) {
    const Real rescale = all.rescale_to(block.maximum, score, power);
    all.maximum = block.maximum;
    all.weights = fma(all.weights, rescale, block.weights);
    unrolled<width_v>([&](int i) { all.o[i] = fma(all.o[i], rescale, block.o[i]); });
    block.clear();
  }
};

// Keys of a block; those outside `valid` are zeros. True for all if any has a bias of -inf.
CUFLASH_DEVICE bool load_keys(SharedMemory& smem, const RowSource& k, const RowSource& v,
                              const Score& score, int first_key, Range valid) {
  bool hides = false;
  __syncthreads();  // every thread is done with the block before
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::block_n; i += Config::num_threads) {
    const int kv_idx = first_key + i;
    smem.keys[i].load(k, v, score, kv_idx, valid.contains(kv_idx));
    hides |= smem.keys[i].hides();
  }
  return __syncthreads_or(hides);  // the keys are there
}

// Adds the keys of a block to the rows from `first_row` on, one every num_threads.
template <bool masked>
CUFLASH_DEVICE void add_block(Row (&own)[rows], const SharedMemory& smem, const Score& score,
                              int first_row, int first_key, const WarpPowers& power) {
#pragma unroll 1
  for (int begin = 0; begin < Config::block_n; begin += run) {
    Real s[rows][run];
    uint32_t seen[rows] = {};
#pragma unroll
    for (int j = 0; j < run; ++j) {
      const Key key = smem.keys[begin + j];
      const int kv_idx = first_key + begin + j;
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int q_idx = first_row + r * Config::num_threads;
        bool visible = true;
        if constexpr (masked) {
          visible = score.kv_range(q_idx, q_idx + 1).contains(kv_idx) &&
                    key.seen_by(score, q_idx, kv_idx);
        }
        const Real product = own[r].dot(key);
        s[r][j] = visible ? key.apply(score, product, q_idx, kv_idx) : -infinity();
        seen[r] |= static_cast<uint32_t>(visible) << j;
      }
    }
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      own[r].online_softmax(s[r], score, power);
      if constexpr (width_v > 0) {
#pragma unroll
        for (int j = 0; j < run; ++j) {
          const Key& key = smem.keys[begin + j];
          bool counts = !masked || (seen[r] >> j & 1);
          if constexpr (Config::dropout) {
            counts = counts &&
                     keeps_pair(score, first_row + r * Config::num_threads, first_key + begin + j);
          }
          unrolled<width_v>([&](int i) {
            // Nothing that an invisible or dropped key holds may reach a sum, NaN included.
            Real& o = own[r].block.o[i];
            o = counts ? fma(s[r][j], key.v(i), o) : o;
          });
        }
      }
    }
  }
}

// out and lse of a row; one that saw nothing becomes +0 and lse_without_keys. Returns whether they
// are not to be relied on: sums of large values may be infinite where their mean is not.
CUFLASH_DEVICE bool store(const ForwardParams& params, const Work& work, const Score& score,
                          const Row& row, int q_idx) {
  if (q_idx >= score.seqlen.rows_q) return false;
  const int first_q = score.seqlen.first_q;
  const bool hidden = q_idx >= score.seqlen.q || row.all.weights == 0;
  const RowEnd end = end_of_row(score, work.entry, row.all.maximum, row.all.weights);
  const KeyPart part = KeyPart::of_this_block(params);
  const RowTarget out(part.out(params), params.out_layout, work.entry, first_q, params.head_dim_v,
                      Config::head_dim_v);
  const Real factor = kept_scale(params.score) * end.weight / end.sum;
  bool overflowed = false;
#pragma unroll
  for (int i = 0; i < width_v; ++i) {
    overflowed |= fabs(row.all.o[i]) == infinity();
    out.data[q_idx * out.row_stride + i * out.column_stride] =
        out.rounded(hidden ? 0 : row.all.o[i] * factor);
  }
  if (params.lse != nullptr) {
    const int64_t offset = work.entry * params.lse_layout.batch + part.index;
    params.lse[offset + (first_q + q_idx) * params.lse_layout.row] =
        hidden ? score.lse_without_keys(work.entry, q_idx) : end.lse;
  }
  return q_idx < score.seqlen.q &&
         (overflowed || is_unsure(score, score.reference(row.all.maximum), row.all.weights));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_forward_narrow(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  let_combine_start();
  SharedMemory& smem = shared_memory<SharedMemory>();
  const Work work = Work::of_this_block(params);
  const Score score(params.score, work.entry, KeyPart::of_this_block(params).keys);
  const int first_q = score.seqlen.first_q, first_k = score.seqlen.first_k;
  const RowSource q(params.q, params.q_layout, work.entry, first_q, params.head_dim);
  const RowSource k(params.k, params.k_layout, work.entry, first_k, params.head_dim);
  const RowSource v(params.v, params.v_layout, work.entry, first_k, params.head_dim_v);
  const Range tile{work.first_row, work.first_row + Config::block_m};
  const Range keys = score.kv_range(tile.begin, tile.end);
  const BlockRanges blocks = score.kv_blocks(tile.begin, tile.end);
  VisitedBlocks<Walk::keys> visited(score, blocks, tile);
  const WarpPowers power;
  const int first_row = work.first_row + threadIdx.x;
  Row own[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int q_idx = first_row + r * Config::num_threads;
    own[r].begin(q, q_idx, q_idx < score.seqlen.q);
  }
#pragma unroll 1
  for (int block = visited.first_from(blocks.begin); block < blocks.end;
       block = visited.next_after(block)) {
    const int first_key = block * Config::block_n;
    const bool hides = load_keys(smem, k, v, score, first_key, keys);
    if (looks_up || hides || visited.masked(block)) {
      add_block<true>(own, smem, score, first_row, first_key, power);
    } else {
      add_block<false>(own, smem, score, first_row, first_key, power);
    }
    unrolled<rows>([&](int r) { own[r].end_block(score, power); });
  }
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int q_idx = first_row + r * Config::num_threads;
    const bool unsure = store(params, work, score, own[r], q_idx);
    const uint32_t lanes = __ballot_sync(0xffffffff, unsure);
    __syncwarp();  // a row was written by one thread, and an exact one by a warp
    for_each_bit(lanes, [&](int lane) {
      recompute_out(params, work.entry, q_idx - lane_index() + lane, true);
    });
  }
}
