// Accumulators to global memory, in the caller's dtype and strides.
#pragma once

#include "params.cuh"
#include "scheduler.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// One result of one batch entry, from `first_row` of its matrix on: rows at any stride,
// `num_columns` true columns.
struct RowTarget {
  using Value = typename Storage<Config::out_dtype>::type;

  Value* data;
  int64_t row_stride;
  int64_t column_stride;
  int num_columns;

  __device__ __forceinline__ RowTarget(void* array, const Layout& layout, const BatchIndex& entry,
                                       int first_row, int columns)
      : data(static_cast<Value*>(array) + entry * layout.batch + first_row * layout.row),
        row_stride(layout.row),
        column_stride(layout.column),
        num_columns(columns) {}

  __device__ __forceinline__ static Value rounded(float x) {
    if constexpr (Config::out_dtype == Dtype::float32) {
      return x;
    } else {
      return static_cast<Value>(pack<Config::out_dtype>(x, 0.0f));
    }
  }

  // Columns `column` and column + 1 of a row; one store where the two are neighbours in memory.
  __device__ __forceinline__ void store_pair(int row, int column, float first, float second) const {
    if (column >= num_columns) return;
    Value* to = data + row * row_stride + column * column_stride;
    const bool aligned = reinterpret_cast<uint64_t>(to) % (2 * sizeof(Value)) == 0;
    if (column_stride == 1 && aligned && column + 1 < num_columns) {
      if constexpr (Config::out_dtype == Dtype::float32) {
        *reinterpret_cast<float2*>(to) = make_float2(first, second);
      } else {
        *reinterpret_cast<uint32_t*>(to) = pack<Config::out_dtype>(first, second);
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
                                            float factor, const float (&acc)[tiles][4]) {
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
