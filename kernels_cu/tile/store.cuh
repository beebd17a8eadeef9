// Stores accumulators to global memory, in the caller's dtype and strides.
#pragma once

#include "ptx/once.cuh"
#include "schedule/scheduler.cuh"
#include "tile/fragment.cuh"

namespace cuflash {

// One result of one batch entry: its matrix from `first_row` on, with any strides. This thread
// block, or this warp, has the columns from `first_column` on. `width` is the padded width.
struct RowTarget {
  using Value = Storage<Config::out_dtype>;
  static constexpr Dtype halves = sizeof(Value) == 2 ? Config::out_dtype : Dtype::bfloat16;
  struct alignas(2 * sizeof(Value)) Pair {
    Value first, second;
  };

  Value* data;
  int64_t row_stride;
  int64_t column_stride;
  int first_column;
  int num_columns;

  CUFLASH_DEVICE RowTarget(void* array, const Layout& layout, const BatchIndex& entry,
                           int first_row, int columns, int width)
      : data(static_cast<Value*>(array) + entry * layout.batch + first_row * layout.row),
        row_stride(layout.row),
        column_stride(layout.column),
        first_column(first_own_column(width)),
        num_columns(columns) {
    if constexpr (own_parts > 1) {
      data += first_column * column_stride;
      num_columns = min(num_columns - first_column, width / own_parts);
    }
  }

  CUFLASH_DEVICE static Value rounded(Real x) {
    if constexpr (sizeof(Value) == 2) {
      return static_cast<Value>(pack<halves>(x, 0));
    } else {
      return static_cast<Value>(x);
    }
  }

  // Can eight neighbouring columns of every row be written at once?
  CUFLASH_DEVICE bool takes_chunks() const {
    return column_stride == 1 && row_stride % 8 == 0 && num_columns % 8 == 0 &&
           reinterpret_cast<uint64_t>(data) % 16 == 0;
  }

  // Stores `column` and column + 1 of a row, counted from first_column: by one store if the two are
  // neighbours in memory.
  CUFLASH_DEVICE void store_pair(int row, int column, Real first, Real second) const {
    if (column >= num_columns) return;
    Value* to = data + row * row_stride + column * column_stride;
    const bool aligned = reinterpret_cast<uint64_t>(to) % (2 * sizeof(Value)) == 0;
    if (column_stride == 1 && aligned && column + 1 < num_columns) {
      if constexpr (sizeof(Value) == 2) {
        *reinterpret_cast<uint32_t*>(to) = pack<halves>(first, second);
      } else {
        *reinterpret_cast<Pair*>(to) = {rounded(first), rounded(second)};
      }
      return;
    }
    to[0] = rounded(first);
    if (column + 1 < num_columns) to[column_stride] = rounded(second);
  }
};

// Stores 16 rows of a warp, times `factor`. `num_rows` of them exist.
template <int tiles>
CUFLASH_DEVICE void store_slice(const RowTarget& target, int first_row, int num_rows, Real factor,
                                const Real (&acc)[tiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int lane = ptx::thread_index() % 32;
    const int row = fragment_row(0, 2 * half, lane);
    if (row >= num_rows) continue;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      target.store_pair(first_row + row, fragment_column(t, 0, lane), acc[t][2 * half] * factor,
                        acc[t][2 * half + 1] * factor);
    }
  }
}

// Exchanges x[i] of lane j of a quad with x[j] of lane i.
CUFLASH_DEVICE void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = lane_index() & 1, high = lane_index() & 2;
  uint32_t a = __shfl_xor_sync(0xffffffff, odd ? x[0] : x[1], 1);
  uint32_t b = __shfl_xor_sync(0xffffffff, odd ? x[2] : x[3], 1);
  (odd ? x[0] : x[1]) = a;
  (odd ? x[2] : x[3]) = b;
  a = __shfl_xor_sync(0xffffffff, high ? x[0] : x[2], 2);
  b = __shfl_xor_sync(0xffffffff, high ? x[1] : x[3], 2);
  (high ? x[0] : x[2]) = a;
  (high ? x[1] : x[3]) = b;
}

// Where a lane has four neighbouring columns of a row after exchange_halves(): the even lanes of a
// quad of tile t, the odd lanes of tile t + 1.
CUFLASH_DEVICE int column_of_four(int t, int lane) {
  const int quad_lane = lane % 4;
  return 8 * (t + quad_lane % 2) + 4 * (quad_lane / 2);
}

// A lane has two columns of a row in each of two tiles (x, y and z, w). Returns four neighbouring
// columns of one of these tiles; or the other way round.
CUFLASH_DEVICE float4 exchange_halves(float4 x, int lane) {
  const bool odd = lane % 2;
  const float first = __shfl_xor_sync(0xffffffff, odd ? x.x : x.z, 1);
  const float second = __shfl_xor_sync(0xffffffff, odd ? x.y : x.w, 1);
  return odd ? make_float4(first, second, x.z, x.w) : make_float4(x.x, x.y, first, second);
}

// store_slice(), but if the addresses allow it, 16-bit results are stored by 16 bytes: the four
// lanes of a quad exchange registers, so that each lane stores eight neighbouring columns.
template <int tiles>
CUFLASH_DEVICE void store_slice_wide(const RowTarget& target, int first_row, int num_rows,
                                     float factor, const float (&acc)[tiles][4]) {
  static_assert(tiles % 4 == 0, "a quad stores four tiles together");
  if constexpr (sizeof(RowTarget::Value) == 2) {
    if (target.takes_chunks()) {
      const int lane = ptx::thread_index() % 32;  // read here: no register holds it before (D85)
      const int row = fragment_row(0, 0, lane), quad_lane = lane % 4;
      RowTarget::Value* to = target.data + (first_row + row) * target.row_stride + 8 * quad_lane;
#pragma unroll
      for (int t = 0; t < tiles; t += 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = pack<RowTarget::halves>(acc[t + i][2 * half] * factor,
                                           acc[t + i][2 * half + 1] * factor);
          }
          transpose_quad(x);
          if (row + 8 * half < num_rows && 8 * (t + quad_lane) < target.num_columns) {
            ptx::store_once(to + 8 * half * target.row_stride + 8 * t,
                            make_uint4(x[0], x[1], x[2], x[3]));
          }
        }
      }
      return;
    }
  }
  store_slice(target, first_row, num_rows, factor, acc);
}

}  // namespace cuflash
