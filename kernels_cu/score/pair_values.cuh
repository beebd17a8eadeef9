// Values of a matrix at the pairs of an accumulator that a lane holds. They are read together: a
// conditional read for each pair would wait for memory as many times. (D9)
#pragma once

#include "tile/fragment.cuh"

namespace cuflash {

// The values for one row or, transposed, for one key. Empty if there is no matrix.
template <Dtype dtype, int tiles>
struct PairValues {
  using Value = Storage<dtype>;
  struct alignas(2 * sizeof(Value)) Pair {
    Value of[2];
  };
  Pair pairs[dtype == Dtype::none ? 1 : tiles];

  PairValues() = default;

  // `index` is the row, or key, with stride `across`. `first` is the lane's first column, with
  // stride `along`. `count` columns exist, and beyond them the last one is read. Called by all
  // lanes of the warp.
  CUFLASH_DEVICE PairValues(const void* matrix, int64_t across, int64_t along, int index, int first,
                            int count) {
    if constexpr (dtype != Dtype::none) {
      const auto* data = static_cast<const Value*>(matrix);
      const auto* from = data + index * across;
      const int block_end = first - 2 * (ptx::thread_index() % 4) + 8 * tiles;
      const uint64_t bytes = reinterpret_cast<uint64_t>(data) | across * sizeof(Value);
      if (warp_any(along == 1 && bytes % sizeof(Pair) == 0 && block_end <= count)) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          pairs[t] = *reinterpret_cast<const Pair*>(from + first + 8 * t);
        }
      } else {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            pairs[t].of[i] = from[min(first + 8 * t + i, count - 1) * along];
          }
        }
      }
    }
  }

  // The value at column i of tile t.
  CUFLASH_DEVICE Real operator()(int t, int i) const {
    if constexpr (dtype == Dtype::none) return 0;
    return finite_real<dtype>(pairs[t].of[i]);
  }
};

}  // namespace cuflash
