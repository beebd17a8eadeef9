// TMA loads of a tile of an operand, and clearing of its rows.
#pragma once

#include "score/score.cuh"
#include "sm90/barrier.cuh"
#include "sm90/matmul.cuh"

namespace cuflash {

// Coordinates of a batch entry in the tensor map of an operand, where broadcast axes have extent 1.
CUFLASH_DEVICE void map_coordinates(int (&batch)[3], const BatchIndex& entry,
                                    const Layout& layout) {
#pragma unroll
  for (int i = 0; i < 3; ++i) batch[i] = layout.batch.axis[i] != 0 ? entry.axis[i] : 0;
}

// Starts the copy of a tile from `first_row` on, whose bytes `full` already expects. Called by one
// lane.
template <typename Tile>
CUFLASH_DEVICE void start_load(Tile& tile, const ptx::TensorMap& map, const Layout& layout,
                               const BatchIndex& entry, int first_row, uint64_t& full) {
  int batch[3];
  map_coordinates(batch, entry, layout);
#pragma unroll
  for (int panel = 0; panel < Tile::num_panels; ++panel) {
    ptx::tma_load(ptx::shared_address(tile.data[panel]), map, ptx::shared_address(&full),
                  Tile::panel_columns * panel, first_row, batch);
  }
}

// Clears one row. Called by a warp.
template <typename Tile>
CUFLASH_DEVICE void clear_row(Tile& tile, int row) {
#pragma unroll
  for (int panel = 0; panel < Tile::num_panels; ++panel) {
    reinterpret_cast<uint32_t*>(tile.data[panel][row])[lane_index()] = 0;
  }
}

// Clears rows [begin, end), four at a time. Called by a warp.
template <typename Tile>
CUFLASH_DEVICE void clear_rows(Tile& tile, int begin, int end) {
#pragma unroll 1
  for (int first = begin; first < end; first += 4) {
    const int row = first + lane_index() / 8;
#pragma unroll
    for (int panel = 0; panel < Tile::num_panels; ++panel) {
      uint4* chunks = reinterpret_cast<uint4*>(tile.data[panel][row]);
      if (row < end) chunks[lane_index() % 8] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Clears the loaded rows outside `kept`.
template <typename Tile>
CUFLASH_DEVICE void clear_outside(Tile& tile, Range kept, int loaded) {
  clear_rows(tile, 0, min(kept.begin, loaded));
  clear_rows(tile, max(kept.end, 0), loaded);
}

}  // namespace cuflash
