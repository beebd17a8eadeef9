// Loads from global to shared memory: a block of rows becomes a swizzled tile, with zeros for
// everything outside the matrix.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"
#include "score/score.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

// One operand of one batch entry: its matrix from `first_row` and `first_column` on, with
// `num_columns` true columns and any strides.
template <Dtype dtype_>
struct RowsOf {
  static constexpr Dtype dtype = dtype_;
  using Stored = Storage<dtype>;

  const Stored* data;
  int64_t row_stride;
  int64_t column_stride;
  int num_columns;

  CUFLASH_DEVICE RowsOf(const void* array, const Layout& layout, const BatchIndex& entry,
                        int first_row, int columns, int first_column = 0)
      : data(static_cast<const Stored*>(array) + entry * layout.batch + first_row * layout.row +
             first_column * layout.column),
        row_stride(layout.row),
        column_stride(layout.column),
        num_columns(columns - first_column) {}

  CUFLASH_DEVICE const Stored* row(int index) const { return data + index * row_stride; }
  CUFLASH_DEVICE Real number(int index, int column) const {
    return to_real<dtype>(data[index * row_stride + column * column_stride]);
  }
};
using RowSource = RowsOf<Config::dtype>;
using KeyRows = RowsOf<key_dtype>;  // of k and v

// Rows of a block that have no common stride: `places` holds the offset of each row, in elements.
struct PlacedRows : KeyRows {
  const int64_t* places;  // in shared memory

  CUFLASH_DEVICE PlacedRows(const KeyRows& rows, const int64_t* of_rows)
      : KeyRows(rows), places(of_rows) {}
};
template <typename Source>
constexpr bool in_order = true;
template <>
constexpr bool in_order<PlacedRows> = false;

// Starts the copy of rows [first_row, first_row + Tile::rows). All threads of the block call it.
// Rows outside `valid` and columns past the true width become zero without being read, so that
// nothing in them, NaN included, can reach a product. Config::copy_bytes divides the true width in
// bytes, so that each copy lies wholly within the width or outside. The tile is complete after each
// thread's cp_async_wait and a barrier. (The element-wise form only needs the barrier.)
template <typename Tile, typename Source>
CUFLASH_DEVICE void load_tile(Tile& tile, const Source& source, int first_row, Range valid) {
  using Stored = typename Source::Stored;
  static_assert(sizeof(Stored) == Tile::element_bytes, "a copy converts nothing");
  constexpr int num_threads = Config::num_threads;
  constexpr int chunks = Tile::rows * Tile::row_chunks;  // in a panel
  constexpr int steps = (chunks + num_threads - 1) / num_threads;
  constexpr int row_step = num_threads / Tile::row_chunks;
  static_assert(num_threads % Tile::row_chunks == 0,
                "a thread copies the same column in every step");
  const int thread = ptx::thread_index();
  const int chunk = thread % Tile::row_chunks;
  const int thread_row = thread / Tile::row_chunks;
  const Stored* row_data = source.row(first_row + thread_row);
  const uint32_t smem = ptx::shared_address(tile.data);
#pragma unroll(Config::copy_bytes > sizeof(Stored) ? steps : 1)
  for (int step = 0; step < steps; ++step) {
    const int tile_row = thread_row + step * row_step;
    if (chunks % num_threads != 0 && tile_row >= Tile::rows) break;
    if constexpr (!in_order<Source>) row_data = source.data + source.places[tile_row];
    const bool row_valid = static_cast<uint32_t>(first_row + tile_row - valid.begin) <
                           static_cast<uint32_t>(valid.end - valid.begin);
#pragma unroll(Config::copy_bytes > sizeof(Stored) ? Tile::num_panels : 1)
    for (int panel = 0; panel < Tile::num_panels; ++panel) {
      const int column = panel * Tile::panel_columns + Tile::chunk_columns * chunk;
      const int offset = panel * Tile::panel_bytes + Tile::chunk_offset(tile_row, chunk);
      if constexpr (Config::copy_bytes >= 4) {
        constexpr int copy_columns = Config::copy_bytes / sizeof(Stored);
        const int64_t step = copy_columns == 1 ? source.column_stride : 1;
#pragma unroll
        for (int c = 0; c < Tile::chunk_columns; c += copy_columns) {
          ptx::cp_async<Config::copy_bytes>(smem + offset + sizeof(Stored) * c,
                                            row_data + (column + c) * step,
                                            row_valid && column + c < source.num_columns);
        }
      } else {
        Stored* to = tile.data + offset / sizeof(Stored);
#pragma unroll 4
        for (int c = 0; c < Tile::chunk_columns; ++c) {
          const bool is_valid = row_valid && column + c < source.num_columns;
          to[c] = is_valid ? row_data[(column + c) * source.column_stride] : Stored(0);
        }
      }
    }
    row_data += row_step * source.row_stride;
  }
}

}  // namespace cuflash
