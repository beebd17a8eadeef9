// Compares score/score.cuh with the definition of visibility, pair by pair, for many problems and
// without attention. It is a kernel for a GPU compiler and a function for a host compiler.
#include "score/score.cuh"

namespace cuflash {

constexpr int probed_entry = 1;

__device__ int64_t probed_integer(const void* array, const BatchStrides& strides) {
  return static_cast<const int64_t*>(array)[probed_entry * strides.axis[0]];
}

// The definition of visibility, in 64-bit numbers, which cannot overflow.
struct Definition {
  int64_t q_length, kv_length, offset, lowest, highest;

  __device__ Definition(const ScoreParams& params) {
    q_length = params.q_length;
    kv_length = params.kv_length;
    if (Config::q_lengths != Dtype::none) {
      const int64_t given = probed_integer(params.q_lengths, params.q_lengths_strides);
      q_length = given < 0 ? 0 : (given > params.seqlen_q ? params.seqlen_q : given);
    }
    if (Config::kv_lengths != Dtype::none) {
      const int64_t given = probed_integer(params.kv_lengths, params.kv_lengths_strides);
      kv_length = given < 0 ? 0 : (given > params.seqlen_k ? params.seqlen_k : given);
    }
    offset = params.offset_value;
    if (Config::offset == Offset::lengths) offset = kv_length - q_length;
    if (Config::offset == Offset::int64) {
      offset = probed_integer(params.offset, params.offset_strides);
    }
    lowest = Config::window_left ? offset - params.window_left : -(1ll << 62);
    highest = Config::window_right ? offset + params.window_right : 1ll << 62;
  }

  __device__ bool visible(int64_t q_idx, int64_t kv_idx) const {
    const int64_t diagonal = kv_idx - q_idx;
    return q_idx < q_length && kv_idx < kv_length && lowest <= diagonal && diagonal <= highest;
  }
};

// Counts errors: blocks must hold all visible pairs, begin and end with visible pairs, and be full
// where they say so. `seen` is true for a visible pair (tile index, streamed index). Tile indices
// from `existing` on are discarded later and need not see anything.
template <typename Seen>
__device__ int check_blocks(const BlockRanges& blocks, const Range& range, int tile_begin,
                            int tile_end, int existing, int streamed, int block, const Seen& seen) {
  int wrong = 0;
  int first = 1 << 30, last = -1;
  for (int j = 0; j < streamed; ++j) {
    bool any = false, all = true;
    for (int i = tile_begin; i < tile_end; ++i) {
      any |= seen(i, j);
      all &= i >= existing || seen(i, j);
    }
    const int b = j / block;
    if (any) first = min(first, j);
    if (any) last = max(last, j);
    wrong += any && !(b >= blocks.begin && b < blocks.end);
    wrong += any != range.contains(j);
    wrong += !all && b >= blocks.begin && b < blocks.end && !blocks.masked(b);
  }
  const bool nothing = last < 0;
  wrong += nothing != (blocks.begin >= blocks.end);
  wrong += !nothing && (blocks.begin != first / block || blocks.end != last / block + 1);
  wrong += !nothing && blocks.full_end > (streamed + block - 1) / block;
  return wrong;
}

// Counts errors in the bits of columns within a range. One `begin` for each problem is enough.
__device__ int check_columns(int begin) {
  int wrong = 0;
  for (int end = -3; end < 140; ++end) {
    const Range columns{begin, end};
    const ColumnBits seen = ColumnBits::within(columns);
    for (int t = 0; t < 16; ++t) {
      for (int i = 0; i < 2; ++i) wrong += seen.contains(t, i) != columns.contains(8 * t + i);
    }
  }
  return wrong;
}

__device__ int count_wrong(const ScoreParams& params) {
  const BatchAxes axes{1, {probed_entry + 1, 1, 1, 1, 1, 1}};
  const Score score(params, BatchIndex(axes, probed_entry));
  const Definition definition(params);
  int wrong = check_columns((31 * params.seqlen_q + params.seqlen_k) % 140 - 5);
  wrong += score.seqlen.q != definition.q_length;
  wrong += score.seqlen.k != definition.kv_length;
  wrong += score.seqlen.offset != definition.offset;
  for (int m = 0; m < params.seqlen_q; ++m) {
    for (int n = 0; n < params.seqlen_k; ++n) {
      const int column = n % Config::block_n;
      wrong += score.visible(m, n) != definition.visible(m, n);
      wrong += score.kv_range_from(n - column, m).contains(column) != definition.visible(m, n);
    }
  }
  for (int m = 0; m < params.seqlen_q; m += Config::block_m) {
    const int end = m + Config::block_m;
    wrong += check_blocks(score.kv_blocks(m, end), score.kv_range(m, end), m, end, score.seqlen.q,
                          params.seqlen_k, Config::block_n,
                          [&](int i, int j) { return definition.visible(i, j); });
  }
  for (int n = 0; n < params.seqlen_k; n += Config::block_n) {
    const int end = n + Config::block_n;
    wrong +=
        check_blocks(score.q_blocks(n, end), score.q_range(n, end), n, end, end, params.seqlen_q,
                     Config::block_m, [&](int i, int j) { return definition.visible(j, i); });
  }
  return wrong;
}

}  // namespace cuflash

#ifdef __CUDACC__
extern "C" __global__ void probe(const cuflash::ScoreParams* problems, int num_problems,
                                 int* wrong) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < num_problems) wrong[index] = cuflash::count_wrong(problems[index]);
}
#else
extern "C" void probe(const cuflash::ScoreParams* problems, int num_problems, int* wrong) {
  for (int index = 0; index < num_problems; ++index) {
    wrong[index] = cuflash::count_wrong(problems[index]);
  }
}
#endif
