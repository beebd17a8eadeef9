// Attention forward of narrow heads on CUDA cores, a few rows to each thread.
//
//   for each tile of block_m rows of q:                       one thread block
//     for each block of block_n keys that some row sees:
//       copy k, v and a bias shared by all queries to shared memory, one key at a time
//       for each run of keys:                               registers: scores of run x rows
//         s = score(q.k);  m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p
//         o = o exp(m - m') + sum dropout(p) v
//       L = L exp(M - m) + l;  O = O exp(M - m) + o;  M = m;  l = o = 0
//     out = O / L,  lse = M + log L                         a sink joins M and L here
//
// Each block has its own sums (l, o), which are then added to L and O. A single float32 sum of
// 262,144 exponentials loses every term below half a unit in its last place: 5e-5 of the sum for
// exponentials as different as points in space give them. With sums of blocks the loss is 2e-6.
// Tensor cores would pad heads to 16 or 32 columns, and with 3 columns the exponential takes most
// of the time anyway. All threads read the same key at a time, for all their rows. (D61)
#include "portable/forward_rows.cuh"
#include "simt/narrow.cuh"

namespace cuflash {

constexpr int rows = Config::block_m / Config::num_threads;  // rows of a thread
constexpr int run = 8;                                       // keys between two maxima
static_assert(rows * Config::num_threads == Config::block_m, "equal rows per thread");
static_assert(Config::block_n % run == 0, "block_n is a multiple of the run length");

struct SharedMemory {
  Key keys[Config::block_n];
};

// Running sums relative to a maximum score: exponentials, and values times their exponentials.
struct Sums {
  Real maximum, weights;
  Real o[width_v + 1];  // one more, since width_v may be 0

  CUFLASH_DEVICE void clear() {
    weights = 0;
    unrolled<width_v>([&](int i) { o[i] = 0; });
  }

  // The factor that makes these sums relative to another maximum, or 0 if there are no sums yet.
  CUFLASH_DEVICE Real rescale_to(Real other, const Score& score, const WarpPowers& power) const {
    // The maximum of a row that has seen no key is -inf, and -inf minus -inf would be NaN.
    const Real to = other == -infinity() ? 0 : score.reference(other);
    return power(score.exponent_between(score.reference(maximum), to));
  }
};

// One row of q, its sums in this block, and its sums over all previous blocks.
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

  // Turns the scores of a run into weights, and rescales the sums of the block to the new maximum.
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

  // Adds the sums of the block to the previous ones. The next block starts from the same maximum.
  CUFLASH_DEVICE void end_block(const Score& score, const WarpPowers& power) {
    const Real rescale = all.rescale_to(block.maximum, score, power);
    all.maximum = block.maximum;
    all.weights = fma(all.weights, rescale, block.weights);
    unrolled<width_v>([&](int i) { all.o[i] = fma(all.o[i], rescale, block.o[i]); });
    block.clear();
  }
};

// Loads the keys of a block, with zeros outside `valid`. Returns true to all threads if the bias of
// some key is -inf.
CUFLASH_DEVICE bool load_keys(SharedMemory& smem, const RowSource& k, const RowSource& v,
                              const Score& score, int first_key, Range valid) {
  bool hides = false;
  __syncthreads();  // every thread has read the previous block
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::block_n; i += Config::num_threads) {
    const int kv_idx = first_key + i;
    smem.keys[i].load(k, v, score, kv_idx, valid.contains(kv_idx));
    hides |= smem.keys[i].hides();
  }
  return __syncthreads_or(hides);  // the keys have arrived
}

// Adds the keys of a block to the rows of this thread: `first_row` and every num_threads-th after.
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
            // No element of an invisible or dropped key may reach a sum: it may be NaN.
            Real& o = own[r].block.o[i];
            o = counts ? fma(s[r][j], key.v(i), o) : o;
          });
        }
      }
    }
  }
}

// Stores out and lse of a row, or +0 and lse_without_keys for a row that saw no key. Returns
// whether the row must be computed again: a sum of large values may overflow where their mean does
// not.
CUFLASH_DEVICE bool store(const ForwardParams& params, const Work& work, const Score& score,
                          const Row& row, int q_idx) {
  if (q_idx >= score.seqlen.rows_q) return false;
  const int first_q = score.seqlen.first_q;
  const bool hidden = q_idx >= score.seqlen.q || row.all.weights == 0;
  const RowEnd end = end_of_row(score, work.entry, row.all.maximum, row.all.weights);
  const KeyPart part = KeyPart::of_thread_block(params);
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
         (overflowed || must_recompute(score, score.reference(row.all.maximum), row.all.weights));
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::num_threads,
                                             cuflash::Config::blocks_per_sm)
    cuflash_forward_narrow(const __grid_constant__ cuflash::ForwardParams params) {
  using namespace cuflash;
  let_combine_start();
  SharedMemory& smem = shared_memory<SharedMemory>();
  const Work work = Work::of_thread_block(params);
  const Score score(params.score, work.entry, KeyPart::of_thread_block(params).keys);
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
    const bool recompute = store(params, work, score, own[r], q_idx);
    const uint32_t lanes = __ballot_sync(0xffffffff, recompute);
    __syncwarp();  // one thread wrote each row, and the warp may overwrite it below
    for_each_bit(lanes, [&](int lane) {
      recompute_out(params, work.entry, q_idx - lane_index() + lane, true);
    });
  }
}
