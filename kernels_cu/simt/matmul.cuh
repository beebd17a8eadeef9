// The two products of attention on CUDA cores, for devices without the matrix instructions of sm_80
// and for float64 where those are no faster. Accumulators have the layout of tile/matmul_sm80.cuh.
// Every dtype is multiplied and summed as Real. (D31)
#pragma once

#include "simt/global_tile.cuh"

namespace cuflash {

// Neighbouring columns that are read at once.
constexpr int read_columns_at_once = Config::copy_bytes > sizeof(Element)
                                         ? Config::copy_bytes / sizeof(Element)
                                         : 1;

template <int count>
CUFLASH_DEVICE void read_elements(Real (&to)[count], const Element* from) {
  struct alignas(count * sizeof(Element)) Together {
    Element element[count];
  };
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = 0;
  } else {
    const Together read = *reinterpret_cast<const Together*>(from);
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = to_real<Config::dtype>(read.element[i]);
  }
}

// A left or a right operand: a tile from `first_row` on that is summed over its columns.
template <typename Tile>
struct GlobalRows {
  const Tile& tile;
  int first_row;
};

// A right operand: a tile from `first_column` on that is summed over its rows.
template <typename Tile>
struct GlobalSums {
  const Tile& tile;
  int first_column;
};

template <int rows, int columns>
CUFLASH_DEVICE GlobalRows<GlobalTile<rows, columns>> read_rows(
    const GlobalTile<rows, columns>& tile, int first_row = 0) {
  return {tile, first_row};
}

template <int rows, int columns>
CUFLASH_DEVICE GlobalRows<GlobalTile<rows, columns>> read_columns(
    const GlobalTile<rows, columns>& tile) {
  return {tile, 0};
}

template <int rows, int columns>
CUFLASH_DEVICE GlobalSums<GlobalTile<rows, columns>> read_sums(
    const GlobalTile<rows, columns>& tile, int first_column = 0) {
  return {tile, first_column};
}

// acc += A . B^T, summed over the columns, with 16 `slices` rows of A and all rows of B. Every
// addition is rounded, so part_columns changes nothing.
template <int part_columns = 0, int slices, typename ATile, typename BTile>
CUFLASH_DEVICE void multiply_transposed(Real (&acc)[slices][BTile::rows / 8][4],
                                        const GlobalRows<ATile>& a, const GlobalRows<BTile>& b) {
  constexpr int tiles = BTile::rows / 8, at_once = read_columns_at_once;
  const Element* a_rows[slices][2];
  const Element* b_rows[tiles][2];
#pragma unroll
  for (int s = 0; s < slices; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a_rows[s][half] = a.tile.row(a.first_row + fragment_row(s, 2 * half));
    }
  }
#pragma unroll
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) b_rows[t][i] = b.tile.row(fragment_column(t, i));
  }
  const int64_t a_step = a.tile.column_stride * at_once, b_step = b.tile.column_stride * at_once;
#pragma unroll 1
  for (int left = a.tile.num_columns; left > 0; left -= at_once) {
    Real a_read[slices][2][at_once];
#pragma unroll
    for (int s = 0; s < slices; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read_elements(a_read[s][half], a_rows[s][half]);
        if (a_rows[s][half] != nullptr) a_rows[s][half] += a_step;
      }
    }
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Real b_read[at_once];
        read_elements(b_read, b_rows[t][i]);
        if (b_rows[t][i] != nullptr) b_rows[t][i] += b_step;
#pragma unroll
        for (int s = 0; s < slices; ++s) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < at_once; ++c) {
              Real& sum = acc[s][t][2 * half + i];
              sum = fma(a_read[s][half][c], b_read[c], sum);
            }
          }
        }
      }
    }
  }
}

// acc += A . B, summed over the rows of B, with A in registers and as many columns of B as acc has.
template <int slices, int tiles, typename BTile>
CUFLASH_DEVICE void multiply(Real (&acc)[slices][tiles][4],
                             const Register (&a_frag)[slices][BTile::rows / 16][operand_registers],
                             const GlobalSums<BTile>& b) {
  constexpr int at_once = read_columns_at_once > 1 ? 2 : 1;
  const int column = b.first_column + fragment_column(0, 0);
  const int64_t stride = b.tile.column_stride;
#pragma unroll
  for (int k = 0; k < BTile::rows / 8; ++k) {
#pragma unroll 1
    for (int lane = 0; lane < 4; ++lane) {  // of the four that hold a row of A
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Real a[slices][2];
        unrolled<slices, 2>([&](int s, int half) {
          a[s][half] = __shfl_sync(0xffffffff, a_frag[s][k / 2][k % 2 * 4 + 2 * i + half], lane, 4);
        });
        const Element* row = b.tile.row(8 * k + 2 * lane + i);
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          Real pair[2];
#pragma unroll
          for (int c = 0; c < 2; c += at_once) {
            const bool exists = row != nullptr && column + 8 * t + c < b.tile.num_columns;
            Real read[at_once];
            read_elements(read, exists ? row + (column + 8 * t + c) * stride : nullptr);
#pragma unroll
            for (int j = 0; j < at_once; ++j) pair[c + j] = read[j];
          }
          unrolled<slices, 4>(
              [&](int s, int j) { acc[s][t][j] = fma(a[s][j / 2], pair[j % 2], acc[s][t][j]); });
        }
      }
    }
  }
}

}  // namespace cuflash
