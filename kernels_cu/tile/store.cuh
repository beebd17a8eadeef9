// Accumulators to global memory, in the caller's dtype and strides.
#pragma once

#include "params.cuh"
#include "scheduler.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// One result of one batch entry, from `first_row` of its matrix on: rows at any stride, of which
// this block of threads has the columns from `first_column` on. Tiles are `width` columns wide.
struct RowTarget {
  using Value = typename Storage<Config::out_dtype>::type;
  struct alignas(2 * sizeof(Value)) Pair {
    Value first, second;
  };

  Value* data;
  int64_t row_stride;
  int64_t column_stride;
  int first_column;
  int num_columns;

  __device__ __forceinline__ RowTarget(void* array, const Layout& layout, const BatchIndex& entry,
                                       int first_row, int columns, int width)
      : data(static_cast<Value*>(array) + entry * layout.batch + first_row * layout.row),
        row_stride(layout.row),
        column_stride(layout.column),
        first_column(first_own_column(width)),
        num_columns(columns) {
    if constexpr (Config::column_parts > 1) {
      data += first_column * column_stride;
      num_columns = min(num_columns - first_column, width / Config::column_parts);
    }
  }

  __device__ __forceinline__ static Value rounded(Real x) {
    if constexpr (sizeof(Value) == 2) {
      return static_cast<Value>(pack<Config::out_dtype>(x, 0));
    } else {
      return static_cast<Value>(x);
    }
  }

  // Own columns `column` and column + 1 of a row; one store where the two are neighbours in memory.
  __device__ __forceinline__ void store_pair(int row, int column, Real first, Real second) const {
    if (column >= num_columns) return;
    Value* to = data + row * row_stride + column * column_stride;
    const bool aligned = reinterpret_cast<uint64_t>(to) % (2 * sizeof(Value)) == 0;
    if (column_stride == 1 && aligned && column + 1 < num_columns) {
      if constexpr (sizeof(Value) == 2) {
        *reinterpret_cast<uint32_t*>(to) = pack<Config::out_dtype>(first, second);
      } else {
        *reinterpret_cast<Pair*>(to) = {rounded(first), rounded(second)};
      }
      return;
    }
    to[0] = rounded(first);
    if (column + 1 < num_columns) to[column_stride] = rounded(second);
  }
};

// Stores 16 rows of a warp, of which `num_rows` exist.
template <int tiles>
__device__ __forceinline__ void store_slice(const RowTarget& target, int first_row, int num_rows,
                                            Real factor, const Real (&acc)[tiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    if (row >= num_rows) continue;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      target.store_pair(first_row + row, fragment_column(t, 0), acc[t][2 * half] * factor,
                        acc[t][2 * half + 1] * factor);
    }
  }
}

}  // namespace cuflash
