// Matrices of 16-bit elements in shared memory: the swizzle, and the addresses ldmatrix reads.
//
// A tile is split into panels of 64 (or 32, or 16) columns; a panel's rows are contiguous. The
// 16-byte chunk c of row r lies at chunk c ^ swizzle(r), so that the eight rows of one 8x8 matrix
// fall into eight different groups of four banks. For 64 columns (128-byte rows):
//
//            chunk 0  1  2  3  4  5  6  7
//      row 0       0  1  2  3  4  5  6  7
//      row 1       1  0  3  2  5  4  7  6
//      row 2       2  3  0  1  6  7  4  5       ...
#pragma once

#include "numeric.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/special.cuh"

namespace cuflash {

template <int rows_, int columns_>
struct SmemTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = columns % 64 == 0 ? 64 : (columns % 32 == 0 ? 32 : 16);
  static constexpr int num_panels = columns / panel_columns;
  static constexpr int row_chunks = panel_columns / 8;  // 16-byte chunks of a panel's row
  static constexpr int row_bytes = 2 * panel_columns;
  static constexpr int panel_bytes = rows * row_bytes;

  alignas(128) Element data[rows * columns];

  __device__ __forceinline__ static constexpr int swizzle(int row) {
    return panel_columns == 64 ? row & 7 : (panel_columns == 32 ? (row >> 1) & 3 : (row >> 2) & 1);
  }

  // Byte offset of a 16-byte chunk within its panel.
  __device__ __forceinline__ static constexpr int chunk_offset(int row, int chunk) {
    return row * row_bytes + ((chunk ^ swizzle(row)) << 4);
  }

  // A row lies in one piece in every panel; its 32 lanes clear it together.
  __device__ __forceinline__ void clear_row(int row, int lane) {
#pragma unroll
    for (int panel = 0; panel < num_panels; ++panel) {
      for (int column = lane; column < panel_columns; column += 32) {
        data[(panel * rows + row) * panel_columns + column] = 0;
      }
    }
  }
};

// One lane's view of a tile for ldmatrix: the four 8x8 matrices of a 16x16 block.
template <typename Tile>
struct MatrixReader {
  uint32_t lane_address;

  // Block (row16, column16) in units of 16. Swizzle bits of a lane are the same in every block, and
  // a block's column only flips address bits above its chunk's lowest, hence the exclusive or.
  __device__ __forceinline__ uint32_t address(int row16, int column16) const {
    constexpr int blocks_per_panel = Tile::panel_columns / 16;
    return (lane_address ^ ((column16 % blocks_per_panel) << 5)) + row16 * 16 * Tile::row_bytes +
           column16 / blocks_per_panel * Tile::panel_bytes;
  }
};

// Matrices in the order (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): an A
// operand whose rows start at first_row, and transposed a B operand whose rows are summed over.
template <typename Tile>
__device__ __forceinline__ MatrixReader<Tile> read_rows(const Tile& tile, int first_row = 0) {
  const int lane = ptx::thread_index() % 32;
  return {ptx::shared_address(tile.data) + first_row * Tile::row_bytes +
          Tile::chunk_offset(lane & 15, lane >> 4)};
}

// (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): a B operand whose columns are
// summed over.
template <typename Tile>
__device__ __forceinline__ MatrixReader<Tile> read_columns(const Tile& tile) {
  const int lane = ptx::thread_index() % 32;
  return {ptx::shared_address(tile.data) +
          Tile::chunk_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)};
}

}  // namespace cuflash
