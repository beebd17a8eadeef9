// The statistics of streamed queries in shared memory, and how queries that see no key are cleared.
#pragma once

#include "ptx/cp_async.cuh"
#include "score/score.cuh"
#include "tile/smem_tile.cuh"

namespace cuflash {

// Starts the copy of the statistics of block_m rows. Rows outside `valid` become zero: they lie in
// masked blocks, where they see no key.
CUFLASH_DEVICE void load_statistics(RowStatistics (&to)[Config::block_m], const RowStatistics* from,
                                    int first_row, Range valid) {
  const int row = ptx::thread_index();
  if (row < Config::block_m) {
    ptx::cp_async<sizeof(RowStatistics)>(ptx::shared_address(&to[row]), from + first_row + row,
                                         valid.contains(first_row + row));
  }
}

// Clears rows that see no key although they lie within q_range of some key, because of a mask or a
// bias: nothing they hold may reach a product. They have lse = +inf here and are rare. Each of
// `tiles` points to as many tiles as hold block_m rows together.
template <typename... Tiles>
CUFLASH_DEVICE void clear_fully_masked_rows(const RowStatistics (&rows)[Config::block_m],
                                            Tiles*... tiles) {
  const bool hidden = threadIdx.x < Config::block_m && rows[threadIdx.x].lse == infinity();
  if (!__syncthreads_or(hidden)) return;  // every thread has read the statistics
  for (int row = warp_index(); row < Config::block_m; row += Config::num_warps) {
    if (rows[row].lse != infinity()) continue;
    (tiles[row / Tiles::rows].clear_row(row % Tiles::rows, lane_index()), ...);
  }
  __syncthreads();  // the rows are cleared before any warp reads them
}

}  // namespace cuflash
