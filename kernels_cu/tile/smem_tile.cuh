// Matrices in shared memory: where an element lies.
//
// A tile is split into panels. A row of a panel is contiguous and takes 128 bytes (or 64, or 32).
// The 16-byte chunk c of row r lies at chunk c ^ swizzle(r), so that the eight rows of one 8x8
// matrix of 16-bit elements fall into eight different groups of four banks. For 128-byte rows:
//
//            chunk 0  1  2  3  4  5  6  7
//      row 0       0  1  2  3  4  5  6  7
//      row 1       1  0  3  2  5  4  7  6
//      row 2       2  3  0  1  6  7  4  5       ...
//
#pragma once

#include "numeric.cuh"

namespace cuflash {

template <int rows_, int columns_, typename Stored = Element>
struct SmemTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int element_bytes = sizeof(Stored);
  static constexpr int widest_panel = 128 / element_bytes;
  static constexpr int panel_columns =
      columns % widest_panel == 0
          ? widest_panel
          : (columns % (widest_panel / 2) == 0 ? widest_panel / 2 : widest_panel / 4);
  static constexpr int num_panels = columns / panel_columns;
  static constexpr int chunk_columns = 16 / element_bytes;
  static constexpr int row_chunks = panel_columns / chunk_columns;  // 16-byte chunks of a row
  static constexpr int row_bytes = element_bytes * panel_columns;
  static constexpr int panel_bytes = rows * row_bytes;

  alignas(128) Stored data[rows * columns];

  // One access to 8-byte elements reads four chunks from each of two neighbouring rows, or two
  // chunks from each of four rows, every other one. Bit 2 separates neighbouring rows, bits 1 and 2
  // separate every other row.
  CUFLASH_DEVICE static constexpr int swizzle(int row) {
    if (element_bytes == 8) return ((row ^ row >> 2) & 1) << 2 | (row & 2);
    return row_bytes == 128 ? row & 7 : (row_bytes == 64 ? (row >> 1) & 3 : (row >> 2) & 1);
  }

  // Byte offset of a 16-byte chunk within its panel.
  CUFLASH_DEVICE static constexpr int chunk_offset(int row, int chunk) {
    return row * row_bytes + ((chunk ^ swizzle(row)) << 4);
  }

  // Clears a row, by the 32 lanes of a warp. The row is contiguous in each panel.
  CUFLASH_DEVICE void clear_row(int row, int lane) {
#pragma unroll
    for (int panel = 0; panel < num_panels; ++panel) {
      for (int column = lane; column < panel_columns; column += 32) {
        data[(panel * rows + row) * panel_columns + column] = 0;
      }
    }
  }
};

}  // namespace cuflash
