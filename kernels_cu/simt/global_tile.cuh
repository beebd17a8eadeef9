// A tile for products on CUDA cores: rows of the caller's array, read directly from global memory.
// Shared memory does not limit head sizes, and L1 supplies one row to many lanes.
#pragma once

#include "tile/pages.cuh"

namespace cuflash {

// Describes a tile, in shared memory. One thread writes it, and a barrier makes it complete.
template <int rows_, int columns_>
struct alignas(128) GlobalTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = 16;

  const Element* data;  // the first row
  int64_t row_stride;
  const int64_t* places;  // offsets of rows without a common stride
  int64_t column_stride;
  int num_columns;
  Range exist;           // rows of the tile that exist
  uint32_t cleared[16];  // a bit for each row: is it cleared?
  static_assert(rows <= 32 * 16, "`cleared` has one bit per row");

  CUFLASH_DEVICE void clear_row(int row, int lane) {
    if (lane == 0) atomicOr(&cleared[row / 32], 1u << row % 32);
  }

  // The address of a row, or null for a row of zeros.
  CUFLASH_DEVICE const Element* row(int index) const {
    const bool zeros = !exist.contains(index) || (cleared[index / 32] >> index % 32 & 1);
    if (zeros) return nullptr;
    if (Config::paged && places != nullptr) return data + places[index];
    return data + index * row_stride;
  }
};

// Records where rows [first_row, first_row + Tile::rows) are. Rows outside `valid` are never read.
template <int rows, int columns, typename Source>
CUFLASH_DEVICE void load_tile(GlobalTile<rows, columns>& tile, const Source& source, int first_row,
                              Range valid) {
  if (ptx::thread_index() != 0) return;
  tile.places = nullptr;
  tile.data = source.row(first_row);
  if constexpr (!in_order<Source>) {
    tile.places = source.places;
    tile.data = source.data;
  }
  tile.row_stride = source.row_stride;
  tile.column_stride = source.column_stride;
  tile.num_columns = source.num_columns;
  tile.exist = valid.relative_to(first_row);
#pragma unroll
  for (int i = 0; i < (rows + 31) / 32; ++i) tile.cleared[i] = 0;
}

}  // namespace cuflash
