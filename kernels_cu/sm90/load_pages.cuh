// How TMA brings a block of keys whose rows lie in pages: one box from each page, or a part of one.
//
// The map of such an operand has the axes (column, row of a page, axis, axis, page), where the two
// axes are those of the launch that the operand moves along. A box has page_size rows or block_n,
// whichever is less, so that one divides the other (ForwardSm90Config.chosen).
#pragma once

#include "ptx/tma.cuh"
#include "tile/pages.cuh"

namespace cuflash {

CUFLASH_DEVICE void page_coordinates(int (&batch)[3], const BatchIndex& entry, const Layout& layout,
                                     int page) {
  batch[0] = page;
  batch[1] = batch[2] = 0;
  int found = 0;
#pragma unroll
  for (int i = 0; i < max_batch_axes; ++i) {
    if (layout.batch.axis[i] == 0) continue;
    if (found == 0) batch[1] = entry.axis[i];
    if (found == 1) batch[2] = entry.axis[i];
    ++found;
  }
}

// Starts the copies of the keys from `first_key` on; `full` was told to expect their bytes. By a
// warp: each lane brings one box. Rows beyond the length are those of some page that exists.
template <typename Tile>
CUFLASH_DEVICE void start_load_of_pages(Tile& tile, const ptx::TensorMap& map, const Layout& layout,
                                        const ForwardParams& params, const BatchIndex& entry,
                                        int first_key, uint64_t& full) {
  const int size = params.page_size, box = min(size, Tile::rows);
  const int row = lane_index() * box;
  if (row >= Tile::rows) return;
  const int key = min(first_key + row, params.score.seqlen_k - 1);
  const int number = table_of(params, entry)[key / size * params.page_table_layout.row];
  const int page = max(0, min(number, params.num_pages - 1));
  int batch[3];
  page_coordinates(batch, entry, layout, page);
#pragma unroll
  for (int panel = 0; panel < Tile::num_panels; ++panel) {
    ptx::tma_load(ptx::shared_address(tile.data[panel][row]), map, ptx::shared_address(&full),
                  Tile::panel_columns * panel, (first_key + row) % size, batch);
  }
}

}  // namespace cuflash
