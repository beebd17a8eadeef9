// Where CUDA cores multiply, a tile is rows of the caller's array, read where they lie: no shared
// memory limits head sizes, and one row serves many lanes from the first cache.
#pragma once

#include "tile/pages.cuh"

namespace cuflash {

// In shared memory, written by one thread; complete after the next barrier.
template <int rows_, int columns_>
struct alignas(128) GlobalTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = 16;

  const Element* data;  // of the first row
  int64_t row_stride;
  const int64_t* places;  // of rows that lie in no order
  int64_t column_stride;
  int num_columns;
  Range exist;           // rows of the tile
  uint32_t cleared[16];  // a bit for each row
  static_assert(rows <= 32 * 16, "a bit for each row");

  CUFLASH_DEVICE void clear_row(int row, int lane) {
    if (lane == 0) atomicOr(&cleared[row / 32], 1u << row % 32);
  }

  // Null for a row of zeros.
  CUFLASH_DEVICE const Element* row(int index) const {
    const bool zeros = !exist.contains(index) || (cleared[index / 32] >> index % 32 & 1);
    if (zeros) return nullptr;
    if (Config::paged && places != nullptr) return data + places[index];
    return data + index * row_stride;
  }
};

// Says where rows [first_row, first_row + Tile::rows) lie; those outside `valid` are never read.
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
