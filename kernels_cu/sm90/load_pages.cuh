// TMA loads of a block of keys whose rows lie in pages: one box from each page or part of a page.
//
// The tensor map of such an operand has the axes (column, row of a page, axis, axis, page). Its two
// middle axes are the batch axes of the launch along which the operand is not broadcast. A box has
// min(page_size, block_n) rows, and one of these numbers divides the other
// (ForwardSm90Config.chosen).
#pragma once

#include "ptx/tma.cuh"
#include "tile/pages.cuh"

namespace cuflash {

// Coordinates of a batch entry along the two middle axes.
struct PageAxes {
  int axis[2] = {0, 0};

  CUFLASH_DEVICE PageAxes(const BatchIndex& entry, const Layout& layout) {
    int found = 0;
#pragma unroll
    for (int i = 0; i < max_batch_axes; ++i) {
      if (layout.batch.axis[i] == 0) continue;
      if (found == 0) axis[0] = entry.axis[i];
      if (found == 1) axis[1] = entry.axis[i];
      ++found;
    }
  }
};

// The pages of one entry's keys, as a lane of the producer looks them up. Contiguous keys need no
// look-up. (D154)
template <bool paged>
struct KeyPages {
  struct Box {};

  CUFLASH_DEVICE KeyPages(const ForwardParams&, const BatchIndex&) {}
  CUFLASH_DEVICE Box look_up(const ForwardParams&, int) const { return {}; }
};
template <>
struct KeyPages<true> {
  // The box of k and of v that a lane loads for a block: a page number from the table, which may be
  // invalid, and the first row in that page.
  struct Box {
    int number, row;
  };

  const int32_t* numbers;  // page numbers of the entry
  PageAxes k_axes, v_axes;

  CUFLASH_DEVICE KeyPages(const ForwardParams& params, const BatchIndex& entry)
      : numbers(table_of(params, entry)),
        k_axes(entry, params.k_layout),
        v_axes(entry, params.v_layout) {}

  // The box of the block from `first_key` on. A block before the first or behind the last key gets
  // some box of the table.
  CUFLASH_DEVICE Box look_up(const ForwardParams& params, int first_key) const {
    const int size = params.page_size, row = lane_index() * min(size, Config::block_n);
    const int key = max(0, min(first_key + row, params.score.seqlen_k - 1));
    const int column = key / size;
    return {numbers[column * params.page_table_layout.row], key - column * size};
  }
};

// Starts the copies of a block of keys, whose bytes `full` already expects. Called by a warp: each
// lane loads its box. Rows beyond the length come from some page that exists.
template <typename Tile>
CUFLASH_DEVICE void start_load_of_pages(Tile& tile, const ptx::TensorMap& map, const PageAxes& axes,
                                        const ForwardParams& params, const KeyPages<true>::Box& box,
                                        uint64_t& full) {
  const int row = lane_index() * min(params.page_size, Tile::rows);
  if (row >= Tile::rows) return;
  const int page = max(0, min(box.number, params.num_pages - 1));
  const int batch[3] = {page, axes.axis[0], axes.axis[1]};
#pragma unroll
  for (int panel = 0; panel < Tile::num_panels; ++panel) {
    ptx::tma_load(ptx::shared_address(tile.data[panel][row]), map, ptx::shared_address(&full),
                  Tile::panel_columns * panel, box.row, batch);
  }
}

}  // namespace cuflash
