// How a lane reads the operands of a product of fragments, acc (16x8) += a (16 x step) . b (step x
// 8), from shared memory.
//
// 16-bit elements, and float32 summed over columns, are read by ldmatrix. The other products of
// wider elements sum columns (or rows) in an order of their own, which both operands share: see
// fragment.cuh.
#pragma once

#include "ptx/mma_sync.cuh"
#include "ptx/special.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

// Moves an address by `index` blocks of `bytes` along the columns. Swizzle bits of a lane are the
// same in every block, and a block's column only flips address bits above its chunk's lowest, hence
// the exclusive or.
template <typename Tile, int bytes>
__device__ __forceinline__ uint32_t along_columns(uint32_t address, int index) {
  constexpr int blocks_per_panel = Tile::row_bytes / bytes;
  return (address ^ (index % blocks_per_panel * bytes)) +
         index / blocks_per_panel * Tile::panel_bytes;
}

// Four 8x8 matrices of 16-bit elements, or 8x4 of float32, as ldmatrix hands them out.
__device__ __forceinline__ void read_matrices(uint32_t (&frag)[4], uint32_t address, int) {
  ptx::ldmatrix_x4(frag, address);
}

__device__ __forceinline__ void read_matrices(float (&frag)[4], uint32_t address, int) {
  uint32_t words[4];
  ptx::ldmatrix_x4(words, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) frag[i] = __uint_as_float(words[i]);
}

// Two neighbouring columns of a row, and of the row eight rows below.
__device__ __forceinline__ void read_matrices(double (&frag)[4], uint32_t address, int row_bytes) {
  ptx::load_shared(frag[0], frag[1], address);
  ptx::load_shared(frag[2], frag[3], address + 8 * row_bytes);
}

// The left operand: 16 rows of a matrix, whose columns are summed over.
template <typename Tile>
struct RowsReader {
  static constexpr int block_bytes = product_step * sizeof(Element);

  uint32_t lane_address;

  // Rows from 16 * row16 on, columns from product_step * k on.
  __device__ __forceinline__ void read(Register (&frag)[4], int row16, int k) const {
    const uint32_t address =
        along_columns<Tile, block_bytes>(lane_address, k) + row16 * 16 * Tile::row_bytes;
    read_matrices(frag, address, Tile::row_bytes);
    if constexpr (is_double) {  // rows come first in a left operand
      const Register column = frag[1];
      frag[1] = frag[2];
      frag[2] = column;
    }
  }
};

// Two right operands side by side, whose columns are 16 rows of a matrix: its columns are summed
// over.
template <typename Tile>
struct ColumnsReader {
  static constexpr int block_bytes = product_step * sizeof(Element);

  uint32_t lane_address;

  // Rows from 16 * row16 on, columns from product_step * k on.
  __device__ __forceinline__ void read(Register (&frag)[4], int row16, int k) const {
    const uint32_t address =
        along_columns<Tile, block_bytes>(lane_address, k) + row16 * 16 * Tile::row_bytes;
    read_matrices(frag, address, Tile::row_bytes);
  }
};

// Two right operands side by side, 16 columns of a matrix whose rows are summed over.
template <typename Tile>
struct SumReader {
  static constexpr int block_bytes = 16 * sizeof(Element);

  uint32_t lane_address;

  // Rows from product_step * k on, columns from 16 * column16 on.
  template <typename Value>
  __device__ __forceinline__ void read(Value (&frag)[4], int k, int column16) const {
    const uint32_t address = along_columns<Tile, block_bytes>(lane_address, column16) +
                             k * product_step * Tile::row_bytes;
    if constexpr (sizeof(Element) == 2) {
      ptx::ldmatrix_x4_trans(frag, address);
    } else {
      // This lane's even row and the next, whose chunks lie elsewhere.
      const uint32_t next = (address ^ (Tile::swizzle(1) << 4)) + Tile::row_bytes;
      frag[0] = ptx::load_shared<Value>(address);
      frag[1] = ptx::load_shared<Value>(next);
      frag[2] = ptx::load_shared<Value>(address ^ (block_bytes / 2));
      frag[3] = ptx::load_shared<Value>(next ^ (block_bytes / 2));
    }
  }
};

// A left operand whose rows start at first_row. Of 16-bit elements the four matrices are (rows 0-7,
// columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), of float32 half as wide.
template <typename Tile>
__device__ __forceinline__ RowsReader<Tile> read_rows(const Tile& tile, int first_row = 0) {
  const int lane = ptx::thread_index() % 32;
  const int offset = is_double ? Tile::chunk_offset(lane >> 2, lane & 3)
                               : Tile::chunk_offset(lane & 15, lane >> 4);
  return {ptx::shared_address(tile.data) + first_row * Tile::row_bytes + offset};
}

// Right operands whose columns are summed over: (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7),
// (8-15, 8-15).
template <typename Tile>
__device__ __forceinline__ ColumnsReader<Tile> read_columns(const Tile& tile) {
  const int lane = ptx::thread_index() % 32;
  const int offset = is_double
                         ? Tile::chunk_offset(lane >> 2, lane & 3)
                         : Tile::chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  return {ptx::shared_address(tile.data) + offset};
}

// Right operands whose rows are summed over, of the columns from first_column on, where a panel
// begins.
template <typename Tile>
__device__ __forceinline__ SumReader<Tile> read_sums(const Tile& tile, int first_column = 0) {
  const int lane = ptx::thread_index() % 32;
  const uint32_t address =
      ptx::shared_address(tile.data) + first_column / Tile::panel_columns * Tile::panel_bytes;
  if constexpr (sizeof(Element) == 2) {
    return {address + Tile::chunk_offset(lane & 15, lane >> 4)};
  } else {
    constexpr int chunk_columns = Tile::chunk_columns;
    const int column = lane / 4;
    return {address + Tile::chunk_offset(2 * (lane % 4), column / chunk_columns) +
            column % chunk_columns * static_cast<int>(sizeof(Element))};
  }
}

}  // namespace cuflash
